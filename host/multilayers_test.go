package host

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// layeredPair is a MultiConnector of a child that saves layer by layer and one that does not.
func layeredPair(t *testing.T, whole, settings map[string]any) (r *rig, d []string) {
	t.Helper()
	d = dirs(t, 2)
	r = multiRig(t, 2, whole, kid(map[string]any{"dir": d[0], "fault": "layers"}, settings, nil), kid(map[string]any{"dir": d[1]}, nil, nil))
	require.True(t, r.LayerWise())
	return r, d
}

// sealed waits until a child has learned of a layer on each rank: it keeps the digests of the first block.
func (r *rig) sealed(dir, layer string) {
	r.t.Helper()
	require.Eventually(r.t, func() bool {
		found, err := filepath.Glob(filepath.Join(dir, "*.seal"+layer))
		return err == nil && len(found) == len(r.kvs)
	}, time.Minute, time.Millisecond)
}

// Rule MULTI-15: one child learns of each layer, the other one saves after the last.
func TestLayersOfChildren(t *testing.T) {
	ks := keys(1, 3)
	t.Run("computed", func(t *testing.T) {
		r, d := layeredPair(t, nil, nil)
		step, tr := r.computing("a", ks, 4)
		r.compute(step, tr.Blocks, 0)
		r.sealed(d[0], "0")
		require.Zero(t, files(t, d[1]), "it waits for the last layer")
		r.compute(step, tr.Blocks, 1)
		e := r.next(Saved)
		require.NoError(t, e.Err)
		require.Empty(t, e.Failed)
		require.Equal(t, 6, files(t, d[1]), "3 blocks on 2 ranks")
		require.Equal(t, 48, r.match(query("b", ks), nil).Tokens)
		require.NoError(t, r.load("b", ks, 20).Err)
		require.True(t, r.same(blocksOf(ks, 20)))
		require.NoError(t, os.RemoveAll(d[0]))
		require.NoError(t, os.Mkdir(d[0], 0o700))
		require.NoError(t, r.load("c", ks, 40).Err, "from the other one")
		require.True(t, r.same(blocksOf(ks, 40)))
	})
	t.Run("given up", func(t *testing.T) {
		r, d := layeredPair(t, nil, nil)
		step, tr := r.computing("a", ks, 4)
		r.compute(step, tr.Blocks, 0)
		r.GiveUp(step)
		e := r.next(Saved)
		require.ErrorIs(t, e.Err, connector.ErrGone)
		require.Len(t, e.Failed, 3)
		require.Zero(t, files(t, d[1]))
		require.Zero(t, r.match(query("b", ks), nil).Tokens)
	})
	t.Run("killed", func(t *testing.T) {
		r, d := layeredPair(t, nil, nil)
		step, tr := r.computing("a", ks, 4)
		r.compute(step, tr.Blocks, 0)
		r.sealed(d[0], "0")
		process, err := os.FindProcess(r.pids()[0])
		require.NoError(t, err)
		require.NoError(t, process.Kill())
		r.compute(step, tr.Blocks, 1)
		require.Empty(t, r.next(Saved).Failed, "the other one has them")
		require.NoError(t, r.load("b", ks, 20).Err)
		require.True(t, r.same(blocksOf(ks, 20)))
	})
}

// A MultiConnector ends in time also when the engine has left a step that it had begun.
func TestLayersOfChildrenAtTheEnd(t *testing.T) {
	r, d := layeredPair(t, map[string]any{"deadlines": map[string]any{"drain": "200ms"}}, nil)
	step, tr := r.computing("a", keys(1, 3), 4)
	r.compute(step, tr.Blocks, 0)
	r.sealed(d[0], "0")
	require.ErrorIs(t, r.closeNow(), context.DeadlineExceeded)
	r.exactlyOnce(1, 0)
	require.Zero(t, files(t, d[1]))
	r.closeErr = nil // the cleanup closes again
}

// Rule MULTI-15, LAYER-08: the deadline of a child begins when the last layer is computed. Then one that hangs is killed alone.
func TestLayersOfHungChild(t *testing.T) {
	r, d := layeredPair(t, nil, map[string]any{
		"heartbeat": map[string]any{"limit": "1h"}, "deadlines": map[string]any{"match": "1h", "later": "1h", "save": "100ms", "grace": "50ms"},
	})
	ks := keys(1, 3)
	before := r.pids()
	step, tr := r.computing("a", ks, 4)
	r.compute(step, tr.Blocks, 0)
	r.sealed(d[0], "0")
	stop(t, before[0])
	killed := func() bool { return !stopped(before[0]) || r.metric("kvport_child_deadline_kills_total") > 0 }
	require.Never(t, killed, 300*time.Millisecond, 50*time.Millisecond, "it has time while layers are computed: more than afterwards")
	r.compute(step, tr.Blocks, 1)
	require.Empty(t, r.next(Saved).Failed, "the other one has them")
	r.waitFor("ready", "ready")
	require.NotEqual(t, before[0], r.pids()[0], "it was killed for its deadline")
	require.Equal(t, before[1], r.pids()[1])
	require.Positive(t, r.metric("kvport_child_deadline_kills_total"))
}
