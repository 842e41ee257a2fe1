package conformance

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/kvport/kvport/connector"
)

func keyCases() []Case {
	groups := storeCase("other-group", "KEY-08", "Two groups with equal keys are kept apart.", otherGroup)
	groups.Profiles, groups.Groups, groups.Run = []Profile{Groups, Power}, true, rigged(0, true, otherGroup)
	return []Case{
		storeCase("partial-block", "KEY-04", "A block without a key is not stored, and a load of one fails.", partialBlock),
		storeCase("other-shape", "KEY-05", "An engine with another Shape sees nothing.", otherShape),
		storeCase("other-key", "KEY-06", "No key that differs in one bit is found, and none of another model.", otherKey),
		storeCase("near-keys", "KEY-06", "Blocks whose store keys share their first or last bytes are kept apart.", nearKeys),
		storeCase("other-rank", "KEY-07", "Each of two ranks gets back its own shard.", otherRank),
		groups,
	}
}

// seesNothing fails the case if the engine is offered or loads any of the blocks.
func (e *engine) seesNothing(who string, keys ...connector.BlockKey) {
	e.Helper()
	e.equal(0, e.match(keys...), "blocks offered to %s", who)
	to := blocks(8, keys...)
	if e.load(to...) == nil {
		e.Errorf("a load by %s succeeds", who)
	}
}

func partialBlock(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(2)
	bs := append(blocks(0, keys...), connector.Block{ID: 2})
	e.fill(bs...)
	t := transfer(bs)
	t.Tokens -= blockTokens - 1
	if err := e.saveOnly(r.Context(), t); err != nil {
		e.failed(err, 2) // to say that it was not stored is fine
	}
	r.equal(2, e.match(keys...), "blocks offered")
	to := append(blocks(4, keys...), connector.Block{ID: 6})
	e.wipe(0, to...)
	e.failed(e.load(to...), 6)
	e.holds(to[:2]...)
	r.equal(0, e.match(connector.BlockKey{}), "blocks offered under the zero key")
}

func otherShape(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(3)
	e.save(blocks(0, keys...)...)
	other := e.beside(setup{shape: "other"})
	other.openAll()
	other.seesNothing("an engine of another shape", keys...)
}

func otherKey(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(1)
	e.save(blocks(0, keys...)...)
	for i := range len(keys[0]) {
		near := keys[0]
		near[i] ^= 1 << e.rand.IntN(8)
		e.seesNothing("a request whose key differs in one bit", near)
	}
	tokens := []int32{1, 2, 3, 4, 5, 6, 7, 8}
	space := connector.KeySpace{Model: e.env.Model}
	ours := space.Keys(tokens, blockTokens)
	e.save(blocks(0, ours...)...)
	r.equal(2, e.match(ours...), "blocks offered to the engine that saved them")
	other := e.beside(setup{model: "other"})
	other.openAll()
	space.Model = other.env.Model
	other.seesNothing("an engine with another model", space.Keys(tokens, blockTokens)...)
	if r.info.Scope != connector.ScopeEngine {
		r.equal(2, e.match(ours...), "blocks offered to the engine that saved them, later")
	}
}

// nearShape is the Shape under which nearPairs are near.
func nearShape() connector.Fingerprint { return sha256.Sum256([]byte("conformance near keys")) }

// nearPairs are block keys, each a number and zeros, of which the store keys share bytes under nearShape, for rank 0
// of 1 and group 0. They come from Pollard's rho: to share n bytes costs some 2^(4n) hashes,
// so 8 bytes and more are for package storetest.
func nearPairs() []nearPair {
	return []nearPair{
		{"first 7", 0x6ab9b1a15e27b3, 0xb41d93d4bdff59},
		{"last 7", 0xc4431f38be7577, 0x4921c15ccd81e7},
	}
}

// nearPair is two block keys whose store keys share some bytes.
type nearPair struct {
	share string
	a, b  uint64
}

// nearKey is a block key.
func nearKey(n uint64) (k connector.BlockKey) {
	binary.LittleEndian.PutUint64(k[:], n)
	return k
}

// nearKeys saves blocks whose names a connector that shortens its keys takes for the same. They are the same in every
// run: a backend may have them already, so they are replaced.
func nearKeys(r *rig) {
	e := r.closed(setup{})
	e.env.Shape = nearShape()
	e.openAll()
	for _, pair := range nearPairs() {
		a, b := nearKey(pair.a), nearKey(pair.b)
		clean := e.match(a) == 0 && e.match(b) == 0
		for n, k := range []connector.BlockKey{a, b} {
			if n == 1 && clean {
				e.seesNothing(fmt.Sprintf("a request whose store key shares the %s bytes with one that was saved", pair.share), k)
			}
			t := transfer(blocks(n, k))
			t.Replace = true
			e.fill(t.Blocks...)
			r.must(e.saveOnly(r.Context(), t), "save")
		}
		to := append(blocks(4, a), blocks(5, b)...)
		e.wipe(0, to...)
		r.must(e.load(to...), "load of two blocks whose store keys share the %s bytes", pair.share)
		e.holds(to...)
	}
}

func otherRank(r *rig) {
	e := r.engine(setup{world: 2})
	keys := e.keys(3)
	e.save(blocks(0, keys...)...)
	to := blocks(5, keys...)
	e.wipe(0, to...)
	r.equal(3, e.match(keys...), "blocks offered")
	r.must(e.load(to...), "load")
	e.holds(to...)
}

func otherGroup(r *rig) {
	layout := twoGroups()
	e := r.engine(setup{layout: &layout})
	var from, to []connector.Block
	keys := e.keys(3)
	for g := range uint16(2) {
		for i, k := range keys {
			from = append(from, connector.Block{Key: k, ID: connector.BlockID(i), Group: g})
			to = append(to, connector.Block{Key: k, ID: connector.BlockID(10 + i), Group: g})
		}
	}
	e.save(from...)
	e.wipe(0, to...)
	r.equal(3, e.match(keys...), "blocks offered")
	r.must(e.load(to...), "load")
	e.holds(to...)
}
