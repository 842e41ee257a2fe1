package place

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// Rule PLACE-07: what each state becomes in the next life.
func TestRecover(t *testing.T) {
	p := newPair(t, 10)
	p.save(1, false, parts(1, 2)...) // slots 8 and 9
	_ = p.reserve(parts(3)...)       // nobody answered
	half := p.grant(false, parts(4, 5)...)
	fill(half.Bytes(0), 4)
	_, err := half.Publish(0)
	require.NoError(t, err)
	whole := p.grant(false, parts(6)...)
	_, err = p.plugin.Fill(Set{Parts: parts(7)})
	require.NoError(t, err)
	p.save(9, false, parts(8)...)
	refs, err := p.host.Find(keysOf(parts(8)), now)
	require.NoError(t, err)
	pin, err := p.host.Pin(refs[0])
	require.NoError(t, err)
	p.plugin.Retire(p.plugin.Find(parts(8)))
	require.Equal(t, Counts{Free: 3, Lent: 3, Filling: 1, Resident: 2, Retired: 1}, p.whole())

	p.host.Died()
	_, err = p.host.Reopen()
	require.ErrorIs(t, err, ErrWriting)
	p.want(1, 1) // what is resident is read in the meantime
	fill(whole.Bytes(0), 6)
	done, err := whole.Publish(0)
	require.NoError(t, err)
	require.True(t, done, "it was finished")
	_, err = p.host.Reopen()
	require.ErrorIs(t, err, ErrWriting)
	_, told := half.Drop()
	require.False(t, told, "nobody has lent anything any more")
	p.restart()

	c := p.whole()
	require.Equal(t, Counts{Free: 6, Resident: 3, Retired: 1}, c)
	p.want(1, 1)
	p.want(2, 1)
	p.want(6, 6)
	for _, k := range []byte{3, 4, 5, 7, 8} {
		p.gone(k)
	}
	require.ErrorIs(t, pin.Release(now), ErrGone)
	require.Zero(t, p.plugin.Sweep())
	require.Equal(t, Counts{Free: 7, Resident: 3}, p.whole())
}

// Rule PLACE-07: a replacement that was never whole takes nothing with it when its time is over; a whole one does.
func TestRecoverFromHalfAReplacement(t *testing.T) {
	for written, kept := range []int{2, 2, 0} {
		p := newPair(t, 4)
		p.save(1, false, parts(1, 2)...)
		s, err := p.host.Reserve(parts(1, 2), 0, true)
		require.NoError(t, err)
		a := p.plugin.Lend(s.Request(), now-1)
		_, err = s.Accept(&a, now-2)
		require.NoError(t, err)
		for part := range written {
			fill(s.Bytes(part), 2)
			_, err = s.Publish(part)
			require.NoError(t, err)
		}
		s.Drop()
		p.restart()
		require.Equal(t, Counts{Free: 4 - kept, Resident: kept}, p.whole(), "%d parts of it", written)
		if kept > 0 {
			p.want(1, 1)
			p.want(2, 1)
		}
	}
}

// Rule PLACE-07: a whole block hides what it replaced, also if it is not kept itself; of blocks with the same serial one whose time is over hides
// nothing.
func TestRecoverFromReplacements(t *testing.T) {
	block := func(serial uint64, expires int64, lead Slot, keys ...byte) (list []Header) {
		for i, k := range keys {
			list = append(list, Header{Serial: serial, Expires: expires, Key: key(k), Part: uint16(i), Parts: uint16(len(keys)), Lead: lead, Epoch: 1})
		}
		return list
	}
	for name, c := range map[string]struct {
		blocks [][]Header
		kept   byte
	}{
		"its time is over":    {[][]Header{block(5, 0, 0, 1, 2), block(10, now-1, 2, 2, 3), block(12, 0, 4, 3)}, 3},
		"a part was replaced": {[][]Header{block(5, 0, 0, 1, 2), block(10, 0, 2, 2, 3), block(12, 0, 4, 3)}, 3},
		"no order":            {[][]Header{block(0, now-1, 0, 4), block(0, 0, 1, 4)}, 4},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, 5)
			for s, h := range slices.Concat(c.blocks...) {
				p.forge(Slot(s), h)
			}
			var err error
			p.plugin, err = Open(p.a, p.w, p.g, Opening{Epoch: 1, Serial: 20}, now)
			require.NoError(t, err)
			require.Equal(t, Counts{Free: 4, Resident: 1}, p.whole())
			require.NotNil(t, p.plugin.Find([]Part{{Key: key(c.kept)}}))
		})
	}
}

// A former life wrote whatever it liked.
func TestRecoverFromDamage(t *testing.T) {
	for at := range int64(8 * (1 + headerWords)) {
		p := newPair(t, 3)
		p.save(1, false, parts(1, 2)...)
		p.save(3, false, parts(3)...)
		p.host.Died()
		o, err := p.host.Reopen()
		require.NoError(t, err)
		p.arena[p.g.wordAt(2)+at] ^= 0x40
		p.plugin, err = Open(p.a, p.w, p.g, o, now)
		require.NoError(t, err)
		require.Equal(t, Counts{Free: 2, Resident: 1}, p.whole(), "byte %d", at)
		p.want(3, 3)
		p.gone(1)
	}
}

// A header whose check is right may still claim more than there is.
func TestRecoverFromForgery(t *testing.T) {
	p := newPair(t, 4)
	for name, list := range map[string][]Header{
		"65,535 parts":    {{Parts: 65535, Lead: 0}},
		"no head":         {{Parts: 2, Part: 1, Lead: 1}, {Parts: 2, Part: 1, Lead: 1}},
		"a head of none":  {{Parts: 1, Part: 0, Lead: 1}, {Parts: 1, Part: 0, Lead: 2}},
		"one part twice":  {{Parts: 3, Key: key(1)}, {Parts: 3, Part: 1, Key: key(2)}, {Parts: 3, Part: 1, Key: key(3)}},
		"one key twice":   {{Parts: 2, Key: key(1)}, {Parts: 2, Part: 1, Key: key(1)}},
		"not drawn yet":   {{Parts: 1, Serial: 10}},
		"other serials":   {{Parts: 2, Key: key(1), Serial: 1}, {Parts: 2, Part: 1, Key: key(2), Serial: 2}},
		"other counts":    {{Parts: 2, Key: key(1)}, {Parts: 3, Part: 1, Key: key(2)}},
		"other times":     {{Parts: 2, Key: key(1), Expires: now + 1}, {Parts: 2, Part: 1, Key: key(2)}},
		"an older epoch":  {{Parts: 1, Epoch: 2}},
		"over":            {{Parts: 1, Expires: now}},
		"longer than all": {{Parts: 1, Length: 101}},
	} {
		for s, h := range list {
			h.Epoch++
			p.forge(Slot(s), h)
		}
		var err error
		p.plugin, err = Open(p.a, p.w, p.g, Opening{Epoch: 1, Serial: 9}, now)
		require.NoError(t, err)
		require.Equal(t, Counts{Free: 4}, p.whole(), name)
	}
}

// FuzzOpen: an arena full of anything opens, no slot is lost, and all of them can be used.
func FuzzOpen(f *testing.F) {
	p := newPair(&testing.T{}, 3)
	p.save(1, false, parts(1, 2)...)
	f.Add(p.arena[page:][:3*headerSize], uint64(0))
	f.Add([]byte{3, 1}, uint64(1))
	f.Fuzz(func(t *testing.T, heads []byte, pins uint64) {
		p := newPair(t, 3)
		copy(p.arena[page:p.g.bytesAt(0)], heads)
		for s := range Slot(3) { // the fuzzer does not guess a check
			if len(heads) > int(s) && heads[s]&1 != 0 {
				h := p.g.loadHeader(p.a, s)
				h[headerWords-1] = sum(s, Word(p.a.Load(p.g.wordAt(s))).Generation(), &h)
				p.g.storeHeader(p.a, s, &h)
			}
			binary.LittleEndian.PutUint64(p.words[p.g.pinAt(s):], pins>>s&1)
		}
		p.restart()
		for _, s := range p.plugin.Resident() {
			p.plugin.Retire(s)
		}
		for s := range Slot(3) {
			p.w.Store(p.g.pinAt(s), 0)
		}
		require.Zero(t, p.plugin.Sweep())
		require.Equal(t, Counts{Free: 3}, p.whole())
		p.save(1, false, parts(1, 2, 3)...)
		p.want(3, 1)
	})
}
