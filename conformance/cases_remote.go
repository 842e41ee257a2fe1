package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
)

func remoteCase(id, rule, text string, body func(*rig, *server)) Case {
	return Case{ID: id, Rule: rule, Text: text, Profiles: []Profile{Remote}, Run: rigged(0, false, func(r *rig) { body(r, r.remote()) })}
}

// changingCase is a remoteCase that changes what lies in the server, or how it runs. Where the config has a relay to another server, a control
// program must do that; without one the case does not apply.
func changingCase(id, rule, text string, body func(*rig, *server)) Case {
	return remoteCase(id, rule, text, func(r *rig, s *server) {
		if s.Server == nil && s.control == nil {
			r.unfit("the config names no Redis server of the suite (@SERVER@), and no --server-control changes another")
		}
		body(r, s)
	})
}

// redisCase is a remoteCase that does what only Redis servers know.
func redisCase(id, rule, text string, body func(*rig, *server)) Case {
	return remoteCase(id, rule, text, func(r *rig, s *server) {
		if s.Server == nil {
			r.unfit("the config names no Redis server of the suite (@SERVER@)")
		}
		body(r, s)
	})
}

func remoteCases() []Case {
	return []Case{
		remoteCase("remote-stopped", "REMOTE-01", "The server is stopped and continued during calls that have a deadline.", remoteStopped),
		remoteCase("remote-cancelled", "REMOTE-01", "Calls are cancelled while the server is stopped.", remoteCancelled),
		remoteCase("remote-cut-load", "REMOTE-02", "Connections are cut in the middle of loads.", remoteCutLoad),
		remoteCase("remote-cut-save", "REMOTE-02", "Connections are cut in the middle of saves.", remoteCutSave),
		changingCase("remote-restart", "REMOTE-03", "The server is killed and comes back empty.", remoteRestart),
		remoteCase("remote-away", "REMOTE-03", "Connections are refused for a while; what was stored is there afterwards.", remoteAway),
		changingCase("remote-length", "REMOTE-04", "Values are shorter and longer than what was saved.", remoteLength),
		changingCase("remote-swapped", "REMOTE-04", "Each key has the value of another.", remoteSwapped),
		redisCase("remote-type", "REMOTE-04", "The server has lists under the keys, not values.", remoteType),
		changingCase("remote-evicted", "REMOTE-05", "Some blocks are removed between Match and Load.", remoteEvicted),
		changingCase("remote-flushed", "REMOTE-05", "All blocks are removed between Match and Load.", remoteFlushed),
		changingCase("remote-full", "REMOTE-06", "The server has no memory left for a while.", remoteFull),
		remoteCase("remote-slow", "REMOTE-07", "The server is 200 ms away.", remoteSlow),
		remoteCase("remote-idle", "REMOTE-11", "Connections that nobody uses are closed, 3 times: the next Match and load miss nothing.", remoteIdle),
		changingCase("remote-busy", "REMOTE-08", "The server answers everything with an error, such as BUSY, for a while.", remoteBusy),
		changingCase("remote-others", "REMOTE-09", "Others keep keys in the same server.", remoteOthers),
		remoteCase("remote-outage-log", "LOG-01", "Fifty calls fail while the server is away.", remoteOutageLog),
		remoteSecretCase(),
	}
}

// stored saves n blocks from slot 0 on.
func (e *engine) stored(n int) []connector.BlockKey {
	e.Helper()
	keys := e.keys(n)
	from := blocks(0, keys...)
	e.fill(from...)
	e.must(e.saveOnly(e.Context(), transfer(from)), "save")
	return keys
}

// strict loads blocks: each that no error names must be right. It gives their number.
func (e *engine) strict(keys []connector.BlockKey) int {
	e.Helper()
	to := blocks(0, keys...)
	e.wipe(0x44, to...)
	err := e.tryMove(transfer(to), false)
	failed := map[connector.BlockID]bool{}
	if err != nil {
		e.acceptable("load", err)
		part, ok := errors.AsType[*connector.BlockError](err)
		if !ok {
			return 0
		}
		for _, id := range part.Blocks {
			failed[id] = true
		}
	}
	intact := 0
	for _, b := range to {
		if failed[b.ID] {
			continue
		}
		intact++
		if !e.right(b, slots-1) {
			e.Errorf("block %d is wrong, and no error names it (error: %v)", b.ID, err)
		}
	}
	return intact
}

// usual reports whether an error is one of those of blocks that cannot be had.
func usual(err error) bool {
	return errors.Is(err, connector.ErrGone) || errors.Is(err, connector.ErrCorrupt) || errors.Is(err, connector.ErrOutdated) || errors.Is(err, connector.ErrBusy)
}

// acceptable checks that a host can act on an error. That of a context is right where the call took until its end.
func (e *engine) acceptable(what string, err error) {
	e.Helper()
	if !usual(err) && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		e.Errorf("%s: error %q wraps none of ErrGone, ErrCorrupt, ErrOutdated and ErrBusy (see \"What to answer when something fails\" in docs/write-a-connector.md)", what, err)
	}
}

// back waits until stored blocks are offered and right again. If they are not in time the case ends.
func (e *engine) back(keys []connector.BlockKey) {
	e.Helper()
	for w := e.patience(e.recovery()); ; e.pause(askAgain) {
		if offered := e.tryMatch(keys); offered == len(keys) && e.strict(keys) == len(keys) {
			return
		}
		if w.over() {
			e.late(w.began, "stored blocks are not offered and loaded again after %v", e.recovery())
		}
	}
}

func remoteStopped(r *rig, s *server) {
	e := r.engine(setup{})
	keys := e.stored(4)
	r.must(s.Pause(), "stop the server")
	fresh := e.keys(2)
	save := transfer(blocks(8, fresh...))
	e.fill(save.Blocks...)
	// Each call returns soon after its deadline, which these check; none succeeds by magic.
	if n := e.strict(keys); n > 0 {
		r.Errorf("%d blocks were loaded from a stopped server", n)
	}
	if err := e.tryMove(save, true); err == nil {
		r.Errorf("a save succeeded while the server was stopped")
	}
	e.tryMatch(keys)
	r.must(s.Resume(), "continue the server")
	e.back(keys)
	e.mended(e.keys(3))
}

func remoteCancelled(r *rig, s *server) {
	const calls = 8
	e := r.engine(setup{})
	keys := e.stored(4)
	r.must(s.Pause(), "stop the server")
	ctx, cancel := context.WithCancel(r.Context())
	ended := make(chan struct{})
	var left atomic.Int32
	left.Store(calls)
	worker := e.workers[0] // the loads may outlive the case, and closing it forgets the worker
	go func() {
		defer close(ended)
		together(calls, func(i int) {
			defer left.Add(-1)
			t := transfer(blocks(2*i, keys[:2]...))
			_ = worker.Load(ctx, &t, e.kv[0])
		})
	}()
	e.pause(20 * askAgain) // all wait for the server now
	cancel()
	cancelled := time.Now()
	if _, came := awaited(r, ended, soon); !came {
		late := left.Load()
		defer r.late(cancelled, "%d of %d cancelled loads have not returned after %v", late, calls, soon)
		r.must(s.Resume(), "continue the server")
		select {
		case <-ended: // nothing is closed under them
		case <-r.Context().Done():
		}
		return
	}
	before := e.memory()
	r.must(s.Resume(), "continue the server")
	e.pause(20 * askAgain)
	for rank, m := range e.memory() {
		if !bytes.Equal(before[rank], m) {
			r.Errorf("the cache was written after the loads had returned")
		}
	}
	e.back(keys)
}

// cutting makes a call again and again, each time with connections cut after fewer bytes than the most that one of them has passed. What
// passes is the connector's choice: it may have one connection for all blocks, or one for each. So a call that nothing has cut halves the
// bytes of the next, and calls go on until something was cut. A call ends the cutting itself, with cutAfter(0).
func (s *server) cutting(r *rig, tries int, most int64, cutAfter func(int64), call func()) {
	r.Helper()
	for n := 0; n < tries || s.relays.Cuts() == 0 && most > 0; n++ {
		after, before := 1+r.rand.Int64N(max(1, most-1)), s.relays.Cuts()
		cutAfter(after)
		call()
		if s.relays.Cuts() == before {
			most = after / 2
		}
	}
	switch {
	case s.relays.Cuts() > 0:
	case s.Server == nil: // its address may lead to others, which are reached past the relays
		r.unfit("no connection was cut: none passes a relay of the config")
	default:
		r.Errorf("no connection was cut, the case says nothing")
	}
}

func remoteCutLoad(r *rig, s *server) {
	e := r.engine(setup{})
	keys := e.stored(8)
	s.relays.CutAfter(0)
	e.back(keys)
	s.cutting(r, 15, s.relays.Answered(), s.relays.CutAfter, func() {
		e.strict(keys)
		s.relays.CutAfter(0)
		e.back(keys[:2])
	})
	e.back(keys)
}

func remoteCutSave(r *rig, s *server) {
	e := r.engine(setup{})
	s.relays.CutSentAfter(0)
	before := e.stored(4)
	s.cutting(r, 10, s.relays.Sent(), s.relays.CutSentAfter, func() {
		keys := e.keys(4)
		from := blocks(0, keys...)
		e.fill(from...)
		err := e.tryMove(transfer(from), true)
		s.relays.CutSentAfter(0)
		if err != nil {
			e.acceptable("save", err)
			keys = before
			for _, k := range unnamed(err, from) { // each is stored, whatever became of those before it
				e.back([]connector.BlockKey{k})
			}
		}
		e.back(keys)
	})
	e.mended(e.keys(3))
}

func remoteRestart(r *rig, s *server) {
	e := r.engine(setup{})
	keys := e.stored(4)
	r.equal(4, e.match(keys...), "blocks offered")
	s.stop()
	for range 3 {
		e.tryMatch(keys)
		if n := e.strict(keys); n > 0 {
			r.Errorf("%d blocks were loaded from a dead server", n)
		}
	}
	r.restart(s)
	e.eventually(e.recovery(), func() string {
		if n := e.tryMatch(keys); n > 0 {
			return fmt.Sprintf("%d blocks are offered that the server has lost", n)
		}
		return ""
	})
	e.resaved(keys)
	e.mended(keys)
}

func remoteAway(r *rig, s *server) {
	e := r.engine(setup{})
	keys := e.stored(4)
	s.relays.Refuse(true)
	for range 5 {
		e.tryMatch(keys)
		e.strict(keys)
		save := transfer(blocks(8, e.keys(2)...))
		e.fill(save.Blocks...)
		if e.tryMove(save, true) == nil {
			r.Errorf("a save succeeded while the server was away")
		}
	}
	s.relays.Refuse(false)
	e.back(keys)
	e.mended(e.keys(3))
}

func remoteIdle(r *rig, s *server) {
	e := r.engine(setup{})
	keys := e.stored(4)
	for range 3 {
		s.relays.Cut()
		r.equal(4, e.match(keys...), "blocks offered after idle connections were closed")
		s.relays.Cut()
		r.equal(4, e.strict(keys), "blocks loaded after idle connections were closed")
		s.relays.Cut()
		keys = e.stored(4)
	}
}

// damagedValues changes what is stored and checks that the host can recover from it.
func damagedValues(r *rig, s *server, change func(n int, value []byte) []byte) {
	e := r.engine(setup{})
	keys := e.stored(6)
	r.values(s, change)
	e.tryMatch(keys)
	e.judged(keys)
	e.mended(keys)
}

func remoteLength(r *rig, s *server) {
	damagedValues(r, s, func(n int, value []byte) []byte {
		switch n % 3 {
		case 0:
			return value[:r.rand.IntN(max(1, len(value)))]
		case 1:
			return append(value, value...)
		}
		return []byte{}
	})
}

func remoteSwapped(r *rig, s *server) {
	var last []byte
	damagedValues(r, s, func(_ int, value []byte) []byte {
		was := last
		if last = value; was == nil {
			return value
		}
		return was
	})
}

func remoteType(r *rig, s *server) {
	e := r.engine(setup{})
	keys := e.stored(4)
	c := s.Client()
	for _, k := range r.names(redisStock{c}) {
		r.must(c.Del(r.Context(), k).Err(), "remove a value")
		r.must(c.LPush(r.Context(), k, "somebody's list").Err(), "put a list in its place")
	}
	r.must(c.Close(), "close")
	if n := e.strict(keys); n > 0 {
		r.Errorf("%d blocks were made of lists", n)
	}
	e.mended(keys)
}

func remoteEvicted(r *rig, s *server) {
	e := r.engine(setup{})
	keys := e.stored(6)
	r.equal(6, e.match(keys...), "blocks offered")
	n := r.values(s, func(n int, value []byte) []byte {
		if n%2 == 0 {
			return nil
		}
		return value
	})
	lost(e, keys)
	intact := e.strict(keys)
	// A store that keeps a block in several values loses it with the first of them.
	if n == len(keys) && intact != len(keys)/2 {
		r.Errorf("%d of %d blocks were loaded when every second value was gone", intact, len(keys))
	}
	e.resaved(keys)
	e.mended(keys)
}

// lost checks that a load which finds blocks missing fails with an error that asks for no retry.
func lost(e *engine, keys []connector.BlockKey) {
	e.Helper()
	err := e.tryMove(transfer(blocks(0, keys...)), false)
	if !errors.Is(err, connector.ErrGone) || errors.Is(err, connector.ErrBusy) {
		e.Errorf("load of blocks that are gone: error %v, want one that wraps ErrGone and not ErrBusy", err)
	}
}

func remoteFlushed(r *rig, s *server) {
	e := r.engine(setup{})
	keys := e.stored(4)
	r.equal(4, e.match(keys...), "blocks offered")
	r.empty(s)
	lost(e, keys)
	e.eventually(e.recovery(), func() string {
		if n := e.tryMatch(keys); n > 0 {
			return fmt.Sprintf("%d blocks are offered that the server has lost", n)
		}
		return ""
	})
	e.resaved(keys)
	e.mended(keys)
}

func remoteFull(r *rig, s *server) {
	e := r.engine(setup{})
	keys := e.stored(4)
	r.crowd(s)
	for range 4 {
		fresh := e.keys(2)
		save := transfer(blocks(8, fresh...))
		e.fill(save.Blocks...)
		if err := e.tryMove(save, true); err == nil {
			r.equal(2, e.match(fresh...), "blocks offered after a save that a full server took")
		} else {
			e.acceptable("save", err)
			e.offersUnnamed(err, save.Blocks)
		}
		r.equal(4, e.tryMatch(keys), "blocks offered by a full server")
		r.equal(4, e.strict(keys), "blocks loaded from a full server")
	}
	r.vacate(s)
	e.mended(e.keys(3))
}

func remoteSlow(r *rig, s *server) {
	const away = 200 * time.Millisecond
	e := r.engine(setup{})
	keys := e.stored(4)
	s.relays.Delay(away)
	e.back(keys)
	start := time.Now()
	r.equal(4, e.strict(keys), "blocks loaded")
	if took := time.Since(start); took < away || took > soon {
		r.Errorf("a load took %v at a distance of %v", took, away)
	}
	e.mended(e.keys(3))
}

func remoteBusy(r *rig, s *server) {
	e := r.engine(setup{})
	keys := e.stored(4)
	answerAgain := e.busy(s)
	for range 3 {
		e.tryMatch(keys)
		if n := e.strict(keys); n > 0 {
			r.Errorf("%d blocks were loaded from a server that answers with errors", n)
		}
		save := transfer(blocks(8, e.keys(2)...))
		e.fill(save.Blocks...)
		if err := e.tryMove(save, true); err == nil {
			r.Errorf("a save succeeded on a server that answers with errors")
		} else {
			e.acceptable("save", err)
			r.equal(0, len(unnamed(err, save.Blocks)), "blocks that the error of a save does not name while the server answers with errors")
		}
	}
	answerAgain()
	e.back(keys)
	e.mended(e.keys(3))
}

// busy has the server answer everything with an error, until the function is called that it gives.
func (e *engine) busy(s *server) (end func()) {
	e.Helper()
	if s.Server == nil {
		e.order(s, "refuse")
		return func() { e.mend(s) }
	}
	e.do(e.Context(), s, "config", "set", "lua-time-limit", "20")
	ctx, cancel := context.WithTimeout(e.Context(), e.recovery())
	e.afterwards(func(context.Context) error {
		cancel()
		return nil
	})
	script := make(chan error, 1)
	go func() { script <- s.Do(ctx, "eval", "while true do end", "0") }()
	e.eventually(soon, func() string {
		if err := s.Do(e.Context(), "ping"); err == nil || !strings.Contains(err.Error(), "BUSY") {
			return fmt.Sprintf("the server is not busy: %v", err)
		}
		return ""
	})
	return func() {
		e.do(e.Context(), s, "script", "kill")
		if err := <-script; err == nil {
			e.Errorf("a script without an end has ended well")
		}
	}
}

func remoteOthers(r *rig, s *server) {
	in := r.stock(s)
	foreign := map[string]string{"session:1": "theirs", "kv": "", "block": strings.Repeat("x", 1000)}
	if s.Server == nil { // where others may have values of these names
		mark := "kvport-others-" + randomHex(8)
		foreign = map[string]string{mark + "-1": "theirs", mark + "-2": strings.Repeat("x", 1000)}
	}
	theirs := map[string]string{}
	r.afterwards(func(ctx context.Context) error { return forget(ctx, in, theirs) })
	for name, value := range foreign {
		r.done(in.put(r.Context(), name, []byte(value)), "put a value of somebody else")
		theirs[name] = value
		have, err := in.get(r.Context(), name)
		r.done(err, "get a value of somebody else")
		if string(have) != value {
			r.inconclusive("what is read of value %s is not what was put there", name)
		}
	}
	e := r.engine(setup{})
	keys := e.stored(6)
	e.mended(keys)
	r.equal(0, e.tryMatch(e.keys(2)), "blocks offered that nobody saved")
	e.closeAll()
	for name, value := range foreign {
		have, there := e.foreign(in, name, value)
		switch {
		case !there:
			r.Errorf("value %s of somebody else is gone", name)
		case string(have) != value:
			r.Errorf("value %s of somebody else has changed", name)
		}
	}
}

// forget removes values, as far as the server of the case can.
func forget(ctx context.Context, in stock, values map[string]string) error {
	var errs []error
	for name := range values {
		if err := in.remove(ctx, name); !errors.Is(err, errCannot) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// foreign reads somebody's value. A control program fails in the same way whether a value is gone or it cannot tell: that a value is gone is
// believed if the program says so twice, and finds the value when it has put it there again.
func (e *engine) foreign(in stock, name, value string) (have []byte, there bool) {
	e.Helper()
	for range 2 {
		have, err := in.get(e.Context(), name)
		if !absent(err) {
			e.done(err, "get a value of somebody else")
			return have, true
		}
		e.pause(10 * askAgain)
	}
	e.done(in.put(e.Context(), name, []byte(value)), "put a value of somebody else")
	_, err := in.get(e.Context(), name)
	e.done(err, "get a value of somebody else")
	return nil, false
}

func remoteOutageLog(r *rig, s *server) {
	const calls, most = 50, 15
	e := r.closed(setup{})
	count := e.logged()
	e.openAll()
	keys := e.stored(2)
	before := count()
	s.relays.Refuse(true)
	for range calls {
		e.tryMatch(keys)
		e.strict(keys)
	}
	s.relays.Refuse(false)
	if n := count() - before; n > most {
		r.Errorf("%d lines were logged in %d calls to a server that was away, at most %d make sense", n, 2*calls, most)
	}
}

// remoteSecretCase applies to connectors whose config names a file with a password.
func remoteSecretCase() Case {
	c := changingCase("remote-secret", "REMOTE-10", "The password is wrong: opening fails, and neither errors nor logs show the password.", func(r *rig, s *server) {
		switch {
		case s.Server == nil:
			r.order(s, "lock")
		case s.password == "":
			r.Skipf("the config names no file with a password (@PASSWORD_FILE@)")
		default:
			r.do(r.Context(), s, "config", "set", "requirepass", "another")
		}
		e := r.closed(setup{})
		_, err := e.inst.Scheduler(r.Context(), e.env, e.config)
		switch {
		case err == nil:
			r.Errorf("it opened with a wrong password")
		case !errors.Is(err, connector.ErrIncompatible):
			r.Errorf("open with a wrong password: error %q does not wrap ErrIncompatible", err)
		case s.password != "" && strings.Contains(err.Error(), s.password):
			r.Errorf("the error of opening shows the password")
		}
	})
	c.Optional = true
	return c
}
