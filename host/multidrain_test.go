package host

import (
	"context"
	"maps"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// A child that hangs does not stretch the end of its MultiConnector, however long its own deadlines are: it is killed when
// the drain deadline has passed. What its sibling saves is stored, and every transfer has its event.
func TestMultiCloseWhileHanging(t *testing.T) {
	const never = "1h"
	deadlines := func(more map[string]any) map[string]any {
		own := map[string]any{"save": never, "transfer": never}
		maps.Copy(own, more)
		return map[string]any{"heartbeat": map[string]any{"limit": never}, "deadlines": own}
	}
	for _, fault := range []string{"hang_save", "hang_load"} {
		for _, nested := range []bool{false, true} {
			name := fault
			if nested {
				name += " of a nested child"
			}
			t.Run(name, func(t *testing.T) {
				d := dirs(t, 2)
				hangs := kid(map[string]any{"dir": d[0], "fault": fault}, deadlines(nil), nil)
				if nested {
					hangs = kid(map[string]any{"connectors": []any{hangs}}, deadlines(nil), map[string]any{"kv_connector": MultiName})
				}
				r := multiRig(t, 1, deadlines(map[string]any{"drain": "200ms"}), hangs, kid(map[string]any{"dir": d[1]}, deadlines(nil), nil))
				transfers := 1
				if fault == "hang_load" {
					transfers++
					r.save("a", keys(1, 2), 0)
					r.start("a", keys(1, 2), 10)
				} else {
					saved := transfer("a", keys(1, 2), 0)
					r.fill(saved.Blocks)
					r.send(&connector.Step{Computed: []connector.Transfer{saved}})
				}
				require.Eventually(t, func() bool { return files(t, d[1]) == 2 }, time.Minute, time.Millisecond, "the sibling saves")
				pids := r.processes()
				require.Len(t, pids, 2)
				began := time.Now()
				require.ErrorIs(t, r.closeNow(), context.DeadlineExceeded)
				require.Less(t, time.Since(began), 10*time.Minute, "an hour without the drain deadline")
				r.exactlyOnce(transfers, 0)
				for _, pid := range pids {
					require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH)
				}
				r.closeErr = nil // the cleanup closes again
			})
		}
	}
}

// A stopped child that has nothing to do does not answer when it is asked to end: it is killed when the drain deadline
// has passed, which is not an error.
func TestMultiCloseWithStoppedChild(t *testing.T) {
	patient := map[string]any{"heartbeat": map[string]any{"limit": "1h"}}
	r := multiRig(t, 1, map[string]any{"heartbeat": map[string]any{"limit": "1h"}, "deadlines": map[string]any{"drain": "200ms"}},
		kid(map[string]any{"dir": t.TempDir(), "fault": "hold"}, patient, nil), kid(map[string]any{"dir": t.TempDir()}, patient, nil))
	pids := r.processes()
	stop(t, pids[0])
	require.NoError(t, r.closeNow())
	for _, pid := range pids {
		require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH)
	}
	require.ErrorContains(t, r.composite.members[0].child.lastErr, errClosing.Error(), "not for its own patience")
}

// processes are those of all children, however deep.
func (r *rig) processes() (pids []int) {
	var each func(list []Health)
	each = func(list []Health) {
		for _, h := range list {
			if h.PID != 0 {
				pids = append(pids, h.PID)
			}
			each(h.Children)
		}
	}
	each(r.Health().Children)
	return pids
}
