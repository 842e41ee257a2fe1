// Host is a small host: it starts a plugin, uses it through a death and a reset, and prints what came of each step.
// TestSkew builds it in the trees of two commits, so it uses only what package host has in both.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
)

const (
	blocks = 8
	stride = 320
	size   = 256
	tokens = 4 // of a block
)

// steps are the host's steps with one plugin.
type steps struct {
	ctx       context.Context //nolint:containedctx // of the program
	path      string
	config    json.RawMessage
	region    *host.Region
	process   *host.Process
	scheduler connector.Scheduler
	worker    connector.Worker
}

func main() {
	s := &steps{path: os.Args[1], config: json.RawMessage(os.Args[2])}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	s.ctx = ctx
	if err := s.run(); err != nil {
		fmt.Println("error:", err)
		cancel()
		os.Exit(1)
	}
}

func (s *steps) run() (err error) {
	if s.region, err = host.NewRegion(blocks * stride); err != nil {
		return err
	}
	defer s.region.Close()
	for i := range s.region.Bytes() {
		s.region.Bytes()[i] = byte(31 * i % 251)
	}
	if err := s.open(); err != nil {
		return err
	}
	s.describe()
	s.match("a miss", 1, 2)
	s.move("a save", s.worker.Save, 0, 1, 2)
	s.match("a match", 1, 2, 3)
	s.move("a load", s.worker.Load, 4, 1, 2)
	s.move("a load of what is not there", s.worker.Load, 6, 9)
	s.move("a save of what is partial", s.worker.Save, 7, 0)
	s.reset()
	s.match("a match after the reset", 1, 2)
	s.move("a save after the reset", s.worker.Save, 0, 1, 2)
	s.process.Kill()
	<-s.process.Done()
	s.move("a load from a dead plugin", s.worker.Load, 6, 1)
	_ = errors.Join(s.scheduler.Close(), s.worker.Close()) // of the dead process
	if err := s.open(); err != nil {
		return err
	}
	s.match("a match in the next life", 1, 2)
	s.move("a load in the next life", s.worker.Load, 6, 2)
	fmt.Println("close:", text(errors.Join(s.scheduler.Close(), s.worker.Close())))
	fmt.Println("end:", text(s.process.Close(s.ctx)))
	return nil
}

// open starts the plugin and opens both sides.
func (s *steps) open() (err error) {
	if s.process, err = host.Launch(s.ctx, s.path, host.LaunchOptions{Regions: []*host.Region{s.region}}); err != nil {
		return err
	}
	env := connector.Env{
		Engine: "engine-1", Epoch: 7, Role: connector.RoleBoth, World: 1, Model: connector.Fingerprint{1}, Shape: connector.Fingerprint{2},
		Layout: connector.Layout{
			Name: "planes", Blocks: blocks, Groups: []connector.Group{{BlockTokens: tokens, Policy: connector.PolicyAll}},
			Segments: []connector.Segment{{BlockStride: stride, Bytes: size}},
		},
	}
	if s.scheduler, err = s.process.OpenScheduler(s.ctx, env, s.config); err != nil {
		return err
	}
	s.worker, err = s.process.OpenWorker(s.ctx, env, s.config)
	return err
}

func (s *steps) describe() {
	info, err := s.process.Describe(s.ctx, s.config)
	fmt.Println("describe:", info.Name, info.Scope, info.Capabilities, text(err))
	_, err = s.process.Describe(s.ctx, json.RawMessage(`{"dri":1}`))
	fmt.Println("describe a bad config:", text(err))
}

func (s *steps) match(what string, keys ...byte) {
	q := connector.Query{Request: "r1", Tokens: tokens*len(keys) + 1}
	for _, k := range keys {
		q.Keys = append(q.Keys, key(k))
	}
	matches, err := s.scheduler.Match(s.ctx, []connector.Query{q})
	fmt.Println(what+":", matches, text(err))
}

// move moves blocks from the given one on, and prints the sum of the cache.
func (s *steps) move(what string, call func(context.Context, *connector.Transfer, *connector.KV) error, from int, keys ...byte) {
	t := &connector.Transfer{Request: "r1", Tokens: tokens * len(keys)}
	for i, k := range keys {
		t.Blocks = append(t.Blocks, connector.Block{Key: key(k), ID: connector.BlockID(from + i)})
	}
	err := call(s.ctx, t, nil)
	fmt.Printf("%s: %s, cache %x\n", what, text(err), sha256.Sum256(s.region.Bytes()))
}

func (s *steps) reset() {
	if r, ok := connector.As[connector.Resetter](s.scheduler); ok {
		emptied, err := r.Reset(s.ctx)
		fmt.Println("reset:", emptied, text(err))
		return
	}
	fmt.Println("reset: not offered")
}

func key(n byte) connector.BlockKey { return connector.BlockKey(bytes.Repeat([]byte{n}, 32)) }

// text is what callers can act on in an error: its words may change.
func text(err error) string {
	var named *connector.BlockError
	if errors.As(err, &named) {
		return fmt.Sprint(kind(err), " ", named.Blocks)
	}
	return kind(err)
}

func kind(err error) string {
	for _, k := range []error{connector.ErrBusy, connector.ErrIncompatible, connector.ErrCorrupt, connector.ErrGone} {
		if errors.Is(err, k) {
			return k.Error()
		}
	}
	if err != nil {
		return err.Error()
	}
	return "ok"
}
