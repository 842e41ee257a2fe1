package host

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// A producer saves and gives a ticket, a consumer waits until what the ticket promises is there.
func TestTicketMakesConsumerWait(t *testing.T) {
	dir := t.TempDir()
	p := newRig(t, rigOptions{role: "kv_producer", dir: dir, engine: "p"})
	d := newRig(t, rigOptions{role: "kv_consumer", dir: dir, engine: "d"})
	ks := keys(1, 4)
	p.save("a", ks, 0)
	fin := p.end("a", 65, true, blocksOf(ks, 0)...)
	require.NotNil(t, fin.Ticket)
	require.False(t, fin.Held)

	last := filepath.Join(dir, ks[3].String()+".0")
	require.NoError(t, os.Rename(last, last+".hidden")) // not stored yet, as D sees it
	q := query("x", ks)
	require.True(t, d.Match(q, fin.Ticket).Later)
	require.NoError(t, os.Rename(last+".hidden", last))
	require.Equal(t, 64, d.match(q, fin.Ticket).Tokens)
	require.NoError(t, d.load("x", ks, 8).Err)
	require.True(t, d.same(blocksOf(ks, 8)))

	require.Equal(t, connector.Match{}, p.Match(query("y", ks), nil), "a producer never loads")
	require.Len(t, p.load("y", ks, 8).Failed, 4)
	e := d.save("z", keys(2, 2), 20)
	require.Empty(t, e.Failed)
	_, err := os.Stat(filepath.Join(dir, keys(2, 2)[0].String()+".0"))
	require.ErrorIs(t, err, os.ErrNotExist, "a consumer never saves")
	require.Nil(t, d.end("z", 32, true).Ticket)
}

// What never comes is a miss when Later ends; what is there by then is offered.
func TestTicketOfMissingBlocks(t *testing.T) {
	dir := t.TempDir()
	p := newRig(t, rigOptions{dir: dir})
	d := newRig(t, rigOptions{dir: dir, settings: map[string]any{"deadlines": map[string]any{"later": "1s"}}})
	ks := keys(1, 4)
	p.save("a", ks, 0)
	ticket := p.end("a", 64, true).Ticket
	require.NoError(t, os.Remove(filepath.Join(dir, ks[2].String()+".0")))
	began := time.Now()
	require.Equal(t, 32, d.match(query("x", ks), ticket).Tokens)
	require.GreaterOrEqual(t, time.Since(began), 900*time.Millisecond)
}

func TestRefusedTickets(t *testing.T) {
	dir := t.TempDir()
	p := newRig(t, rigOptions{dir: dir})
	d := newRig(t, rigOptions{dir: dir})
	other := newRig(t, rigOptions{dir: dir, shape: "other"})
	ks := keys(1, 2)
	p.save("a", ks, 0)
	ticket := p.end("a", 33, true).Ticket

	forged := append([]byte(nil), ticket...)
	forged[20] ^= 1
	require.Equal(t, 32, d.match(query("w", ks), forged).Tokens, "content is found without a ticket too")
	require.InDelta(t, 1, d.metric("kvport_tickets_refused_total"), 0)
	for range 3 { // asking again is no replay
		require.Equal(t, 32, d.match(query("x", ks), ticket).Tokens)
	}
	require.InDelta(t, 1, d.metric("kvport_tickets_refused_total"), 0)
	d.match(query("y", ks), ticket)
	require.InDelta(t, 2, d.metric("kvport_tickets_refused_total"), 0, "replayed")
	other.match(query("x", ks), ticket)
	require.InDelta(t, 1, other.metric("kvport_tickets_refused_total"), 0, "other shape")
	picky := newRig(t, rigOptions{dir: dir, settings: map[string]any{"peers": []string{"somebody"}}})
	picky.match(query("x", ks), ticket)
	require.InDelta(t, 1, picky.metric("kvport_tickets_refused_total"), 0, "not a peer")
	d.match(query("z", ks), []byte("rubbish"))
	require.InDelta(t, 3, d.metric("kvport_tickets_refused_total"), 0)
}

// A ticket promises nothing that the engine does not have already.
func TestTicketCoveredLocally(t *testing.T) {
	dir := t.TempDir()
	p := newRig(t, rigOptions{dir: dir})
	d := newRig(t, rigOptions{dir: dir, settings: map[string]any{"deadlines": map[string]any{"later": "1m"}}})
	ks := keys(1, 4)
	p.save("a", ks[:2], 0)
	ticket := p.end("a", 33, true).Ticket
	q := query("x", ks)
	q.Computed = 32
	require.Equal(t, connector.Match{}, d.match(q, ticket))
}

// TestLossyIsNotVerified: nobody checks what a lossy connector loads, so nobody hears that a check is still to come.
func TestLossyIsNotVerified(t *testing.T) {
	var landed atomic.Int32
	r := newRig(t, rigOptions{
		extra: map[string]any{"lossy": true, "fault": "damage"}, settings: map[string]any{"allow_lossy": true},
		landed: func(connector.RequestID, int) { landed.Add(1) },
	})
	ks := keys(1, 1)
	r.save("a", ks, 0)
	require.NoError(t, r.load("b", ks, 4).Err)
	require.False(t, r.same(blocksOf(ks, 4)))
	require.Zero(t, landed.Load())
}

func TestHolds(t *testing.T) {
	r := newRig(t, rigOptions{extra: map[string]any{"fault": "hold"}, settings: map[string]any{"deadlines": map[string]any{"hold": "300ms"}}})
	ks := keys(1, 2)
	r.save("fetched", ks, 0)
	fin := r.end("fetched", 40, true, blocksOf(ks, 0)...)
	require.True(t, fin.Held)
	require.Empty(t, fin.Blocks)
	envelope, reason, err := r.tickets.verify(fin.Ticket, "x")
	require.NoError(t, err, reason)
	require.Equal(t, "ticket of fetched", string(envelope.Plugin))
	require.Equal(t, 40, envelope.Tokens)
	require.Equal(t, 300*time.Millisecond, envelope.Lease)
	e := r.next(Released)
	require.Equal(t, []connector.BlockID{0, 1}, e.Blocks)
	require.Equal(t, fin.Step, e.Step)

	require.False(t, r.end("plain", 40, false, blocksOf(ks, 0)...).Held)
	began := time.Now()
	require.True(t, r.end("forgotten", 40, true, blocksOf(ks, 4)...).Held)
	require.Equal(t, []connector.BlockID{4, 5}, r.next(Released).Blocks)
	require.GreaterOrEqual(t, time.Since(began), 250*time.Millisecond)
	require.Zero(t, r.match(query("x", keys(2, 2)), []byte("forged")).Tokens, "nothing to find without a ticket")
	require.Equal(t, 32, r.match(query("y", ks), []byte("forged")).Tokens, "what it has stored needs none")

	// Of a hold that does not end by itself, on however busy a machine.
	r = newRig(t, rigOptions{extra: map[string]any{"fault": "hold"}, settings: map[string]any{"deadlines": map[string]any{"hold": "1h", "hold_max": "1h"}}})
	require.True(t, r.end("killed", 40, true, blocksOf(ks, 8)...).Held)
	require.Equal(t, 1, r.Health().Held)
	r.mu.Lock()
	plugin := r.gen.proc
	r.mu.Unlock()
	plugin.KillFor(context.Canceled)
	require.Equal(t, []connector.BlockID{8, 9}, r.next(Released).Blocks)
}

// TestLeases: a hold that the connector renews stays, to the longest that any may; the connector learns
// which holds are over.
func TestLeases(t *testing.T) {
	r := newRig(t, rigOptions{extra: map[string]any{"fault": "lease", "lease_ms": 4000}, settings: map[string]any{"deadlines": map[string]any{"hold": "4s", "hold_max": "7s"}}})
	ks := keys(1, 2)
	began := time.Now()
	require.True(t, r.end("kept", 40, true, blocksOf(ks, 0)...).Held)
	require.True(t, r.end("forgotten", 40, true, blocksOf(ks, 4)...).Held)
	require.Equal(t, []connector.BlockID{4, 5}, r.next(Released).Blocks)
	require.Equal(t, []connector.BlockID{0, 1}, r.next(Released).Blocks)
	require.Greater(t, time.Since(began), 5*time.Second, "renewed as long as it may")
	for n, end := 0, time.Now().Add(time.Minute); ; n++ {
		e := r.end(fmt.Sprint("fetched ", n), 40, true, blocksOf(ks, 8)...)
		envelope, _, err := r.tickets.verify(e.Ticket, connector.RequestID(fmt.Sprint("x", n)))
		require.NoError(t, err)
		require.Equal(t, []connector.BlockID{8, 9}, r.next(Released).Blocks)
		if strings.Contains(string(envelope.Plugin), "2") && strings.Contains(string(envelope.Plugin), "1") {
			break
		}
		require.True(t, time.Now().Before(end), "the connector does not learn about the end of its holds: %s", envelope.Plugin)
	}
}

func TestPlannerChooses(t *testing.T) {
	var landed atomic.Int32
	r := newRig(t, rigOptions{extra: map[string]any{"fault": "plan"}, landed: func(connector.RequestID, int) { landed.Add(1) }})
	ks := keys(1, 4)
	e := r.save("a", ks, 0) // the planner leaves out the last block
	require.NoError(t, e.Err)
	require.Empty(t, e.Failed)
	require.Equal(t, 48, r.match(query("b", ks), nil).Tokens)
	e = r.load("b", ks[:3], 10)
	require.Equal(t, []connector.BlockID{12}, e.Failed)
	require.True(t, r.same(blocksOf(ks[:2], 10)))
	require.Zero(t, landed.Load(), "what it chose is not the whole load")
	require.InDelta(t, 2, r.metric("kvport_plugin_violations_total"), 0, "the transfers it made up")
	envelope, _, err := r.tickets.verify(r.end("a", 64, true).Ticket, "x")
	require.NoError(t, err)
	require.Equal(t, 48, envelope.Tokens)
}

func TestReset(t *testing.T) {
	r := newRig(t, rigOptions{})
	ks := keys(1, 2)
	r.save("a", ks, 0)
	require.Equal(t, 32, r.match(query("b", ks), nil).Tokens)
	emptied, err := r.Reset(t.Context())
	require.NoError(t, err)
	require.True(t, emptied)
	require.Equal(t, connector.Match{}, r.match(query("b", ks), nil), "a cached answer is forgotten too")
}

// Another build of a plugin may have lost a power when it comes back: its use fails, and the engine goes on.
func TestPowerIsLost(t *testing.T) {
	r := newRig(t, rigOptions{})
	require.NoError(t, os.WriteFile(filepath.Join(r.dir, "poorer"), nil, 0o600))
	r.killed()
	_, err := r.Reset(t.Context())
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.Equal(t, "ready", r.Health().State)
}

func TestProbe(t *testing.T) {
	r := newRig(t, rigOptions{settings: map[string]any{"deadlines": map[string]any{"match": "5s"}}})
	ks := keys(1, 2)
	r.save("a", ks, 0)
	require.Equal(t, 32, r.Match(query("", ks), nil).Tokens)
	require.Equal(t, 0, r.Match(query("", keys(2, 2)), nil).Tokens)
	promised, refused := r.Brought("")
	require.Zero(t, promised)
	require.Empty(t, refused)
}

func TestStepAfterClose(t *testing.T) {
	r := newRig(t, rigOptions{})
	require.NoError(t, r.closeNow())
	r.send(&connector.Step{Computed: []connector.Transfer{transfer("a", keys(1, 1), 0)}})
	require.Equal(t, connector.Match{}, r.Match(query("a", keys(1, 1)), nil))
	require.Equal(t, 0, r.Health().Pending)
}
