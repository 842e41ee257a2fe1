package host

import (
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
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

// TestMultiLeases: a hold stays as long as any child renews its part, also when the other one dies, and at most
// for hold_max; each child hears in its own numbers of what is over.
func TestMultiLeases(t *testing.T) {
	d := dirs(t, 3)
	r := multiRig(t, 1, map[string]any{"deadlines": map[string]any{"hold": "300ms", "hold_max": "1500ms"}},
		kid(map[string]any{"dir": d[0], "fault": "lease"}, nil, nil), kid(map[string]any{"dir": d[1]}, nil, nil), kid(map[string]any{"dir": d[2], "fault": "lease"}, nil, nil))
	require.NotZero(t, r.Info().Capabilities&connector.CanLease)
	ks := keys(1, 2)
	lasts := func(id string, to connector.BlockID, during func()) {
		began := time.Now()
		require.True(t, r.end(id, 40, true, blocksOf(ks, to)...).Held)
		during()
		require.Equal(t, connector.RequestID(id), r.next(Released).Request)
		require.Greater(t, time.Since(began), 1100*time.Millisecond, "renewed as long as it may")
	}
	lasts("kept", 0, func() {
		require.True(t, r.end("forgotten", 40, true, blocksOf(ks, 4)...).Held)
		require.Equal(t, connector.RequestID("forgotten"), r.next(Released).Request)
	})
	lasts("kept by one", 0, func() {
		pid := r.pids()[0]
		require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	})
	require.Eventually(t, func() bool { return r.pids()[0] != 0 }, time.Minute, time.Millisecond)
	for n := 0; ; n++ { // the first child counts from 1 again
		e := r.end(fmt.Sprint("fetched ", n), 40, true, blocksOf(ks, 8)...)
		envelope, _, err := r.tickets.verify(e.Ticket, connector.RequestID(fmt.Sprint("x", n)))
		require.NoError(t, err)
		require.Equal(t, connector.RequestID(fmt.Sprint("fetched ", n)), r.next(Released).Request)
		_, last, found := strings.Cut(string(envelope.Plugin), "TestConnector#3")
		require.True(t, found)
		heard := strings.Fields(strings.Trim(last[strings.Index(last, "["):], "[]"))
		if slices.Contains(heard, "1") && slices.Contains(heard, "2") && slices.Contains(heard, "3") {
			break
		}
		require.Less(t, n, 200, "the last child does not learn about the end of its holds: %q", envelope.Plugin)
	}
	lasts("kept again", 0, func() {})
}

// TestMultiSaysWhatItMasks: the log names the powers of children that are not passed on, and what that costs.
func TestMultiSaysWhatItMasks(t *testing.T) {
	var log testkit.Log
	multiRigWith(t, rigOptions{log: slog.New(slog.NewTextHandler(&log, nil))},
		kid(map[string]any{"dir": t.TempDir(), "fault": "layers"}, nil, nil), kid(map[string]any{"dir": t.TempDir()}, nil, nil),
		kid(map[string]any{"dir": t.TempDir(), "fault": "reshape"}, nil, map[string]any{"kv_role": "kv_producer"}))
	lines := regexp.MustCompile(`level=INFO msg="a MultiConnector does not pass on .*`).FindAllString(log.String(), -1)
	require.Len(t, lines, 1, "a producer loads no ticket")
	require.Contains(t, lines[0], `child=0/TestConnector not_passed_on="layers: blocks are saved when the step is computed"`)
}
