package nixl

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// slotOf copies a slot, as a consumer does.
func slotOf(b *board, slot int) []byte {
	at := (slot - 1) * slotWords
	return bytes.Clone(unsafe.Slice((*byte)(unsafe.Pointer(&b.words[at])), slotBytes))
}

// TestBoard: a slot says yes for the ticket that it was set for, until its end, and not once it was cleared or
// while it is written.
func TestBoard(t *testing.T) {
	b, err := newBoard()
	require.NoError(t, err)
	mine, other := sumOf(connector.Ticket("a")), sumOf(connector.Ticket("b"))
	slot := b.take()
	require.NotZero(t, slot)
	require.False(t, slotSays(slotOf(b, slot), mine), "nothing there")
	b.set(slot, mine, time.Now().Add(time.Hour))
	require.True(t, slotSays(slotOf(b, slot), mine))
	require.False(t, slotSays(slotOf(b, slot), other))

	before := slotOf(b, slot)
	b.set(slot, mine, time.Now().Add(10*time.Hour))
	after := slotOf(b, slot)
	require.NotEqual(t, before, after)
	for i := range slotBytes { // copied while it was renewed
		torn := append(bytes.Clone(after[:i]), before[i:]...)
		if !bytes.Equal(torn, before) && !bytes.Equal(torn, after) {
			require.False(t, slotSays(torn, mine), i)
		}
	}
	for i := range slotBytes * 8 {
		damaged := bytes.Clone(after)
		damaged[i/8] ^= 1 << (i % 8)
		require.False(t, slotSays(damaged, mine), i)
	}

	b.set(slot, mine, time.Now().Add(30*time.Millisecond))
	over := binary.NativeEndian.Uint64(slotOf(b, slot)[16:])
	require.Eventually(t, func() bool { return !slotSays(slotOf(b, slot), mine) }, time.Minute, time.Millisecond, "the end has passed, and nobody did anything")
	require.GreaterOrEqual(t, monotonic(), over)

	b.set(slot, mine, time.Now().Add(time.Hour))
	b.clear(slot)
	require.Equal(t, make([]byte, slotBytes), slotOf(b, slot))
	for range boardSlots {
		require.NotZero(t, b.take())
	}
	require.Zero(t, b.take(), "a full board")
	b.set(0, mine, time.Now()) // what has no slot
	b.clear(0)
	require.Zero(t, (*board)(nil).take())
	require.NoError(t, b.close())
	require.NotEmpty(t, clockName())
}

// TestLooks: only the first load of a producer's life asks where blocks are, and none of one machine asks
// whether they were held, as long as the board can be seen.
func TestLooks(t *testing.T) {
	rng := rand.New(rand.NewPCG(30, 31))
	p, d := open(t, connector.RoleProducer, Config{}, nil), open(t, connector.RoleConsumer, Config{}, nil)
	told := 0
	p.node.told = func() { told++ }
	load := func(n int, change func(*ticket)) error {
		theirs, hold := p.finish(rng, byte(n), n)
		raw := hold.Ticket
		if change != nil {
			from, err := parseTicket(raw)
			require.NoError(t, err)
			change(&from)
			raw, err = from.encode()
			require.NoError(t, err)
		}
		ours, err := d.load(rng, byte(n), n, raw)
		if err == nil {
			require.Equal(t, p.bytes(theirs), d.bytes(ours))
			p.fetched(hold.ID)
		}
		return err
	}
	for n := 2; n < 12; n++ {
		require.NoError(t, load(n, nil))
	}
	require.Equal(t, 1, told)
	require.NoError(t, load(1, nil), "a partial block alone")
	require.Equal(t, 2, told, "of which no key tells what it is")
	for what, change := range map[string]func(*ticket){
		"ids":    func(x *ticket) { x.IDs[1] ^= 2 },
		"slot":   func(x *ticket) { x.Slot++ },
		"lease":  func(x *ticket) { x.LeaseMS++ },
		"no ids": func(x *ticket) { x.IDs = nil },
		"life":   func(x *ticket) { x.Life = "another" },
	} {
		before := told
		require.NoError(t, load(9, change), what)
		require.Equal(t, before+1, told, "%s: a ticket that was changed is believed no place of a block", what)
	}
	require.ErrorIs(t, load(9, func(x *ticket) { x.Secret[3]++ }), connector.ErrGone)

	require.NoError(t, load(9, nil), "it asks, and remembers")
	d.w.(*worker).rank.producers.mu.Lock()
	for _, x := range d.w.(*worker).rank.producers.all {
		x.near = false
	}
	d.w.(*worker).rank.producers.mu.Unlock()
	before := told
	require.NoError(t, load(9, nil), "from another machine")
	require.Equal(t, before, told)
	require.ErrorIs(t, load(9, func(x *ticket) { x.Secret[3]++ }), connector.ErrGone)
}

// TestIDs: the block ids of a ticket come out as they went in, by group.
func TestIDs(t *testing.T) {
	rng := rand.New(rand.NewPCG(32, 33))
	for range 200 {
		groups := 1 + rng.IntN(3)
		var blocks []connector.Block
		want := make([][]connector.BlockID, groups)
		for range rng.IntN(50) {
			b := connector.Block{ID: connector.BlockID(rng.Int32N(1 << 20)), Group: uint16(rng.IntN(groups))}
			blocks = append(blocks, b)
			want[b.Group] = append(want[b.Group], b.ID)
		}
		got, err := unpackIDs(packIDs(blocks, groups), groups)
		require.NoError(t, err)
		have := make([][]connector.BlockID, groups)
		for _, b := range got {
			have[b.Group] = append(have[b.Group], b.ID)
		}
		require.Equal(t, want, have)
	}
}

// FuzzIDs: no bytes make more blocks than bytes, or one that no cache has.
func FuzzIDs(f *testing.F) {
	f.Add([]byte{3, 2, 4, 6}, 1)
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0}, 2)
	f.Add([]byte{1, 1}, 1)
	f.Fuzz(func(t *testing.T, data []byte, groups int) {
		blocks, err := unpackIDs(data, groups&7)
		if err != nil {
			require.ErrorIs(t, err, connector.ErrGone)
			return
		}
		require.LessOrEqual(t, len(blocks), len(data))
		for _, b := range blocks {
			require.GreaterOrEqual(t, b.ID, connector.BlockID(0))
		}
	})
}

// TestNames: a ticket is believed where blocks are only if it is about them.
func TestNames(t *testing.T) {
	l, _ := testLayout()
	rng := rand.New(rand.NewPCG(34, 35))
	for n := 2; n < 9; n++ {
		x := &connector.Transfer{Tokens: tokens(n), Blocks: run(rng, 1, n)}
		k := keys(1, n)[n-2]
		good := ticket{Tokens: tokens(n), Last: k[:], Lasts: [][]byte{k[:]}, Life: "life", IDs: []byte{1}}
		require.True(t, good.names(x, &l), n)
		for what, change := range map[string]func(*ticket){
			"another key":      func(t *ticket) { t.Last = make([]byte, len(k)) },
			"no key":           func(t *ticket) { t.Last = nil },
			"of another group": func(t *ticket) { t.Lasts = nil },
			"shorter":          func(t *ticket) { t.Tokens -= 16 },
			"no life":          func(t *ticket) { t.Life = "" },
			"no ids":           func(t *ticket) { t.IDs = nil },
			"weak":             func(t *ticket) { t.Turn = true },
		} {
			bad := good
			change(&bad)
			require.False(t, bad.names(x, &l), "%s, %d", what, n)
		}
		rest := *x
		rest.Blocks = x.Blocks[1:]
		require.True(t, good.names(&rest, &l), "without the first block, %d", n)
	}
}
