package host

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/leaktest"
	"github.com/kvport/kvport/multiconnector"
	"github.com/kvport/kvport/verify/testkit"
)

// A ticket waits for the saves that it promises, not for those of every child: the save of a slow child goes
// on, and keeps its blocks, until it is over.
func TestMultiTicketDoesNotWaitForSlowChild(t *testing.T) {
	for name, c := range map[string]struct {
		fault string // of the child whose ticket it is
		slow  int    // which child is slow
	}{"stores": {"", 1}, "stores, the slow one first": {"", 0}, "a holder": {"hold", 1}} {
		t.Run(name, func(t *testing.T) {
			d := dirs(t, 2)
			patient := map[string]any{"deadlines": map[string]any{"save": "1h", "finish": "1h"}}
			kids := []map[string]any{kid(map[string]any{"dir": d[0], "fault": c.fault}, patient, nil), kid(map[string]any{"dir": d[1], "fault": c.fault}, patient, nil)}
			kids[c.slow] = kid(map[string]any{"dir": d[c.slow], "fault": "hang_save"}, patient, nil)
			p := multiRig(t, 1, patient, kids...)
			ks := keys(1, 4)
			tr := transfer("a", ks, 0)
			p.fill(tr.Blocks)
			p.send(&connector.Step{
				Arrived: []connector.Query{query("a", ks)}, Computed: []connector.Transfer{tr},
				Ended: []connector.Ended{{Request: "a", Reason: connector.ReasonLength, Tokens: 64, Remote: true, Blocks: tr.Blocks}},
			})
			fin := p.next(Finished)
			require.NotNil(t, fin.Ticket)
			require.Equal(t, c.fault == "hold", fin.Held)
			require.Equal(t, []EventKind{Stored, Finished}, []EventKind{p.seen[0].Kind, p.seen[1].Kind})
			require.Empty(t, p.seen[0].Blocks, "they stay pinned")
			require.Equal(t, 1, p.Health().Pending)
			require.Equal(t, 4, files(t, d[1-c.slow]))
			require.NoError(t, syscall.Kill(p.pids()[c.slow], syscall.SIGKILL))
			saved := p.next(Saved)
			require.Len(t, saved.Blocks, 4)
			require.Empty(t, saved.Failed, "the other child has them")
			require.Len(t, p.seen, 3, "%+v", p.seen)
		})
	}
}

// Where a block that the ticket promises is not stored, the ticket waits until it is known which.
func TestMultiTicketOfFailedSave(t *testing.T) {
	d := dirs(t, 2)
	p := multiRig(t, 1, nil, kid(map[string]any{"dir": d[0], "fault": "fail_save"}, nil, nil), kid(map[string]any{"dir": d[1], "fault": "fail_save"}, nil, nil))
	ks := keys(1, 4)
	require.Len(t, p.save("a", ks, 0).Failed, 1)
	require.NotNil(t, p.end("a", 64, true, blocksOf(ks, 0)...).Ticket)
	require.NotContains(t, []EventKind{p.seen[0].Kind, p.seen[1].Kind}, Stored)
}

// TestMultiLeases: a hold stays as long as any child renews its part, also when the other one dies; each child hears in
// its own numbers of what is over.
func TestMultiLeases(t *testing.T) {
	d := dirs(t, 3)
	leaser := func(dir string) map[string]any {
		return kid(map[string]any{"dir": dir, "fault": "lease", "lease_ms": time.Hour.Milliseconds()}, nil, nil)
	}
	r := multiRig(t, 1, map[string]any{"deadlines": map[string]any{"hold_max": "2h", "finish": "1m"}}, leaser(d[0]), kid(map[string]any{"dir": d[1]}, nil, nil), leaser(d[2]))
	require.NotZero(t, r.Info().Capabilities&connector.CanLease)
	ks := keys(1, 2)
	renewed := func(child, hold int) { // once more
		t.Helper()
		times := func() int {
			text, _ := os.ReadFile(filepath.Join(d[child], fmt.Sprint("renewed", hold)))
			n, _ := strconv.Atoi(string(text))
			return n
		}
		was := times()
		require.Eventually(t, func() bool { return times() > was }, time.Minute, time.Millisecond)
	}
	ends := func(id string, to connector.BlockID) {
		t.Helper()
		require.True(t, r.end(id, 40, true, blocksOf(ks, to)...).Held)
		require.Equal(t, connector.RequestID(id), r.next(Released).Request)
	}
	require.True(t, r.end("kept", 40, true, blocksOf(ks, 0)...).Held)
	renewed(0, 1)
	renewed(2, 1)
	ends("forgotten", 4)
	r.killChild(0)
	renewed(2, 1)
	renewed(2, 1)
	ends("forgotten too", 4) // the first child counts from 1 again
	n := 0
	for until := time.Now().Add(time.Minute); ; n++ {
		id := fmt.Sprint("fetched ", n)
		e := r.end(id, 40, true, blocksOf(ks, 8)...)
		require.Equal(t, connector.RequestID(id), r.next(Released).Request)
		envelope, _, err := r.tickets.verify(e.Ticket, connector.RequestID(fmt.Sprint("x", n)))
		require.NoError(t, err)
		first, last := heardIn(t, envelope.Plugin, "TestConnector"), heardIn(t, envelope.Plugin, "TestConnector#3")
		require.NotContains(t, last, "1", "it is kept")
		if slices.Contains(first, "1") && slices.Contains(last, "2") && slices.Contains(last, "3") {
			break
		}
		require.True(t, time.Now().Before(until), "the children do not learn about the end of their holds: %q", envelope.Plugin)
	}
	require.True(t, r.end("kept again", 40, true, blocksOf(ks, 12)...).Held)
	renewed(0, n+3)
	renewed(2, n+5)
	require.Equal(t, 2, r.Health().Held)
}

// heardIn is what a child of the test plugin has heard of, by its part of a ticket.
func heardIn(t *testing.T, ticket []byte, child string) []string {
	t.Helper()
	_, part, found := strings.Cut(string(ticket), child)
	require.True(t, found)
	list, _, _ := strings.Cut(part[strings.Index(part, "[")+1:], "]")
	return strings.Fields(list)
}

// renewer is a scheduler side in this process that renews the holds of requests named "kept".
type renewer struct {
	noScheduler
	mu   sync.Mutex
	last connector.HoldID
	kept []connector.HoldID
	dead bool
}

const renewerTTL = 300 * time.Millisecond

func (k *renewer) Finish(_ context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make([]connector.Hold, len(ended))
	for i, e := range ended {
		k.last++
		out[i] = connector.Hold{ID: k.last, TTL: renewerTTL}
		if strings.HasPrefix(string(e.Request), "kept") {
			k.kept = append(k.kept, k.last)
		}
	}
	return out, nil
}

func (k *renewer) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func (k *renewer) Renewals(ctx context.Context, ended []connector.HoldID) ([]connector.HoldID, error) {
	pause(ctx, 50*time.Millisecond)
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.dead || ctx.Err() != nil {
		return nil, connector.ErrGone
	}
	k.kept = slices.DeleteFunc(k.kept, func(id connector.HoldID) bool { return slices.Contains(ended, id) })
	return slices.Clone(k.kept), nil
}

func (k *renewer) isDead(yes bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dead = yes
}

// TestMultiLeasesLast: a hold that any child renews lasts as long as any may, and no longer.
func TestMultiLeasesLast(t *testing.T) {
	leaks := leaktest.Watch(t)
	synctest.Test(t, func(t *testing.T) {
		one, other := &renewer{}, &renewer{}
		child := multiconnector.Child{
			Name: "one", Role: connector.RoleBoth,
			Info: connector.Info{Groups: true, Scope: connector.ScopeNode, Capabilities: connector.CanHold | connector.CanLease},
		}
		sibling := child
		sibling.Name = "other"
		m, err := multiconnector.New(MultiName, []multiconnector.Child{child, sibling})
		require.NoError(t, err)
		const longest = 1500 * time.Millisecond
		r := inProcess(t, rigOptions{settings: map[string]any{"deadlines": map[string]any{"hold_max": longest.String()}}},
			m.Scheduler([]connector.Scheduler{one, other}, []connector.Group{{BlockTokens: blockTokens}}, nil))
		ks := keys(1, 2)
		lasts := func(id string, to connector.BlockID, during func()) time.Duration {
			t.Helper()
			began := time.Now()
			require.True(t, r.end(id, 40, true, blocksOf(ks, to)...).Held)
			during()
			require.Equal(t, connector.RequestID(id), r.next(Released).Request)
			return time.Since(began)
		}
		nothing := func() {}
		for _, c := range []struct {
			id     string
			during func()
		}{
			{"kept", func() { require.Equal(t, renewerTTL, lasts("forgotten", 4, nothing)) }},
			{"kept by one", func() { one.isDead(true) }},
			{"kept again", func() { one.isDead(false) }},
		} {
			lasted := lasts(c.id, 0, c.during)
			require.Greater(t, lasted, longest-renewerTTL, "%s: renewed as long as it may", c.id)
			require.LessOrEqual(t, lasted, longest, c.id)
		}
		one.isDead(true)
		other.isDead(true)
		require.Equal(t, renewerTTL, lasts("kept by nobody", 0, nothing))
	})
	leaks()
}

// TestMultiSaysWhatItMasks: the log names the powers of children that are not passed on, and what that costs.
func TestMultiSaysWhatItMasks(t *testing.T) {
	masked := func(other string) []string {
		var log testkit.Log
		multiRigWith(t, rigOptions{log: slog.New(slog.NewTextHandler(&log, nil))},
			kid(map[string]any{"dir": t.TempDir(), "fault": "layers"}, nil, nil), kid(map[string]any{"dir": t.TempDir(), "fault": other}, nil, nil),
			kid(map[string]any{"dir": t.TempDir(), "fault": "reshape"}, nil, map[string]any{"kv_role": "kv_producer"}))
		return regexp.MustCompile(`level=INFO msg="a MultiConnector does not pass on .*`).FindAllString(log.String(), -1)
	}
	require.Empty(t, masked(""), "what is passed on is not named")
	lines := masked("plan")
	require.Len(t, lines, 1)
	require.Contains(t, lines[0], `child=0/TestConnector not_passed_on="layers: another child decides`)
}
