package host

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
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
