package sdk

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// lendingStore is a Store that lends slots; host is what a host writes there.
type lendingStore struct {
	*powerful
	lends int
	asked int // how often for slots
	back  []uint64
	fail  any                         // what Back panics with
	below map[connector.StoreKey]bool // blocks that are not in memory any more
}

// Placed implements Placing.
func (l *lendingStore) Placed(keys []connector.StoreKey) []uint32 {
	l.asked++
	return l.powerful.Placed(slices.DeleteFunc(slices.Clone(keys), func(k connector.StoreKey) bool { return l.below[k] }))
}

func (l *lendingStore) Lends() int { return l.lends }

func (l *lendingStore) Lend(n int) (slots []uint32, serial uint64) {
	for i := range n {
		slots = append(slots, uint32(i))
	}
	return slots, 9
}

func (l *lendingStore) Back(serials []uint64) {
	if l.fail != nil {
		panic(l.fail)
	}
	l.back = append(l.back, serials...)
}

func (l *lendingStore) host(keys ...connector.StoreKey) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range keys {
		l.data[k] = [][]byte{{1}}
	}
}

func lender(t *testing.T, store connector.Store, env connector.Env) (connector.Scheduler, connector.Lender) {
	t.Helper()
	scheduler, worker := open(t, storeOf(powerfulDefinition(), store), env)
	t.Cleanup(func() {
		require.NoError(t, worker.Close())
		require.NoError(t, scheduler.Close())
	})
	lender, ok := worker.(connector.Lender)
	require.True(t, ok)
	return scheduler, lender
}

// Rules EVENT-01 and PLACE-34: what the host says that it has written is stored, if it is still there, and the Store hears the rest.
func TestLend(t *testing.T) {
	store := &lendingStore{powerful: &powerful{memory: newMemory()}, lends: 5}
	env := testEnv(0, 1)
	env.Placement = &connector.Placement{Slots: 10, SlotBytes: 100, Epoch: 1, Serial: 1}
	scheduler, l := lender(t, store, env)
	require.Equal(t, 5, l.Lends())
	bs := blocks(3)
	shard := func(b connector.Block) connector.StoreKey {
		return connector.NewStoreKey(b.Key, env.Shape, 0, connector.Shard{World: 1})
	}
	store.host(shard(bs[0]), shard(bs[2]))
	loan, err := l.Lend(t.Context(), &connector.Lending{Written: bs, Back: []uint64{4, 6}, Used: []uint32{8}, Want: 3})
	require.NoError(t, err)
	require.Equal(t, &connector.Loan{Slots: []uint32{0, 1, 2}, Serial: 9, Placed: []uint32{uint32(shard(bs[0])[0]), uint32(shard(bs[2])[0])}}, loan)
	require.Equal(t, []uint64{4, 6}, store.back)
	require.Equal(t, []uint32{8}, store.used)
	events := take(t, scheduler)
	require.Len(t, events, 1)
	require.Equal(t, connector.BlocksStored, events[0].Kind)
	require.Equal(t, []connector.BlockKey{bs[0].Key, bs[2].Key}, events[0].Keys)
	store.removed([]connector.StoreKey{shard(bs[2])})
	require.Equal(t, []connector.BlockKey{bs[2].Key}, take(t, scheduler)[0].Keys)
	loan, err = l.Lend(t.Context(), &connector.Lending{Want: 9})
	require.NoError(t, err)
	require.Len(t, loan.Slots, 5, "no more than it lends")
	store.fail = "broken"
	_, err = l.Lend(t.Context(), &connector.Lending{Want: 1})
	require.ErrorContains(t, err, "broken")
}

// Rule EVENT-01: a block that was evicted before the Store's worker is told about it is stored, if the tier below has it.
func TestLendTellsOfWhatIsBelow(t *testing.T) {
	store := &lendingStore{powerful: &powerful{memory: newMemory()}, lends: 5}
	env := testEnv(0, 1)
	env.Placement = &connector.Placement{Slots: 10, SlotBytes: 100, Epoch: 1, Serial: 1}
	scheduler, l := lender(t, store, env)
	bs := blocks(4)
	var shards []connector.StoreKey
	for _, b := range bs {
		shards = append(shards, connector.NewStoreKey(b.Key, env.Shape, 0, connector.Shard{World: 1}))
	}
	store.host(shards[0], shards[1], shards[3])
	store.below = map[connector.StoreKey]bool{shards[1]: true, shards[3]: true}
	loan, err := l.Lend(t.Context(), &connector.Lending{Written: bs[:3]})
	require.NoError(t, err)
	require.Equal(t, []uint32{uint32(shards[0][0])}, loan.Placed)
	require.Equal(t, []connector.BlockKey{bs[0].Key, bs[1].Key}, take(t, scheduler)[0].Keys)
	store.before = func(call string, _ int) error {
		if call == "lookup" {
			return connector.ErrBusy
		}
		return nil
	}
	_, err = l.Lend(t.Context(), &connector.Lending{Written: bs[3:]})
	require.NoError(t, err)
	store.removed(shards[1:2])
	events := take(t, scheduler)
	require.Len(t, events, 1, "nobody knows whether the last one is there")
	require.Equal(t, connector.BlocksRemoved, events[0].Kind)
}

// A Store that still has all that the host has written is not asked about each block.
func TestLendAsksOnce(t *testing.T) {
	store := &lendingStore{powerful: &powerful{memory: newMemory()}, lends: 5}
	env := testEnv(0, 1)
	env.Placement = &connector.Placement{Slots: 10, SlotBytes: 100, Epoch: 1, Serial: 1}
	scheduler, l := lender(t, store, env)
	bs := blocks(8)
	for _, b := range bs {
		store.host(connector.NewStoreKey(b.Key, env.Shape, 0, connector.Shard{World: 1}))
	}
	loan, err := l.Lend(t.Context(), &connector.Lending{Written: bs})
	require.NoError(t, err)
	require.Len(t, loan.Placed, len(bs))
	require.Len(t, take(t, scheduler)[0].Keys, len(bs))
	require.Equal(t, 2, store.asked, "what is there for the events, and for the answer")
}

// Rule PLACE-26: what a call of Lend that fails would have named is named by the next one.
func TestLendNamesWhatFailedBefore(t *testing.T) {
	store := &lendingStore{powerful: &powerful{memory: newMemory()}, lends: 5}
	env := testEnv(0, 1)
	env.Placement = &connector.Placement{Slots: 10, SlotBytes: 100, Epoch: 1, Serial: 1}
	_, l := lender(t, store, env)
	bs := blocks(2)
	store.before = func(call string, _ int) error {
		if call == "put" {
			return &connector.ItemError{Items: []int{1}, Err: connector.ErrDeclined}
		}
		return nil
	}
	_, err := l.SavePlaced(t.Context(), &connector.Transfer{Blocks: bs}, testKV(t, 1), nil)
	require.ErrorIs(t, err, connector.ErrDeclined)
	key := connector.NewStoreKey(bs[0].Key, env.Shape, 0, connector.Shard{World: 1})
	store.host(key)
	store.fail = "broken"
	_, err = l.Lend(t.Context(), &connector.Lending{})
	require.ErrorContains(t, err, "broken")
	store.fail = nil
	loan, err := l.Lend(t.Context(), &connector.Lending{})
	require.NoError(t, err)
	require.Equal(t, []uint32{uint32(key[0])}, loan.Placed)
}

// A worker lends nothing without a placement, for an engine that does not save, and if the Store does not; all ranks share what it lends.
func TestLends(t *testing.T) {
	store := &lendingStore{powerful: &powerful{memory: newMemory()}, lends: 5}
	env := testEnv(0, 2)
	_, l := lender(t, store, env)
	require.Zero(t, l.Lends())
	env.Placement = &connector.Placement{Slots: 10, SlotBytes: 100, Epoch: 1, Serial: 1}
	_, l = lender(t, store, env)
	require.Equal(t, 2, l.Lends())
	env.Role = connector.RoleConsumer
	_, l = lender(t, store, env)
	require.Zero(t, l.Lends())
	env.Role = connector.RoleBoth
	_, l = lender(t, &powerful{memory: newMemory()}, env)
	require.Zero(t, l.Lends())
	_, err := l.Lend(t.Context(), &connector.Lending{})
	require.ErrorIs(t, err, connector.ErrIncompatible)
}
