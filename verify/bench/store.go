package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/verify/fixture"
)

// StoreOptions say what Store works with.
type StoreOptions struct {
	Self       string   // a binary that calls ServePlugin first thing: kvport's own
	PluginPath []string // where the plugins are that are measured: all of them
	Dir        string   // folder of disk tiers; empty: the system's for temporary files
	Server     string   // binary of a Redis or Valkey server; empty: that of make deps, or one of the PATH
	Only       string   // measure only what has this in its name; empty: everything
	Peers      bool     // measure other people's stores beside ours
	PeersDir   string   // what verify/bench/peers/setup.py made
	Quick      bool     // a few rounds, to see that it works
	Emit       Emit
}

// store is one run of Store.
type store struct {
	StoreOptions
	fixtures fixture.List
	memory   string            // a folder in memory
	server   *redistest.Server // nil: none, and why
	why      string
}

// storeShapes are blocks of 64 tokens: those of the demo model in 16 bits, and those of a model of 8 billion
// parameters with 8 KV heads. Many blocks in one transfer are what a prompt of some length makes.
func storeShapes() []shape {
	return []shape{
		{"1.41 MiB", 30, 48 << 10, 1},
		{"8 MiB", 32, 256 << 10, 1},
		{"1.41 MiB x 16", 30, 48 << 10, 16},
		{"8 MiB x 4", 32, 256 << 10, 4},
	}
}

// Store measures every store connector that it finds, through its plugin process, beside what limits it, and
// with Peers other people's stores. It emits a row for each thing as soon as it is known; what cannot be
// measured is a row with the reason.
func Store(ctx context.Context, o StoreOptions) (err error) {
	s := &store{StoreOptions: o}
	if s.fixtures, err = fixtures(); err != nil {
		return err
	}
	if s.memory, err = os.MkdirTemp(memoryFolder(), "kvport-bench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(s.memory)) }()
	if s.server, err = startRedis(o.Server); err != nil {
		s.why = err.Error()
	} else {
		defer func() { err = errors.Join(err, s.server.Close()) }()
	}
	for _, found := range host.List(ctx, o.PluginPath) {
		if found.Err != nil {
			continue // no plugin; `kvport plugins list` says why
		}
		if err := s.connector(ctx, found); err != nil {
			return fmt.Errorf("%s: %w", found.Manifest.Name, err)
		}
	}
	if s.measures("pipe, tcp") {
		if err := s.pipes(ctx); err != nil {
			return err
		}
	}
	if !o.Peers {
		return nil
	}
	return s.compare(ctx)
}

// measures reports whether something with this name must be measured.
func (s *store) measures(name string) bool { return strings.Contains(name, s.Only) }

// memoryFolder is where files are in memory, if this system has such a place.
func memoryFolder() string {
	const shm = "/dev/shm"
	if info, err := os.Stat(shm); err == nil && info.IsDir() {
		return shm
	}
	return ""
}

// connector measures one plugin in each of its set-ups.
func (s *store) connector(ctx context.Context, found host.Found) error {
	setups, why := s.setups(found.Manifest.Name)
	if why != "" {
		if !s.measures(found.Manifest.Name) {
			return nil
		}
		return s.Emit(absent(found.Manifest.Name, why))
	}
	for _, set := range setups {
		if !s.measures(set.name) {
			continue
		}
		if set.absent != "" {
			if err := s.Emit(absent(set.name, set.absent)); err != nil {
				return err
			}
			continue
		}
		for _, sh := range storeShapes() {
			if sh.batch > 1 && !set.batches {
				continue
			}
			if err := s.measure(ctx, found.Path, set, sh); err != nil {
				return fmt.Errorf("%s, %s: %w", set.name, sh.name, err)
			}
		}
	}
	return nil
}

// measure is one connector in one set-up with one size.
func (s *store) measure(ctx context.Context, binary string, set setup, sh shape) (err error) {
	dir, err := os.MkdirTemp(set.dir, "store-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	config, err := set.config(dir, sh)
	if err != nil {
		return err
	}
	l, err := openLink(ctx, linkOptions{binary: binary, config: config, shape: sh, digests: true, arena: true, bytes: s.bytes(sh), life: set.name})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	lim, err := set.limit(ctx, s, l, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lim.close()) }()
	w := &walk{link: l, hasher: l.hasher, fresh: l.blocks / sh.batch}
	for n := range w.fresh + set.warm(l) { // every page has been touched, and what is full stays so
		if err := w.save(ctx, n, true); err != nil {
			return err
		}
	}
	storing, loading, done, err := s.ways(ctx, set, w, lim, dir)
	defer func() { err = errors.Join(err, done()) }()
	if err != nil {
		return err
	}
	if err := w.ask(ctx); err != nil {
		return err
	}
	saves, err := s.turns(set).measure(ctx, storing...)
	if err != nil {
		return err
	}
	if err := w.settle(ctx, set.later); err != nil {
		return err
	}
	loads, err := s.turns(set).measure(ctx, loading...)
	if err != nil {
		return err
	}
	return s.emit(set, sh, saves, loads)
}

// way is one thing that takes turns with others.
type way = func(round int) error

// ways are what is measured of a connector, in the order that emit knows: ours and the limit, without and
// with digests, then a rival.
func (s *store) ways(ctx context.Context, set setup, w *walk, lim limit, dir string) (storing, loading []way, done func() error, err error) {
	done = func() error { return nil }
	storing = []way{
		func(n int) error { return w.save(ctx, n, false) }, func(n int) error { return lim.save(w.other(2*n), false) },
		func(n int) error { return w.save(ctx, n, true) }, func(n int) error { return lim.save(w.other(2*n+1), true) },
	}
	loading = []way{
		func(n int) error { return w.load(ctx, 2*n, false) }, func(n int) error { return lim.load(w.other(2*n), false) },
		func(n int) error { return w.load(ctx, 2*n+1, true) }, func(n int) error { return lim.load(w.other(2*n+1), true) },
	}
	switch {
	case set.second != nil:
		second, err := set.second(ctx, s, w.link, dir)
		if err != nil {
			return nil, nil, done, err
		}
		done = second.close
		for i, digests := range []bool{false, true} {
			storing = append(storing, func(n int) error { return second.save(w.other(2*n+i+7), digests) })
			loading = append(loading, func(n int) error { return second.load(w.other(2*n+i+7), digests) })
		}
	case set.bare:
		bare, err := startBare(ctx, s.Self, w.link)
		if err != nil {
			return nil, nil, done, err
		}
		done = bare.close
		for i, digests := range []bool{false, true} {
			storing = append(storing, func(n int) error { return bare.save(w.other(2*n+i+7), digests) })
			loading = append(loading, func(n int) error { return bare.load(w.other(2*n+i+7), digests) })
		}
	}
	return storing, loading, done, nil
}

// bytes is how much memory a walk over the cache touches: it must not stay in the processor's caches.
func (s *store) bytes(sh shape) int64 {
	if s.Quick {
		return 2 * int64(sh.batch) * sh.block()
	}
	return cacheBytes
}

func (s *store) turns(set setup) turns {
	switch {
	case s.Quick:
		return turns{few: 2, budget: 1}
	case set.files: // every round leaves blocks
		return turns{few: 30, budget: 1}
	}
	return turns{few: 25, budget: 1500 * time.Millisecond}
}

func (s *store) emit(set setup, sh shape, saves, loads []took) error {
	for _, way := range []struct {
		name string
		all  []took
	}{{"store", saves}, {"load", loads}} {
		if set.later && way.name == "store" {
			continue // acknowledged before it is written: the time says nothing of the disk
		}
		for i, name := range rowNames(set, way.name, sh) {
			ours, limit := way.all[2*i], way.all[2*i+1]
			if err := s.row(name, sh, ours, limit, set.of(sh)); err != nil {
				return err
			}
			switch {
			case set.second != nil:
				if err := s.row(name+" : "+set.rival, sh, ours, way.all[4+i], budget{}); err != nil {
					return err
				}
			case set.bare:
				if err := s.row(name+" : a bare process", sh, ours, way.all[4+i], bareBudget(sh)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// bareBudget is how near to a bare process a store in memory must come: it also looks keys up, minds deadlines
// and counts, which weighs more the less there is to copy (record 127 in docs/adr).
func bareBudget(sh shape) budget {
	if sh.block()*int64(sh.batch) < smallBytes {
		return atLeast(0.6)
	}
	return atLeast(0.7)
}

// rowNames are the rows of one way of a set-up: without and with digests.
func rowNames(set setup, way string, sh shape) [2]string {
	return [2]string{fmt.Sprintf("%s %s %s", set.name, way, sh.name), fmt.Sprintf("%s %s+digest %s", set.name, way, sh.name)}
}

// row emits how fast ours is beside something else.
func (s *store) row(name string, sh shape, ours, other took, b budget) error {
	bytes := sh.block() * int64(sh.batch)
	return s.Emit(faster(name, bytes, ours.speed(bytes), other.speed(bytes), "GB/s")(b))
}

// walk stores blocks that were never stored before and loads those that were last, a step a round, so that each
// of them has left the processor's caches.
type walk struct {
	link   *link
	hasher *digest.Hasher
	fresh  int // steps after which the cache is walked through
	stored int // steps
}

// place is a step's transfer of the content number at.
func (w *walk) place(step, at int) *connector.Transfer {
	return w.link.transfer(step, at*w.link.shape.batch)
}

// other is a step half a cache away: the limit's, which must not find what we have just touched.
func (w *walk) other(n int) *connector.Transfer { return w.link.transfer(n+w.fresh/2, 0) }

func (w *walk) save(ctx context.Context, _ int, digests bool) error {
	w.link.hasher = nil
	if digests {
		w.link.hasher = w.hasher
	}
	t := w.place(w.stored, w.stored)
	w.stored++
	return w.link.save(ctx, t)
}

// ask asks for what is going to be stored, as an engine does before it computes a prompt.
func (w *walk) ask(ctx context.Context) error {
	const steps = 1024
	return w.link.match(ctx, w.stored*w.link.shape.batch, steps)
}

// load loads one of the last blocks to the place where it was.
func (w *walk) load(ctx context.Context, n int, digests bool) error {
	w.link.hasher = nil
	if digests {
		w.link.hasher = w.hasher
	}
	step := w.stored - w.fresh + n%w.fresh
	return w.link.load(ctx, w.place(step, step))
}

// settle stores the last blocks once more, with digests. A store that writes later gets time to do so; on a
// slow disk it may give blocks up to make room in memory, and these are stored again.
func (w *walk) settle(ctx context.Context, later bool) error {
	for range w.fresh {
		if err := errors.Join(w.save(ctx, 0, true), w.pause(ctx, later, 0)); err != nil {
			return err
		}
	}
	for try := 1; later; try++ {
		missing := 0
		for step := w.stored - w.fresh; step < w.stored; step++ {
			err := w.link.load(ctx, w.place(step, step))
			if err == nil {
				continue
			}
			if !errors.Is(err, connector.ErrGone) || try > 4 {
				return err
			}
			missing++
			if err := errors.Join(w.link.save(ctx, w.place(step, step)), w.pause(ctx, later, try)); err != nil {
				return err
			}
		}
		later = missing > 0
	}
	return nil
}

// pause is how long it takes to write a block, twice as long with every try.
func (w *walk) pause(ctx context.Context, later bool, try int) error {
	if !later {
		return nil
	}
	select {
	case <-time.After(time.Duration(w.link.shape.block()) * 8 << try): // 0.13 GB/s at first
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
