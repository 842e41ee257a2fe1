package mutants

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvport/kvport/connector"
)

// Unseen is a wrong connector whose fault no case looks for: those that play random histories find it, and no other unless Also says so.
type Unseen struct {
	Mutant

	Class string   // of faults; what cases with a subject of their own miss
	Rules []string // one of which the report must name
	Also  []string // cases with another subject that find it, too
	Racy  bool     // it reads or writes what it must not at that moment
	Long  bool     // it shows in batches that only longer runs have
}

// RandomlyFound lists the wrong connectors that only random histories find.
func RandomlyFound() []Unseen {
	return slices.Concat(sizeFaults(), ageFaults(), batchFaults(), stateFaults(), resetFaults(), engineFaults(), sharedFaults(), lateFaults(), growthFaults(), boundedFaults(), holdFaults(), readFaults(), answerTurnFaults(), manyLayerFaults(),
		slotFaults(), behindFaults(), memoryFaults(), answerFaults())
}

// someRandomlyFound is one of them for each case, to be found like the others.
func someRandomlyFound() (some []Mutant) {
	for _, u := range RandomlyFound() {
		if !slices.ContainsFunc(some, func(m Mutant) bool { return m.Case == u.Case }) {
			some = append(some, u.Mutant)
		}
	}
	return some
}

// unseen is a Store that change made wrong.
func unseen(class, name, rule string, change func(*badStore)) Unseen {
	return Unseen{Mutant: mutant(name, "random", change), Class: class, Rules: []string{rule}}
}

// shared is a Store whose engines share what change keeps; change is called once for all of them.
func shared(class, name, rule string, change func(m *memory) func(*badStore)) Unseen {
	m := Mutant{Name: name, Case: "random", Plugin: func() connector.Plugin {
		var once sync.Once
		var each func(*badStore)
		return storePlugin(func(s *badStore) {
			once.Do(func() { each = change(s.memory) })
			each(s)
		})
	}}
	return Unseen{Mutant: m, Class: class, Rules: []string{rule}}
}

// planted is the Reference with a fault.
func planted(class, name, rule string, plant func(*backend, *wrappers)) Unseen {
	m := Mutant{Name: name, Case: "random", Plugin: func() connector.Plugin {
		b := newBackend()
		var w wrappers
		plant(b, &w)
		return b.plugin(w)
	}}
	return Unseen{Mutant: m, Class: class, Rules: []string{rule}}
}

// or adds a rule that the report may name too.
func (u Unseen) or(rules ...string) Unseen {
	u.Rules = append(u.Rules, rules...)
	return u
}

// also names cases that find it, too.
func (u Unseen) also(ids ...string) Unseen {
	u.Also = ids
	return u
}

// long marks one that shows in big batches.
func (u Unseen) long() Unseen {
	u.Long = true
	return u
}

// eachItem makes a call of one that changes items.
func eachItem(call func(context.Context, []connector.Item) error, change func(connector.Item) connector.Item) func(context.Context, []connector.Item) error {
	return func(ctx context.Context, items []connector.Item) error {
		changed := make([]connector.Item, len(items))
		for i, it := range items {
			changed[i] = change(it)
		}
		return call(ctx, changed)
	}
}

const (
	sizes  = "real sizes"
	groups = "groups of unequal size"
	ageing = "ageing"
	large  = "big batches"
	states = "what happened before"
	acks   = "acknowledgements"
	leaks  = "leaks"
	bounds = "bounds"
	pairs  = "holds beside holds"
	shapes = "loads in many calls"
	turns  = "conversations"

	manyLayers = "saves beside saves"

	lateness = "late writers"
)

func sizeFaults() []Unseen {
	segments := func(most int) func(connector.Item) connector.Item {
		return func(it connector.Item) connector.Item {
			it.Spans = it.Spans[:min(most, len(it.Spans))]
			return it
		}
	}
	return []Unseen{
		unseen(sizes, "moves 64 segments of a block", "WORK-01", func(s *badStore) {
			s.get, s.put = eachItem(s.memory.Get, segments(64)), eachItem(s.memory.Put, segments(64))
		}).or("STORE-04").also("shapes"), // if the first load fills memory that was written before
		unseen(sizes, "writes 1024 segments of a block, as many as one call of the system takes", "WORK-01", func(s *badStore) {
			s.put = eachItem(s.memory.Put, segments(1024))
		}).or("STORE-04", "WORK-08", "LAYOUT-03"),
		unseen(sizes, "leaves out what is behind the first MiB of a block", "WORK-01", func(s *badStore) {
			s.put = eachItem(s.memory.Put, func(it connector.Item) connector.Item {
				if it.Size() > 1<<20 {
					it.Spans = [][]byte{slices.Concat(it.Spans...)[:1<<20]}
				}
				return it
			})
		}).or("STORE-04", "WORK-08", "LAYOUT-03").also("shapes"),
		unseen(sizes, "keeps the length of a block in 16 bits", "WORK-01", func(s *badStore) {
			s.put = func(ctx context.Context, items []connector.Item) error {
				for _, it := range items {
					if it.Size() > 0xFFFF {
						it.Spans = [][]byte{slices.Concat(it.Spans...)[:it.Size()&0xFFFF]}
					}
					if err := s.memory.Put(ctx, []connector.Item{it}); err != nil {
						return err
					}
				}
				return nil
			}
		}).or("STORE-04").also("shapes"),
		unseen(sizes, "sends frames of 64 KiB at most", "WORK-01", func(s *badStore) {
			s.put = func(ctx context.Context, items []connector.Item) error {
				if slices.ContainsFunc(items, func(it connector.Item) bool { return it.Size() > 64<<10 }) {
					return errors.New("message too long")
				}
				return s.memory.Put(ctx, items)
			}
		}).or("STORE-06").also("shapes"),
		planted(groups, "needs all blocks of the third group", "WORK-05", onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			all := &scheduler{backend: s.backend, env: s.env}
			all.env.Layout.Groups = slices.Clone(s.env.Layout.Groups)
			for g := 2; g < len(all.env.Layout.Groups); g++ {
				all.env.Layout.Groups[g].Policy = connector.PolicyAll
			}
			out, _ := all.Match(context.Background(), qs)
			return out
		})).or("STORE-01"),
	}
}

func ageFaults() []Unseen {
	return []Unseen{
		shared(ageing, "remembers 2500 keys", "WORK-05", func(*memory) func(*badStore) { return newest(2500, true) }).or("STORE-01", "WORK-01").long(),
		shared(ageing, "numbers slots with 11 bits", "KEY-06", elevenBits).or("WORK-01").long(),
		shared(ageing, "closes with an index of 30 keys", "STORE-01", func(*memory) func(*badStore) { return newest(30, false) }),
	}
}

// newest keeps the blocks that were stored last: always, or when it closes.
func newest(most int, always bool) func(*badStore) {
	var order []connector.StoreKey
	return func(s *badStore) {
		forget := func() {
			for len(order) > most {
				delete(s.blocks, order[0])
				order = order[1:]
			}
		}
		s.put = func(ctx context.Context, items []connector.Item) error {
			s.mu.Lock()
			for _, it := range items {
				if s.blocks[it.Key] == nil {
					order = append(order, it.Key)
				}
			}
			s.mu.Unlock()
			err := s.memory.Put(ctx, items)
			s.mu.Lock()
			defer s.mu.Unlock()
			if always {
				forget()
			}
			return err
		}
		s.close = func() error {
			s.mu.Lock()
			defer s.mu.Unlock()
			forget()
			return nil
		}
	}
}

// elevenBits gives each block a slot, and the 2049th that of the first.
func elevenBits(*memory) func(*badStore) {
	const count = 1 << 11
	slots := [count][]byte{}
	where := map[connector.StoreKey]int{}
	next := 0
	return func(s *badStore) {
		s.put = func(ctx context.Context, items []connector.Item) error {
			err := s.memory.Put(ctx, items)
			s.mu.Lock()
			defer s.mu.Unlock()
			for _, it := range items {
				if s.blocks[it.Key] == nil {
					continue
				}
				at, known := where[it.Key]
				if !known {
					at = next % count
					next++
					where[it.Key] = at
				}
				slots[at] = s.blocks[it.Key]
			}
			return err
		}
		s.get = func(ctx context.Context, items []connector.Item) error {
			s.mu.Lock()
			for _, it := range items {
				if at, known := where[it.Key]; known && s.blocks[it.Key] != nil {
					s.blocks[it.Key] = slots[at]
				}
			}
			s.mu.Unlock()
			return s.memory.Get(ctx, items)
		}
	}
}

func batchFaults() []Unseen {
	return []Unseen{
		unseen(large, "looks for holes in the first 32 keys", "STORE-02", func(s *badStore) {
			s.lookup = func(runs [][]connector.StoreKey) ([]int, error) {
				found, err := s.memory.Lookup(context.Background(), runs)
				s.mu.Lock()
				defer s.mu.Unlock()
				for i, keys := range runs {
					for n := found[i] + 1; found[i] >= 32 && n < len(keys); n++ {
						if s.blocks[keys[n]] != nil {
							found[i] = n + 1
						}
					}
				}
				return found, err
			}
		}),
		unseen(large, "names absent items by the low 4 bits of their index", "WORK-02", func(s *badStore) {
			s.get = func(ctx context.Context, items []connector.Item) error {
				err := s.memory.Get(ctx, items)
				if missing, ok := errors.AsType[*connector.ItemError](err); ok && ctx.Err() == nil {
					for i := range missing.Items {
						missing.Items[i] &= 15
					}
				}
				return err
			}
		}).also("large-batch"),
		unseen(large, "fills a block once that comes twice in a load", "WORK-02", func(s *badStore) {
			s.get = func(ctx context.Context, items []connector.Item) error {
				seen := map[connector.StoreKey]bool{}
				return s.memory.Get(ctx, slices.DeleteFunc(slices.Clone(items), func(it connector.Item) bool {
					was := seen[it.Key]
					seen[it.Key] = true
					return was
				}))
			}
		}),
		planted(large, "takes what the engine has of the first query for all", "SCHED-04", onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			qs = slices.Clone(qs)
			for i := range qs {
				qs[i].Computed = min(qs[0].Computed, len(qs[i].Keys)*s.env.Layout.Groups[0].BlockTokens)
			}
			out, _ := s.Match(context.Background(), qs)
			return out
		})).or("WORK-05", "WORK-01", "STORE-01", "KEY-06", "STORE-03", "STORE-02"),
		unseen(large, "ends a save at the first block that is there", "WORK-05", func(s *badStore) {
			s.put = func(ctx context.Context, items []connector.Item) error {
				for i, it := range items {
					if !it.Replace && s.same(it) {
						return s.memory.Put(ctx, items[:i])
					}
					if err := s.memory.Put(ctx, items[i:i+1]); err != nil {
						return err
					}
				}
				return nil
			}
		}).or("WORK-01"),
	}
}

func stateFaults() []Unseen {
	return []Unseen{
		unseen(states, "replaces a block once", "STORE-06", func(s *badStore) {
			replaced := map[connector.StoreKey]bool{}
			put := eachItem(s.memory.Put, func(it connector.Item) connector.Item {
				s.mu.Lock()
				defer s.mu.Unlock()
				if it.Replace {
					it.Replace = !replaced[it.Key]
					replaced[it.Key] = true
				}
				return it
			})
			s.put = put
		}),
	}
}

func resetFaults() []Unseen {
	return []Unseen{
		planted(states, "resets what has been stored last", "RESET-01", func(_ *backend, w *wrappers) {
			const most = 24
			w.scheduler = func(s *scheduler) connector.Scheduler {
				return &badScheduler{scheduler: s, reset: func(ctx context.Context) (bool, error) {
					b := s.backend
					b.mu.Lock()
					kept := map[connector.StoreKey][]byte{}
					for k, data := range b.blocks {
						if len(b.blocks) > most && len(kept) < len(b.blocks)-most {
							kept[k] = data
						}
					}
					b.mu.Unlock()
					emptied, err := s.Reset(ctx)
					b.mu.Lock()
					defer b.mu.Unlock()
					maps.Copy(b.blocks, kept)
					return emptied, err
				}}
			}
		}),
		planted(states, "remembers what it offered when another engine resets", "RESET-01", func(_ *backend, w *wrappers) {
			w.scheduler = func(s *scheduler) connector.Scheduler {
				bad := &badScheduler{scheduler: s}
				known := map[connector.BlockKey]bool{}
				bad.match = func(_ context.Context, qs []connector.Query) ([]connector.Match, error) {
					out := make([]connector.Match, len(qs))
					for i, q := range qs {
						out[i] = s.match(q, func(g int, k connector.BlockKey) bool { return known[k] || s.present(g, k) })
						size := s.env.Layout.Groups[0].BlockTokens
						for _, k := range q.Keys[q.Computed/size : (q.Computed+out[i].Tokens)/size] {
							known[k] = known[k] || len(s.env.Layout.Groups) == 1
						}
					}
					return out, nil
				}
				bad.reset = func(ctx context.Context) (bool, error) {
					clear(known)
					return s.Reset(ctx)
				}
				return bad
			}
		}).or("STORE-01", "WORK-01"),
	}
}

// engineFaults are about what other calls have left.
func engineFaults() []Unseen {
	return []Unseen{
		shared(states, "remembers which blocks a long load missed", "WORK-01", func(*memory) func(*badStore) {
			missed := map[connector.StoreKey]bool{}
			return func(s *badStore) {
				s.get = func(ctx context.Context, items []connector.Item) error {
					failed := &connector.ItemError{Err: connector.ErrGone}
					for i, it := range items {
						s.mu.Lock()
						known := missed[it.Key]
						s.mu.Unlock()
						if !known && s.memory.Get(ctx, items[i:i+1]) == nil {
							continue
						}
						s.mu.Lock()
						missed[it.Key] = known || ctx.Err() == nil && len(items) > 6
						s.mu.Unlock()
						failed.Items = append(failed.Items, i)
					}
					if failed.Items == nil {
						return nil
					}
					return failed
				}
			}
		}).or("WORK-02", "STORE-01"),
		shared(states, "drops a Replace of what is being loaded", "STORE-06", func(*memory) func(*badStore) {
			under := map[connector.StoreKey]int{}
			return func(s *badStore) {
				mark := func(items []connector.Item, by int) {
					s.mu.Lock()
					defer s.mu.Unlock()
					for _, it := range items {
						under[it.Key] += by
					}
				}
				s.get = func(ctx context.Context, items []connector.Item) error {
					mark(items, 1)
					defer mark(items, -1)
					defer func() { <-time.After(time.Millisecond) }() // a disk's time
					return s.memory.Get(ctx, items)
				}
				s.put = eachItem(s.memory.Put, func(it connector.Item) connector.Item {
					s.mu.Lock()
					defer s.mu.Unlock()
					it.Replace = it.Replace && under[it.Key] == 0
					return it
				})
			}
		}),
	}
}

func sharedFaults() []Unseen {
	right := connector.NewStoreKey
	return []Unseen{
		planted(states, "knows four ranks", "KEY-07", derived(func(k connector.BlockKey, f connector.Fingerprint, g uint16, s connector.Shard) connector.StoreKey {
			s.Rank = min(s.Rank, 3)
			return right(k, f, g, s)
		})).or("STORE-03").also("many-shards"),
		planted(groups, "knows two groups", "KEY-08", derived(func(k connector.BlockKey, f connector.Fingerprint, g uint16, s connector.Shard) connector.StoreKey {
			return right(k, f, min(g, 1), s)
		})).or("GROUP-03", "GROUP-04", "KEY-07", "WORK-01", "STORE-05").also("shapes"),
		planted(groups, "checks the last two blocks of a window", "GROUP-04", onMatch(func(s *scheduler, qs []connector.Query) []connector.Match {
			few := &scheduler{backend: s.backend, env: s.env}
			few.env.Layout.Groups = slices.Clone(s.env.Layout.Groups)
			for g := range few.env.Layout.Groups { // named cases have windows of two
				few.env.Layout.Groups[g].Trailing = min(2, few.env.Layout.Groups[g].Trailing)
			}
			out, _ := few.Match(context.Background(), qs)
			return out
		})),
		planted(states, "answers probes by the first key of a prompt", "STORE-02", func(_ *backend, w *wrappers) {
			w.scheduler = func(s *scheduler) connector.Scheduler {
				known := map[connector.BlockKey]connector.Match{}
				return &badScheduler{scheduler: s, match: func(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
					out, err := s.Match(ctx, qs)
					for i, q := range qs {
						if q.Request != "" || len(q.Keys) < 4 || q.Computed > 0 {
							continue
						}
						if m, is := known[q.Keys[0]]; is && m.Tokens > 0 {
							out[i] = m
						}
						known[q.Keys[0]] = out[i]
					}
					return out, err
				}}
			}
		}).or("SCHED-04", "KEY-06", "RESET-01", "WORK-05", "STORE-01", "WORK-01", "STORE-03", "GROUP-03", "GROUP-04"),
		planted(acks, "acknowledges what is behind the 2048th block of a save before it stores it", "WORK-05", onSave(func(c call) error {
			const most = 1 << 11
			if len(c.t.Blocks) <= most || c.ctx.Err() != nil {
				return c.rightSave()
			}
			first, rest := *c.t, *c.t
			first.Blocks, rest.Blocks = c.t.Blocks[:most], c.t.Blocks[most:]
			data := make([][]byte, len(rest.Blocks))
			for i, b := range rest.Blocks {
				spans, err := c.kv.Spans(b)
				if err != nil {
					return err
				}
				data[i] = slices.Concat(spans...)
			}
			time.AfterFunc(100*time.Millisecond, func() {
				for i, b := range rest.Blocks {
					if b.Key != (connector.BlockKey{}) {
						c.backend.put(c.key(b), data[i], rest.Replace, c.life)
					}
				}
			})
			return c.Save(c.ctx, &first, c.kv)
		})).or("WORK-01", "STORE-01", "STORE-05", "STORE-06", "WORK-02").long(),
	}
}

func lateFaults() []Unseen {
	lazy := shared(acks, "reads the cache some saves later", "KEY-06", func(m *memory) func(*badStore) {
		var mu sync.Mutex
		var pending []connector.Item
		flush := func() {
			defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
			defer func() { // the memory may be gone
				_ = recover()
				pending = nil
			}()
			for _, it := range pending {
				data := slices.Concat(it.Spans...)
				it.Spans = [][]byte{data}
				_ = m.Put(context.Background(), []connector.Item{it})
			}
		}
		return func(s *badStore) {
			s.put = func(ctx context.Context, items []connector.Item) error {
				mu.Lock()
				defer mu.Unlock()
				if len(items) > 2 { // short saves wait for company
					flush()
					return s.memory.Put(ctx, items)
				}
				pending = append(pending, slices.Clone(items)...)
				return ctx.Err()
			}
			s.lookup = func(runs [][]connector.StoreKey) ([]int, error) {
				mu.Lock()
				defer mu.Unlock()
				flush()
				return s.memory.Lookup(context.Background(), runs)
			}
			s.get = func(ctx context.Context, items []connector.Item) error {
				mu.Lock()
				defer mu.Unlock()
				flush()
				return s.memory.Get(ctx, items)
			}
		}
	})
	lazy.Racy = true
	return []Unseen{lazy.or("WORK-01", "WORK-02", "WORK-05", "STORE-06", "WORK-08", "STORE-04")}
}

// growthFaults leave something behind in calls that end badly, now and then.
func growthFaults() []Unseen {
	grows := func(name string, stays func()) Unseen {
		u := shared(leaks, name, "WORK-10", func(*memory) func(*badStore) {
			var failed atomic.Int64
			return func(s *badStore) {
				s.get = func(ctx context.Context, items []connector.Item) error {
					err := s.memory.Get(ctx, items)
					if err != nil && failed.Add(1)%40 == 0 {
						stays()
					}
					return err
				}
			}
		})
		u.Case = "random-growth"
		return u
	}
	var mu sync.Mutex
	var kept [][]byte
	return []Unseen{
		grows("leaves a goroutine behind in a load that fails", func() { go func() { <-time.After(time.Minute) }() }),
		grows("leaves a descriptor open in a load that fails", leak()),
		grows("starts a process in a load that fails, and never asks how it ended", func() {
			_, _ = syscall.ForkExec("/bin/true", []string{"true"}, nil)
		}),
		grows("keeps a buffer of a load that fails", func() {
			mu.Lock()
			defer mu.Unlock()
			kept = append(kept, bytes.Repeat([]byte{1}, 1<<20))
		}),
	}
}
