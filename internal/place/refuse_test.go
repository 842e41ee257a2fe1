package place

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// Rule PLACE-09: what the host refuses in an answer, and that it costs the plugin its answer and nobody a byte.
func TestRefusedAnswers(t *testing.T) {
	for _, c := range []struct {
		name   string
		answer func(p *pair, a Answer) Answer
		want   RefusalError
	}{
		{"beyond the last", func(_ *pair, a Answer) Answer { a.Slots[1] = 8; return a }, RefusalError{8, OutOfRange}},
		{"far beyond", func(_ *pair, a Answer) Answer { a.Slots[0] = 1<<32 - 1; return a }, RefusalError{1<<32 - 1, OutOfRange}},
		{"too few", func(_ *pair, a Answer) Answer { a.Slots = a.Slots[:1]; return a }, RefusalError{0, Count}},
		{"none", func(_ *pair, a Answer) Answer { a.Slots = nil; return a }, RefusalError{0, Count}},
		{"one slot for both parts", func(_ *pair, a Answer) Answer { a.Slots[1] = a.Slots[0]; return a }, RefusalError{4, LentTwice}},
		{"another save's slot", func(_ *pair, a Answer) Answer { a.Slots[1] = 7; return a }, RefusalError{7, LentTwice}},
		{"a free slot", func(_ *pair, a Answer) Answer { a.Slots[1] = 0; return a }, RefusalError{0, NotLent}},
		{"a resident slot", func(_ *pair, a Answer) Answer { a.Slots[1] = 6; return a }, RefusalError{6, NotLent}},
		{"a pinned slot", func(p *pair, a Answer) Answer { p.w.Add(p.g.pinAt(a.Slots[1]), 1); return a }, RefusalError{5, Pinned}},
		{"a state that there is not", func(p *pair, a Answer) Answer { p.a.Store(p.g.wordAt(5), 77); return a }, RefusalError{5, NotLent}},
		{"no verdict", func(_ *pair, a Answer) Answer { a.Verdict = 0; return a }, RefusalError{0, NoVerdict}},
		{"another verdict", func(_ *pair, a Answer) Answer { a.Verdict = 9; return a }, RefusalError{0, NoVerdict}},
		{"known beyond the last", func(_ *pair, a Answer) Answer { a.Verdict, a.Slots = Known, []Slot{6, 8}; return a }, RefusalError{8, OutOfRange}},
		{"known in one slot twice", func(_ *pair, a Answer) Answer { a.Verdict, a.Slots = Known, []Slot{6, 6}; return a }, RefusalError{0, Count}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPair(t, 8)
			other := p.grant(false, parts(1)...) // in slot 7
			p.save(3, false, parts(2)...)        // in slot 6
			s := p.reserve(parts(3, 4)...)       // in slots 4 and 5
			a := c.answer(p, p.plugin.Lend(s.Request(), 0))
			_, err := s.Accept(&a, now)
			require.ErrorIs(t, err, ErrRefused)
			require.Equal(t, &c.want, err)
			require.Equal(t, c.want.Reason != Pinned, c.want.Fault())
			require.Contains(t, err.Error(), string(c.want.Reason))
			_, err = s.Publish(0)
			require.ErrorIs(t, err, ErrVoid)
			r, told := s.Drop()
			require.True(t, told)
			p.plugin.Returned(r)
			p.want(2, 3)
			fill(other.Bytes(0), 6)
			_, err = other.Publish(0)
			require.NoError(t, err)
			p.want(1, 6)
			p.whole()
		})
	}
}

// A plugin that says that it knows a block has to have it.
func TestKnownIsLookedAt(t *testing.T) {
	p := newPair(t, 4)
	p.save(1, false, parts(1, 2)...)
	slots := p.plugin.Find(parts(1, 2)).Slots
	for _, lie := range [][]Slot{{slots[1], slots[0]}, slots[:1], {0, 1}} {
		s := p.reserve(parts(3, 4)[:len(lie)]...)
		_, err := s.Accept(&Answer{Verdict: Known, Slots: lie}, now)
		require.ErrorIs(t, err, ErrGone)
		s.Drop()
	}
	s := p.reserve(parts(3, 4)...)
	_, err := s.Accept(&Answer{Verdict: Known, Slots: slots}, now)
	require.ErrorIs(t, err, ErrGone, "that is another block")
	p.gone(3)
}

// flips changes the header of slot 0 whenever somebody begins to read it.
type flips struct {
	Memory
	p *pair
	n byte
}

// Load is Memory's.
func (f *flips) Load(at int64) uint64 {
	if at == f.p.g.wordAt(0) {
		f.p.forge(0, Header{Serial: 1, Key: key(f.n + 1), Length: 100, Part: uint16(f.n), Parts: 3, Epoch: 1})
		f.n = (f.n + 1) % 3
	}
	return f.Memory.Load(at)
}

// Rule PLACE-09: one slot is not many, whatever it seems to hold; an index that believed that would search without end.
func TestOneSlotForManyParts(t *testing.T) {
	p := newPair(t, 2)
	p.host.Draw(1)
	p.host.arena = &flips{Memory: p.a, p: p}
	for _, slots := range [][]Slot{{0, 0, 0}, {0, 1, 0}} {
		require.Equal(t, &RefusalError{Reason: Count}, p.host.Notice(&Notice{Slots: slots}, now))
		p.gone(4)
	}
}

// Rule PLACE-09: a word that changes while it is lent is nobody's block.
func TestWordChanged(t *testing.T) {
	p := newPair(t, 1)
	s := p.grant(false, parts(1)...)
	p.a.Store(p.g.wordAt(0), uint64(NewWord(9, Ready)))
	_, err := s.Publish(0)
	require.Equal(t, &RefusalError{0, WordChanged}, err)
	p.gone(1)
}

// Rule PLACE-10: whatever is changed in a header costs the hit, and is named.
func TestLyingHeaders(t *testing.T) {
	for at := int64(0); at < 8*(1+headerWords); at += 8 {
		p := newPair(t, 1)
		p.save(1, false, parts(1)...)
		n := p.plugin.Notices()[0]
		refs, err := p.host.Find(keysOf(parts(1)), now)
		require.NoError(t, err)
		word := p.g.wordAt(0) + at
		p.a.Store(word, p.a.Load(word)^1<<9)
		want := ErrRefused
		if at == 0 {
			want = ErrGone // another generation, with the header of this one
			p.a.Store(word, uint64(NewWord(1, Retired)))
		}
		_, err = p.host.Pin(refs[0])
		require.ErrorIs(t, err, want, "word at %d", at)
		require.ErrorIs(t, p.host.Notice(&n, now), want)
		require.Zero(t, p.w.Load(p.g.pinAt(0)))
		_, err = p.host.Find(keysOf(parts(1)), now)
		require.Error(t, err)
		p.gone(1)
	}
}

// A header with a right check says what it likes; it is not believed either.
func TestForgedHeaders(t *testing.T) {
	p := newPair(t, 4)
	p.save(1, false, parts(1, 2)...)
	slots := p.plugin.Find(parts(1, 2)).Slots
	forge := func(h Header) error {
		words := h.Encode(slots[0], Word(p.a.Load(p.g.wordAt(slots[0]))).Generation())
		p.g.storeHeader(p.a, slots[0], &words)
		return p.host.Notice(&Notice{Slots: slots}, now)
	}
	right := Header{Serial: 1, Key: key(1), Length: 100, Group: 2, Parts: 2, Lead: slots[0], Epoch: 1}
	for name, c := range map[string]struct {
		forge func(h *Header)
		want  error
	}{
		"not drawn yet":      {func(h *Header) { h.Serial = 2 }, &RefusalError{slots[0], SerialAhead}},
		"too long":           {func(h *Header) { h.Length = 101 }, &RefusalError{slots[0], HeaderLies}},
		"part beyond parts":  {func(h *Header) { h.Part = 2 }, &RefusalError{slots[0], HeaderLies}},
		"lead beyond slots":  {func(h *Header) { h.Lead = 4 }, &RefusalError{slots[0], HeaderLies}},
		"another lead":       {func(h *Header) { h.Lead = slots[1] }, ErrGone},
		"another part":       {func(h *Header) { h.Part = 1 }, ErrGone},
		"more parts":         {func(h *Header) { h.Parts = 3 }, ErrGone},
		"before a reset":     {func(h *Header) { h.Epoch = 0 }, ErrGone},
		"over":               {func(h *Header) { h.Expires = now }, ErrGone},
		"the other's serial": {func(h *Header) { h.Serial = 0 }, ErrGone},
	} {
		h := right
		c.forge(&h)
		err := forge(h)
		refusal := &RefusalError{}
		if errors.As(c.want, &refusal) {
			require.Equal(t, refusal, err, name)
		} else {
			require.ErrorIs(t, err, c.want, name)
		}
	}
	require.NoError(t, forge(right))
	require.ErrorIs(t, p.host.Notice(&Notice{}, now), ErrRefused)
	require.ErrorIs(t, p.host.Notice(&Notice{Slots: make([]Slot, 5)}, now), ErrRefused)
	_, err := p.host.Pin(Ref{Slot: 4})
	require.ErrorIs(t, err, ErrRefused)
}

// A notice that is looked at while its slot gets another block does not push that block out.
func TestNoticeMeetsSave(t *testing.T) {
	p := newPair(t, 1)
	f, err := p.plugin.Fill(Set{Parts: parts(1)})
	require.NoError(t, err)
	n, err := f.Publish()
	require.NoError(t, err)
	began, err := p.host.look(n.Slots)
	require.NoError(t, err)
	refs := []Ref{{Slot: 0, Part: parts(1)[0], generation: 1}}
	p.plugin.Retire(p.plugin.Find(parts(1)))
	s := p.grant(false, parts(2)...)
	require.ErrorIs(t, p.host.Notice(&n, now), ErrGone, "the slot is being written")
	_, err = s.Publish(0)
	require.NoError(t, err)
	require.ErrorIs(t, p.host.enter(refs, &began), ErrGone)
	p.want(2, 0)
}

func TestImpossibleParts(t *testing.T) {
	p := newPair(t, 2)
	for _, list := range [][]Part{nil, parts(1, 2, 3), parts(1, 1), {{Length: 101}}} {
		_, err := p.host.Reserve(list, 0, false)
		require.ErrorIs(t, err, ErrImpossible)
		_, err = p.plugin.Fill(Set{Parts: list})
		require.ErrorIs(t, err, ErrImpossible)
		require.Equal(t, Answer{Verdict: Declined}, p.plugin.Lend(&Request{Serial: 5, Epoch: 1, Parts: list}, 0))
	}
	require.Equal(t, Answer{Verdict: Declined}, p.plugin.Lend(&Request{Serial: 5, Epoch: 2, Parts: parts(1)}, 0), "of another epoch")
}

func TestGeometry(t *testing.T) {
	for _, g := range []Geometry{{0, 1}, {-1, 1}, {1, 0}, {1, -1}, {1, 1 << 32}, {1<<30 + 1, 1}, {1 << 30, 1 << 31}} {
		require.ErrorIs(t, g.Validate(), ErrGeometry, "%+v", g)
	}
	require.NoError(t, Geometry{1 << 30, 1 << 14}.Validate())
	p := newPair(t, 2)
	for _, g := range []Geometry{{0, 100}, {3, 100}, {2, 10_000}} {
		_, err := NewHost(p.a, p.w, g)
		require.ErrorIs(t, err, ErrGeometry)
		_, err = Open(p.a, p.w, g, Opening{Epoch: 1}, now)
		require.ErrorIs(t, err, ErrGeometry)
	}
	for _, b := range [][]byte{p.arena, p.words} {
		b[3]++
		_, err := Open(p.a, p.w, p.g, Opening{Epoch: 1}, now)
		require.ErrorIs(t, err, ErrGeometry, "another version")
		b[3]--
	}
	_, err := Map(p.arena[1:])
	require.ErrorIs(t, err, ErrGeometry)
	_, err = Map(nil)
	require.ErrorIs(t, err, ErrGeometry)
}
