// Custom is a connector written in full: a Scheduler that says what could be loaded, and a Worker that
// moves bytes between the cache and one file a block.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

type config struct {
	Dir string `json:"dir" jsonschema:"required,description=Folder of the blocks."`
}

// side is both halves: they share the folder and nothing else.
type side struct {
	config
	env connector.Env
}

// Match offers the leading blocks of which every rank has its part.
func (s *side) Match(_ context.Context, queries []connector.Query) ([]connector.Match, error) {
	matches := make([]connector.Match, len(queries))
	size := s.env.Layout.Groups[0].BlockTokens
	for i, q := range queries {
		n := q.Computed / size
		for n < len(q.Keys) && s.everywhere(q.Keys[n]) {
			n++
		}
		if tokens := n*size - q.Computed; tokens > 0 && s.env.Role.Loads() {
			matches[i] = connector.Match{Tokens: tokens, Async: true}
		}
	}
	return matches, nil
}

func (s *side) everywhere(k connector.BlockKey) bool {
	for rank := range s.env.World {
		if _, err := os.Stat(s.path(k, rank)); err != nil {
			return false
		}
	}
	return true
}

// path is the file of one rank's part: the store key keeps shapes and ranks apart.
func (s *side) path(k connector.BlockKey, rank int) string {
	return filepath.Join(s.Dir, connector.NewStoreKey(k, s.env.Shape, 0, connector.Shard{Rank: rank, World: s.env.World}).String())
}

func (s *side) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	return s.each(ctx, t, kv, func(path string, spans [][]byte) error {
		data, err := os.ReadFile(path)
		for _, span := range spans {
			data = data[copy(span, data):]
		}
		return err
	})
}

// Save writes and renames, so that no block is ever half there.
func (s *side) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	return s.each(ctx, t, kv, func(path string, spans [][]byte) error {
		temporary := path + rand.Text()
		if err := os.WriteFile(temporary, bytes.Join(spans, nil), 0o600); err != nil {
			return errors.Join(err, os.Remove(temporary))
		}
		return os.Rename(temporary, path)
	})
}

// each does something with every block and names those that failed, as partial ones do: they have no key.
func (s *side) each(ctx context.Context, t *connector.Transfer, kv *connector.KV, do func(string, [][]byte) error) error {
	failed := &connector.BlockError{}
	for _, b := range t.Blocks {
		spans, err := kv.Spans(b)
		if b.Key == (connector.BlockKey{}) {
			err = connector.ErrGone
		}
		if err = errors.Join(err, ctx.Err()); err == nil {
			err = do(s.path(b.Key, s.env.Rank), spans)
		}
		if err != nil {
			failed.Blocks, failed.Err = append(failed.Blocks, b.ID), fmt.Errorf("%w: %w", connector.ErrGone, err)
		}
	}
	if failed.Blocks == nil {
		return nil
	}
	return failed
}

func (s *side) Close() error { return nil }

func open(env connector.Env, raw json.RawMessage) (*side, error) {
	c, err := sdk.DecodeConfig[config](raw)
	if err = errors.Join(err, env.Validate()); err != nil {
		return nil, err
	}
	return &side{config: c, env: env}, os.MkdirAll(c.Dir, 0o700)
}

func plugin() connector.Plugin {
	describe := func(_ context.Context, raw json.RawMessage) (connector.Info, error) {
		_, err := sdk.DecodeConfig[config](raw)
		return connector.Info{Name: "CustomExample", Scope: connector.ScopeShared}, err
	}
	scheduler := func(_ context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
		return open(env, raw)
	}
	worker := func(_ context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
		return open(env, raw)
	}
	return connector.Plugin{Name: "CustomExample", Version: "1", Schema: sdk.SchemaOf[config](), Describe: describe, Scheduler: scheduler, Worker: worker}
}

func main() { sdk.Serve(plugin()) }
