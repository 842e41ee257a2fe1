package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/kvport/kvport/connector"
)

// A Harness starts a connector with one config. Every case gets its own.
type Harness interface {
	// Start starts the connector for one engine whose ranks have size bytes of cache each.
	Start(ctx context.Context, ranks int, size int64) (*Instance, error)
	// Config is the connector's config, a JSON object.
	Config() json.RawMessage
	// Close removes what the harness made, after the last Instance was closed.
	Close() error
}

// Maker makes a Harness for one case.
type Maker func() (Harness, error)

// Instance is one started connector: what an engine sees of it.
type Instance struct {
	Describe  func(ctx context.Context, config json.RawMessage) (connector.Info, error)
	Scheduler func(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Scheduler, error)
	// Worker opens the worker side of rank env.Rank, whose cache is Memory[env.Rank].
	Worker func(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Worker, error)
	Memory [][]byte     // the cache of each rank
	PID    int          // the connector's process, for counting its resources; 0: this one
	Close  func() error // ends the connector; all sides are closed
}

// placeholders in a config's strings stand for a folder that every case gets anew; see
// plugins/*/conform.json.
const placeholder, shellPlaceholder = "@TMP@", "${TMP}"

// base is what all harnesses share: the config and its folder.
type base struct {
	config json.RawMessage
	dir    string // "" when the config has no placeholder
}

func newBase(config json.RawMessage) (base, error) {
	if len(config) == 0 {
		config = json.RawMessage("{}")
	}
	text := strings.ReplaceAll(string(config), shellPlaceholder, placeholder)
	b := base{config: json.RawMessage(text)}
	if !strings.Contains(text, placeholder) {
		return b, nil
	}
	dir, err := os.MkdirTemp("", "kvport-conform-")
	if err != nil {
		return b, fmt.Errorf("folder for the config: %w", err)
	}
	quoted, err := json.Marshal(dir)
	if err != nil {
		return b, errors.Join(err, os.RemoveAll(dir))
	}
	b.dir = dir
	b.config = json.RawMessage(strings.ReplaceAll(text, placeholder, strings.Trim(string(quoted), `"`)))
	return b, nil
}

// Config implements Harness.
func (b base) Config() json.RawMessage { return b.config }

// Close implements Harness.
func (b base) Close() error {
	if b.dir == "" {
		return nil
	}
	return os.RemoveAll(b.dir)
}

// InProcess runs the connector without a process boundary. @TMP@ (or ${TMP}) in the config stands
// for a folder that each case gets anew.
func InProcess(p connector.Plugin, config json.RawMessage) Maker {
	return func() (Harness, error) {
		b, err := newBase(config)
		return &inProcess{b, p}, err
	}
}

type inProcess struct {
	base
	plugin connector.Plugin
}

// Start implements Harness.
func (h *inProcess) Start(_ context.Context, ranks int, size int64) (*Instance, error) {
	i := &Instance{
		Describe: h.plugin.Describe, Scheduler: h.plugin.Scheduler, Worker: h.plugin.Worker,
		Memory: make([][]byte, ranks),
		Close:  func() error { return nil },
	}
	for r := range i.Memory {
		i.Memory[r] = make([]byte, size)
	}
	return i, nil
}
