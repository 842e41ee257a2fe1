package mutants

import (
	"context"
	"errors"
	"math/bits"
	"slices"
	"strings"

	"github.com/kvport/kvport/connector"
)

// shapeMutants are wrong for caches, batches and prompts of other shapes than their authors had.
func shapeMutants() []Mutant {
	const page = 1000
	changed := func(name string, change func(spans [][]byte) [][]byte) Mutant {
		return mutant(name, "shapes", func(s *badStore) {
			s.put = eachItem(s.memory.Put, func(it connector.Item) connector.Item {
				it.Spans = change(slices.Clone(it.Spans))
				return it
			})
		})
	}
	without := func(is func(n int) bool) func([][]byte) [][]byte {
		return func(spans [][]byte) [][]byte {
			for n, span := range spans {
				if is(len(span)) {
					spans[n] = make([]byte, len(span))
				}
			}
			return spans
		}
	}
	return []Mutant{
		changed("a store that counts the spans of a block in 8 bits", func(spans [][]byte) [][]byte { return spans[:len(spans)&0xFF] }),
		changed("a store that loses spans which fill whole pages", without(func(n int) bool { return n%4096 == 0 })),
		changed("a store that copies words of 8 bytes, and no shorter spans", without(func(n int) bool { return n < 8 })),
		changed("a store whose frames take 8 MiB of a block", func(spans [][]byte) [][]byte {
			room := 8 << 20
			for n, span := range spans {
				spans[n] = span[:min(len(span), room)]
				room -= len(spans[n])
			}
			return spans
		}),
		mutant("a store that names absent blocks by their places in a page of a load", "large-batch", func(s *badStore) {
			s.get = func(ctx context.Context, items []connector.Item) error {
				err := s.memory.Get(ctx, items)
				if missing, ok := errors.AsType[*connector.ItemError](err); ok && ctx.Err() == nil {
					for i := range missing.Items {
						missing.Items[i] %= page
					}
				}
				return err
			}
		}),
		mutant("a store that believes the last key of a run", "prefix-hole", func(s *badStore) {
			s.lookup = func(runs [][]connector.StoreKey) ([]int, error) {
				found, err := s.memory.Lookup(context.Background(), runs)
				s.mu.Lock()
				defer s.mu.Unlock()
				for i, run := range runs {
					if len(run) > 0 && s.blocks[run[len(run)-1]] != nil {
						found[i] = len(run)
					}
				}
				return found, err
			}
		}),
	}
}

// oddFaults show with block sizes, names of requests and numbers of layers and groups that a first engine does not have.
func oddFaults() []fault {
	right := connector.NewStoreKey
	return []fault{
		{"keeps the tokens of a block in 8 bits", "shapes", inBlocksOf(func(tokens int) int { return max(1, tokens&0xFF) })},
		{"takes the tokens of a block for a power of two", "shapes", inBlocksOf(func(tokens int) int { return 1 << bits.Len(uint(tokens-1)) })}, //nolint:gosec // not negative
		{"names a file after the request that saves", "odd-requests", onSave(func(c call) error {
			if name := string(c.t.Request); len(name) > 255 || strings.ContainsAny(name, "/\x00") {
				return errors.New("no such file or directory")
			}
			return c.rightSave()
		})},
		{"knows 64 layers", "layer-deep", onLayers(func(c layerCall) error {
			for n := 0; n < min(c.layers(), 64); {
				var err error
				if n, err = c.progress.Wait(c.ctx, n); err != nil {
					return err
				}
			}
			c.put(c.copyAll())
			return c.waitFor(c.layers())
		})},
		{"gives each rank four groups", "shapes", derived(func(k connector.BlockKey, f connector.Fingerprint, g uint16, s connector.Shard) connector.StoreKey {
			s.Rank, g = s.Rank+int(g/4), g%4
			return right(k, f, g, s)
		})},
	}
}

// inBlocksOf plants a Match that counts in blocks of another size.
func inBlocksOf(size func(tokens int) int) func(*backend, *wrappers) {
	return onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
		out, _ := s.Match(context.Background(), qs)
		tokens := s.env.Layout.Groups[0].BlockTokens
		for i, m := range out {
			out[i].Tokens = m.Tokens / tokens * size(tokens)
		}
		return out
	})
}
