package host

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/tracker"
)

// largeRank is a rank with landing memory, and blocks that are so large that a load of all of them is 3 MiB.
func largeRank(t *testing.T, keys digest.Keys) (*rank, []connector.Block, []connector.BlockID) {
	t.Helper()
	const blocks, part = 24, 64 << 10
	layout, size := WithDigests(connector.Layout{
		Name: "test", Blocks: blocks, Groups: []connector.Group{{BlockTokens: blockTokens, Policy: connector.PolicyAll}},
		Segments: []connector.Segment{
			{Layer: 0, Offset: 0, BlockStride: part, Bytes: part},
			{Layer: 1, Offset: blocks * part, BlockStride: part, Bytes: part},
		},
	})
	region := make([]byte, size)
	random := rand.New(rand.NewPCG(1, 2))
	for i := range region {
		region[i] = byte(random.Uint32())
	}
	kv, err := connector.NewKV(layout, [][]byte{region})
	require.NoError(t, err)
	lands, need, err := landingLayout(layout, 2*size)
	require.NoError(t, err)
	landing, err := newLanding(lands, need)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, landing.region.Close()) })
	r := &rank{kv: kv, landing: landing, hands: make(chan struct{}, 2)}
	r.hasher = digest.New(keys, connector.NewFingerprint("test"), connector.NewFingerprint("shape"), connector.Shard{World: 1})
	var list []connector.Block
	var slots []connector.BlockID
	for i := range blocks {
		list = append(list, connector.Block{Key: connector.BlockKey{1, byte(i)}, ID: connector.BlockID(i)})
		slots = append(slots, connector.BlockID((i+5)%blocks))
	}
	list[blocks-1].Key = connector.BlockKey{} // partial
	return r, list, slots
}

// both are the bytes of a block without its digests, in the cache and in a slot.
func (r *rank) both(b, slot connector.BlockID) (here, there []byte) {
	for s := range 2 {
		here, there = append(here, r.kv.View(s, b)...), append(there, r.landing.kv.View(s, slot)...)
	}
	return here, there
}

// TestLandingCopies: large saves and loads through landing memory move every byte, and what the plugin has changed there is found. The
// partial block has no digest when it is saved.
func TestLandingCopies(t *testing.T) {
	for name, keys := range map[string]digest.Keys{"keyed": digest.Keyed(keyring.Fixed(keyring.Of(make([]byte, 32))), nil), "xxh3": digest.XXH3()} {
		r, blocks, slots := largeRank(t, keys)
		require.NoError(t, r.makeDigests(blocks, slots))
		saved := map[connector.BlockID][]byte{}
		for i, b := range blocks {
			here, there := r.both(b.ID, slots[i])
			require.True(t, bytes.Equal(here, there), "%s: block %d", name, b.ID)
			saved[b.ID] = here
		}
		full := blocks[:len(blocks)-1]
		require.Empty(t, r.checkDigests(full).corrupt, name)

		random := rand.New(rand.NewPCG(3, 4))
		clear(r.kv.Region(0))
		move := &tracker.Move{Kind: tracker.Load, Transfer: &connector.Transfer{Blocks: full}, Slots: slots[:len(full)]}
		for _, damaged := range []int{3, 17} {
			r.landing.kv.View(random.IntN(2), slots[damaged])[random.IntN(64<<10)] ^= 4
		}
		found := r.verifyIn(move.In(nil), full)
		require.Equal(t, []connector.BlockID{3, 17}, found.corrupt, name)
		require.Empty(t, append(found.foreign, found.outdated...), name)
		for _, b := range full {
			if b.ID == 3 || b.ID == 17 {
				continue
			}
			here, _ := r.both(b.ID, 0)
			require.True(t, bytes.Equal(saved[b.ID], here), "%s: block %d", name, b.ID)
		}
		require.ElementsMatch(t, []connector.BlockID{3, 17}, r.checkDigests(full).corrupt, "%s: the cache has what was verified", name)

		some := &connector.BlockError{Blocks: []connector.BlockID{0, 9}, Err: connector.ErrGone}
		clear(r.kv.Region(0))
		require.Equal(t, []connector.BlockID{3, 17}, r.verifyIn(move.In(some), tracker.Arrived(full, some)).corrupt, "%s: two blocks have not arrived", name)
		for _, id := range []connector.BlockID{0, 9} {
			here, _ := r.both(id, 0)
			require.Zero(t, bytes.Trim(here, "\x00"), "%s: block %d", name, id)
		}
	}
}
