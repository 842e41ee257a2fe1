package tier_test

import (
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/place"
	"github.com/kvport/kvport/sdk/tier"
)

// lenderEnd is a host to which a worker lends slots.
type lenderEnd struct {
	*hostEnd
	lender connector.Lender
	loans  []place.Loan
}

func newLenderEnd(t *testing.T, slots int, change func(o *tier.Options)) *lenderEnd {
	h := newHostEndOf(t, slots, func(o *tier.Options) {
		o.Lend, o.Lower = true, nil
		change(o)
	})
	lender, ok := h.worker.(connector.Lender)
	require.True(t, ok)
	return &lenderEnd{hostEnd: h, lender: lender}
}

// ask asks for slots, and says what was written and what is given back. It learns where the blocks lie.
func (h *lenderEnd) ask(l connector.Lending) (lent int) {
	loan, err := h.lender.Lend(h.Context(), &l)
	require.NoError(h, err)
	for i, s := range loan.Slots {
		h.loans = append(h.loans, place.Loan{Slot: place.Slot(s), Serial: loan.Serial + uint64(i)})
	}
	h.learn(loan.Placed)
	return len(loan.Slots)
}

// take is the oldest loan.
func (h *lenderEnd) take() place.Loan {
	l := h.loans[0]
	h.loans = h.loans[1:]
	return l
}

// write writes a block into a lent slot.
func (h *lenderEnd) write(t *connector.Transfer) (slot uint32) {
	l, b := h.take(), t.Blocks[0]
	save, err := h.host.Claim(l, place.Part{Key: h.key(b), Length: blockSize}, 0)
	require.NoError(h, err)
	copy(save.Bytes(0), h.kv.View(0, b.ID))
	_, err = save.Publish(0)
	require.NoError(h, err)
	return uint32(l.Slot)
}

func (h *lenderEnd) key(b connector.Block) connector.StoreKey {
	return connector.NewStoreKey(b.Key, h.env.Shape, 0, connector.Shard{World: 1})
}

// offered is how many of the blocks a query by message finds.
func (h *lenderEnd) offered(t *connector.Transfer) int {
	run := make([]connector.StoreKey, len(t.Blocks))
	for i, b := range t.Blocks {
		run[i] = h.key(b)
	}
	found, err := h.store.Lookup(h.Context(), [][]connector.StoreKey{run})
	require.NoError(h, err)
	return found[0]
}

// Rules PLACE-29 and PLACE-32: what the host has written into a lent slot is a block like others, before anybody tells the plugin.
func TestLentSlots(t *testing.T) {
	const slots = 256
	for _, policy := range []string{tier.LRU, tier.S3FIFO, tier.FIFO} {
		h := newLenderEnd(t, slots, func(o *tier.Options) { o.Policy = policy })
		require.Equal(t, 2, h.lender.Lends())
		require.NoError(t, h.save(h.blocks(0, slots)), "memory is full")
		require.Equal(t, 2, h.ask(connector.Lending{Want: 5}))
		require.Zero(t, h.ask(connector.Lending{Want: 5}), "that is all")
		rand.NewChaCha8([32]byte{1}).Read(h.kv.View(0, 20))
		slot := h.write(h.blocks(276, 277)) // its ID is 20
		require.Equal(t, 1, h.offered(h.blocks(276, 277)))
		memory, _ := h.store.Counts()
		require.EqualValues(t, slots+1, memory.Stored)
		require.EqualValues(t, slots-1, memory.Blocks)
		to := h.blocks(276, 277)
		to.Blocks[0].ID = 40
		h.load(to, []uint32{slot})
		require.Equal(t, h.kv.View(0, 20), h.kv.View(0, 40))
		require.Equal(t, []uint32{slot}, h.placed(to))
		require.Equal(t, 1, h.ask(connector.Lending{Want: 5, Written: h.blocks(276, 277).Blocks}))
		for first := 0; first < slots; first += 32 {
			require.NoError(t, h.save(h.blocks(first, first+32)))
		}
		if policy == tier.LRU {
			require.Empty(t, h.placed(to), "it is evicted as others are")
		}
	}
}

// Nothing is lent where not every block that is offered is kept, nor where others read what lies below.
func TestLendsNothing(t *testing.T) {
	for name, change := range map[string]func(o *tier.Options){
		"quota": func(o *tier.Options) { o.TenantBytes = 1 << 20 }, "threshold": func(o *tier.Options) { o.StoreThreshold = 2 },
		"ttl": func(o *tier.Options) { o.TTL = time.Hour }, "few slots": func(o *tier.Options) { o.Slots = 127 },
		"nobody reads": func(o *tier.Options) { o.Placement = nil }, "arc": func(o *tier.Options) { o.Policy = tier.ARC },
		"something below": func(o *tier.Options) { o.Lower = folder{t.TempDir()} }, "not said": func(o *tier.Options) { o.Lend = false },
	} {
		h := newLenderEnd(t, 256, change)
		require.Zero(t, h.lender.Lends(), name)
		require.Zero(t, h.ask(connector.Lending{Want: 5}), name)
	}
}

// Rule PLACE-32: whoever asks for a block does not wait until others are evicted for slots that are going to be lent.
func TestQueriesBesideLend(t *testing.T) {
	began, free := make(chan struct{}), make(chan struct{})
	var held atomic.Bool
	h := newLenderEnd(t, 256, func(o *tier.Options) {
		o.Changed = func(_ connector.StoreKey, stored bool) {
			if !stored && held.CompareAndSwap(true, false) {
				close(began)
				<-free
			}
		}
	})
	require.NoError(t, h.save(h.blocks(0, 256)), "memory is full")
	require.Equal(t, 1, h.ask(connector.Lending{Want: 1}))
	held.Store(true)
	lent := make(chan int)
	go func() {
		slots, _ := h.store.Lend(5)
		lent <- len(slots)
	}()
	<-began
	found := h.offered(h.blocks(255, 256))
	more, _ := h.store.Lend(5)
	close(free)
	require.Equal(t, 1, found)
	require.Empty(t, more, "what is about to be lent counts")
	require.Equal(t, 1, <-lent)
}

// Rule PLACE-29: each rank has its share, however many slots of another one are being written, or hold blocks that nobody has taken note of.
func TestRanksShareWhatIsLent(t *testing.T) {
	h := newLenderEnd(t, 512, func(*tier.Options) {})
	seen := map[uint32]bool{}
	ask := func(rank connector.Lender, want int) (lent int) {
		loan, err := rank.Lend(t.Context(), &connector.Lending{Want: want})
		require.NoError(t, err)
		for i, s := range loan.Slots {
			require.False(t, seen[s], "slot %d is lent twice", s)
			seen[s] = true
			h.loans = append(h.loans, place.Loan{Slot: place.Slot(s), Serial: loan.Serial + uint64(i)})
		}
		return len(loan.Slots)
	}
	var ranks [2]connector.Lender
	for n := range ranks {
		var lends bool
		ranks[n], lends = h.rank(n, 2).(connector.Lender)
		require.True(t, lends)
		require.Equal(t, 2, ranks[n].Lends())
	}
	require.Equal(t, 2, ask(ranks[0], 5), "no more than its share")
	h.write(h.blocks(0, 1))
	require.Equal(t, 2, ask(ranks[1], 5))
	require.Equal(t, 1, ask(ranks[0], 1), "for the one that is written")
	require.Zero(t, ask(ranks[1], 1))
}

// Rule PLACE-33: what comes into a slot that was lent before a reset is older, and the slot is not lost.
func TestLentBeforeAReset(t *testing.T) {
	h := newLenderEnd(t, 256, func(*tier.Options) {})
	require.Equal(t, 2, h.ask(connector.Lending{Want: 2}))
	early := h.take()
	h.loans = append(h.loans, early)
	h.write(h.blocks(0, 1))
	_, err := h.store.Reset(t.Context())
	require.NoError(t, err)
	require.Zero(t, h.offered(h.blocks(0, 1)))
	slot := h.write(h.blocks(1, 2))
	require.Zero(t, h.offered(h.blocks(1, 2)))
	require.Empty(t, h.placed(h.blocks(1, 2)), "slot %d", slot)
	require.Equal(t, 2, h.ask(connector.Lending{Want: 2, Back: []uint64{early.Serial, 1 << 39}}), "slots that mean nothing are not taken back")
	h.write(h.blocks(2, 3))
	require.Equal(t, 1, h.offered(h.blocks(2, 3)))
}

// Rule PLACE-13: of a block that was saved by message meanwhile the later one stays, and the other's slot is free.
func TestLentAndSavedByMessage(t *testing.T) {
	h := newLenderEnd(t, 256, func(*tier.Options) {})
	require.Equal(t, 1, h.ask(connector.Lending{Want: 1}))
	b := h.blocks(0, 1)
	require.NoError(t, h.save(b))
	named := h.placed(b)
	h.host.Forget()
	slot := h.write(b)
	require.Equal(t, []uint32{slot}, h.placed(b))
	require.Equal(t, 1, h.offered(b))
	require.Empty(t, h.placed(b))
	require.Equal(t, 1, h.ask(connector.Lending{Want: 1, Written: b.Blocks}))
	require.Equal(t, named, h.placed(b), "the answer says where it lies")
	require.NoError(t, h.save(b))
	h.write(h.blocks(1, 2))
	memory, _ := h.store.Counts()
	require.EqualValues(t, 2, memory.Blocks)
}

// Whatever happens to them, no slot is lost.
func TestNoLentSlotIsLost(t *testing.T) {
	const slots = 384
	h := newLenderEnd(t, slots, func(o *tier.Options) { o.Policy = tier.S3FIFO })
	rng := rand.New(rand.NewPCG(172, 0))
	for range 4000 {
		n := rng.IntN(450)
		switch rng.IntN(6) {
		case 0:
			h.ask(connector.Lending{Want: rng.IntN(3), Used: []uint32{uint32(rng.IntN(slots))}})
		case 1, 2:
			if len(h.loans) > 0 {
				h.write(h.blocks(n, n+1))
			}
		case 3:
			if len(h.loans) > 0 {
				h.ask(connector.Lending{Back: []uint64{h.take().Serial}})
			}
		case 4:
			require.NoError(t, h.save(h.blocks(n, n+1)))
		case 5:
			if rng.IntN(20) == 0 {
				_, err := h.store.Reset(t.Context())
				require.NoError(t, err)
				h.host.Forget()
			}
		}
	}
	for len(h.loans) > 0 {
		h.ask(connector.Lending{Back: []uint64{h.take().Serial}})
	}
	require.NoError(t, h.save(h.blocks(0, slots)))
	require.Len(t, h.placed(h.blocks(0, slots)), slots)
}
