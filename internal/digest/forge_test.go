package digest

import (
	"bytes"
	"encoding/hex"
	"errors"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/keyring"
)

// tries is how often each attack is made.
const tries = 1000

// attack is what somebody does who can write the store, and knows everything except the keys.
type attack struct {
	name string
	do   func(a *attacker)
	want error // ErrCorrupt, unless it is another one
}

// attacker has a cache in which block 1 of group 0 is to become something that the victim believes.
type attacker struct {
	*testing.T
	rng   *rand.Rand
	kv    *connector.KV
	mine  *Hasher // with a key of the attacker's own
	other connector.Block
}

var target = block(1, 0)

// bytes puts other content into the target.
func (a *attacker) bytes() {
	for _, s := range a.kv.Segments(0)[:2] {
		view := a.kv.View(s, target.ID)
		view[a.rng.IntN(len(view))] ^= 1 + byte(a.rng.IntN(255))
	}
}

// head is the header of the target.
func (a *attacker) head() []byte { return a.kv.View(3, target.ID)[:headerSize] }

// from copies all of another block, its digests included, into the target.
func (a *attacker) from(other connector.Block) {
	for _, s := range a.kv.Segments(0) {
		copy(a.kv.View(s, target.ID), a.kv.View(s, other.ID))
	}
}

func attacks() []attack {
	return []attack{
		{name: "forged by a key of the attacker's own, under the name of ours", do: func(a *attacker) {
			a.bytes()
			ours := bytes.Clone(a.head())
			require.NoError(a, a.mine.Make(a.kv, target))
			copy(a.head(), ours)
		}},
		{name: "forged by guessing", do: func(a *attacker) {
			a.bytes()
			digests := a.kv.View(3, target.ID)[headerSize:]
			for i := range digests {
				digests[i] = byte(a.rng.Uint32())
			}
		}},
		{name: "other bytes under the old digests", do: (*attacker).bytes},
		{name: "made again under XXH3, under the name of ours", do: func(a *attacker) {
			a.bytes()
			ours := bytes.Clone(a.head())
			require.NoError(a, hasher(XXH3()).Make(a.kv, target))
			copy(a.head(), ours)
		}},
		{name: "made again under XXH3 and the header of edition 2", do: func(a *attacker) {
			a.bytes()
			m := hasher(XXH3()).unkeyed()
			copy(m.header[:], a.head()) // covered by the sums as well
			require.NoError(a, m.Make(a.kv, target))
		}},
		{name: "another key's block", do: func(a *attacker) { a.from(a.other) }},
		{name: "layers exchanged", do: func(a *attacker) {
			first, second := a.kv.View(0, target.ID), a.kv.View(1, target.ID)
			for i := range first {
				first[i], second[i] = second[i], first[i]
			}
			digests := a.kv.View(3, target.ID)[headerSize:]
			for i := range Size {
				digests[i], digests[Size+i] = digests[Size+i], digests[i]
			}
		}},
		{name: "a layer and its digest of another block", do: func(a *attacker) {
			copy(a.kv.View(1, target.ID), a.kv.View(1, a.other.ID))
			copy(a.kv.View(3, target.ID)[headerSize+Size:], a.kv.View(3, a.other.ID)[headerSize+Size:])
		}},
		{name: "downgraded to edition 1", want: connector.ErrOutdated, do: func(a *attacker) {
			a.bytes()
			require.NoError(a, hasher(XXH3()).Make(a.kv, target))
		}},
		{name: "an edition to come", want: connector.ErrOutdated, do: func(a *attacker) { a.head()[0] = 3 + byte(a.rng.IntN(253)) }},
		{name: "made by a key that the ring lacks", want: connector.ErrGone, do: func(a *attacker) {
			a.bytes()
			require.NoError(a, a.mine.Make(a.kv, target))
		}},
		{name: "a header of zeros", do: func(a *attacker) { clear(a.head()) }},
		{name: "edition 0", do: func(a *attacker) { a.head()[0] = 0 }},
		{name: "reserved bytes that are not zero", do: func(a *attacker) { a.head()[1+a.rng.IntN(7)] = 1 + byte(a.rng.IntN(255)) }},
		{name: "edition 1 with a key", do: func(a *attacker) { a.head()[0] = editionXXH3 }},
		{name: "made by another key of the ring, under the name of the first", do: func(a *attacker) {
			ours := bytes.Clone(a.head())
			require.NoError(a, hasher(by("b")).Make(a.kv, target))
			copy(a.head(), ours)
		}},
	}
}

// Whoever can write the store and lacks the keys gets nothing believed.
func TestAttacks(t *testing.T) {
	victim := hasher(by("ab"))
	for _, a := range attacks() {
		rng := rand.New(rand.NewPCG(1, 1))
		secret := make([]byte, keyring.MinKey)
		for try := range tries {
			for i := range secret {
				secret[i] = byte(rng.Uint32())
			}
			kv := cache(t, uint64(try%8))
			x := &attacker{T: t, rng: rng, kv: kv, mine: hasher(Keyed(keyring.Fixed(keyring.Of(secret)), nil)), other: block(2, 0)}
			require.NoError(t, victim.Make(kv, target))
			require.NoError(t, victim.Make(kv, x.other))
			a.do(x)
			err := victim.Check(kv, target)
			if a.want == nil {
				a.want = connector.ErrCorrupt
			}
			require.ErrorIs(t, err, a.want, a.name)
			require.Equal(t, errors.Is(a.want, connector.ErrCorrupt), errors.Is(err, connector.ErrCorrupt), a.name)
		}
	}
}

// Whoever has another edition does not believe ours, in either direction.
func TestEditionsAreApart(t *testing.T) {
	all := map[int]*Hasher{editionXXH3: hasher(XXH3()), editionKeyed: hasher(by("a"))}
	for made, maker := range all {
		for read, reader := range all {
			kv := cache(t, 3)
			require.NoError(t, maker.Make(kv, target))
			err := reader.Check(kv, target)
			other, is := errors.AsType[*EditionError](err)
			require.Equal(t, made != read, is)
			if is {
				require.Equal(t, made, other.Edition)
				require.ErrorContains(t, err, "block 1 of group 0")
			} else {
				require.NoError(t, err)
			}
		}
	}
}

// The first key makes, each of them checks, and a key that is not there is named.
func TestRing(t *testing.T) {
	kv := cache(t, 4)
	require.NoError(t, hasher(by("ba")).Make(kv, target))
	require.Equal(t, ringOf("b").First().ID, hex.EncodeToString(kv.View(3, target.ID)[8:headerSize]))
	for _, letters := range []string{"b", "ab", "acdb"} {
		require.NoError(t, hasher(by(letters)).Check(kv, target), letters)
	}
	err := hasher(by("ac")).Check(kv, target)
	foreign, is := errors.AsType[*ForeignKeyError](err)
	require.True(t, is, err)
	require.Equal(t, ringOf("b").First().ID, foreign.ID)
	require.ErrorContains(t, err, foreign.ID)
	require.NotErrorIs(t, err, connector.ErrCorrupt)

	tenant := Keyed(keyring.Fixed(ringOf("b")), []byte("t"))
	require.ErrorIs(t, hasher(tenant).Check(kv, target), connector.ErrCorrupt)
}

// A ring that changes reaches digests at once, and blocks that were stored before are believed as long as their key is there. A
// Maker goes on with its key.
func TestRotation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "ring")
		require.NoError(t, keyring.Create(path, keyring.New(time.Now())))
		file, err := keyring.Open(path)
		require.NoError(t, err)
		go file.Watch(t.Context(), slog.New(slog.DiscardHandler), nil)
		h := hasher(Keyed(file, nil))
		kv, old := cache(t, 5), block(2, 0)
		require.NoError(t, h.Make(kv, old))
		maker, err := h.Maker()
		require.NoError(t, err)
		require.NoError(t, maker.MakeSegments(kv, block(3, 0), kv.Segments(0)[:1]))
		was := file.Ring().First().ID
		change := func(edit func(*keyring.Ring) (*keyring.Ring, error)) {
			_, err := keyring.Change(path, edit)
			require.NoError(t, err)
			<-time.After(2 * keyring.Every)
		}
		change(func(r *keyring.Ring) (*keyring.Ring, error) { return r.Rotate(time.Now()) })
		change(func(r *keyring.Ring) (*keyring.Ring, error) { return r.Promote(r.Keys[1].ID) })
		require.NoError(t, h.Make(kv, target))
		require.Equal(t, file.Ring().First().ID, hex.EncodeToString(kv.View(3, target.ID)[8:headerSize]))
		require.NoError(t, h.Check(kv, old))
		require.NoError(t, maker.MakeSegments(kv, block(3, 0), kv.Segments(0)[1:]))
		require.NoError(t, h.Check(kv, block(3, 0)), "all layers of a block are of one key")

		change(func(r *keyring.Ring) (*keyring.Ring, error) { return r.Drop(was) })
		require.NoError(t, h.Check(kv, target))
		foreign, is := errors.AsType[*ForeignKeyError](h.Check(kv, old))
		require.True(t, is)
		require.Equal(t, was, foreign.ID)
	})
}

// Keys that cannot be used are an error and not a panic.
func TestBadKeys(t *testing.T) {
	for _, k := range []keyring.Key{{ID: keyring.ID(nil), Secret: make([]byte, 15)}, {ID: "zz", Secret: make([]byte, 16)}, {ID: "00", Secret: make([]byte, 16)}} {
		h := hasher(Keyed(keyring.Fixed(&keyring.Ring{Keys: []keyring.Key{k}}), nil))
		kv := cache(t, 6)
		require.ErrorContains(t, h.Make(kv, target), "keys of digests")
		require.NoError(t, hasher(by("a")).Make(kv, target))
		require.ErrorContains(t, h.Check(kv, target), "keys of digests")
	}
}
