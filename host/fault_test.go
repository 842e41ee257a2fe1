package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/verify/testkit"
)

// exactlyOnce checks rule HOST-01 over all events seen: one Loaded or Saved for each transfer, one
// Finished for each ended request, each with the transfer's blocks.
func (r *rig) exactlyOnce(transfers, ended int) {
	r.t.Helper()
	type key struct {
		kind    EventKind
		request connector.RequestID
		step    uint64
	}
	seen := map[key]int{}
	moved, finished := 0, 0
	for _, e := range r.seen {
		switch e.Kind {
		case Loaded, Saved:
			moved++
		case Finished:
			finished++
		default:
			continue
		}
		seen[key{e.Kind, e.Request, e.Step}]++
	}
	for k, n := range seen {
		require.Equal(r.t, 1, n, "events of %v", k)
	}
	require.Equal(r.t, transfers, moved, "Loaded and Saved")
	require.Equal(r.t, ended, finished, "Finished")
}

func TestLoadFaults(t *testing.T) {
	// Only what ends by its deadline has a short one: on a busy machine the others take longer than that.
	short := map[string]any{"deadlines": map[string]any{"transfer": "600ms", "grace": "100ms"}}
	long := map[string]any{"deadlines": map[string]any{"transfer": "1m"}}
	for _, c := range []struct {
		fault      string
		want       error
		loaded     bool // by retry
		violations bool
		restart    bool
	}{
		{fault: "hang_load", want: connector.ErrGone, restart: true},
		{fault: "wait_load"}, // it sees a deadline or a cancel, whichever comes first
		{fault: "panic_load"},
		{fault: "crash_load", want: connector.ErrGone, restart: true},
		{fault: "busy_load", loaded: true},
		{fault: "lie_load", want: connector.ErrCorrupt},
		{fault: "damage", want: connector.ErrCorrupt},
		{fault: "foreign", want: connector.ErrIncompatible, violations: true},
	} {
		t.Run(c.fault, func(t *testing.T) {
			settings := long
			if c.fault == "hang_load" || c.fault == "wait_load" {
				settings = short
			}
			r := newRig(t, rigOptions{extra: map[string]any{"fault": c.fault, "at": 1}, settings: settings})
			ks := keys(1, 3)
			r.save("a", ks, 0)
			require.Equal(t, 48, r.match(query("b", ks), nil).Tokens)
			e := r.load("b", ks, 20)
			require.Equal(t, []connector.BlockID{20, 21, 22}, e.Blocks)
			if c.loaded {
				require.NoError(t, e.Err)
				require.True(t, r.same(blocksOf(ks, 20)))
				return
			}
			require.Equal(t, e.Blocks, e.Failed)
			require.Error(t, e.Err)
			if c.want != nil {
				require.ErrorIs(t, e.Err, c.want)
			}
			if errors.Is(c.want, connector.ErrCorrupt) {
				require.InDelta(t, 3, r.metric("kvport_integrity_failures_total"), 0)
			}
			require.Equal(t, c.violations, r.metric("kvport_plugin_violations_total") > 0)
			require.Equal(t, connector.Match{}, r.match(query("b", ks), nil), "a load that left nothing is not offered again")
			if c.restart {
				require.Eventually(t, func() bool { return r.Health().State == "ready" }, time.Minute, time.Millisecond)
				require.Positive(t, r.metric("kvport_plugin_restarts_total"))
			}
			r.end("b", 0, false, blocksOf(ks, 20)...)
			r.exactlyOnce(2, 1)
		})
	}
}

// A damaged stored block is found, recomputed, and written again by the next save.
func TestDamagedBlockIsReplaced(t *testing.T) {
	r := newRig(t, rigOptions{})
	ks := keys(1, 3)
	r.save("a", ks, 0)
	path := filepath.Join(r.dir, ks[1].String()+".0")
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	data[100] ^= 4
	require.NoError(t, os.WriteFile(path, data, 0o600))

	e := r.load("b", ks, 10)
	require.Equal(t, []connector.BlockID{11}, e.Failed)
	require.ErrorIs(t, e.Err, connector.ErrCorrupt)
	require.InDelta(t, 1, r.metric("kvport_integrity_failures_total"), 0)
	r.save("b", ks, 10)
	e = r.load("c", ks, 20)
	require.Empty(t, e.Failed)
	require.True(t, r.same(blocksOf(ks, 20)))
}

// A load that is lost because another request's load hung is run again on the next plugin.
func TestInnocentLoadIsRetried(t *testing.T) {
	r := newRig(t, rigOptions{
		extra:    map[string]any{"fault": "crash_load", "at": 2, "once": true, "slow_ms": 50},
		settings: map[string]any{"deadlines": map[string]any{"transfer": "8s"}},
	})
	ks, other := keys(1, 2), keys(2, 2)
	r.save("a", ks, 0)
	r.save("b", other, 4)
	x, y := transfer("x", ks, 20), transfer("y", other, 30)
	r.wipe(append(x.Blocks, y.Blocks...))
	r.send(&connector.Step{Admitted: []connector.Transfer{x, y}})
	for range 2 {
		e := r.next(Loaded)
		require.NoError(t, e.Err)
	}
	require.True(t, r.same(append(x.Blocks, y.Blocks...)))
	require.Positive(t, r.metric("kvport_transfer_retries_total"))
	r.exactlyOnce(4, 0)
}

func TestStoppedPluginIsKilled(t *testing.T) {
	r := newRig(t, rigOptions{settings: map[string]any{"heartbeat": map[string]any{"interval": "20ms", "limit": "1s"}}})
	ks := keys(1, 2)
	r.save("a", ks, 0)
	pid := r.Health().PID
	require.Positive(t, pid) // 0 is this process's group
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	require.Eventually(t, func() bool { return state(pid) == "T" || gone(pid) }, time.Minute, time.Millisecond, "a busy machine sees only its end")
	e := r.load("b", ks, 10) // runs on the next plugin
	require.NoError(t, e.Err)
	require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH)
	require.Equal(t, 1, r.Health().Restarts)
}

func TestHungMatchIsKilled(t *testing.T) {
	r := newRig(t, rigOptions{
		extra:    map[string]any{"fault": "hang_match", "at": 1, "once": true},
		settings: map[string]any{"deadlines": map[string]any{"later": "400ms"}},
	})
	ks := keys(1, 2)
	r.save("a", ks, 0)
	require.Equal(t, connector.Match{}, r.match(query("b", ks), nil), "Later ends in a miss")
	require.Eventually(t, func() bool { return r.Health().Restarts == 1 }, time.Minute, time.Millisecond)
	for n, end := 0, time.Now().Add(time.Minute); r.match(query(fmt.Sprint("c", n), ks), nil).Tokens != 32; n++ {
		require.True(t, time.Now().Before(end), "the next plugin does not find what is stored") // on a busy machine its first answers are later than Later
	}
}

func TestSaveFaults(t *testing.T) {
	for _, fault := range []string{"fail_save", "crash_save", "hang_save"} {
		t.Run(fault, func(t *testing.T) {
			deadlines := map[string]any{"save": "500ms", "grace": "100ms"}
			if fault == "fail_save" { // it ends by itself: on a busy machine later than that
				deadlines["save"] = "1m"
			}
			r := newRig(t, rigOptions{
				extra:    map[string]any{"fault": fault, "at": 1},
				settings: map[string]any{"deadlines": deadlines},
			})
			ks := keys(1, 3)
			e := r.save("a", ks, 0)
			require.Error(t, e.Err)
			if fault == "fail_save" {
				require.Equal(t, []connector.BlockID{2}, e.Failed)
			} else {
				require.Len(t, e.Failed, 3)
			}
			fin := r.end("a", 48, true, blocksOf(ks, 0)...)
			if fault == "fail_save" {
				require.NotNil(t, fin.Ticket)
				envelope, reason, err := r.tickets.verify(fin.Ticket, "x")
				require.NoError(t, err, reason)
				require.Equal(t, 32, envelope.Tokens, "only what was saved is promised")
			} else {
				require.Nil(t, fin.Ticket)
			}
			r.exactlyOnce(1, 1)
		})
	}
}

func TestAnswersOutOfBounds(t *testing.T) {
	for _, fault := range []string{"more", "groups"} {
		t.Run(fault, func(t *testing.T) {
			r := newRig(t, rigOptions{extra: map[string]any{"fault": fault}})
			ks := keys(1, 2)
			r.save("a", ks, 0)
			require.Equal(t, connector.Match{}, r.match(query("b", ks), nil))
			require.InDelta(t, 1, r.metric("kvport_plugin_violations_total"), 0)
		})
	}
}

// The main promise under fire: plugins die at any moment while transfers run.
func TestKillUnderLoad(t *testing.T) {
	kills := 50
	if testing.Short() {
		kills = 10
	}
	if os.Getenv("KVPORT_SOAK") != "" {
		kills = 1000
	}
	r := newRig(t, rigOptions{
		ranks: 2, extra: map[string]any{"slow_ms": 1},
		settings: map[string]any{"breaker": map[string]any{"deaths": 1000, "backoff_max": "10ms"}},
	})
	stored := keys(1, 8)
	r.save("seed", stored, 0)
	transfers, ended, loaded := 1, 0, 0
	for kill := range kills {
		for i := range 4 {
			id := fmt.Sprintf("r%d.%d", kill, i)
			fresh := keys(10+4*kill+i, 2)
			first := connector.BlockID(16 + 12*i)
			load, save := transfer(id, stored, first), transfer(id, fresh, first+8)
			r.wipe(load.Blocks)
			r.fill(save.Blocks)
			r.send(&connector.Step{
				Arrived:  []connector.Query{query(id, stored)},
				Admitted: []connector.Transfer{load}, Computed: []connector.Transfer{save},
			})
		}
		if kill%3 != 0 { // sometimes kill at once, sometimes when something has come through
			r.next(Loaded)
		}
		pid := 0
		require.Eventually(t, func() bool { // a kill counts only if it hit
			pid = r.Health().PID
			return pid != 0 && syscall.Kill(pid, syscall.SIGKILL) == nil
		}, time.Minute, time.Millisecond)
		transfers += 8
		for r.count(Loaded)+r.count(Saved) < transfers {
			r.nextAny()
		}
		for i := range 4 {
			id := fmt.Sprintf("r%d.%d", kill, i)
			r.end(id, 0, i%2 == 0)
			ended++
		}
		require.Eventually(t, func() bool { return syscall.Kill(pid, 0) == syscall.ESRCH }, time.Minute, time.Millisecond)
	}
	for _, e := range r.seen {
		if e.Kind == Loaded && len(e.Failed) == 0 {
			loaded++
		}
	}
	require.Equal(t, 0, r.Health().Pending)
	require.NoError(t, r.closeNow())
	r.exactlyOnce(transfers, ended)
	t.Logf("%d kills, %d transfers, %d of %d loads whole, %d restarts", kills, transfers, loaded, 4*kills, r.restarts)
}

func (r *rig) count(kind EventKind) int {
	n := 0
	for _, e := range r.seen {
		if e.Kind == kind {
			n++
		}
	}
	return n
}

func (r *rig) nextAny() {
	r.t.Helper()
	timeout := time.NewTimer(time.Minute)
	defer timeout.Stop()
	select {
	case e, ok := <-r.Events():
		require.True(r.t, ok)
		r.seen = append(r.seen, e)
	case <-timeout.C:
		require.FailNow(r.t, "no event", "%+v", r.Health())
	}
}

func TestBreaker(t *testing.T) {
	dir, ks := t.TempDir(), keys(1, 2)
	var log testkit.Log
	dies := func(cooldown string) *rig { // as often as a plugin may
		r := newRig(t, rigOptions{
			dir: dir, log: slog.New(slog.NewTextHandler(&log, nil)), settings: map[string]any{"breaker": map[string]any{"deaths": 2, "cooldown": cooldown}},
		})
		r.save("a", ks, 0)
		for range 2 {
			var pid int
			require.Eventually(t, func() bool { // what Health says may be over by the time of the kill
				h := r.Health()
				pid = h.PID
				return h.State == "ready" && pid != 0 && syscall.Kill(pid, syscall.SIGKILL) == nil
			}, time.Minute, time.Millisecond)
			require.Eventually(t, func() bool { return r.Health().PID != pid }, time.Minute, time.Millisecond)
		}
		return r
	}
	r := dies("1h") // so that nothing depends on how soon a busy machine looks
	require.Eventually(t, func() bool { return r.Health().State == "broken" }, time.Minute, time.Millisecond)
	require.NotEmpty(t, r.Health().Error)
	require.Equal(t, connector.Match{}, r.Match(query("b", ks), nil), "no waiting while broken")
	require.ErrorIs(t, r.load("b", ks, 10).Err, connector.ErrGone)
	require.NoError(t, r.closeNow())
	const left = "plugin keeps dying, it is left alone for a while"
	require.Equal(t, 1, strings.Count(log.String(), left))

	r = dies("100ms")
	require.Eventually(t, func() bool { return strings.Count(log.String(), left) == 2 && r.Health().State == "ready" }, time.Minute, time.Millisecond)
	require.Equal(t, 32, r.match(query("c", ks), nil).Tokens)
	require.NoError(t, r.load("c", ks, 10).Err)
}

// Close ends what runs, and every transfer has its event.
func TestCloseWhileHanging(t *testing.T) {
	const never = "1h"
	r := newRig(t, rigOptions{extra: map[string]any{"fault": "hang_load", "at": 1}, settings: map[string]any{
		"heartbeat": map[string]any{"limit": never}, "deadlines": map[string]any{"drain": "200ms", "transfer": never, "save": never},
	}})
	ks := keys(1, 2)
	r.save("a", ks, 0)
	r.send(&connector.Step{Admitted: []connector.Transfer{transfer("b", ks, 10)}, Computed: []connector.Transfer{transfer("c", ks, 20)}})
	began := time.Now()
	require.ErrorIs(t, r.closeNow(), context.DeadlineExceeded)
	require.Less(t, time.Since(began), 10*time.Minute, "an hour without the drain deadline")
	r.exactlyOnce(3, 0)
	r.closeErr = nil // the cleanup closes again
}
