package host

import (
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/leaktest"
)

func TestSaveMatchLoad(t *testing.T) {
	for _, ranks := range []int{1, 3} {
		r := newRig(t, rigOptions{ranks: ranks})
		ks := keys(1, 4)
		e := r.save("a", ks, 0)
		require.NoError(t, e.Err)
		require.Empty(t, e.Failed)
		require.Equal(t, []connector.BlockID{0, 1, 2, 3}, e.Blocks)
		require.Equal(t, uint64(1), e.Step)

		require.Equal(t, connector.Match{Tokens: 64, Async: true}, r.match(query("b", ks), nil))
		blocks := blocksOf(ks, 10)
		require.False(t, r.same(blocks))
		e = r.load("b", ks, 10)
		require.NoError(t, e.Err)
		require.True(t, r.same(blocks))
		require.InDelta(t, 2*4*1024*ranks+2*4*48*ranks, r.metric("kvport_transfer_bytes_total"), 0)

		require.Equal(t, connector.Match{}, r.match(query("c", keys(2, 4)), nil), "another prompt")
		q := query("d", ks)
		q.Tokens = 64
		require.Equal(t, 48, r.match(q, nil).Tokens, "one token is left to compute, and blocks stay whole")
		q = query("e", ks)
		q.Computed = 32
		require.Equal(t, 32, r.match(q, nil).Tokens)
		fin := r.end("b", 65, false, blocks...)
		require.Len(t, fin.Blocks, 4)
		require.False(t, fin.Held)
		require.Nil(t, fin.Ticket)
	}
}

func TestMatchIsQuick(t *testing.T) {
	const never = "1h"
	r := newRig(t, rigOptions{settings: map[string]any{"heartbeat": map[string]any{"limit": never}, "deadlines": map[string]any{"later": never}}})
	ks := keys(1, 2)
	r.save("a", ks, 0)
	pid := r.Health().PID
	stop(t, pid)
	began := time.Now()
	require.True(t, r.Match(query("b", ks), nil).Later)
	require.Less(t, time.Since(began), time.Minute, "the engine's loop does not wait for the plugin, which does not answer")
	require.NoError(t, syscall.Kill(pid, syscall.SIGCONT))
	require.Equal(t, 32, r.match(query("b", ks), nil).Tokens)
}

func TestDescribeRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		extra map[string]any
		want  string
	}{
		"unknown field": {map[string]any{"dirr": "x"}, "dirr"},
		"lossy":         {map[string]any{"lossy": true}, "allow_lossy"},
		"layout":        {map[string]any{"layout": "other"}, "layouts"},
	} {
		t.Run(name, func(t *testing.T) {
			leaks := leaktest.Watch(t)
			o := rigOptions{extra: c.extra}
			cfg, eng, opts := o.build(t)
			_, err := Open(t.Context(), cfg, eng, opts)
			require.ErrorIs(t, err, ErrConfig)
			require.ErrorContains(t, err, c.want)
			leaks()
		})
	}
}
