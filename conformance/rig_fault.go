package conformance

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvport/kvport/connector"
)

// harness is the case's Harness as its Maker made it, which may have further methods.
func (r *rig) harness() Harness {
	if s, ok := r.h.(seeded); ok {
		return s.Harness
	}
	return r.h
}

// isStaged reports whether the connector runs at trust level staged.
func (r *rig) isStaged() bool {
	h, ok := r.harness().(*loopback)
	return ok && h.staged
}

// torn reports whether a load that nothing damaged gave wrong bytes, which at staged the host notices before the case can.
func (r *rig) torn(err error) bool { return r.isStaged() && errors.Is(err, connector.ErrCorrupt) }

// folder is where the connector keeps what it stores. Without one the case does not apply.
func (r *rig) folder() string {
	r.Helper()
	if b, ok := r.harness().(Backend); ok && b.Folder() != "" {
		return b.Folder()
	}
	r.Skipf("the config names no folder (@TMP@) that could be damaged")
	return ""
}

// process is the connector's process. Without one the case does not apply.
func (e *engine) process() Process {
	e.Helper()
	if e.inst.Process == nil {
		e.Skipf("the connector runs in this process; kvport conform runs it in its own")
	}
	return e.inst.Process
}

// signal sends a signal to the connector's process.
func (e *engine) signal(s syscall.Signal) {
	e.Helper()
	e.must(syscall.Kill(e.process().PID(), s), "send %v", s)
}

// kill ends the connector's process with SIGKILL and waits until it is reaped.
func (e *engine) kill() {
	e.Helper()
	p := e.process()
	e.inst.killed = true
	e.signal(syscall.SIGKILL)
	select {
	case <-p.Done():
	case <-e.Context().Done():
		e.must(e.Context().Err(), "waiting for the death of process %d", p.PID())
	}
}

// life opens the next life of an engine, whose process has ended, in an instance of its own, with the same name, model, layout and
// ranks.
func (e *engine) life() *engine {
	e.Helper()
	n := e.reborn()
	n.openAll()
	return n
}

// reborn is life whose sides are not open yet.
func (e *engine) reborn() *engine {
	e.Helper()
	layout := e.env.Layout
	n := e.closed(setup{world: e.env.World, layout: &layout})
	n.env.Engine, n.env.Model, n.env.Shape = e.env.Engine, e.env.Model, e.env.Shape
	return n
}

// opens tries one side after the other, closes what it has opened, and gives the error of the first that does not open.
func (e *engine) opens() error {
	e.Helper()
	s, err := e.begunScheduler()
	if err != nil {
		return err
	}
	e.must(e.endless(time.Now(), s.Close()), "close the scheduler side")
	for rank := range e.workers {
		w, err := e.begunWorker(rank)
		if err != nil {
			return err
		}
		e.must(e.endless(time.Now(), w.Close()), "close the worker side of rank %d", rank)
	}
	return nil
}

// survived opens the next life of an engine. The first sure blocks must be there, as far as Scope
// says so; whatever else is offered must be whole; and everything can be saved and loaded again.
func (e *engine) survived(keys []connector.BlockKey, sure int) {
	e.Helper()
	n := e.life()
	if e.info.Scope == connector.ScopeEngine {
		sure = 0
	}
	found := n.match(keys...)
	if found < sure || found > len(keys) {
		e.Errorf("%d of %d blocks are offered to the next life, %d were acknowledged", found, len(keys), sure)
	}
	n.whole(keys[:min(found, len(keys))], 0)
	n.save(blocks(0, keys...)...)
	e.equal(len(keys), n.match(keys...), "blocks offered after they were saved again")
	n.whole(keys, 0)
	n.closeAll()
	e.must(n.inst.Close(), "end of the next life")
}

// whole loads blocks into the slots from first on and checks their content.
func (e *engine) whole(keys []connector.BlockKey, first int) {
	e.Helper()
	if len(keys) == 0 {
		return
	}
	to := blocks(first, keys...)
	e.wipe(0x11, to...)
	e.must(e.load(to...), "load of %d blocks that were offered", len(keys))
	e.holds(to...)
}

// returns runs a call and fails the case if it has not returned soon after its context ended.
func (e *engine) returns(what string, limit time.Duration, call func(context.Context) error) error {
	e.Helper()
	ctx, cancel := context.WithTimeout(e.Context(), limit)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- call(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	ended := time.Now()
	err, came := awaited(e.rig, done, soon)
	if !came {
		e.late(ended, "%s had not returned %v after its context ended", what, soon)
	}
	return err
}

// tryMatch asks for a prompt once. Any error is a miss.
func (e *engine) tryMatch(keys []connector.BlockKey) int {
	e.Helper()
	offered := 0
	_ = e.returns("Match", soon, func(ctx context.Context) error {
		ms, err := e.scheduler.Match(ctx, []connector.Query{query(keys)})
		if err == nil && len(ms) == 1 {
			offered = ms[0].Tokens / blockTokens
		}
		return err
	})
	return offered
}

// tryMove loads or saves on rank 0 once.
func (e *engine) tryMove(t connector.Transfer, save bool) error {
	e.Helper()
	worker, kv := e.workers[0], e.kv[0]
	if save {
		return e.returns("Save", soon, func(ctx context.Context) error { return worker.Save(ctx, &t, kv) })
	}
	return e.returns("Load", soon, func(ctx context.Context) error { return worker.Load(ctx, &t, kv) })
}

// unnamed are the keys of blocks that the error of their save does not name: they are stored. An error that names no blocks is about all of them.
func unnamed(err error, of []connector.Block) (keys []connector.BlockKey) {
	part, some := errors.AsType[*connector.BlockError](err)
	if !some {
		return nil
	}
	for _, b := range of {
		if !slices.Contains(part.Blocks, b.ID) {
			keys = append(keys, b.Key)
		}
	}
	return keys
}

// offersUnnamed checks that those blocks are offered soon.
func (e *engine) offersUnnamed(err error, of []connector.Block) {
	e.Helper()
	for _, k := range unnamed(err, of) {
		e.eventually(soon, func() string {
			if e.tryMatch([]connector.BlockKey{k}) == 0 {
				return fmt.Sprintf("a block is not offered although the error of its save does not name it: %v", err)
			}
			return ""
		})
	}
}

// eventually asks again and again until check gives "".
func (e *engine) eventually(limit time.Duration, check func() string) {
	e.Helper()
	for w := e.patience(limit); ; e.pause(10 * askAgain) {
		wrong := check()
		if wrong == "" {
			return
		}
		if w.over() {
			e.overdue(w.began, "after %v: %s", limit, wrong)
			return
		}
	}
}

// isDigest reports whether a segment is the one of the digests.
func (e *engine) isDigest(segment int) bool {
	return e.env.Layout.Segments[segment].Layer == connector.DigestLayer
}

// fits reports whether a block's digests are those of its bytes: a host that finds otherwise drops
// the block.
func (e *engine) fits(b connector.Block) bool {
	return !slices.ContainsFunc(e.kv, func(kv *connector.KV) bool { return e.hasher().Check(kv, b) != nil })
}

// right reports whether a block holds its content. It overwrites the slot spare.
func (e *engine) right(b connector.Block, spare connector.BlockID) bool {
	want := b
	want.ID = spare
	e.fill(want)
	for rank := range e.kv {
		for _, s := range e.kv[rank].Segments(b.Group) {
			if firstDifference(e.kv[rank].View(s, spare), e.kv[rank].View(s, b.ID)) >= 0 {
				return false
			}
		}
	}
	return true
}

// judged loads blocks of a damaged backend. Each must be right, or be named by an error that
// a host can act on, or have digests that tell. It gives the number that were right.
func (e *engine) judged(keys []connector.BlockKey) (intact int) {
	e.Helper()
	to := blocks(0, keys...)
	e.wipe(0x33, to...)
	err := e.tryMove(transfer(to), false)
	failed := map[connector.BlockID]bool{}
	if err != nil {
		if !usual(err) {
			e.Errorf("error %q wraps none of ErrGone, ErrCorrupt, ErrOutdated and ErrBusy", err)
		}
		var part *connector.BlockError
		if !errors.As(err, &part) {
			return 0
		}
		for _, id := range part.Blocks {
			failed[id] = true
		}
	}
	for _, b := range to {
		switch {
		case failed[b.ID]:
		case e.right(b, slots-1):
			intact++
		case e.fits(b):
			e.Errorf("block %d holds wrong bytes with digests that fit them", b.ID)
		}
	}
	return intact
}

// mended saves blocks again, as a host does after damage, and checks that they can be loaded.
func (e *engine) mended(keys []connector.BlockKey) {
	e.Helper()
	from := blocks(0, keys...)
	t := transfer(from)
	t.Replace = true
	e.eventually(e.recovery(), func() string {
		e.fill(from...)
		if err := e.tryMove(t, true); err != nil {
			return fmt.Sprintf("save: %v", err)
		}
		if n := e.tryMatch(keys); n != len(keys) {
			return fmt.Sprintf("%d of %d blocks are offered", n, len(keys))
		}
		to := blocks(len(keys), keys...)
		e.wipe(0, to...)
		if err := e.tryMove(transfer(to), false); err != nil {
			return fmt.Sprintf("load: %v", err)
		}
		for _, b := range to {
			if !e.right(b, slots-1) {
				return fmt.Sprintf("block %d is wrong", b.ID)
			}
		}
		return ""
	})
}

// resaved saves blocks again that were lost, without Replace, as a host does with what it was not offered, and checks that they are offered
// (rule WORK-05): that they were saved before, by the same sides, does not matter.
func (e *engine) resaved(keys []connector.BlockKey) {
	e.Helper()
	from := blocks(0, keys...)
	e.eventually(e.recovery(), func() string {
		e.fill(from...)
		if err := e.tryMove(transfer(from), true); err != nil {
			return fmt.Sprintf("save of blocks that were lost: %v", err)
		}
		if n := e.tryMatch(keys); n != len(keys) {
			return fmt.Sprintf("%d of %d blocks are offered that were lost, and saved again without Replace", n, len(keys))
		}
		return ""
	})
}

// recovery is how long a connector may need to work again after its backend does: 15 s of a case's usual 60.
func (r *rig) recovery() time.Duration { return cmp.Or(r.settings.deadline, defaultDeadline) / 4 }

// logged counts the lines that the connector logs from now on.
func (e *engine) logged() func() int64 {
	lines := &lineCounter{count: new(atomic.Int64), next: e.settings.log.Handler()}
	e.env.Log = slog.New(lines)
	return func() int64 {
		n := lines.count.Load()
		if e.inst.Logged != nil {
			n += e.inst.Logged()
		}
		return n
	}
}

// together runs n calls at once and waits for all.
func together(n int, call func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { call(i) })
	}
	wg.Wait()
}

// endWithCase lets the case's end close what is open by then. Only closing is left to do there: nothing is
// written that a call which the case gave up waiting for may read.
func (e *engine) endWithCase() {
	if e.opened[e] {
		return
	}
	e.opened[e] = true
	e.closers = append(e.closers, func() error {
		var errs []error
		for _, w := range e.workers {
			if w != nil {
				errs = append(errs, e.endless(time.Now(), w.Close()))
			}
		}
		if e.scheduler != nil {
			errs = append(errs, e.endless(time.Now(), e.scheduler.Close()))
		}
		return errors.Join(errs...)
	})
}

// arena is what the connector asks for with a config; nil if it refuses that, as its sides will.
func (r *rig) arena(i *Instance, config json.RawMessage, layout *connector.Layout, world int) []byte {
	r.Helper()
	info, err := i.Describe(r.Context(), config)
	if size := info.ArenaSize(layout, world); err == nil && size > 0 {
		r.must(i.Fit(size), "arena of %d bytes", size)
	}
	return i.Arena
}

// equal fails the case if an int is not what it should be.
func (r *rig) equal(want, got int, format string, args ...any) {
	r.Helper()
	if want != got {
		r.Errorf("%s: got %d, want %d", fmt.Sprintf(format, args...), got, want)
	}
}
