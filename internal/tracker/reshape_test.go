package tracker

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// reshapeCase is a load of two groups' blocks from an engine with blocks of another size.
type reshapeCase struct {
	ours, theirs int // tokens of blocks
	from, end    int // tokens of the load
	same         int // that the ticket promises: it may be less
	*Reshape
	blocks []connector.Block
	faults map[Read]error
}

func drawReshape(rng *rand.Rand) *reshapeCase {
	sizes := [][2]int{{4, 4}, {4, 16}, {16, 4}, {2, 32}, {1, 16}}[rng.IntN(5)]
	c := &reshapeCase{ours: sizes[0], theirs: sizes[1], end: 1 + rng.IntN(70), faults: map[Read]error{}}
	blocks := (c.end + c.ours - 1) / c.ours
	c.from, c.same = rng.IntN(blocks)*c.ours, max(1, c.end+rng.IntN(5)-2)
	for g := range 1 + rng.IntN(2) {
		for i := range blocks - c.from/c.ours {
			c.blocks = append(c.blocks, connector.Block{ID: connector.BlockID(100*g + i), Group: uint16(g)})
		}
	}
	m := Move{
		Transfer: &connector.Transfer{From: c.from, Tokens: c.end - c.from, Blocks: c.blocks},
		Source:   &Source{BlockTokens: c.theirs, Tokens: c.same, Keys: make([]connector.BlockKey, (c.same+c.theirs-1)/c.theirs)},
	}
	c.Reshape = m.Reshape([]connector.Group{{BlockTokens: c.ours, Policy: connector.PolicyAll}, {BlockTokens: c.ours, Policy: connector.PolicyAll}})
	return c
}

// want says what becomes of a block, token by token.
func (c *reshapeCase) want(b connector.Block) (gone, corrupt bool) {
	first := c.from + int(b.ID%100)*c.ours
	last := min(first+c.ours, c.end)
	for token := first; token < last; token++ {
		if min(last, (token/c.theirs+1)*c.theirs) > c.same { // it needs more of this one than was promised
			gone = true
			continue
		}
		err := c.faults[Read{b.Group, token / c.theirs}]
		gone, corrupt = gone || err != nil, corrupt || errors.Is(err, connector.ErrCorrupt)
	}
	return gone && !corrupt, corrupt
}

// TestReshapeOutcome: for any sizes and tokens, each of our blocks needs exactly the source blocks that have one of its
// tokens, and fails with each of them; damage goes before absence.
func TestReshapeOutcome(t *testing.T) {
	rng := rand.New(rand.NewPCG(146, 2))
	damage := fmt.Errorf("block 3: %w", connector.ErrCorrupt)
	for range 2000 {
		c := drawReshape(rng)
		seen := map[Read]bool{}
		for _, batch := range c.Batches(1 + rng.IntN(5)) {
			for i, b := range batch {
				require.Equal(t, Read{batch[0].Group, batch[0].Place + i}, b)
				require.False(t, seen[b], "once")
				seen[b] = true
				require.Equal(t, min((b.Place+1)*c.theirs, c.same), c.End(b.Place))
				c.faults[b] = []error{nil, nil, nil, connector.ErrGone, damage}[rng.IntN(5)]
			}
		}
		out := c.Outcome(func(b Read) error {
			require.True(t, seen[b], "%v is not read", b)
			return c.faults[b]
		})
		arrived := Arrived(c.blocks, out.Err)
		for _, b := range c.blocks {
			gone, corrupt := c.want(b)
			require.Equal(t, gone, !slices.Contains(arrived, b), "block %d", b.ID)
			require.Equal(t, corrupt, slices.Contains(out.Corrupt, b.ID), "block %d", b.ID)
		}
		require.Equal(t, len(out.Corrupt) > 0, out.Damage != nil)
	}
}

// TestReshapeUnread: a source block whose digest nobody here can check fails ours for that reason, and not as one that is
// gone: it is counted, and replaced when it is saved.
func TestReshapeUnread(t *testing.T) {
	b := reshapedBench(t, 1, nil)
	b.admit(0)
	m := one[Move](b)
	load := m.Reshape([]connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}})
	faults := map[Read]error{{Place: 1}: fmt.Errorf("key 7: %w", ErrForeignKey), {Place: 2}: fmt.Errorf("edition 1: %w", connector.ErrOutdated)}
	out := load.Outcome(func(r Read) error { return faults[r] })
	require.Equal(t, Outcome{Foreign: []connector.BlockID{0}, Outdated: []connector.BlockID{1}}, out)
	b.done(m, out)
	e := one[Tell](b).Event
	require.Equal(t, []connector.BlockID{0, 1}, e.Failed)
	require.True(t, e.Replace)
	require.Equal(t, 1, b.Counters().Foreign)
	require.Equal(t, 1, b.Counters().Outdated)
	require.Zero(t, b.Counters().Damaged)
}

// reshapedBench is a bench with a ticket of another shape for each of n requests.
func reshapedBench(t *testing.T, n int, change func(*Config)) *bench {
	b := newBench(t, func(c *Config) {
		c.Can, c.Ranks, c.Windows = connector.CanHold, 2, 2
		c.Addresses = func(_ connector.RequestID, blockTokens, tokens int) []connector.BlockKey {
			keys := make([]connector.BlockKey, (tokens+blockTokens-1)/blockTokens)
			keys[len(keys)-1] = connector.BlockKey{7}
			return keys
		}
		if change != nil {
			change(c)
		}
	})
	for i := range n {
		q := connector.Query{Request: connector.RequestID(fmt.Sprint(i)), Tokens: 33}
		require.True(t, b.Accept(&q, &Ticket{
			Tokens: 32, Lease: time.Minute, Plugin: []byte("t"), Cut: Cut{BlockTokens: 8, Last: connector.BlockKey{7}}, Source: &Source{World: 3},
		}))
		_, actions := b.Query(b.now, q)
		b.got(actions)
	}
	return b
}

func (b *bench) admit(i int) {
	tr := connector.Transfer{Request: connector.RequestID(fmt.Sprint(i)), Tokens: 32, Blocks: []connector.Block{{Key: connector.BlockKey{1}, ID: connector.BlockID(2 * i)}, {Key: connector.BlockKey{2}, ID: connector.BlockID(2*i + 1)}}}
	b.got(b.Step(b.now, &connector.Step{ID: uint64(i + 1), Admitted: []connector.Transfer{tr}}, nil))
}

// TestReshapeWindows: a load from an engine of another shape is one call for all ranks, with a window to itself. Others
// wait for one, and a dead plugin's is not given out before the plugin is reaped.
func TestReshapeWindows(t *testing.T) {
	b := reshapedBench(t, 4, nil)
	var moves []Move
	for i := range 4 {
		b.admit(i)
		moves = append(moves, all[Move](b)...)
	}
	require.Len(t, moves, 2, "as many as there are windows")
	require.NotEqual(t, moves[0].Window, moves[1].Window)
	require.Equal(t, &Source{World: 3, BlockTokens: 8, Tokens: 32, Keys: moves[0].Source.Keys}, moves[0].Source)
	require.Len(t, moves[0].Source.Keys, 4)
	require.NotNil(t, moves[0].Check)
	b.done(moves[0], Outcome{Corrupt: []connector.BlockID{1}, Damage: fmt.Errorf("that one: %w", connector.ErrCorrupt)})
	e := one[Tell](b).Event
	require.Equal(t, []connector.BlockID{1}, e.Failed)
	require.False(t, e.Unverified)
	require.Equal(t, 1, e.Damaged)
	require.ErrorContains(t, e.Damage, "that one")
	next := one[Move](b)
	require.Equal(t, moves[0].Window, next.Window)
	b.done(next, Outcome{Lost: true})
	b.got(b.Down(b.now, 1))
	require.Empty(t, all[Move](b))
	b.got(b.Reaped(b.now, 1))
	b.got(b.Up(b.now, 2))
	require.Len(t, all[Move](b), 2)
}

// TestHeldLoadsAreNotDivided: at trust level staged a load of what a producer holds is one call, or fails: the hold is
// over when a call has fetched it.
func TestHeldLoadsAreNotDivided(t *testing.T) {
	for slots, fails := range map[int]bool{8: false, 1: true} {
		b := newBench(t, func(c *Config) { c.Can, c.Slots = connector.CanHold, slots })
		q := connector.Query{Request: "0", Tokens: 33}
		require.True(t, b.Accept(&q, &Ticket{Tokens: 32, Lease: time.Minute, Plugin: []byte("t")}))
		_, actions := b.Query(b.now, q)
		b.got(actions)
		b.admit(0)
		if fails {
			require.ErrorIs(t, one[Tell](b).Event.Err, errLanding)
			continue
		}
		require.Len(t, one[Move](b).Slots, 2)
	}
}
