package host

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// turn ends a request whose answer is held for the next turn, and gives the ticket.
func (r *rig) turn(id string, tokens int, blocks ...connector.Block) []byte {
	r.t.Helper()
	r.send(&connector.Step{Ended: []connector.Ended{{
		Request: connector.RequestID(id), Reason: connector.ReasonLength, Tokens: tokens, Remote: true, Weak: true, Blocks: blocks,
	}}})
	e := r.next(Finished)
	require.False(r.t, e.Held, "nothing is kept")
	require.Len(r.t, e.Blocks, len(blocks))
	return e.Ticket
}

// TestTurnTicket: a ticket of an earlier turn keeps no block, serves one load of enough tokens, and a block that
// was reused meanwhile is gone, not damaged.
func TestTurnTicket(t *testing.T) {
	dir := t.TempDir()
	open := func(engine string, threshold int) *rig {
		return newRig(t, rigOptions{
			dir: dir, engine: engine, extra: map[string]any{"fault": "hold"}, settings: map[string]any{"recompute_threshold": threshold},
		})
	}
	d, p, picky := open("d", 64), open("p", 32), open("picky", 33)
	ks := keys(1, 2)
	d.save("a", ks, 0)
	ticket := d.turn("a", 32, blocksOf(ks, 0)...)
	require.Equal(t, connector.Match{}, picky.match(query("x", ks), ticket), "32 tokens are not worth a transfer")
	require.Equal(t, 32, p.match(query("x", ks), ticket).Tokens)
	require.NoError(t, p.load("x", ks, 8).Err)
	require.True(t, p.same(blocksOf(ks, 8)))
	require.Equal(t, connector.Match{}, p.match(query("x", ks), ticket), "after a preemption it computes")
	require.InDelta(t, 2, p.metric("kvport_turn_blocks_total"), 0)

	path := filepath.Join(dir, ks[1].String()+".0")
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	data[100] ^= 1
	require.NoError(t, os.WriteFile(path, data, 0o600))
	again := d.turn("b", 32, blocksOf(ks, 0)...)
	require.Equal(t, 32, p.match(query("y", ks), again).Tokens)
	e := p.load("y", ks, 12)
	require.ErrorIs(t, e.Err, connector.ErrGone)
	require.NotErrorIs(t, e.Err, connector.ErrCorrupt)
	require.Equal(t, []connector.BlockID{13}, e.Failed)
	require.True(t, p.same(blocksOf(ks[:1], 12)))
	require.Zero(t, p.metric("kvport_integrity_failures_total"))
	require.InDelta(t, 4, p.metric("kvport_turn_blocks_total"), 0)
}

// TestTurnWantsBoth: an engine that only loads has no digests of what it computes, and gives no ticket.
func TestTurnWantsBoth(t *testing.T) {
	d := newRig(t, rigOptions{role: "kv_consumer", extra: map[string]any{"fault": "hold"}})
	ks := keys(1, 2)
	require.Nil(t, d.turn("a", 32, blocksOf(ks, 0)...))
}
