// Attack is the plugin of somebody who means harm. It keeps blocks in memory, as a right one does; what it does in addition is the
// mode of its config. What worked it writes into the file "did" in its own folder, so it can be told whether a sandbox holds it back.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

func main() {
	if slices.Contains(os.Args[1:], idleArg) {
		idle()
	}
	d := sdk.Definition{
		Name: "AttackConnector", Version: "1", Scope: connector.ScopeEngine, Groups: true, Needs: connector.Needs{Writes: []string{"dir"}},
		Environment: []string{"HOME", "HF_TOKEN", "ATTACK_SECRET", "PATH", "LD_PRELOAD"},
	}
	sdk.Serve(attacking(sdk.FromStore(d, open)))
}

type config struct {
	Mode    string   `json:"mode" jsonschema:"description=What it does; right does nothing."`
	Dir     string   `json:"dir" jsonschema:"description=Its own folder."`
	Secrets []string `json:"secrets,omitempty" jsonschema:"description=Files that it must not read."`
	Sibling string   `json:"sibling,omitempty" jsonschema:"description=A folder of somebody else."`
	TCP     int      `json:"tcp,omitempty" jsonschema:"description=A port where somebody listens."`
	UDP     int      `json:"udp,omitempty" jsonschema:"description=A port where somebody listens."`
	Unix    string   `json:"unix,omitempty" jsonschema:"description=A socket of somebody else."`
}

// store keeps blocks in memory.
type store struct {
	config

	mu     sync.Mutex
	blocks map[connector.StoreKey][]byte
	order  []connector.StoreKey
}

func open(_ context.Context, env connector.Env, c config) (connector.Store, error) {
	if err := os.MkdirAll(c.Dir, 0o700); err != nil { // in a sandbox it is there
		return nil, err
	}
	attempt(&c, env.Log)
	return &store{config: c, blocks: map[connector.StoreKey][]byte{}}, nil
}

// Lookup implements connector.Store.
func (s *store) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := make([]int, len(runs))
	for i, keys := range runs {
		for _, k := range keys {
			if s.blocks[k] == nil && s.Mode != "claim" {
				break
			}
			found[i]++
		}
	}
	return found, nil
}

// Get implements connector.Store.
func (s *store) Get(_ context.Context, items []connector.Item) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	failed := &connector.ItemError{Err: connector.ErrGone}
	for i, it := range items {
		data := s.blocks[s.asked(it.Key)]
		if data == nil {
			if s.Mode != "claim" {
				failed.Items = append(failed.Items, i)
			}
			continue
		}
		for _, span := range it.Spans {
			data = data[copy(span, data):]
		}
	}
	if failed.Items != nil {
		return failed
	}
	return nil
}

// asked is the block that is given for a key.
func (s *store) asked(key connector.StoreKey) connector.StoreKey {
	at := slices.Index(s.order, key)
	switch {
	case at < 0:
	case s.Mode == "replay": // the first block that it was ever given
		return s.order[0]
	case s.Mode == "move": // the next block
		return s.order[(at+1)%len(s.order)]
	}
	return key
}

// Put implements connector.Store.
func (s *store) Put(_ context.Context, items []connector.Item) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, it := range items {
		var data []byte
		for _, span := range it.Spans {
			data = append(data, span...)
		}
		if s.blocks[it.Key] == nil {
			s.order = append(s.order, it.Key)
		}
		s.blocks[it.Key] = data
	}
	return nil
}

// Close implements connector.Store.
func (s *store) Close() error { return nil }

// report says that something worked.
func report(c *config, format string, args ...any) error {
	f, err := os.OpenFile(filepath.Join(c.Dir, "did"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, format+"\n", args...)
	return errors.Join(err, f.Close())
}
