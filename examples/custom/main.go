// Custom is a connector written in full: a Scheduler and a Worker, here one type, which keep a file a block.
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"syscall"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/sdk"
)

type side struct {
	Dir string `json:"dir" jsonschema:"required,description=Folder of the blocks."`
	env connector.Env
}

// Match offers the leading blocks of which every rank has its part.
func (s *side) Match(ctx context.Context, queries []connector.Query) ([]connector.Match, error) {
	matches := make([]connector.Match, len(queries))
	size := s.env.Layout.Groups[0].BlockTokens
	for i, q := range queries {
		n := q.Computed / size
		for n < len(q.Keys) && !s.lacks(q.Keys[n]) {
			n++
		}
		if tokens := n*size - q.Computed; tokens > 0 && s.env.Role.Loads() {
			matches[i] = connector.Match{Tokens: tokens, Async: true}
		}
	}
	return matches, ctx.Err()
}

func (s *side) lacks(k connector.BlockKey) (lacks bool) {
	for rank := range s.env.World {
		_, err := os.Stat(s.path(k, rank))
		lacks = lacks || err != nil
	}
	return lacks
}

// path is the file of one rank's part: the store key keeps shapes and ranks apart.
func (s *side) path(k connector.BlockKey, rank int) string {
	return filepath.Join(s.Dir, connector.NewStoreKey(k, s.env.Shape, 0, connector.Shard{Rank: rank, World: s.env.World}).String())
}

func (s *side) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	return s.each(ctx, t, kv, func(path string, spans [][]byte) error {
		f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		data := make([]byte, pipe.Size(spans))
		_, err = f.ReadAt(data, 0) // fails if it is a pipe: nothing here waits for one
		pipe.Copy(spans, [][]byte{data})
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
	failed := &connector.BlockError{Err: connector.ErrGone}
	for _, b := range t.Blocks {
		spans, err := kv.Spans(b)
		if err != nil || ctx.Err() != nil || b.Key == (connector.BlockKey{}) || do(s.path(b.Key, s.env.Rank), spans) != nil {
			failed.Blocks = append(failed.Blocks, b.ID)
		}
	}
	if failed.Blocks == nil {
		return nil
	}
	return failed
}

func (s *side) Close() error { return nil }

func open(_ context.Context, env connector.Env, s side) (*side, error) {
	return &side{s.Dir, env}, os.MkdirAll(s.Dir, 0o700)
}

func main() {
	sdk.Serve(sdk.FromSides(sdk.Definition{Name: "CustomExample", Version: "1", Scope: connector.ScopeShared, Needs: connector.Needs{Writes: []string{"dir"}}}, open, open))
}
