package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/native/nixl"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/shm"
	"github.com/kvport/kvport/pipe/tcp"
)

// transportShapes are the transfers by which the ways between two engines are compared. A block is one
// piece of memory.
func transportShapes() []shape {
	return []shape{{"8 MiB of 48 KB", 1, 48 << 10, 171}, {"64 MiB of 1 MiB", 1, 1 << 20, 64}}
}

// transportBytes is the memory at either end: more than processors' caches hold.
const transportBytes = 3 * 64 << 20

// transports compares the ways from one engine to another with the libraries they are made of and with memcpy.
func (t *transfer) transports(ctx context.Context) error {
	for _, s := range transportShapes() {
		for _, digests := range []bool{false, true} {
			if err := t.courses(ctx, &field{shape: s, digests: digests, lines: []line{t.libraries, t.crossings, t.links}}); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
		}
	}
	return nil
}

// course is one way to move the blocks of a step.
type course struct {
	name   string
	absent string // why it cannot be measured; empty: it can
	limit  string // the course that it is made of; empty: memcpy alone
	beside string // another course that it is compared with; empty: none
	budget budget // of the ratio to that
	move   func(round int) error
}

// field is what the courses of one size share.
type field struct {
	ctx      context.Context //nolint:containedctx // of the measurement, for every course
	shape    shape
	digests  bool
	tcp      bool // nothing but sockets
	lines    []line
	from, to *host.Region // memory of this process
	order    [2][]int
	clock    *stopwatch
	sum      uint64
	closers  []func() error
}

// line opens some of the courses of a field.
type line func(*field) ([]course, error)

// courses measures all ways, which take turns, and emits a row for each beside what it is made of and one
// beside memcpy.
func (t *transfer) courses(ctx context.Context, f *field) (err error) {
	bytes := int64(transportBytes)
	if t.Quick {
		f.shape.batch = min(f.shape.batch, 4)
		bytes = 2 * int64(f.shape.batch) * f.shape.block()
	}
	f.ctx, f.clock = ctx, &stopwatch{begin: time.Now()}
	defer func() { err = errors.Join(err, f.close()) }()
	all, err := t.lineUp(f, bytes)
	if err != nil {
		return err
	}
	var ways []way
	for _, c := range all {
		if c.absent == "" {
			ways = append(ways, c.move)
		}
	}
	turns := t.turns()
	turns.clock = f.clock.now
	took, err := turns.measure(ctx, ways...)
	if err != nil {
		return err
	}
	return t.report(f, all, took)
}

// report emits the rows of all courses.
func (t *transfer) report(f *field, all []course, took []took) error {
	moved := f.shape.block() * int64(f.shape.batch)
	speeds := map[string]float64{}
	for _, c := range all {
		if c.absent == "" {
			speeds[c.name] = took[len(speeds)].speed(moved)
		}
	}
	suffix := " "
	if f.digests {
		suffix = "+digest "
	}
	for _, c := range all {
		name := c.name + suffix + f.shape.name
		if c.absent != "" {
			if err := t.Emit(absent(name, c.absent)); err != nil {
				return err
			}
			continue
		}
		if limit, there := speeds[c.limit]; there {
			b := c.budget
			if err := t.Emit(faster(name, moved, speeds[c.name], limit, "GB/s")(b)); err != nil {
				return err
			}
		}
		if other, there := speeds[c.beside]; there {
			if err := t.Emit(faster(name+" : "+c.beside, moved, speeds[c.name], other, "GB/s")(budget{})); err != nil {
				return err
			}
		}
		if c.name == memcpyCourse || f.tcp {
			continue
		}
		if err := t.Emit(faster(name+" : memcpy", moved, speeds[c.name], speeds[memcpyCourse], "GB/s")(budget{})); err != nil {
			return err
		}
	}
	return nil
}

const (
	memcpyCourse  = "memcpy"
	rawNIXLCourse = "raw nixl"
	rawPushCourse = "raw nixl write"
	rawUCXCourse  = "raw ucx"
	rawTCPCourse  = "raw tcp"
)

// lineUp opens the courses.
func (t *transfer) lineUp(f *field, bytes int64) ([]course, error) {
	var err error
	for _, r := range []**host.Region{&f.from, &f.to} {
		if *r, err = host.NewRegion(bytes); err != nil {
			return nil, err
		}
		f.closers = append(f.closers, (*r).Close)
		fill((*r).Bytes())
	}
	f.order = scattered(f.blocks())
	all := []course{{name: memcpyCourse, move: f.copy}}
	for _, add := range f.lines {
		more, err := add(f)
		if err != nil {
			return nil, err
		}
		all = append(all, more...)
	}
	return all, nil
}

// libraries are NIXL and UCX alone, reading from another process.
func (t *transfer) libraries(f *field) ([]course, error) {
	r, err := openRaw(f.ctx, t.Self, f.to)
	if err != nil {
		return nil, err
	}
	f.closers = append(f.closers, r.close)
	return []course{
		{name: rawNIXLCourse, absent: r.noNIXL, move: func(n int) error { return f.hash(n+1, r.moveNIXL(f.ctx, nixl.Read, f.parts(n+1))) }},
		{name: rawPushCourse, absent: r.noNIXL, move: func(n int) error { return f.hash(n+1, r.moveNIXL(f.ctx, nixl.Write, f.parts(n+1))) }},
		{name: rawUCXCourse, absent: r.noUCX, move: func(n int) error { return f.hash(n+2, r.readUCX(f.ctx, f.parts(n+2))) }},
	}, nil
}

// crossings are the connectors between two plugin processes. The budget is for the bare bytes.
func (t *transfer) crossings(f *field) ([]course, error) {
	all := []course{{name: "nixl connector", limit: rawNIXLCourse}, {name: "nixl connector push", limit: rawPushCourse}}
	if !f.digests {
		all[0].budget = atLeast(0.95)
	}
	t.cross(f, all)
	return all, nil
}

// cross opens two courses of the connector that holds blocks: where the consumer reads, and where the producer writes.
func (t *transfer) cross(f *field, all []course) {
	binary, err := holder(t.PluginPath)
	if err != nil {
		all[0].absent, all[1].absent = err.Error(), err.Error()
		return
	}
	for i, mode := range []string{"pull", "push"} {
		config := crossConfig{Mode: mode}
		if f.tcp {
			config.UCXTCP = onTCP
		}
		x, err := openCrossing(f.ctx, binary, config, linkOptions{shape: f.shape, digests: f.digests, bytes: f.from.Size()})
		if err != nil {
			all[i].absent = err.Error() // told in a row
			continue
		}
		f.closers = append(f.closers, x.close)
		all[i].move = func(n int) error { return x.move(f.ctx, n, f.clock) }
	}
}

// links are pipes, and the TCP that one of them is made of. Frames are blocks.
func (t *transfer) links(f *field) ([]course, error) {
	bytes := f.from.Size()
	raw, err := openPlain(f.ctx, f.shape, f.digests, bytes)
	if err != nil {
		return nil, err
	}
	f.closers = append(f.closers, raw.close)
	from := newBlocks(bytes, f.shape)
	all := []course{{name: rawTCPCourse, move: func(n int) error { return raw.send(from.step(n)) }}}
	for _, p := range []struct {
		name    string
		network pipe.Network
		limit   string
		budget  budget
	}{
		{"tcp pipe", &tcp.Network{NoDigest: !f.digests}, rawTCPCourse, atLeast(0.8)},
		{"shm pipe", &shm.Network{}, "", budget{}},
	} {
		ends, err := openEnds(f.ctx, p.network, f.shape, bytes)
		if err != nil {
			return nil, err
		}
		f.closers = append(f.closers, ends.close)
		c := course{name: p.name, limit: p.limit, budget: p.budget, move: func(n int) error { return ends.send(f.ctx, from.step(n+1)) }}
		if f.digests && p.limit == "" {
			c.absent = "it makes no digests"
		}
		all = append(all, c)
	}
	return all, nil
}

func (f *field) blocks() int { return int(f.from.Size() / f.shape.block()) }

// parts are the blocks of a step.
func (f *field) parts(n int) []part {
	size, batch := f.shape.block(), f.shape.batch
	first := n % (f.blocks() / batch) * batch
	parts := make([]part, batch)
	for i := range parts {
		parts[i] = part{int64(f.order[0][first+i]) * size, int64(f.order[1][first+i]) * size, size}
	}
	return parts
}

// copy is the plainest way, within this process.
func (f *field) copy(n int) error {
	from, to := f.from.Bytes(), f.to.Bytes()
	for _, p := range f.parts(n) {
		copy(to[p.to:][:p.size], from[p.from:][:p.size])
	}
	return f.hash(n, nil)
}

// hash is the pass over a step that has arrived, where digests are asked for.
func (f *field) hash(n int, err error) error {
	if err != nil || !f.digests {
		return err
	}
	to := f.to.Bytes()
	for _, p := range f.parts(n) {
		f.sum ^= xxh3.Hash128(to[p.to:][:p.size]).Lo
	}
	return nil
}

func (f *field) close() error {
	var errs []error
	for i := range f.closers {
		errs = append(errs, f.closers[len(f.closers)-1-i]())
	}
	return errors.Join(errs...)
}
