package host

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/verify/testkit"
)

// cuts opens an engine of a shape of its own that can reshape. prompt is the address of its only prompt's
// first 32 tokens.
func cuts(t *testing.T, shape string, prompt connector.BlockKey, base string) *rig {
	t.Helper()
	return cutsWith(t, shape, prompt, base, rigOptions{settings: map[string]any{"unverified": true}})
}

func cutsWith(t *testing.T, shape string, prompt connector.BlockKey, base string, o rigOptions) *rig {
	t.Helper()
	o.engine, o.shape, o.extra = shape, shape, map[string]any{"fault": "reshape"}
	o.change = func(e *Engine) {
		if base == "" {
			return
		}
		e.Base = connector.NewFingerprint(base)
		e.Address = func(request connector.RequestID, blockTokens, tokens int) connector.BlockKey {
			if request != "" && blockTokens == 16 && tokens == 32 {
				return prompt
			}
			return connector.BlockKey{}
		}
	}
	return newRig(t, o)
}

// TestReshapeTicket: a ticket of another shape is accepted from and by engines that can reshape, for the same
// prompt; a weak hold's never.
func TestReshapeTicket(t *testing.T) {
	ks, others := keys(1, 2), keys(2, 2)
	p := cuts(t, "p", connector.BlockKey{}, "base")
	p.save("a", ks, 0)
	ticket := p.end("a", 33, true, blocksOf(ks, 0)...).Ticket
	require.NotNil(t, ticket)
	d := cuts(t, "d", ks[1], "base")
	require.Equal(t, connector.Match{Tokens: 32, Async: true}, d.match(query("x", others), ticket), "its own keys are others")
	for name, c := range map[string]struct {
		d *rig
	}{
		"another prompt": {cuts(t, "e", others[1], "base")},
		"another base":   {cuts(t, "f", ks[1], "other base")},
		"no base":        {cuts(t, "g", ks[1], "")},
	} {
		require.Equal(t, connector.Match{}, c.d.match(query("x", others), ticket), name)
		require.InDelta(t, 1, c.d.metric("kvport_tickets_refused_total"), 0, name)
	}
	weak := p.turn("b", 32, blocksOf(ks, 0)...)
	require.NotNil(t, weak)
	require.Equal(t, connector.Match{}, d.match(query("y", others), weak))
	require.InDelta(t, 1, d.metric("kvport_tickets_refused_total"), 0)

	plain := cuts(t, "h", connector.BlockKey{}, "")
	plain.save("a", ks, 0)
	of := plain.end("a", 33, true, blocksOf(ks, 0)...).Ticket
	require.Equal(t, connector.Match{}, d.match(query("z", others), of))
	require.InDelta(t, 2, d.metric("kvport_tickets_refused_total"), 0)
}

// TestReshapeIsRefused: without kvport.unverified a ticket of another shape is refused, with a reason that names
// the setting, also for a producer that has set it.
func TestReshapeIsRefused(t *testing.T) {
	ks := keys(1, 2)
	p := cuts(t, "p", connector.BlockKey{}, "base")
	p.save("a", ks, 0)
	ticket := p.end("a", 33, true, blocksOf(ks, 0)...).Ticket
	require.NotNil(t, ticket)
	log := &testkit.Log{}
	d := cutsWith(t, "d", ks[1], "base", rigOptions{log: slog.New(slog.NewTextHandler(log, nil))})
	require.Equal(t, connector.Match{}, d.match(query("x", keys(2, 2)), ticket))
	require.InDelta(t, 1, d.metric("kvport_tickets_refused_total"), 0)
	_, refused := d.Brought("x")
	require.Equal(t, "unverified", refused, "which the answer tells the router")
	require.Zero(t, d.metric("kvport_unverified_blocks_total"))
	require.Contains(t, log.String(), "reason=unverified")
	require.Contains(t, log.String(), "no digest would verify their bytes: incompatible: set kvport.unverified to true to accept that")
	require.NotContains(t, log.String(), "are loaded, too")
	allowed := &testkit.Log{}
	cutsWith(t, "e", ks[1], "base", rigOptions{log: slog.New(slog.NewTextHandler(allowed, nil)), settings: map[string]any{"unverified": true}})
	require.Equal(t, 1, strings.Count(allowed.String(), "level=WARN"), allowed.String())
	require.Contains(t, allowed.String(), "no digest verifies their bytes (kvport.unverified)")
}

// TestReshapeCounts: what arrives reshaped is counted and is not taken for damaged. It gets no digests, so nobody takes it
// for verified, and what follows it is neither saved nor promised.
func TestReshapeCounts(t *testing.T) {
	ks, own := keys(1, 2), keys(2, 3)
	p := cuts(t, "p", connector.BlockKey{}, "base")
	d := cuts(t, "d", ks[1], "base")
	p.save("a", ks, 0)
	ticket := p.end("a", 33, true, blocksOf(ks, 0)...).Ticket
	require.NotNil(t, ticket)
	require.Equal(t, 32, d.match(query("x", own[:2]), ticket).Tokens)
	e := d.load("x", own[:2], 8)
	require.ErrorIs(t, e.Err, connector.ErrGone)
	require.Equal(t, []connector.BlockID{9}, e.Failed)
	require.True(t, e.Unverified)
	require.InDelta(t, 1, d.metric("kvport_unverified_blocks_total"), 0)
	require.Zero(t, d.metric("kvport_integrity_failures_total"))
	rank := d.Host.ranks[0]
	for _, b := range blocksOf(own[:2], 8) {
		require.ErrorIs(t, rank.hasher.Check(rank.kv, b), connector.ErrCorrupt)
	}
	saved := d.save("x", own, 8)
	require.ErrorIs(t, saved.Err, connector.ErrDeclined)
	require.Len(t, saved.Failed, 3)
	require.InDelta(t, 1, d.metric("kvport_transfer_failed_blocks_total"), 0, "of the load alone: no save was tried")
	require.Nil(t, d.end("x", 48, true, blocksOf(own, 8)...).Ticket)
	require.False(t, d.load("y", ks, 20).Unverified, "of its own shape")
	require.Empty(t, d.save("y", ks, 20).Failed)
}
