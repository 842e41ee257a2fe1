package place

import (
	"encoding/binary"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

const now = int64(1_700_000_000_000)

// aligned is zeroed memory that begins at a multiple of 8.
func aligned(n int64) []byte {
	words := make([]uint64, (n+7)/8)
	return unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), n)
}

// pair is both ends of one arena.
type pair struct {
	t            *testing.T
	g            Geometry
	arena, words []byte
	a, w         Memory
	host         *Host
	plugin       *Plugin
}

func newPair(t *testing.T, slots int) *pair {
	t.Helper()
	p := &pair{t: t, g: Geometry{Slots: slots, SlotBytes: 100}}
	p.arena, p.words = aligned(p.g.ArenaBytes()), aligned(p.g.WordsBytes())
	var err error
	p.a, err = Map(p.arena)
	require.NoError(t, err)
	p.w, err = Map(p.words)
	require.NoError(t, err)
	p.host, err = NewHost(p.a, p.w, p.g)
	require.NoError(t, err)
	p.open()
	return p
}

// open starts a life of the plugin.
func (p *pair) open() {
	p.t.Helper()
	o, err := p.host.Reopen()
	require.NoError(p.t, err)
	p.plugin, err = Open(p.a, p.w, p.g, o, now)
	require.NoError(p.t, err)
}

// forge makes a slot READY with whatever header.
func (p *pair) forge(s Slot, h Header) {
	words := h.Encode(s, 5)
	p.g.storeHeader(p.a, s, &words)
	p.a.Store(p.g.wordAt(s), uint64(NewWord(5, Ready)))
}

// restart kills the plugin and starts its next life, which tells the host what it found.
func (p *pair) restart() {
	p.t.Helper()
	p.host.Died()
	p.open()
	for _, n := range p.plugin.Notices() {
		require.NoError(p.t, p.host.Notice(&n, now))
	}
}

func key(n byte) connector.StoreKey { return connector.StoreKey{n, 31: n} }

func parts(keys ...byte) (list []Part) {
	for _, k := range keys {
		list = append(list, Part{Key: key(k), Length: 100, Group: uint16(k) + 1})
	}
	return list
}

func keysOf(list []Part) (keys []connector.StoreKey) {
	for i := range list {
		keys = append(keys, list[i].Key)
	}
	return keys
}

func fill(b []byte, with byte) {
	for i := range b {
		b[i] = with
	}
}

// grant begins a save and has its slots lent.
func (p *pair) grant(replace bool, list ...Part) *Save {
	p.t.Helper()
	s, err := p.host.Reserve(list, 7, replace)
	require.NoError(p.t, err)
	a := p.plugin.Lend(s.Request(), 0)
	v, err := s.Accept(&a, now)
	require.NoError(p.t, err)
	require.Equal(p.t, Granted, v)
	return s
}

// save saves a block whose bytes are with.
func (p *pair) save(with byte, replace bool, list ...Part) *Save {
	p.t.Helper()
	s := p.grant(replace, list...)
	for i := range list {
		fill(s.Bytes(i), with)
		done, err := s.Publish(i)
		require.NoError(p.t, err)
		require.Equal(p.t, i == len(list)-1, done)
	}
	p.plugin.Settle()
	return s
}

// read is the first byte of a resident part.
func (p *pair) read(k byte) (byte, error) {
	refs, err := p.host.Find([]connector.StoreKey{key(k)}, now)
	if err != nil {
		return 0, err
	}
	pin, err := p.host.Pin(refs[0])
	if err != nil {
		return 0, err
	}
	b := pin.Bytes()[0]
	return b, pin.Release(now)
}

func (p *pair) want(k, with byte) {
	p.t.Helper()
	b, err := p.read(k)
	require.NoError(p.t, err)
	require.Equal(p.t, with, b)
}

func (p *pair) gone(k byte) {
	p.t.Helper()
	_, err := p.read(k)
	require.ErrorIs(p.t, err, ErrMiss)
}

// whole checks that no slot is lost.
func (p *pair) whole() Counts {
	p.t.Helper()
	c := p.plugin.Counts()
	require.Equal(p.t, p.g.Slots, c.Free+c.Lent+c.Filling+c.Resident+c.Retired, "%+v", c)
	return c
}

// Rules PLACE-01 and PLACE-02: every word is where the specification says.
func TestLayout(t *testing.T) {
	p := newPair(t, 40)
	require.EqualValues(t, 4096+2*4096+40*128, p.g.ArenaBytes(), "the headers take two pages; a slot of 100 bytes takes 128")
	require.EqualValues(t, 4096+40*64, p.g.WordsBytes())
	at := func(b []byte, o int) uint64 { return binary.LittleEndian.Uint64(b[o:]) }
	require.Equal(t, "kvplace1", string(p.arena[:8]))
	require.Equal(t, "kvpword1", string(p.words[:8]))
	for _, b := range [][]byte{p.arena, p.words} {
		require.EqualValues(t, 100, at(b, 8))
		require.EqualValues(t, 40, at(b, 16))
	}

	list := []Part{{Key: key(1), Length: 90, Group: 3}, {Key: key(2), Length: 80, Group: 4}}
	s, err := p.host.Reserve(list, 77, false)
	require.NoError(t, err)
	a := p.plugin.Lend(s.Request(), now+5)
	_, err = s.Accept(&a, now)
	require.NoError(t, err)
	for i := range list {
		fill(s.Bytes(i), 9)
		_, err = s.Publish(i)
		require.NoError(t, err)
	}
	slot := int(a.Slots[1])
	require.Equal(t, 39, slot, "free slots are taken from the end")
	head := p.arena[4096+128*slot:][:128]
	require.EqualValues(t, 1<<8|3, at(head, 0), "generation and READY")
	require.EqualValues(t, 1, at(head, 8), "serial")
	require.Equal(t, list[1].Key[:], head[16:48])
	require.EqualValues(t, 80, binary.LittleEndian.Uint32(head[48:]))
	require.EqualValues(t, 4, binary.LittleEndian.Uint16(head[52:]), "group")
	require.EqualValues(t, 1, binary.LittleEndian.Uint16(head[54:]), "part")
	require.EqualValues(t, 2, binary.LittleEndian.Uint16(head[56:]), "parts")
	require.EqualValues(t, 0, binary.LittleEndian.Uint16(head[58:]))
	require.EqualValues(t, a.Slots[0], binary.LittleEndian.Uint32(head[60:]), "lead")
	require.EqualValues(t, 77, at(head, 64), "tenant")
	require.EqualValues(t, now+5, at(head, 72), "expires")
	require.EqualValues(t, 1, at(head, 80), "epoch")
	require.NotZero(t, at(head, 88), "check")
	require.Equal(t, make([]byte, 32), head[96:])
	bytes := p.arena[3*4096+128*slot:][:100]
	require.EqualValues(t, 9, bytes[79])
	require.EqualValues(t, 0, bytes[80])

	refs, err := p.host.Find(keysOf(list), now)
	require.NoError(t, err)
	pin, err := p.host.Pin(refs[1])
	require.NoError(t, err)
	line := p.words[4096+64*slot:][:64]
	require.EqualValues(t, 1, at(line, 0), "pin")
	require.NoError(t, pin.Release(now))
	require.EqualValues(t, 0, at(line, 0))
	require.EqualValues(t, now<<16|1, at(line, 8), "use")
	hits, last := p.plugin.Use(Slot(slot))
	require.EqualValues(t, 1, hits)
	require.Equal(t, now, last)
	require.Equal(t, make([]byte, 48), line[16:])
}

// Rules PLACE-05 and PLACE-15: a block is resident when all its parts are READY, and not before.
func TestSaveAndRead(t *testing.T) {
	p := newPair(t, 4)
	list := parts(1, 2)
	s := p.grant(false, list...)
	_, err := p.host.Reserve(parts(2), 0, false)
	require.ErrorIs(t, err, ErrSaving)
	fill(s.Bytes(1), 5)
	done, err := s.Publish(1)
	require.NoError(t, err)
	require.False(t, done)
	_, err = s.Publish(1)
	require.ErrorIs(t, err, ErrVoid, "once")
	p.gone(2)
	fill(s.Bytes(0), 5)
	done, err = s.Publish(0)
	require.NoError(t, err)
	require.True(t, done)
	p.want(1, 5)
	p.want(2, 5)
	require.Equal(t, 1, p.host.Resident())
	p.plugin.Settle()
	require.Equal(t, Counts{Free: 2, Resident: 2}, p.whole())

	again, err := p.host.Reserve(list, 0, false)
	require.NoError(t, err)
	a := p.plugin.Lend(again.Request(), 0)
	v, err := again.Accept(&a, now)
	require.NoError(t, err)
	require.Equal(t, Known, v)
	_, told := again.Drop()
	require.False(t, told, "it is over")
}

// Rule PLACE-17: what does not end is returned, and its slots are free again.
func TestReturn(t *testing.T) {
	p := newPair(t, 3)
	s := p.grant(false, parts(1, 2)...)
	_, err := s.Publish(0)
	require.NoError(t, err)
	r, told := s.Drop()
	require.True(t, told)
	p.plugin.Returned(r)
	p.plugin.Returned(r)
	require.Equal(t, Counts{Free: 3}, p.whole())
	p.gone(1)
	p.save(1, false, parts(1, 2)...)

	full, err := p.host.Reserve(parts(3, 4), 0, false)
	require.NoError(t, err)
	a := p.plugin.Lend(full.Request(), 0)
	_, err = full.Accept(&a, now)
	require.ErrorIs(t, err, ErrDeclined, "one slot is free")
	_, err = p.host.Reserve(parts(3, 4), 0, false)
	require.NoError(t, err, "the declined save is over")
}

// Rule PLACE-04: what is given up waits for its readers, who may finish.
func TestRetiredWaitsForReaders(t *testing.T) {
	p := newPair(t, 2)
	p.save(4, false, parts(1, 2)...)
	refs, err := p.host.Find(keysOf(parts(1, 2)), now)
	require.NoError(t, err)
	pin, err := p.host.Pin(refs[1])
	require.NoError(t, err)
	p.plugin.Retire(p.plugin.Find(parts(1, 2)))
	require.Equal(t, Counts{Free: 1, Retired: 1}, p.whole())
	require.EqualValues(t, 4, pin.Bytes()[99])
	_, err = p.host.Pin(refs[1])
	require.ErrorIs(t, err, ErrGone)
	require.ErrorIs(t, pin.Release(now), ErrGone, "the second look says that it is not READY any more")
	p.gone(1)
	require.Zero(t, p.host.Resident(), "a part that is gone takes the others along")
	require.Zero(t, p.plugin.Sweep())
	require.Equal(t, Counts{Free: 2}, p.whole())
}

// Rule PLACE-11: a slot with another block is not what a former reference meant, and neither is the same block there again.
func TestGenerations(t *testing.T) {
	p := newPair(t, 1)
	p.save(1, false, parts(1)...)
	refs, err := p.host.Find(keysOf(parts(1)), now)
	require.NoError(t, err)
	p.plugin.Retire(p.plugin.Find(parts(1)))
	p.save(2, false, parts(1)...)
	_, err = p.host.Pin(refs[0])
	require.ErrorIs(t, err, ErrGone)
	p.want(1, 2)
}

// Rule PLACE-13: a replacement takes another slot, and wins over what it replaces, in the next life too.
func TestReplace(t *testing.T) {
	p := newPair(t, 3)
	p.save(1, false, parts(1)...)
	s := p.grant(true, parts(1)...)
	fill(s.Bytes(0), 2)
	p.want(1, 1)
	_, err := s.Publish(0)
	require.NoError(t, err)
	p.want(1, 2)
	require.Equal(t, 1, p.host.Resident())
	p.restart() // both are READY
	require.Equal(t, Counts{Free: 2, Resident: 1}, p.whole())
	p.want(1, 2)
	p.save(3, true, parts(1)...)
	require.Equal(t, Counts{Free: 2, Resident: 1}, p.whole())
	p.want(1, 3)
}

// Rule PLACE-14: the plugin fills slots itself, and tells.
func TestPromotion(t *testing.T) {
	p := newPair(t, 3)
	f, err := p.plugin.Fill(Set{Parts: parts(1, 2), Tenant: 5})
	require.NoError(t, err)
	fill(f.Bytes(0), 8)
	fill(f.Bytes(1), 8)
	require.Equal(t, Counts{Free: 1, Filling: 2}, p.whole())
	n, err := f.Publish()
	require.NoError(t, err)
	f.Cancel()
	_, err = f.Publish()
	require.ErrorIs(t, err, ErrVoid)
	p.gone(1)
	require.NoError(t, p.host.Notice(&n, now))
	p.want(1, 8)
	p.want(2, 8)
	_, err = p.plugin.Fill(Set{Parts: parts(1, 2)})
	require.ErrorIs(t, err, ErrKnown)
	_, err = p.plugin.Fill(Set{Parts: parts(3, 4)})
	require.ErrorIs(t, err, ErrFull)

	p.plugin.Retire(p.plugin.Find(parts(1, 2)))
	require.ErrorIs(t, p.host.Notice(&n, now), ErrGone, "a notice that comes late")
	f, err = p.plugin.Fill(Set{Parts: parts(1)})
	require.NoError(t, err)
	p.save(9, false, parts(1)...)
	_, err = f.Publish()
	require.ErrorIs(t, err, ErrKnown, "a save was quicker")
	require.Equal(t, Counts{Free: 2, Resident: 1}, p.whole())
	p.want(1, 9)
}

// Rule PLACE-13: a block that was given up does not hide one with a lower serial from the host, although nobody has looked in between.
func TestGivenUpGivesWay(t *testing.T) {
	for name, told := range map[string]func(p *pair, n *Notice){
		"notice": func(p *pair, n *Notice) { require.NoError(t, p.host.Notice(n, now)) },
		"known": func(p *pair, _ *Notice) {
			s := p.reserve(parts(1, 2)...)
			a := p.plugin.Lend(s.Request(), 0)
			v, err := s.Accept(&a, now)
			require.NoError(t, err)
			require.Equal(t, Known, v)
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t, 5)
			p.save(1, false, parts(1)...)
			p.save(2, false, parts(2)...)
			f, err := p.plugin.Fill(Set{Parts: parts(1, 2)}) // into other slots
			require.NoError(t, err)
			fill(f.Bytes(0), 3)
			fill(f.Bytes(1), 3)
			p.plugin.Retire(p.plugin.Find(parts(1)))
			p.plugin.Retire(p.plugin.Find(parts(2)))
			n, err := f.Publish()
			require.NoError(t, err)
			told(p, &n)
			p.want(1, 3)
			p.want(2, 3)
			require.Equal(t, 1, p.host.Resident())
		})
	}
}

// Rules PLACE-05 and PLACE-13: a block that is given up after the host has looked at it, and before it comes into the index, hides nothing that
// was placed since.
func TestGivenUpMeanwhile(t *testing.T) {
	r := newShelfRig(t)
	for name, given := range map[string]bool{"given up": true, "there": false} {
		loan, _ := r.lend(3)
		r.shelf.Begin(0)
		r.shelf.Publish(0, &Header{Key: connector.StoreKey{1}, Length: 1000}) // its serial is higher
		began, err := r.host.look([]Slot{0})
		require.NoError(t, err)
		head, word, err := r.host.read(0)
		require.NoError(t, err)
		later := []Ref{{Slot: 0, Part: head.part(), serial: head.Serial, generation: word.Generation()}}
		if given {
			r.shelf.Retire(0)
		}
		r.saveLent(loan, 1)
		err = r.host.enter(later, &began)
		refs, found := r.host.Find([]connector.StoreKey{{1}}, 0)
		require.NoError(t, found, name)
		if given {
			require.ErrorIs(t, err, ErrGone)
			require.Equal(t, Slot(3), refs[0].Slot, name)
			r.shelf.Retire(3)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, Slot(0), refs[0].Slot, name)
	}
}

// Rule PLACE-13: a notice of a block counts for nothing while there is a later one of its keys, also if that one's time is over.
func TestLaterStays(t *testing.T) {
	p := newPair(t, 3)
	f, err := p.plugin.Fill(Set{Parts: parts(1)})
	require.NoError(t, err)
	n, err := f.Publish()
	require.NoError(t, err)
	s, err := p.host.Reserve(parts(1), 0, true)
	require.NoError(t, err)
	a := p.plugin.Lend(s.Request(), now+10)
	_, err = s.Accept(&a, now)
	require.NoError(t, err)
	fill(s.Bytes(0), 2)
	_, err = s.Publish(0)
	require.NoError(t, err)
	require.ErrorIs(t, p.host.Notice(&n, now), ErrGone, "the plugin has not given it up yet")
	p.want(1, 2)
	require.ErrorIs(t, p.host.Notice(&n, now+10), ErrGone)
	_, err = p.host.Find(keysOf(parts(1)), now+10)
	require.ErrorIs(t, err, ErrMiss)
}

// Rule PLACE-05: a save whose parts all lie under higher serials has succeeded; if one of them is missing, it has not.
func TestSaveMeetsLaterBlocks(t *testing.T) {
	for later, done := range map[int]bool{1: false, 2: true} {
		p := newPair(t, 4)
		s := p.grant(false, parts(1, 2)...)
		serial := p.host.Draw(1)
		for i, part := range parts(1, 2)[:later] {
			p.forge(Slot(i), Header{Serial: serial, Key: part.Key, Length: part.Length, Group: part.Group, Parts: 1, Lead: Slot(i), Epoch: 1})
			require.NoError(t, p.host.Notice(&Notice{Slots: []Slot{Slot(i)}}, now))
		}
		_, err := s.Publish(0)
		require.NoError(t, err)
		saved, err := s.Publish(1)
		require.Equal(t, done, saved)
		require.Equal(t, done, err == nil)
		_, err = p.host.Find(keysOf(parts(1, 2)), now)
		require.Equal(t, done, err == nil)
	}
}

// What was given up meanwhile is not in the way, also if others came that were given up, too; but not for ever.
func TestInsertTriesAgain(t *testing.T) {
	for given, want := range map[int]error{tries: nil, tries + 1: ErrGone} {
		p := newPair(t, 2)
		block := func(s Slot, serial uint64) []Ref { return []Ref{{Slot: s, Part: parts(1)[0], serial: serial}} }
		tried, inserted := 0, 0
		_, err := p.host.insert(block(1, 1), func() error {
			if tried++; tried <= given {
				p.host.index.insert(block(0, 2)) // its slot is free
			}
			return nil
		}, func() { inserted++ })
		require.Equal(t, want, err)
		require.Equal(t, tries+1, tried)
		require.Equal(t, want == nil, inserted == 1)
	}
}

// Rule PLACE-16.
func TestExpiry(t *testing.T) {
	p := newPair(t, 2)
	s, err := p.host.Reserve(parts(1), 0, false)
	require.NoError(t, err)
	a := p.plugin.Lend(s.Request(), now+10)
	_, err = s.Accept(&a, now)
	require.NoError(t, err)
	_, err = s.Publish(0)
	require.NoError(t, err)
	keys := keysOf(parts(1))
	_, err = p.host.Find(keys, now+9)
	require.NoError(t, err)
	_, err = p.host.Find(keys, now+10)
	require.ErrorIs(t, err, ErrMiss)
	p.host.Died()
	o, err := p.host.Reopen()
	require.NoError(t, err)
	p.plugin, err = Open(p.a, p.w, p.g, o, now+10)
	require.NoError(t, err)
	require.Equal(t, Counts{Free: 2}, p.whole())
}

// Rule PLACE-12: nothing that is older than a reset comes back, also what was written while it went on, and in the next
// life.
func TestReset(t *testing.T) {
	p := newPair(t, 4)
	p.save(1, false, parts(1)...)
	late, unanswered := p.grant(false, parts(2)...), p.reserve(parts(3)...)
	old := p.plugin.Lend(unanswered.Request(), 0)
	f, err := p.plugin.Fill(Set{Parts: parts(4)})
	require.NoError(t, err)
	filled, err := p.plugin.Fill(Set{Parts: parts(4)})
	require.ErrorIs(t, err, ErrFull)
	require.Nil(t, filled)

	epoch := p.host.Reset()
	p.gone(1)
	_, err = late.Publish(0)
	require.ErrorIs(t, err, ErrReset)
	_, err = unanswered.Accept(&old, now)
	require.ErrorIs(t, err, ErrReset)
	n := p.plugin.Notices()
	require.Len(t, n, 1)
	require.ErrorIs(t, p.host.Notice(&n[0], now), ErrGone, "the plugin has not heard about it yet")

	p.plugin.Reset(epoch)
	_, err = f.Publish()
	require.ErrorIs(t, err, ErrReset)
	for _, s := range []*Save{late, unanswered} {
		r, told := s.Drop()
		require.True(t, told)
		p.plugin.Returned(r)
	}
	require.Equal(t, Counts{Free: 4}, p.whole())
	p.save(5, false, parts(1)...)
	p.want(1, 5)

	p.host.Reset() // the plugin dies before it hears
	p.restart()
	require.Equal(t, Counts{Free: 4}, p.whole())
	p.gone(1)
}

func (p *pair) reserve(list ...Part) *Save {
	p.t.Helper()
	s, err := p.host.Reserve(list, 0, false)
	require.NoError(p.t, err)
	return s
}

// A part that was written before a reset becomes READY after it: its header is of the former epoch.
func TestResetBetweenParts(t *testing.T) {
	p := newPair(t, 2)
	s := p.grant(false, parts(1, 2)...)
	require.NoError(t, s.may(0))
	epoch := p.host.Reset()
	_, err := s.arrived()
	require.ErrorIs(t, err, ErrReset)
	p.plugin.Reset(epoch)
	_, err = s.Publish(1)
	require.ErrorIs(t, err, ErrReset)
}

// Rule PLACE-18: a host that starts again has other memory.
func TestFreshHostKnowsNothing(t *testing.T) {
	p := newPair(t, 2)
	p.save(1, false, parts(1)...)
	p.w.Add(p.g.pinAt(0), 3)
	fresh, err := NewHost(p.a, p.w, p.g)
	require.NoError(t, err)
	_, err = fresh.Find(keysOf(parts(1)), now)
	require.ErrorIs(t, err, ErrMiss)
	_, err = fresh.Reserve(parts(1), 0, false)
	require.ErrorIs(t, err, ErrVoid, "no life is open")
	require.Zero(t, p.w.Load(p.g.pinAt(0)))
}
