package conformance

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/kvport/kvport/connector"
)

func killCases() []Case {
	const rule = "FAULT-01"
	return []Case{
		faultCase("kill-idle", rule, "The plugin is killed while it is idle: its next life has what Scope promises.", killIdle),
		faultCase("kill-acked", rule, "The plugin is killed right after a save was acknowledged, 5 times: the blocks are kept as Scope promises.", killAcked),
		faultCase("kill-match", rule, "The plugin is killed during Matches, 4 times: what is stored stays whole.", killMatch),
		faultCase("kill-load", rule, "The plugin is killed during loads, 4 times: what is stored stays whole.", killLoad),
		faultCase("kill-save", rule, "The plugin is killed during saves, 6 times: no block is torn, and what was saved before is there.", killSave),
		faultCase("kill-replace", rule, "The plugin is killed while it replaces stored blocks, 6 times: no block is torn.", killReplace),
		faultCase("kill-open", rule, "The plugin is killed while sides open, 4 times: its next life works.", killOpen),
		faultCase("kill-two", "FAULT-03", "Two engines save, and the plugin of one is killed: the other is unharmed.", killTwo),
		faultCase("stopped", "FAULT-04", "The plugin is stopped for 300 ms and continued: the calls of that time end right.", stopped),
		faultCase("few-files", "FAULT-05", "The plugin runs out of file descriptors: calls fail cleanly, and succeed again afterwards.", fewFiles),
	}
}

func killIdle(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(4)
	e.save(blocks(0, keys...)...)
	e.whole(keys, 8)
	e.kill()
	e.survived(keys, len(keys))
}

func killAcked(r *rig) {
	for range 5 {
		e := r.engine(setup{})
		keys := e.keys(6)
		e.save(blocks(0, keys...)...)
		e.kill()
		e.survived(keys, len(keys))
	}
}

// killDuring kills the process a moment after calls began that run until they fail.
func (e *engine) killDuring(callers int, call func(ctx context.Context, i int) error) {
	e.Helper()
	e.process()
	ctx, cancel := context.WithTimeout(e.Context(), soon)
	defer cancel()
	var begun, all sync.WaitGroup
	begun.Add(callers)
	for i := range callers {
		all.Go(func() {
			begun.Done()
			for ctx.Err() == nil && call(ctx, i) == nil {
			}
		})
	}
	begun.Wait()
	e.pause(time.Duration(e.rand.IntN(4000)) * time.Microsecond)
	e.kill()
	cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		all.Wait()
	}()
	killed := time.Now()
	if _, came := awaited(e.rig, done, 2*soon); !came {
		e.late(killed, "calls have not returned %v after the death of the process", 2*soon)
	}
}

func killMatch(r *rig) {
	for range 4 {
		e := r.engine(setup{})
		keys := e.keys(6)
		e.save(blocks(0, keys...)...)
		scheduler := e.scheduler
		e.killDuring(1, func(ctx context.Context, _ int) error {
			_, err := scheduler.Match(ctx, []connector.Query{query(keys)})
			return err
		})
		e.survived(keys, len(keys))
	}
}

func killLoad(r *rig) {
	for range 4 {
		e := r.engine(setup{})
		keys := e.keys(4)
		e.save(blocks(0, keys...)...)
		e.killDuring(4, func(ctx context.Context, i int) error {
			t := transfer(blocks(4+4*i, keys...))
			return e.workers[0].Load(ctx, &t, e.kv[0])
		})
		e.survived(keys, len(keys))
	}
}

func killSave(r *rig) {
	const each = 64
	layout := planes(5 * each)
	sure := 0
	for round := range 6 {
		if round == 0 {
			sure = r.keepsBehind(&layout, surely*(4*each+oldBlocks), each)
		}
		e := r.engine(setup{layout: &layout})
		old := before{keys: e.keys(oldBlocks), saved: time.Now()}
		e.save(blocks(4*each, old.keys...)...)
		keys := make([][]connector.BlockKey, 4)
		for i := range keys {
			keys[i] = e.keys(each)
			e.fill(blocks(i*each, keys[i]...)...)
		}
		e.killDuring(len(keys), func(ctx context.Context, i int) error {
			t := transfer(blocks(i*each, keys[i]...))
			if err := e.workers[0].Save(ctx, &t, e.kv[0]); err != nil {
				return err
			}
			<-ctx.Done() // each once: a second save would find what is there
			return ctx.Err()
		})
		if round == surely { // those before are more than keepsBehind has seen
			sure = 0
		}
		old.keys = old.keys[:sure]
		e.settled(keys, old)
	}
}

const (
	oldBlocks = 8 // that are saved before the plugin is killed
	surely    = 4 // rounds in which they must be there afterwards, if there is room for all that these save
)

// before is what was saved before the calls amid which the plugin is killed.
type before struct {
	keys  []connector.BlockKey
	saved time.Time // at the earliest
}

// keepsBehind is how many of the old blocks must outlive their engine: all, or none where an empty store has no room for that many blocks, since
// a cap may have any of them given up.
func (r *rig) keepsBehind(layout *connector.Layout, many, each int) int {
	r.Helper()
	if r.info.Scope == connector.ScopeEngine {
		return 0 // whose blocks need not outlive it
	}
	s := r.stage(1, end(layout))
	defer func() { _ = s.shut() }()
	e := s.engine(setup{layout: layout})
	var saved [][]connector.BlockKey
	for n := 0; n < many; n += each {
		keys := e.keys(each)
		e.save(blocks(0, keys...)...)
		saved = append(saved, keys)
	}
	for _, keys := range saved {
		if e.match(keys...) < len(keys) {
			return 0
		}
	}
	return oldBlocks
}

// settled opens the next life and checks that whatever it offers of each prompt is whole, and that it offers all of what is old, unless an
// option gives that up with time.
func (e *engine) settled(keys [][]connector.BlockKey, old before) {
	e.Helper()
	n := e.life()
	if len(old.keys) > 0 {
		found := n.match(old.keys...)
		if found < len(old.keys) && e.limitsTime(time.Since(old.saved)) == "" {
			e.equal(len(old.keys), found, "blocks offered to the next life that were saved before the others")
		}
		n.whole(old.keys[:found], 0)
	}
	for _, k := range keys {
		found := n.match(k...)
		n.whole(k[:found], 0)
	}
	n.works("after the kill")
	n.closeAll()
	e.must(n.inst.Close(), "end of the next life")
}

func killReplace(r *rig) {
	const each = 64
	layout := planes(2 * each)
	for range 6 {
		e := r.engine(setup{layout: &layout})
		keys := e.keys(each)
		e.save(blocks(0, keys...)...)
		e.killDuring(2, func(ctx context.Context, _ int) error {
			t := transfer(blocks(0, keys...))
			t.Replace = true
			return e.workers[0].Save(ctx, &t, e.kv[0])
		})
		e.settled([][]connector.BlockKey{keys}, before{})
	}
}

func killOpen(r *rig) {
	first := r.engine(setup{})
	first.process()
	keys := first.keys(3)
	first.save(blocks(0, keys...)...)
	first.kill()
	for range 4 {
		e := r.closed(setup{})
		e.env.Model, e.env.Shape = first.env.Model, first.env.Shape
		e.killDuring(2, func(ctx context.Context, i int) error {
			if i == 0 {
				s, err := e.inst.Scheduler(ctx, e.env, e.config)
				if err == nil {
					err = s.Close()
				}
				return err
			}
			w, err := e.inst.Worker(ctx, e.env, e.config)
			if err == nil {
				err = w.Close()
			}
			return err
		})
	}
	first.survived(keys, len(keys))
}

func killTwo(r *rig) {
	const each = 16
	layout := planes(4 * each)
	e := r.engine(setup{layout: &layout})
	e.process()
	if r.info.Scope == connector.ScopeEngine {
		e.works("alone")
		return // nobody else sees its blocks
	}
	for range 4 {
		peer := e.peer()
		keys := e.keys(each)
		for _, who := range []*engine{e, peer} {
			who.fill(blocks(0, keys...)...)
		}
		var wg sync.WaitGroup
		var err error
		wg.Go(func() {
			for range 5 {
				t := transfer(blocks(0, keys...))
				t.Replace = true
				if err = e.workers[0].Save(r.Context(), &t, e.kv[0]); err != nil {
					return
				}
			}
		})
		peer.killDuring(2, func(ctx context.Context, _ int) error {
			t := transfer(blocks(0, keys...))
			t.Replace = true
			return peer.workers[0].Save(ctx, &t, peer.kv[0])
		})
		wg.Wait()
		r.must(err, "save of the engine whose peer was killed")
		r.equal(each, e.match(keys...), "blocks offered to the engine whose peer was killed")
		e.whole(keys, 2*each)
	}
}

func stopped(r *rig) {
	e := r.engine(setup{})
	e.process()
	keys, fresh := e.keys(4), e.keys(4)
	e.save(blocks(0, keys...)...)
	for range 3 {
		load, save := transfer(blocks(4, keys...)), transfer(blocks(8, fresh...))
		e.wipe(0, load.Blocks...)
		e.fill(save.Blocks...)
		var wg sync.WaitGroup
		var loaded, saved error
		e.signal(syscall.SIGSTOP)
		wg.Go(func() { loaded = e.workers[0].Load(r.Context(), &load, e.kv[0]) })
		wg.Go(func() { saved = e.workers[0].Save(r.Context(), &save, e.kv[0]) })
		e.pause(300 * time.Millisecond)
		e.signal(syscall.SIGCONT)
		wg.Wait()
		r.must(loaded, "load during a stop of the process")
		r.must(saved, "save during a stop of the process")
		e.holds(load.Blocks...)
		r.equal(4, e.match(fresh...), "blocks offered after a save during a stop")
	}
}

// limitFiles changes how many descriptors a process may have and gives what it could have before.
func limitFiles(pid int, to *syscall.Rlimit) (old syscall.Rlimit, err error) {
	_, _, errno := syscall.RawSyscall6(syscall.SYS_PRLIMIT64, uintptr(pid), syscall.RLIMIT_NOFILE,
		uintptr(unsafe.Pointer(to)), uintptr(unsafe.Pointer(&old)), 0, 0)
	if errno != 0 {
		return old, fmt.Errorf("prlimit: %w", errno)
	}
	return old, nil
}

func fewFiles(r *rig) {
	e := r.engine(setup{})
	pid := e.process().PID()
	keys := e.keys(3)
	e.save(blocks(0, keys...)...)
	e.whole(keys, 4)
	old, err := limitFiles(pid, nil)
	r.must(err, "limit of file descriptors")
	few := old
	few.Cur = 4 // fewer than are open: no further one can be had
	_, err = limitFiles(pid, &few)
	r.must(err, "limit of file descriptors")
	for range 10 {
		if n := e.tryMatch(keys); n > len(keys) {
			r.Errorf("%d blocks offered of %d", n, len(keys))
		}
		load := transfer(blocks(8, keys...))
		e.wipe(0, load.Blocks...)
		if e.tryMove(load, false) == nil {
			e.holds(load.Blocks...)
		}
		fresh := e.keys(2)
		save := transfer(blocks(12, fresh...))
		e.fill(save.Blocks...)
		if e.tryMove(save, true) == nil {
			r.equal(2, e.match(fresh...), "blocks offered after a save that succeeded without a descriptor to be had")
		}
	}
	_, err = limitFiles(pid, &old)
	r.must(err, "process %d, which could open no file", pid) // it may have died of that
	e.eventually(e.recovery(), func() string {
		select {
		case <-e.process().Done():
			e.inst.killed = true
			r.Errorf("the process ended because it could open no file")
			r.FailNow()
		default:
		}
		if n := e.tryMatch(keys); n != len(keys) {
			return fmt.Sprintf("%d of %d blocks are offered", n, len(keys))
		}
		return ""
	})
	e.whole(keys, 4)
	e.works("with enough descriptors again")
}
