package bench

import (
	"context"
	"encoding/json"
	"strconv"

	"github.com/kvport/kvport/verify/fixture"
)

// setup is one way to run a connector.
type setup struct {
	name    string
	absent  string // why it cannot be measured here; empty: it can
	dir     string // where its folder is made
	batches bool   // measured with many blocks in one transfer too
	files   bool   // every stored block stays: few rounds
	later   bool   // blocks are written to where they are loaded from after they are acknowledged
	budget  budget
	small   budget // of transfers below smallBytes, if it is another: there the plugin's message weighs (record 127)
	config  func(dir string, sh shape) (json.RawMessage, error)
	limit   func(ctx context.Context, s *store, l *link, dir string) (limit, error)
	bare    bool // a bare process that copies the same bytes is measured too (record 127)
	// second is something else to compare with in the same turns, which is named rival; nil: nothing.
	second func(ctx context.Context, s *store, l *link, dir string) (limit, error)
	rival  string
	slots  int // blocks that it holds in memory in addition to one walk through the cache, in walks
}

// smallBytes is a transfer whose copy takes no longer than some wakes of processes.
const smallBytes = 4 << 20

// of is the budget of a shape.
func (s *setup) of(sh shape) budget {
	if s.small != (budget{}) && sh.block()*int64(sh.batch) < smallBytes {
		return s.small
	}
	return s.budget
}

// warm is how many steps more than one walk through the cache a store needs to be full.
func (s *setup) warm(l *link) int { return s.slots * l.blocks / l.shape.batch }

// memoryBytes is the size of a memory tier: a walk through the cache fits, with something to spare.
const memoryBytes = cacheBytes + 96<<20

// small is the size of a memory tier over a disk tier: it holds next to nothing.
func small(sh shape) int64 { return 6 * (sh.block() + 4096) }

func gib(bytes int64) string { return strconv.FormatFloat(float64(bytes)/(1<<30), 'f', 4, 64) }

// setups are the ways to run a connector by its name, as its fixture has them, or why there is none.
func (s *store) setups(name string) (sets []setup, why string) {
	f := s.fixtures.Of(name)
	switch {
	case f == nil:
		return nil, "kvport bench has no config for it"
	case len(f.Bench) == 0 && f.NoBench != "":
		return nil, f.NoBench
	case len(f.Bench) == 0:
		return nil, "its fixture has no config for kvport bench"
	}
	for _, b := range f.Bench {
		set := s.medium(b.Medium)
		set.name = b.Name
		set.config = func(dir string, sh shape) (json.RawMessage, error) { return s.fill(b.Config, dir, sh) }
		sets = append(sets, set)
	}
	return sets, ""
}

// medium is how stores are measured that keep their blocks there.
func (s *store) medium(medium string) setup {
	switch medium {
	case "memory":
		return setup{batches: true, bare: true, limit: copyLimit, slots: 1}
	case "disk":
		return setup{dir: s.Dir, files: true, later: true, limit: fileLimit}
	case "server":
		return setup{absent: s.why, files: true, budget: atLeast(0.8), small: atLeast(0.5), limit: redisLimit, second: goRedis, rival: "go-redis"}
	}
	return setup{dir: s.memory, files: true, limit: fileLimit}
}

// fill makes a config of a fixture's for blocks of a shape.
func (s *store) fill(config json.RawMessage, dir string, sh shape) (json.RawMessage, error) {
	values := fixture.Values{"TMP": dir, "MEMORY_BYTES": memoryBytes, "MEMORY_GIB": gib(memoryBytes), "SMALL_BYTES": small(sh), "BLOCK": blockTokens}
	if s.server != nil {
		values["SERVER"] = s.server.Address
	}
	filled, err := fixture.Fill(config, values)
	return json.RawMessage(filled), err
}
