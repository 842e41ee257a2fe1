package place

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzHost: whatever a plugin writes and says, the host neither fails nor leaves its memory, and every operation ends.
func FuzzHost(f *testing.F) {
	f.Add([]byte{0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8})
	f.Add([]byte{0, 0, 0, 0, 7, 0, 1, 1, 0, 2, 2, 0, 3, 3, 3, 4, 5, 5, 6, 0, 1})
	f.Fuzz(func(t *testing.T, script []byte) {
		w := &wild{pair: newPair(t, 3), script: script}
		for len(w.script) > 0 {
			w.step()
		}
		for _, s := range w.saves {
			s.Drop()
		}
		for _, p := range w.pins {
			_ = p.Release(now)
		}
		w.host.Died()
		w.open()
		require.Zero(t, w.w.Load(w.g.pinAt(0)))
		w.whole()
	})
}

// wild is a host whose plugin does what a script says.
type wild struct {
	*pair
	script []byte
	saves  []*Save
	pins   []*Pin
}

func (w *wild) next(n int) int {
	if len(w.script) == 0 {
		return 0
	}
	b := int(w.script[0])
	w.script = w.script[1:]
	return b % n
}

func (w *wild) slots() (list []Slot) {
	for range w.next(4) {
		list = append(list, Slot(w.next(4)))
	}
	return list
}

func (w *wild) step() {
	list := parts(1, 2, 3)[:1+w.next(3)]
	switch w.next(9) {
	case 0:
		if s, err := w.host.Reserve(list, 0, w.next(2) == 0); err == nil {
			w.saves = append(w.saves, s)
		}
	case 1:
		w.read(list)
	case 2:
		at := w.g.wordAt(Slot(w.next(3))) + int64(8*w.next(12))
		w.a.Store(at, binary.LittleEndian.Uint64(append([]byte{byte(w.next(256)), byte(w.next(4))}, 0, 0, 0, 0, 0, 0)))
	case 3:
		s := Slot(w.next(3))
		h := Header{Serial: uint64(w.next(3)), Key: key(byte(1 + w.next(3))), Length: uint32(w.next(102)), Part: uint16(w.next(2)), Parts: uint16(w.next(3)), Lead: Slot(w.next(4)), Epoch: 1}
		words := h.Encode(s, uint64(w.next(3)))
		w.g.storeHeader(w.a, s, &words)
	case 4:
		_ = w.host.Notice(&Notice{Slots: w.slots()}, now)
	case 5:
		w.host.Reset()
	default:
		if len(w.saves) > 0 {
			w.goOn(w.saves[w.next(len(w.saves))])
		}
	}
}

func (w *wild) read(list []Part) {
	refs, err := w.host.Find(keysOf(list), now)
	if err != nil {
		return
	}
	if p, err := w.host.Pin(refs[0]); err == nil {
		w.pins = append(w.pins, p)
		require.LessOrEqual(w.t, len(p.Bytes()), 100)
	}
}

// goOn has a save answered, written or dropped.
func (w *wild) goOn(s *Save) {
	switch part := w.next(4); part {
	case 3:
		s.Drop()
	default:
		a := Answer{Verdict: Verdict(w.next(5)), Slots: w.slots()}
		_, _ = s.Accept(&a, now)
		if s.may(part) == nil {
			s.published[part] = false
			fill(s.Bytes(part), 1)
			_, _ = s.Publish(part)
		}
	}
}
