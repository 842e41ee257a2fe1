package vllmtrace

import (
	"fmt"

	"github.com/kvport/kvport/connector"
)

// Chains are the hashes of each request's full blocks, in order, as far as it had any.
type Chains map[string][]string

// Key is the content address of a block of the traced engine: its own hash, of which the trace has the
// first 8 bytes in hex, bound to the model (ADR 0031).
func Key(model connector.Fingerprint, hash string) connector.BlockKey {
	space := connector.KeySpace{Model: model}
	return space.Foreign("vllm/trace", []byte(hash))
}

// ChainsOf finds the hashes of all blocks. A trace names a hash where a block is saved or loaded;
// a block that came from the local cache has the hash of whoever filled its slot, and one that was
// not saved because it was stored already has that of the only stored block with its parent.
func ChainsOf(log *Log) (Chains, error) {
	s := &chainSearch{chains: map[string]map[int]string{}, next: map[string]map[string]bool{}}
	for range 3 { // what is found in one pass helps the next
		s.slots, s.tables, s.filled = map[int]string{}, map[string][]int{}, map[string]int{}
		for i := range log.Calls {
			if err := s.see(&log.Calls[i]); err != nil {
				return nil, err
			}
		}
	}
	out := Chains{}
	for id, filled := range s.filled {
		for i := range filled {
			h := s.chains[id][i]
			if h == "" {
				return nil, fmt.Errorf("%w: block %d of request %s has no hash", ErrTrace, i, id)
			}
			out[id] = append(out[id], h)
		}
	}
	return out, nil
}

type chainSearch struct {
	blockSize int
	chains    map[string]map[int]string  // by request and index
	next      map[string]map[string]bool // hashes seen behind a hash; "" is the root
	slots     map[int]string             // hash of the full block in a slot
	tables    map[string][]int
	filled    map[string]int // full blocks of a request, at most
}

func (s *chainSearch) see(c *Call) error {
	switch b := c.Body.(type) {
	case *InitCall:
		s.blockSize = b.BlockSize
	case *LookupCall:
		s.filled[b.Request.ID] = max(s.filled[b.Request.ID], 0)
	case *AllocCall:
		return s.alloc(b)
	case *MetaCall:
		return s.step(b)
	}
	return nil
}

func (s *chainSearch) alloc(b *AllocCall) error {
	if len(b.Blocks) != 1 {
		return fmt.Errorf("%w: %d groups, want 1", ErrTrace, len(b.Blocks))
	}
	s.tables[b.Request.ID] = append([]int(nil), b.Blocks[0]...)
	return nil
}

func (s *chainSearch) step(b *MetaCall) error {
	from := map[string]int{}
	for _, n := range b.New {
		s.tables[n.ID], from[n.ID] = append([]int(nil), n.Blocks[0]...), n.Computed
	}
	for _, n := range b.Cached {
		from[n.ID] = n.Computed
		switch {
		case len(n.NewBlocks) == 0:
		case n.Resumed:
			s.tables[n.ID] = append([]int(nil), n.NewBlocks[0]...)
		default:
			s.tables[n.ID] = append(s.tables[n.ID], n.NewBlocks[0]...)
		}
	}
	for _, l := range b.Loads {
		for i, block := range l.Blocks {
			if err := s.name(l.Request, block, l.Hashes[i]); err != nil {
				return err
			}
		}
	}
	for _, v := range b.Saves {
		if err := s.name(v.Request, v.Block, v.Hash); err != nil {
			return err
		}
	}
	for id, n := range b.Scheduled {
		s.fill(id, from[id]/s.blockSize, (from[id]+n)/s.blockSize)
	}
	return nil
}

// name notes the hash of a block that the trace names.
func (s *chainSearch) name(id string, block int, hash string) error {
	for i, have := range s.tables[id] {
		if have == block {
			s.put(id, i, hash)
			return nil
		}
	}
	return fmt.Errorf("%w: request %s does not have block %d", ErrTrace, id, block)
}

func (s *chainSearch) put(id string, i int, hash string) {
	if s.chains[id] == nil {
		s.chains[id] = map[int]string{}
	}
	s.chains[id][i] = hash
	if i < len(s.tables[id]) {
		s.slots[s.tables[id][i]] = hash
	}
	if parent := s.parent(id, i); i == 0 || parent != "" {
		if s.next[parent] == nil {
			s.next[parent] = map[string]bool{}
		}
		s.next[parent][hash] = true
	}
}

func (s *chainSearch) parent(id string, i int) string {
	if i == 0 {
		return ""
	}
	return s.chains[id][i-1]
}

// fill resolves the blocks of a request up to index to; those before index from were there already.
func (s *chainSearch) fill(id string, from, to int) {
	table := s.tables[id]
	for i := 0; i < to && i < len(table); i++ {
		hash := ""
		if s.chains[id] != nil {
			hash = s.chains[id][i]
		}
		if hash == "" && i < from {
			hash = s.slots[table[i]]
		}
		if children := s.next[s.parent(id, i)]; hash == "" && (i == 0 || s.parent(id, i) != "") && len(children) == 1 {
			for hash = range children {
			}
		}
		if hash != "" {
			s.put(id, i, hash)
		} else if i >= from {
			delete(s.slots, table[i])
		}
	}
	s.filled[id] = max(s.filled[id], to)
}
