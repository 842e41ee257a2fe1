package mutants

import (
	"bytes"
	"context"

	"github.com/kvport/kvport/connector"
)

// sameVersion reports whether what is stored was made by the same version with the same key as a block, as far as its length and the header
// of its digests say: rule STORE-07.
func sameVersion(stored []byte, spans [][]byte) bool {
	return sameLength(stored, spans) && sameHeader(stored, spans)
}

func sameLength(stored []byte, spans [][]byte) bool {
	n := 0
	for _, s := range spans {
		n += len(s)
	}
	return len(stored) == n
}

// sameHeader compares the first 16 bytes of the last span, if they are a header of digests.
func sameHeader(stored []byte, spans [][]byte) bool {
	const size = 16
	if len(spans) == 0 {
		return true
	}
	last := spans[len(spans)-1]
	if len(last) < size || last[0] == 0 || [7]byte(last[1:8]) != [7]byte{} {
		return true
	}
	at := len(stored) - len(last)
	return at >= 0 && bytes.Equal(stored[at:at+size], last[:size])
}

// versionMutants skip saves of keys that are there and look at too little of what is there.
func versionMutants() []Mutant {
	skipping := func(name string, same func(stored []byte, spans [][]byte) bool) Mutant {
		return mutant(name, "another-version", func(s *badStore) {
			s.put = func(ctx context.Context, items []connector.Item) error {
				for _, it := range items {
					s.mu.Lock()
					stored := s.blocks[it.Key]
					s.mu.Unlock()
					if stored != nil && !it.Replace && same(stored, it.Spans) {
						continue
					}
					it.Replace = true
					if err := s.memory.Put(ctx, []connector.Item{it}); err != nil {
						return err
					}
				}
				return nil
			}
		})
	}
	return []Mutant{
		skipping("a store that skips what it has, whatever lies there", func([]byte, [][]byte) bool { return true }),
		skipping("a store that skips what it has if the length is right", sameLength),
		skipping("a store that skips what it has if the header of the digests is right", sameHeader),
	}
}
