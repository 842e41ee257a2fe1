package host

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/internal/place"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
)

// lend has the plugin lend slots to a rank.
func (r *placedRig) lend(n, count int) (slots []place.Slot) {
	pool := r.p.pools[n]
	pool.mu.Lock()
	round := pool.round
	pool.mu.Unlock()
	loan := &connector.Loan{Serial: r.shelf.Draw(count)}
	for range count {
		r.shelf.Lend(place.Slot(r.next))
		slots = append(slots, place.Slot(r.next))
		loan.Slots = append(loan.Slots, r.next)
		r.next++
	}
	require.NoError(r, pool.answered(round, count, loan))
	return slots
}

// saveLent saves blocks of one rank without the plugin, and says whether that went.
func (r *placedRig) saveLent(n int, t connector.Transfer) bool {
	over, wrong := r.p.save(r.Context(), r.ranks[n], n, &t)
	require.NoError(r, wrong)
	return over
}

func (r *placedRig) lent(n int) int {
	r.p.pools[n].mu.Lock()
	defer r.p.pools[n].mu.Unlock()
	return len(r.p.pools[n].lent)
}

// Rules PLACE-35 and PLACE-34: a save goes into lent slots without the plugin, is found and loaded from there, and is told afterwards.
func TestSaveLent(t *testing.T) {
	r := newPlacedRig(t, 2, all(), connector.Group{BlockTokens: 16, Policy: connector.PolicyTrailing, Trailing: 2})
	ks := keys(1, 5)
	first, second := r.fill(ks, 0), r.fill(ks, 1)
	for n := range 2 {
		r.p.pools[n].open(16)
		require.False(t, r.saveLent(n, connector.Transfer{Blocks: first}), "nothing is lent")
		slots := r.lend(n, 12)
		require.True(t, r.saveLent(n, connector.Transfer{Blocks: first, Tenant: 7}))
		require.True(t, r.saveLent(n, connector.Transfer{Blocks: second[3:]}))
		require.Equal(t, 5, r.lent(n))
		told, _ := r.p.pools[n].ask()
		require.Len(t, told.Written, 7)
		for i, b := range told.Written {
			require.EqualValues(t, slots[i], b.ID)
			h, ok := r.shelf.Header(slots[i])
			require.True(t, ok)
			require.Equal(t, r.p.key(b.Key, b.Group, n), h.Key)
			require.Equal(t, map[uint16]uint64{0: 7}[b.Group], h.Tenant)
		}
		m, ok := r.p.match(r.query(ks, 0))
		require.Equal(t, n == 1, ok)
		require.Equal(t, 80*n, m.Tokens)
	}
	for n := range 2 {
		require.True(t, r.loaded(n, first...))
		require.True(t, r.loaded(n, second[3:]...))
	}
	require.Equal(t, 14, r.life(), "the next life finds all of it")
	require.Zero(t, r.lent(0), "what its former life has lent is gone")
	require.True(t, r.loaded(0, first...))
}

// Rule PLACE-35: whatever is in doubt goes by message, and no slot is lost for it.
func TestSaveLentInDoubt(t *testing.T) {
	r := newPlacedRig(t, 1, all())
	bs := r.fill(keys(1, 4), 0)
	r.p.pools[0].open(16)
	require.False(t, r.saveLent(0, connector.Transfer{Blocks: bs[:1]}))
	r.lend(0, 3)
	for name, c := range map[string]connector.Transfer{
		"a replacement": {Blocks: bs[:1], Replace: true}, "a ticket": {Blocks: bs[:1], Ticket: connector.Ticket("t")}, "something else": {Blocks: bs[:1], Extra: []byte("x")},
		"a partial block": {Blocks: append([]connector.Block{{ID: 1}}, bs[0])}, "too many": {Blocks: bs}, "nothing": {},
	} {
		require.False(t, r.saveLent(0, c), name)
	}
	require.Equal(t, 3, r.lent(0))
	require.True(t, r.saveLent(0, connector.Transfer{Blocks: bs[2:3]}))
	require.False(t, r.saveLent(0, connector.Transfer{Blocks: bs[2:3]}), "it is known")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	over, wrong := r.p.save(ctx, r.ranks[0], 0, &connector.Transfer{Blocks: bs[:1]})
	require.NoError(t, wrong)
	require.False(t, over)
	require.Equal(t, 2, r.lent(0))
	resume := r.p.pause()
	require.False(t, r.saveLent(0, connector.Transfer{Blocks: bs[3:]}), "a reset is under way")
	require.Zero(t, r.lent(0))
	r.lend(0, 1)
	resume()
	require.Zero(t, r.lent(0), "it may have been lent before the reset")
	told, _ := r.p.pools[0].ask()
	require.Len(t, told.Back, 3)
}

// Rule PLACE-31: slots that cannot be are refused, counted and not used again, and what was saved by message is right.
func TestSaveLentLies(t *testing.T) {
	r := newPlacedRig(t, 1, all())
	bs := r.fill(keys(1, 6), 0)
	r.p.pools[0].open(16)
	held := r.save(0, bs[5])
	for why, lie := range map[place.Reason]func() (slot uint32, serial uint64){
		place.NotLent:     func() (uint32, uint64) { return held[0], r.env.Serial + 100 },
		place.OutOfRange:  func() (uint32, uint64) { return uint32(r.env.Slots), r.env.Serial + 100 },
		place.SerialAhead: func() (uint32, uint64) { r.shelf.Lend(60); return 60, r.env.Serial + 1<<50 },
		place.SerialPast:  func() (uint32, uint64) { r.shelf.Lend(61); return 61, 0 },
	} {
		slot, serial := lie()
		_, round := r.p.pools[0].ask()
		require.NoError(t, r.p.pools[0].answered(round, 1, &connector.Loan{Slots: []uint32{slot}, Serial: serial}))
		over, wrong := r.p.save(t.Context(), r.ranks[0], 0, &connector.Transfer{Blocks: bs[:1]})
		require.False(t, over)
		require.Equal(t, &place.RefusalError{Slot: place.Slot(slot), Reason: why}, wrong)
		require.Zero(t, r.lent(0))
	}
	require.True(t, r.loaded(0, bs[5]))
	slots := r.lend(0, 1)
	_, round := r.p.pools[0].ask()
	require.Error(t, r.p.pools[0].answered(round, 4, &connector.Loan{Slots: []uint32{uint32(slots[0])}, Serial: 1}), "lent twice")
	require.Error(t, r.p.pools[0].answered(round, 4, &connector.Loan{Slots: []uint32{50, 50}, Serial: 1}))
	require.Error(t, r.p.pools[0].answered(round, 1, &connector.Loan{Slots: []uint32{50, 51}, Serial: 1}), "more than were wanted")
	require.Equal(t, 1, r.lent(0))
	require.True(t, r.saveLent(0, connector.Transfer{Blocks: bs[:1]}))
	r.shelf.Bytes(slots[0], 8)[3] ^= 1
	require.False(t, r.loaded(0, bs[0]), "the plugin has written over it")
	require.EqualValues(t, 1, r.damaged.Load())
}

// Rule PLACE-31: a reader does not accept what it copies from a slot that is lent meanwhile, even if the plugin hides that from the look which follows.
func TestSaveLentWhereABlockIsRead(t *testing.T) {
	for _, hides := range []bool{false, true} {
		r := newPlacedRig(t, 1, all())
		bs := r.fill(keys(1, 2), 0)
		r.p.pools[0].open(16)
		r.next = 7
		slot := place.Slot(r.save(0, bs[0])[0])
		refs, err := r.p.find([]connector.StoreKey{r.p.key(bs[0].Key, 0, 0)}, 0)
		require.NoError(t, err)
		pin, err := r.p.host.Pin(refs[0])
		require.NoError(t, err)
		before := bytes.Clone(r.arena)
		r.next = uint32(slot)
		require.Equal(t, []place.Slot{slot}, r.lend(0, 1))
		if hides {
			at := 0
			for before[at] == r.arena[at] {
				at++
			}
			word := r.arena[at&^7:][:8]
			was := place.Word(binary.LittleEndian.Uint64(before[at&^7:]))
			binary.LittleEndian.PutUint64(word, uint64(place.NewWord(was.Generation(), place.Lent)))
		}
		require.True(t, r.saveLent(0, connector.Transfer{Blocks: bs[1:]}))
		to := bs[0]
		to.ID += placedBlocks / 2
		from := digest.Slot{KV: r.p.kv, ID: connector.BlockID(slot)}
		require.ErrorIs(t, r.ranks[0].hasher.CopyIn(r.ranks[0].kv, to, from, digest.StoresForLoad(1000)), connector.ErrCorrupt)
		if gone := pin.Release(0); hides {
			require.NoError(t, gone)
		} else {
			require.ErrorIs(t, gone, place.ErrGone)
		}
		require.False(t, r.loaded(0, bs[0]))
		require.True(t, r.loaded(0, bs[1]))
	}
}

// The plugin is asked before slots run out, and told within a while.
func TestPool(t *testing.T) {
	p := newPool()
	loans, _ := p.take(1)
	require.Nil(t, loans)
	require.Empty(t, p.low, "it lends nothing")
	p.open(40)
	require.Empty(t, p.low, "nothing was saved yet")
	loans, _ = p.take(3)
	require.Nil(t, loans)
	require.True(t, p.wait(t.Context(), nil))
	l, round := p.ask()
	require.Equal(t, connector.Lending{Want: leastLent}, l)
	lend := func(n int, from uint32) {
		loan := &connector.Loan{Serial: uint64(from)}
		for i := range n {
			loan.Slots = append(loan.Slots, from+uint32(i))
		}
		require.NoError(t, p.answered(round, n, loan))
	}
	lend(leastLent, 100)
	loans, _ = p.take(3)
	require.Equal(t, []place.Loan{{Slot: 100, Serial: 100}, {Slot: 101, Serial: 101}, {Slot: 102, Serial: 102}}, loans)
	require.Empty(t, p.low)
	p.put(3, round, []connector.Block{{ID: 100}, {ID: 101}}, loans[2:])
	require.Empty(t, p.low)
	require.Len(t, p.late, 1, "it is told some time")
	require.True(t, p.wait(t.Context(), nil))
	l, _ = p.ask()
	require.Equal(t, connector.Lending{Want: 2, Written: []connector.Block{{ID: 100}, {ID: 101}}}, l)
	p.unheard(&l)
	require.True(t, p.wait(t.Context(), nil), "it is told again")
	again, _ := p.ask()
	require.Equal(t, l, again)
	loans, _ = p.take(21)
	require.Len(t, loans, 21)
	require.Len(t, p.low, 1)
	require.True(t, p.wait(t.Context(), nil))
	l, _ = p.ask()
	require.Equal(t, 40-21-9, l.Want, "no more than it lends, with those that are being written")
	p.void()
	p.put(21, round, nil, loans[:1])
	lend(1, 500)
	l, round = p.ask()
	require.Len(t, l.Back, 9+1+1, "what was lent, taken, and on its way")
	require.Equal(t, 40, l.Want)
	lend(5, 600)
	p.rest()
	p.rest()
	l, _ = p.ask()
	require.Len(t, l.Back, 5, "nobody has needed them")
	require.Zero(t, l.Want)
	loans, _ = p.take(1)
	require.Nil(t, loans)
	lend(5, 700)
	loans, _ = p.take(41)
	require.Nil(t, loans, "never that many")
	loans, _ = p.take(5)
	require.Len(t, loans, 5, "which says nothing about less")
	p.ask() // what was signalled before
	p.open(0)
	p.open(40)
	require.Empty(t, p.low, "nothing was saved in this life")
	require.Zero(t, p.target())
	p.open(0)
	loans, _ = p.take(1)
	require.Nil(t, loans)
}

// A slot whose memory is gone is given back, one of a save that did not begin is used by the next one.
func TestLentSlotFaults(t *testing.T) {
	loans := []place.Loan{{Slot: 1, Serial: 11}, {Slot: 2, Serial: 12}, {Slot: 3, Serial: 13}}
	written, empty, broken, wrong := ended([]lentWrite{
		{loan: loans[0], empty: true}, {loan: loans[1], empty: true, err: fmt.Errorf("address: %w", shm.ErrFault)}, {loan: loans[2], empty: true, err: place.ErrSaving},
	})
	require.NoError(t, wrong)
	require.Empty(t, written)
	require.Equal(t, []place.Loan{loans[0], loans[2]}, empty)
	require.Equal(t, loans[1:2], broken)
	p := newPool()
	p.open(16)
	p.giveBack(broken)
	require.True(t, p.wait(t.Context(), nil))
	l, _ := p.ask()
	require.Equal(t, []uint64{12}, l.Back)
}

// answering is a worker whose answers to Lend a test makes up.
type answering struct {
	connector.Lender
	answer func(l *connector.Lending) (*connector.Loan, error)
}

func (w answering) Lend(_ context.Context, l *connector.Lending) (*connector.Loan, error) {
	return w.answer(l)
}

// lendRig is a host that has written a block into a lent slot, and asks for more slots.
type lendRig struct {
	*aloneRig
	pool *pool
	told connector.Lending // what it has to say
}

func newLendRig(t *testing.T) *lendRig {
	r := newAloneRig(t, 0)
	t.Cleanup(func() { require.NoError(t, r.closeNow()) })
	l := &lendRig{aloneRig: r, pool: r.place.pools[0]}
	l.told = connector.Lending{Written: []connector.Block{{ID: 5, Key: keys(1, 1)[0]}}, Want: 16}
	l.pool.open(l.told.Want)
	l.pool.take(3)
	l.pool.put(0, 0, l.told.Written, nil)
	return l
}

// lend makes one call, in which the plugin hears what the host has to say.
func (r *lendRig) lend(loan *connector.Loan, fails error) (enough bool, err error) {
	return r.Host.lend(r.t.Context(), 0, answering{answer: func(l *connector.Lending) (*connector.Loan, error) {
		require.Equal(r.t, r.told, *l)
		return loan, fails
	}})
}

// Rule PLACE-34: what the plugin has not answered is said again, and counts as no fault.
func TestLendFails(t *testing.T) {
	r := newLendRig(t)
	for _, fails := range []error{connector.ErrBusy, plugin.ErrLost, plugin.ErrUnanswered, context.DeadlineExceeded} {
		enough, err := r.lend(nil, fails)
		require.ErrorIs(t, err, fails)
		require.False(t, enough)
	}
	r.place.used.note([]place.Ref{{Slot: 9}})
	enough, err := r.lend(&connector.Loan{Slots: []uint32{1, 2}, Serial: 1}, nil)
	require.NoError(t, err)
	require.False(t, enough, "the plugin has no more now")
	require.Equal(t, 2, r.placed.lent(0))
	r.told = connector.Lending{Want: 14, Used: []uint32{9}} // which it was not told while it failed
	enough, err = r.lend(&connector.Loan{Slots: []uint32{3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, Serial: 3}, nil)
	require.NoError(t, err)
	require.True(t, enough)
	require.Equal(t, 16, r.placed.lent(0))
	require.Zero(t, testutil.ToFloat64(r.Host.metrics.violations))
}

// Rule PLACE-31: answers that no honest plugin gives are counted, and none of their slots is used.
func TestLendIsRefused(t *testing.T) {
	r := newLendRig(t)
	for i, lie := range []*connector.Loan{
		{Slots: make([]uint32, 17), Serial: 1},
		{Slots: []uint32{5, 5}, Serial: 1},
		{Placed: make([]uint32, 1+wire.MaxUnnamed)},
		{Placed: []uint32{1 << 31}},
	} {
		_, err := r.lend(lie, nil)
		require.NoError(t, err)
		require.InDelta(t, i+1, testutil.ToFloat64(r.Host.metrics.violations), 0)
		require.Zero(t, r.placed.lent(0))
		r.told.Written = nil // it has heard that
	}
}

// Rule PLACE-33: slots of an answer that comes after a reset has begun, or in another life, are not written.
func TestLendAnswersLate(t *testing.T) {
	r := newLendRig(t)
	during := func(happens func()) {
		_, err := r.Host.lend(t.Context(), 0, answering{answer: func(*connector.Lending) (*connector.Loan, error) {
			happens()
			return &connector.Loan{Slots: []uint32{1, 2}, Serial: 8}, nil
		}})
		require.NoError(t, err)
		require.Zero(t, r.placed.lent(0))
		l, _ := r.pool.ask()
		require.Equal(t, []uint64{8, 9}, l.Back)
	}
	var resume func()
	during(func() { resume = r.place.pause() })
	during(func() { resume() })
	during(func() { r.pool.open(16) })
}

// killed is a plugin that remembers why it was killed.
type killed struct {
	*thisProcess
	reason error
}

func (k *killed) KillFor(reason error) { k.reason = reason }

// A plugin that does not answer Lend is killed, one that answers with an error is asked again, and nobody is blamed for the end of its life.
func TestBorrow(t *testing.T) {
	r := newLendRig(t)
	borrow := func(answer func(end context.CancelFunc) error) (reason error) {
		life, end := context.WithCancel(t.Context())
		defer end()
		p := &killed{thisProcess: &thisProcess{done: make(chan struct{})}}
		r.pool.open(16)
		r.pool.take(3)
		r.Host.newGeneration(2, p, noScheduler{}).borrow(life, 0, answering{answer: func(*connector.Lending) (*connector.Loan, error) {
			return nil, answer(end)
		}})
		return p.reason
	}
	for _, fails := range []error{plugin.ErrLost, plugin.ErrUnanswered} {
		require.ErrorIs(t, borrow(func(context.CancelFunc) error { return fails }), fails)
	}
	calls := 0
	require.NoError(t, borrow(func(end context.CancelFunc) error {
		if calls++; calls == 2 {
			end()
			return plugin.ErrLost
		}
		return connector.ErrBusy
	}))
	require.GreaterOrEqual(t, calls, 2)
}

// borrowing has the host ask for slots until the end of the test, or that of the life that answer may call.
func (r *lendRig) borrowing(answer func(end context.CancelFunc) (*connector.Loan, error)) (borrows *sync.WaitGroup) {
	life, end := context.WithCancel(r.t.Context())
	borrows = &sync.WaitGroup{}
	borrows.Go(func() {
		p := &thisProcess{done: make(chan struct{})}
		r.Host.newGeneration(2, p, noScheduler{}).borrow(life, 0, answering{answer: func(*connector.Lending) (*connector.Loan, error) {
			return answer(end)
		}})
	})
	r.t.Cleanup(func() {
		end()
		borrows.Wait()
	})
	return borrows
}

// Rule PLACE-34: the plugin is not asked while it is reset, which may take longer than an answer, and it is asked afterwards. Another reset
// may begin meanwhile, and one of a former life ends.
func TestBorrowWaitsForResets(t *testing.T) {
	r := newLendRig(t)
	former := r.place.pause()
	r.placed.life()
	require.False(t, r.place.paused())
	first, second := r.place.pause(), r.place.pause()
	former()
	r.pool.open(16)
	r.pool.take(3)
	var over atomic.Bool
	var asked []bool
	borrows := r.borrowing(func(end context.CancelFunc) (*connector.Loan, error) {
		asked = append(asked, over.Load())
		end()
		return nil, plugin.ErrLost
	})
	looks := func() {
		require.Eventually(t, func() bool { return len(r.pool.low)+len(r.pool.late) == 0 }, time.Minute, time.Millisecond, "it looks")
		require.NoError(t, r.place.quiet(t.Context()))
	}
	looks()
	first()
	looks()
	require.True(t, r.place.paused())
	over.Store(true)
	second()
	borrows.Wait()
	require.NotEmpty(t, asked)
	require.NotContains(t, asked, false)
}

// resetter is a side that is reset.
type resetter func() bool

func (r resetter) Reset(context.Context) (bool, error) { return r(), nil }

// Rule PLACE-34: a reset that begins while the plugin is asked waits for the answer, but not longer than its own deadline.
func TestResetWaitsForLend(t *testing.T) {
	r := newLendRig(t)
	asked, free := make(chan struct{}), make(chan struct{})
	var answered atomic.Bool
	r.borrowing(func(end context.CancelFunc) (*connector.Loan, error) {
		close(asked)
		<-free
		answered.Store(true)
		end()
		return nil, connector.ErrBusy
	})
	<-asked
	defer r.place.pause()()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := r.resetBy(over, resetter(func() bool { panic("it is not called") }))
	close(free)
	require.ErrorIs(t, err, context.Canceled)
	after, err := r.resetBy(t.Context(), resetter(answered.Load))
	require.NoError(t, err)
	require.True(t, after)
}
