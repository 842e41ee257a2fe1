package shm

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// pair makes both ends of an area, each with a mapping and a bell of its own as in two processes.
func pair(t testing.TB) (first, second *RingEnd) {
	t.Helper()
	file, err := NewRings("test", 2)
	require.NoError(t, err)
	require.NoError(t, AllocateRing(file, RingArea))
	var ends [2]*RingEnd
	a, b, err := NewBells()
	require.NoError(t, err)
	for i, f := range []*os.File{a, b} {
		bell, err := NewBell(int(f.Fd()))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, bell.Close()) })
		ends[i], err = NewRingEnd(int(file.Fd()), RingArea, i == 0, bell)
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
	require.NoError(t, file.Close())
	return ends[0], ends[1]
}

// start receives; a broken ring is told on the channel.
func start(e *RingEnd, take func([]byte)) <-chan error {
	failed := make(chan error, 1)
	e.Start(take, func(err error) { failed <- err })
	return failed
}

func send(e *RingEnd, frame string) (bool, error) {
	return e.Send(len(frame), func(to []byte) ([]byte, error) { return append(to, frame...), nil })
}

func TestRingCarriesFramesInOrder(t *testing.T) {
	a, b := pair(t)
	const count = 5000
	got := make(chan string, count)
	start(b, func(frame []byte) {
		sent, err := send(b, string(frame))
		require.NoError(t, err)
		require.True(t, sent, "there are never more under way than a ring holds")
	})
	start(a, func(frame []byte) { got <- string(frame) })
	random := rand.New(rand.NewPCG(1, 2))
	under := make(map[int]string)
	for i := range count {
		frame := fmt.Sprintf("%d %*d", i, 1+random.IntN(RingFrame-16), i)
		under[i] = frame
		sent, err := send(a, frame)
		require.NoError(t, err)
		require.True(t, sent)
		if i%7 == 0 { // the answers are looked for, not only waited for
			a.Poll(20*time.Microsecond, func() bool { return len(got) > 0 })
		}
		for len(under) > 0 && (len(under) == RingSlots || random.IntN(3) == 0) {
			oldest := i + 1 - len(under)
			require.Equal(t, under[oldest], <-got)
			delete(under, oldest)
		}
	}
	for oldest := count - len(under); oldest < count; oldest++ {
		require.Equal(t, under[oldest], <-got)
	}
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}

func TestRingFull(t *testing.T) {
	a, b := pair(t)
	for i := range RingSlots {
		sent, err := send(a, fmt.Sprint(i))
		require.NoError(t, err)
		require.True(t, sent, i)
	}
	sent, err := send(a, "more")
	require.NoError(t, err)
	require.False(t, sent, "no room")
	var got []string
	take := func(frame []byte) { got = append(got, string(frame)) }
	b.take = take
	require.Equal(t, RingSlots, b.drain())
	require.Equal(t, "0", got[0])
	require.Equal(t, fmt.Sprint(RingSlots-1), got[RingSlots-1])
	sent, err = send(a, "more")
	require.NoError(t, err)
	require.True(t, sent)
	long := make([]byte, RingFrame+1)
	sent, err = send(a, string(long))
	require.NoError(t, err)
	require.False(t, sent, "larger than a slot")
	sent, err = send(a, string(long[1:]))
	require.NoError(t, err)
	require.True(t, sent, "as large as a slot")
	sent, err = a.Send(3, func(to []byte) ([]byte, error) { return to, os.ErrInvalid })
	require.NoError(t, err)
	require.False(t, sent, "what cannot be written is not sent")
	got = nil
	require.Equal(t, 2, b.drain())
	require.Equal(t, []string{"more", string(long[1:])}, got)
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
	sent, err = send(a, "x")
	require.NoError(t, err)
	require.False(t, sent, "closed")
}

// A frame that comes when a poller has looked for the last time and has not left yet is taken by the bell, which leaves
// the rest to the poller: the next frame has to ring again.
func TestRingRungAsPollerLeaves(t *testing.T) {
	a, b := pair(t)
	got := 0
	b.take = func([]byte) { got++ }
	b.polling.Lock()
	require.True(t, b.idle(), "the poller has looked")
	_, err := send(a, "x")
	require.NoError(t, err)
	require.Equal(t, 1, b.drain(), "the bell takes it")
	require.True(t, b.rest(), "and leaves the rest to the poller")
	b.leave()
	require.EqualValues(t, asleep, b.in.state.Load(), "nobody looks for frames any more, so the other end has to ring")
	require.False(t, b.owed.Load())
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
	require.Equal(t, 1, got)
}

// What was sent before an end closes is taken.
func TestRingClose(t *testing.T) {
	for range 100 {
		a, b := pair(t)
		got := 0
		start(b, func([]byte) { got++ })
		for range 3 {
			_, err := send(a, "x")
			require.NoError(t, err)
		}
		require.NoError(t, b.Close())
		require.Equal(t, 3, got)
		b.Poll(time.Hour, func() bool { return false })
		require.NoError(t, a.Close())
	}
}

// Several rings share a bell, and one that is broken leaves the others alone. An end believes nothing
// that the other one wrote.
func TestRingBroken(t *testing.T) {
	for name, scribble := range map[string]func(in *counts, slots []byte){
		"more frames than slots":  func(in *counts, _ []byte) { in.tail.Store(RingSlots + 1) },
		"a tail that went back":   func(in *counts, _ []byte) { in.tail.Store(^uint32(0)) },
		"a frame beyond its slot": func(in *counts, b []byte) { binary.NativeEndian.PutUint32(b, RingFrame+1); in.tail.Store(1) },
		"a frame of 4 GiB":        func(in *counts, b []byte) { binary.NativeEndian.PutUint32(b, ^uint32(0)); in.tail.Store(1) },
	} {
		t.Run(name, func(t *testing.T) {
			a, b := pair(t)
			good := newRingEnd(memory(), true)
			good.bell = a.bell
			arrived := make(chan string, 1)
			start(good, func(frame []byte) { arrived <- string(frame) })
			failed := start(a, func([]byte) { t.Error("a frame arrived") })
			scribble(b.out, b.outMem)
			b.bell.ring()
			require.ErrorIs(t, <-failed, ErrRing)
			binary.NativeEndian.PutUint32(good.inMem, 3)
			copy(good.inMem[slotHeader:], "abc")
			good.in.tail.Store(1)
			b.bell.ring()
			require.Equal(t, "abc", <-arrived)
			require.NoError(t, a.Close())
			require.NoError(t, good.Close())
			require.NoError(t, b.Close())
		})
	}
	a, b := pair(t)
	for _, head := range []uint32{5, 1 << 31} {
		b.in.head.Store(head)
		a.over = false
		_, err := send(a, "x")
		require.ErrorIs(t, err, ErrRing, head)
		sent, err := send(a, "x")
		require.NoError(t, err)
		require.False(t, sent, "a broken end sends nothing any more")
	}
	require.NoError(t, a.Close())
	require.NoError(t, b.Close())
}

// memory is an area of this process alone.
func memory() []byte {
	words := make([]uint64, RingArea/8)
	return unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), RingArea)
}

// A bell that rings all the time, or is closed, harms nobody.
func TestRingBell(t *testing.T) {
	defer goleak.VerifyNone(t)
	before := descriptors(t)
	f, other, err := NewBells()
	require.NoError(t, err)
	bell, err := NewBell(int(f.Fd()))
	require.NoError(t, err)
	deaf := &Bell{fd: int(other.Fd())}
	for range 100_000 {
		deaf.ring() // never waits
	}
	require.NoError(t, other.Close())
	bell.ring()
	require.NoError(t, bell.Close())
	require.NoError(t, f.Close())
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	_, err = NewBell(int(null.Fd()))
	require.ErrorIs(t, err, ErrIncompatible)
	require.NoError(t, null.Close())
	require.Equal(t, before, descriptors(t))
}

// Other languages find things where rule RING-08 says.
func TestRingLayout(t *testing.T) {
	word := func(mem []byte, at int) uint32 { return binary.NativeEndian.Uint32(mem[at:]) }
	for first, half := range map[bool]int{true: 0, false: 1} {
		mem := memory()
		e := newRingEnd(mem, first)
		for n := range RingSlots {
			sent, err := send(e, fmt.Sprintf("frame %02d", n))
			require.NoError(t, err)
			require.True(t, sent)
			at := 4096 + half*64*4096 + n*4096
			require.EqualValues(t, 8, word(mem, at))
			require.Equal(t, fmt.Sprintf("frame %02d", n), string(mem[at+8:at+16]))
			require.EqualValues(t, n+1, word(mem, half*2048))
		}
		other := newRingEnd(mem, !first)
		other.take = func([]byte) {}
		require.Equal(t, RingSlots, other.drain())
		require.EqualValues(t, RingSlots, word(mem, half*2048+64))
		require.True(t, other.idle())
		require.EqualValues(t, 1, word(mem, half*2048+128))
		require.Len(t, mem, 4096+2*64*4096)
	}
}

func TestRingRefuses(t *testing.T) {
	file, err := NewRings("test", 2)
	require.NoError(t, err)
	defer file.Close()
	fd := int(file.Fd())
	unsealed, err := Reserve("test")
	require.NoError(t, err)
	defer unsealed.Close()
	require.NoError(t, unsealed.Truncate(RingArea))
	for name, c := range map[string]struct {
		fd     int
		offset int64
	}{
		"negative":       {fd, -RingArea},
		"no page":        {fd, 8},
		"beyond the end": {fd, 2 * RingArea},
		"huge":           {fd, 1 << 62},
		"unsealed":       {int(unsealed.Fd()), 0},
		"no descriptor":  {1 << 20, 0},
	} {
		_, err := NewRingEnd(c.fd, c.offset, true, nil)
		require.ErrorIs(t, err, ErrIncompatible, name)
	}
}

func TestRingMemoryIsGivenBack(t *testing.T) {
	file, err := NewRings("test", 3)
	require.NoError(t, err)
	defer file.Close()
	allocated := func() int64 {
		var st unix.Stat_t
		require.NoError(t, unix.Fstat(int(file.Fd()), &st))
		return st.Blocks * 512
	}
	require.Zero(t, allocated())
	require.NoError(t, AllocateRing(file, RingArea))
	require.EqualValues(t, RingArea, allocated())
	e, err := NewRingEnd(int(file.Fd()), RingArea, true, nil)
	require.NoError(t, err)
	_, err = send(e, "x")
	require.NoError(t, err)
	require.NoError(t, e.Close())
	require.NoError(t, FreeRing(file, RingArea))
	require.Zero(t, allocated())
	require.Empty(t, maps(t))
}

// FuzzRing reads and writes beside memory that somebody else fills as he likes.
func FuzzRing(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0}, []byte{0}, []byte{3, 0, 0, 0, 0, 0, 0, 0, 'a', 'b', 'c'})
	f.Add([]byte{65, 0, 0, 0}, []byte{1}, []byte{})
	f.Add([]byte{1, 0, 0, 0}, []byte{0}, []byte{0xff, 0xff, 0xff, 0xff})
	f.Add([]byte{64, 0, 0, 0}, []byte{0xff, 0xff, 0xff, 0xff}, []byte{0xf8, 0x0f, 0, 0})
	mem := memory()
	f.Fuzz(func(t *testing.T, tail, head, slots []byte) {
		clear(mem)
		e := newRingEnd(mem, true)
		copy(mem[ringCounts:ringCounts+4], tail)
		copy(mem[64:68], head)
		copy(e.inMem, slots)
		count := 0
		var broken error
		e.take = func(frame []byte) {
			count++
			require.LessOrEqual(t, len(frame), RingFrame)
			require.Same(t, &e.frame[0], unsafe.SliceData(frame), "a copy")
		}
		e.failed = func(err error) { broken = err }
		require.Equal(t, e.drain(), count)
		require.LessOrEqual(t, count, RingSlots)
		if broken != nil {
			require.ErrorIs(t, broken, ErrRing)
			require.Zero(t, e.drain())
		}
		if _, err := send(e, "hello"); err != nil {
			require.ErrorIs(t, err, ErrRing)
		}
		require.NoError(t, e.Close())
	})
}

func BenchmarkRing(b *testing.B) {
	for _, poll := range []bool{false, true} {
		b.Run(fmt.Sprintf("poll=%v", poll), func(b *testing.B) {
			first, second := pair(b)
			fill := func(to []byte) ([]byte, error) { return to[:64], nil }
			answers := make(chan int, 1)
			start(second, func([]byte) { _, _ = second.Send(64, fill) })
			start(first, func([]byte) { answers <- 1 })
			for b.Loop() {
				_, _ = first.Send(64, fill)
				if poll {
					first.Poll(30*time.Microsecond, func() bool { return len(answers) > 0 })
				}
				<-answers
			}
			require.NoError(b, first.Close())
			require.NoError(b, second.Close())
		})
	}
}
