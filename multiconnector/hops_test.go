package multiconnector_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/multiconnector"
)

// holderShelf is a shelf that keeps finished blocks for consumers.
type holderShelf struct {
	*shelf
	serves int // consumers of a hold
}

func (k holderShelf) Finish(_ context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	holds := make([]connector.Hold, len(ended))
	for i := range holds {
		holds[i] = connector.Hold{ID: 1, Consumers: k.serves, Ticket: []byte("held")}
	}
	return holds, nil
}

func (k holderShelf) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// tiers is an engine with a child that keeps blocks for consumers and one that is a shared store.
type tiers struct {
	*rig
	held, store *shelf
}

func newTiers(t *testing.T, storeFirst bool, held, store *shelf) *tiers {
	t.Helper()
	shelves, at := []*shelf{held, store}, 1
	if storeFirst {
		shelves, at = []*shelf{store, held}, 0
	}
	r := newRig(t, func(cs []multiconnector.Child) {
		cs[0].Patience, cs[1].Patience = time.Minute, time.Minute // a busy machine passes none over
		cs[at].Name, cs[at].Info.Scope = "store", connector.ScopeShared
		cs[1-at].Name, cs[1-at].Info.Scope, cs[1-at].Info.Capabilities = "holder", connector.ScopeEngine, connector.CanHold
	}, shelves...)
	return &tiers{r, held, store}
}

// finish ends a request and gives its hold.
func (x *tiers) finish(m *multiconnector.Multi, ks []connector.BlockKey, weak bool) connector.Hold {
	x.t.Helper()
	sides := make([]connector.Scheduler, len(x.shelves))
	for i, s := range x.shelves {
		sides[i] = s
		if s == x.held {
			sides[i] = holderShelf{s, 3}
		}
	}
	sched := m.Scheduler(sides, groups(), nil)
	defer func() { require.NoError(x.t, sched.Close()) }()
	holder, ok := connector.As[connector.Holder](sched)
	require.True(x.t, ok)
	holds, err := holder.Finish(x.t.Context(), []connector.Ended{{
		Request: "r", Tokens: len(ks) * blockTokens, Remote: true, Weak: weak, Blocks: transfer("r", ks).Blocks,
	}})
	require.NoError(x.t, err)
	return holds[0]
}

// TestNoTwoHops: what a producer loaded from a shared store, or saved there, its consumer loads from the store, and from
// the producer only what the store does not have, whatever the order of children at both ends (rule MULTI-13).
func TestNoTwoHops(t *testing.T) {
	moved := map[string]int{}
	for seed := range uint64(400) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		ks := keys(1 + rnd.IntN(12))
		warm, saves, evicted := rnd.IntN(len(ks)+1), rnd.IntN(2) == 0, rnd.IntN(3*len(ks))
		where := fmt.Sprintf("seed %d: %d blocks, %d in the store before, saves %v, evicted %d", seed, len(ks), warm, saves, evicted)

		store := newShelf(ks[:warm]...)
		p := newTiers(t, rnd.IntN(2) == 0, newShelf(), store)
		require.Equal(t, warm*blockTokens, p.match("r", ks).Tokens, where)
		load := transfer("r", ks)
		load.Tokens, load.Blocks = warm*blockTokens, load.Blocks[:warm]
		require.NoError(t, p.worker.Load(t.Context(), load, p.kv))
		if !saves {
			store.saveErr = connector.ErrDeclined
		}
		save := transfer("r", ks)
		save.From, save.Tokens, save.Blocks = warm*blockTokens, (len(ks)-warm)*blockTokens, save.Blocks[warm:]
		for i, b := range save.Blocks {
			p.kv.View(0, b.ID)[0] = ks[warm+i][0]
		}
		if err := p.worker.Save(t.Context(), save, p.kv); saves {
			require.NoError(t, err, where)
		}
		hold := p.finish(p.multi, ks, false)

		there := warm // of the prompt's blocks, in the store now
		if saves {
			there = len(ks)
		}
		if evicted < there {
			delete(store.blocks, ks[evicted])
			there = evicted
		}
		store.loads = nil
		d := newTiers(t, rnd.IntN(2) == 0, newShelf(ks...), store)
		q := connector.Query{Request: "r", Tokens: len(ks)*blockTokens + 1, Keys: ks, Ticket: hold.Ticket}
		m, err := d.sched.Match(t.Context(), []connector.Query{q})
		require.NoError(t, err)
		require.Equal(t, len(ks)*blockTokens, m[0].Tokens, where)
		all := transfer("r", ks)
		all.Ticket = hold.Ticket
		require.NoError(t, d.worker.Load(t.Context(), all, d.kv), where)
		for i, k := range ks {
			require.Equal(t, k[0], d.kv.View(0, connector.BlockID(i))[0], where)
			require.Equal(t, i < there, slices.Contains(loadedOf(store), connector.BlockID(i)), "%s: block %d from the store", where, i)
			require.Equal(t, i >= there, slices.Contains(loadedOf(d.held), connector.BlockID(i)), "%s: block %d from the producer", where, i)
		}
		moved["store"] += there
		moved["producer"] += len(ks) - there
	}
	t.Logf("blocks by way: %v", moved)
	require.Positive(t, moved["store"])
	require.Positive(t, moved["producer"])
}

// TestTicketNamesStore: the children's order decides where a ticket does not name the store. A store that nobody has, or
// bytes that mean nothing, change nothing.
func TestTicketNamesStore(t *testing.T) {
	ks := keys(4)
	p := newTiers(t, false, newShelf(), newShelf(ks...))
	p.match("r", ks)
	named := string(p.finish(p.multi, ks, false).Ticket)
	for ticket, fromStore := range map[string]int{
		named:                                    4,
		"":                                       0,
		"\x01\x00\x06holder\x00\x00\x00\x04held": 0,
		"\x01\x00\x06holder\x00\x00\x00\x04held\x00\x0cshared/store\x00\x00\x00\x01\x08": 2,
		"\x01\x00\x06holder\x00\x00\x00\x04held\x00\x0cshared/store\x00\x00\x00\x01\x80": 0,
		"\x01\x00\x06holder\x00\x00\x00\x04held\x00\x0cshared/store\x00\x00\x00\x01\x07": 1,
		"\x01\x00\x06holder\x00\x00\x00\x04held\x00\x0cshared/other\x00\x00\x00\x01\x08": 0,
	} {
		d := newTiers(t, false, newShelf(ks...), newShelf(ks...))
		_, err := d.sched.Match(t.Context(), []connector.Query{{Request: "r", Tokens: 4*blockTokens + 1, Keys: ks, Ticket: connector.Ticket(ticket)}})
		require.NoError(t, err)
		load := transfer("r", ks)
		load.Ticket = connector.Ticket(ticket)
		require.NoError(t, d.worker.Load(t.Context(), load, d.kv))
		require.Len(t, loadedOf(d.store), fromStore, "%q", ticket)
		require.Len(t, loadedOf(d.held), 4-fromStore, "%q", ticket)
	}
}

// TestTurnHold: nothing is kept for a next turn, whatever the children answer, and the ticket serves as many as the
// child that serves the fewest.
func TestTurnHold(t *testing.T) {
	ks := keys(2)
	p := newTiers(t, false, newShelf(), newShelf())
	strong, weak := p.finish(p.multi, ks, false), p.finish(p.multi, ks, true)
	require.False(t, strong.Weak)
	require.Equal(t, 1, strong.Consumers)
	require.True(t, weak.Weak)
	require.Equal(t, 3, weak.Consumers)
}

// TestTicketNamesEveryAnswer: what a store has answered is named, although it was asked again where the answer of another
// child ended, and had nothing there.
func TestTicketNamesEveryAnswer(t *testing.T) {
	ks := keys(6)
	store, cache, held := newShelf(ks[:3]...), newShelf(ks[:5]...), newShelf()
	p := &tiers{newRig(t, func(cs []multiconnector.Child) {
		cs[0].Name, cs[0].Info.Scope = "store", connector.ScopeShared
		cs[1].Name, cs[1].Info.Scope = "cache", connector.ScopeEngine
		cs[2].Name, cs[2].Info.Scope, cs[2].Info.Capabilities = "holder", connector.ScopeEngine, connector.CanHold
	}, store, cache, held), held, store}
	require.Equal(t, 5*blockTokens, p.match("r", ks).Tokens)
	require.Equal(t, 6+1, store.asked, "blocks: it was asked again for the last one")
	hold := p.finish(p.multi, ks, false)

	d := newTiers(t, false, newShelf(ks...), store)
	_, err := d.sched.Match(t.Context(), []connector.Query{{Request: "r", Tokens: 6*blockTokens + 1, Keys: ks, Ticket: hold.Ticket}})
	require.NoError(t, err)
	load := transfer("r", ks)
	load.Ticket = hold.Ticket
	require.NoError(t, d.worker.Load(t.Context(), load, d.kv))
	require.Equal(t, []connector.BlockID{0, 1, 2}, loadedOf(d.store))
	require.Equal(t, []connector.BlockID{3, 4, 5}, loadedOf(d.held))
}

// TestProducerIsReleased: where a store has all that an engine loads, which is not the last token of the prompt, the
// producer is told that nothing will be fetched. What it alone has of a last block comes from it.
func TestProducerIsReleased(t *testing.T) {
	ks := keys(4)
	p := newTiers(t, true, newShelf(), newShelf(ks...))
	p.match("r", ks)
	ticket := p.finish(p.multi, ks, false).Ticket
	for _, storeFirst := range []bool{true, false} {
		for more := 1; more < blockTokens; more++ { // tokens of the prompt beyond its full blocks
			d := newTiers(t, storeFirst, newShelf(ks...), newShelf(ks...))
			d.held.tail, d.held.blocks[connector.BlockKey{}] = true, 9
			m, err := d.sched.Match(t.Context(), []connector.Query{{Request: "r", Tokens: 4*blockTokens + more, Keys: ks, Ticket: ticket}})
			require.NoError(t, err)
			load := transfer("r", ks)
			load.Ticket = ticket
			if more > 1 {
				load.Tokens += more - 1
				load.Blocks = append(load.Blocks, connector.Block{ID: 4})
			}
			require.NoError(t, d.worker.Load(t.Context(), load, d.kv))
			require.Len(t, loadedOf(d.store), 4)
			require.Len(t, d.held.loads, 1, "it is told about the request once")
			require.Equal(t, "held", string(d.held.loads[0].Ticket))
			if more > 1 {
				require.Equal(t, 4*blockTokens+more, m[0].Tokens)
				require.Equal(t, []connector.BlockID{4}, loadedOf(d.held))
			} else {
				require.Equal(t, 4*blockTokens, m[0].Tokens)
				require.Empty(t, d.held.loads[0].Blocks)
			}
		}
	}
}

// TestStoredIsBounded: what was found in a store last is named in tickets, however much was found before, and what was
// found long ago is forgotten.
func TestStoredIsBounded(t *testing.T) {
	const most = 1 << 16 // keys that are remembered at least
	store := newShelf()
	p := newTiers(t, true, newShelf(), store)
	find := func(from, n int) []connector.BlockKey {
		ks := make([]connector.BlockKey, n)
		for i := range ks {
			binary.LittleEndian.PutUint32(ks[i][:], uint32(from+i))
			store.blocks[ks[i]] = 1
		}
		require.Equal(t, n*blockTokens, p.match("r", ks).Tokens)
		return ks
	}
	empty := len(p.finish(p.multi, keys(4), false).Ticket)
	named := func(ks []connector.BlockKey) bool { return len(p.finish(p.multi, ks, false).Ticket) > empty }
	first := find(1, 4)
	for n := range 3 {
		require.Equal(t, n < 2, named(first), "after %d more", n*most)
		last := find(10+n*most, most)
		require.True(t, named(last[:4]))
		require.True(t, named(last[most-4:]))
	}
}
