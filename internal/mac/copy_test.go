package mac

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

var bothStores = []Stores{Cached, NonTemporal}

// canary surrounds memory that a test has written.
const canary = 0xa5

// address is where memory begins.
func address(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

// aligned says whether a copy to memory may go past the caches.
func aligned(b []byte) bool { return uintptr(address(b))%32 == 0 }

// guarded is memory that begins anywhere, between canaries.
type guarded struct {
	all     []byte
	at, end int
}

func newGuarded(random *rand.Rand, size int) guarded {
	g := guarded{all: bytes.Repeat([]byte{canary}, size+300), at: 64 + random.IntN(129)}
	if random.IntN(2) == 0 {
		for !aligned(g.all[g.at:]) {
			g.at++
		}
	}
	g.end = g.at + size
	return g
}

func (g guarded) bytes() []byte { return g.all[g.at:g.end:g.end] }

func (g guarded) intact() bool {
	return bytes.Count(g.all[:g.at], []byte{canary}) == g.at && bytes.Count(g.all[g.end:], []byte{canary}) == len(g.all)-g.end
}

// TestCopyAgrees: whatever the length, the spans and where they lie, every implementation copies all bytes and nothing else, and
// gives the code of Sum.
func TestCopyAgrees(t *testing.T) {
	shapes := 500
	if os.Getenv("KVPORT_SOAK") != "" {
		shapes = 10_000
	}
	all, past := cores(t), 0
	random := rand.New(rand.NewPCG(5, 6))
	for n := range shapes {
		s := drawShape(random)
		for _, c := range all {
			m := prepare(c, &s.key)
			var want [Size]byte
			m.Sum(&want, s.context, s.spans...)
			for _, stores := range bothStores {
				var h Hash
				var got [Size]byte
				var copies []guarded
				m.Begin(&h, s.context)
				for i, span := range s.spans {
					if i%3 == 2 { // what is added and what is copied may alternate
						h.Add(span)
						continue
					}
					to := newGuarded(random, len(span))
					if stores == NonTemporal && h.filled == 0 && len(span) >= h.rate() && aligned(to.all[to.at:]) {
						past++
					}
					h.Copy(to.bytes(), span, stores)
					require.True(t, bytes.Equal(span, to.bytes()), "shape %d, %s, %s, span %d of %d bytes", n, c, stores, i, len(span))
					copies = append(copies, to)
				}
				h.Sum(&got)
				require.Equal(t, want, got, "shape %d, %s, %s", n, c, stores)
				for i, to := range copies {
					require.True(t, to.intact(), "shape %d, %s, %s: copy %d writes beside its place", n, c, stores, i)
				}
			}
		}
	}
	require.Positive(t, past, "copies that may go past the caches")
	t.Logf("%d shapes: %v copy and give the codes of Sum", shapes, all)
}

// Every length up to several blocks, from every part of a block on.
func TestCopyEveryLength(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 8))
	data := make([]byte, 5*maxRate+1)
	for i := range data {
		data[i] = byte(random.Uint32())
	}
	for _, c := range cores(t) {
		m := prepare(c, &Key{1})
		for _, stores := range bothStores {
			for length := range data {
				for _, before := range []int{0, 1, 31, 32, 63} {
					before = min(before, length)
					var h Hash
					var want, got [Size]byte
					m.Begin(&h, nil)
					h.Add(data[:before])
					to := newGuarded(random, length-before)
					h.Copy(to.bytes(), data[before:length], stores)
					h.Sum(&got)
					m.Sum(&want, nil, data[:length])
					require.Equal(t, want, got, "%s, %s, %d bytes after %d", c, stores, length-before, before)
					require.True(t, bytes.Equal(data[before:length], to.bytes()) && to.intact(), "%s, %s, %d bytes after %d", c, stores, length-before, before)
				}
			}
		}
	}
}

// A destination that is too short is refused before anything is written.
func TestCopyNeedsRoom(t *testing.T) {
	var h Hash
	New(&Key{}).Begin(&h, nil)
	dst := make([]byte, 100)
	require.Panics(t, func() { h.Copy(dst[:99], bytes.Repeat([]byte{1}, 100), Cached) })
	require.Equal(t, make([]byte, 100), dst)
}

// mapped is memory that consists of pages of a file of some pages, in any order. The race detector does not watch it.
func mapped(t *testing.T, pages int, order []int) []byte {
	t.Helper()
	size := os.Getpagesize()
	fd, err := unix.MemfdCreate("kvport-mac-test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Ftruncate(fd, int64(pages*size)))
	return mappedFile(t, fd, order)
}

func mappedFile(t *testing.T, fd int, order []int) []byte {
	t.Helper()
	size := os.Getpagesize()
	all, err := unix.Mmap(-1, 0, len(order)*size, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(all)) })
	for i, page := range order {
		if page >= 0 {
			_, err := unix.MmapPtr(fd, int64(page*size), address(all[i*size:]), uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
			require.NoError(t, err)
		}
	}
	return all
}

// Copy touches nothing beside its memory: there are no pages there.
func TestCopyStaysInside(t *testing.T) {
	page := os.Getpagesize()
	src := mapped(t, 2, []int{-1, 0, 1, -1})[page : 3*page]
	dst := mapped(t, 2, []int{-1, 0, 1, -1})[page : 3*page]
	random := rand.New(rand.NewPCG(9, 10))
	for i := range src {
		src[i] = byte(random.Uint32())
	}
	for _, c := range cores(t) {
		m := prepare(c, &Key{2})
		for _, stores := range bothStores {
			for _, size := range []int{1, 15, 31, 32, 33, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097, 2 * page} {
				for _, before := range []int{0, 1, 40} {
					for _, from := range [][]byte{src[:size], src[2*page-size:]} {
						for _, to := range [][]byte{dst[:size], dst[2*page-size:]} {
							var h Hash
							var want, got [Size]byte
							m.Begin(&h, nil)
							h.Add(make([]byte, before))
							h.Copy(to, from, stores)
							h.Sum(&got)
							m.Sum(&want, nil, make([]byte, before), from)
							require.Equal(t, want, got, "%s, %s, %d bytes", c, stores, size)
							require.True(t, bytes.Equal(from, to), "%s, %s, %d bytes", c, stores, size)
						}
					}
				}
			}
		}
	}
}

// TestCopyReadsOnce: the source changes while it is copied, because the destination is the same memory under another address, some
// blocks before or behind it. The code is that of what lies in the destination, where each byte is written once. A copy that reads
// more than 64 bytes again after it has written them, or digests more before it copies, gives another code. What happens to less is in the text of the
// assembly (TestAssemblyReadsOnce).
func TestCopyReadsOnce(t *testing.T) {
	page, order := os.Getpagesize(), []int{0, 1, 2, 3, 4, 5, 6, 7}
	fd, err := unix.MemfdCreate("kvport-mac-test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Ftruncate(fd, int64(len(order)*page)))
	one, other := mappedFile(t, fd, order), mappedFile(t, fd, order)
	random := rand.New(rand.NewPCG(11, 12))
	before := make([]byte, len(one))
	for _, c := range cores(t) {
		m := prepare(c, &Key{3})
		for _, stores := range bothStores {
			for _, distance := range []int{64, 192, 4096, 12_288} {
				for _, forward := range []bool{false, true} {
					for i := range one {
						one[i] = byte(random.Uint32())
					}
					copy(before, one)
					from, to, was := one[distance:], other[:len(other)-distance], before[distance:]
					if forward {
						from, to, was = one[:len(one)-distance], other[distance:], before[:len(before)-distance]
					}
					var h Hash
					var want, got [Size]byte
					m.Begin(&h, []byte("context"))
					h.Copy(to, from, stores)
					h.Sum(&got)
					m.Sum(&want, []byte("context"), to)
					require.Equal(t, want, got, "%s, %s, %d bytes apart, forward %v", c, stores, distance, forward)
					require.False(t, bytes.Equal(was, from), "the source has changed")
				}
			}
		}
	}
}

// TestCopyDoesNotReadBack: each page of the destination is the same memory, as if somebody else wrote what was just copied. The code
// is that of the source.
func TestCopyDoesNotReadBack(t *testing.T) {
	const pages = 8
	page := os.Getpagesize()
	to := mapped(t, 1, make([]int, pages))
	from := make([]byte, pages*page)
	random := rand.New(rand.NewPCG(13, 14))
	for i := range from {
		from[i] = byte(random.Uint32())
	}
	for _, c := range cores(t) {
		for _, stores := range bothStores {
			m := prepare(c, &Key{4})
			var h Hash
			var want, got [Size]byte
			m.Begin(&h, nil)
			h.Copy(to, from, stores)
			h.Sum(&got)
			m.Sum(&want, nil, from)
			require.Equal(t, want, got, "%s, %s", c, stores)
			require.True(t, bytes.Equal(from[len(from)-page:], to[:page]), "%s, %s", c, stores)
		}
	}
}

// Somebody writes the source all the time: the code is that of what has arrived.
func TestCopyWhileTheSourceChanges(t *testing.T) {
	if runtime.GOMAXPROCS(0) == 1 {
		t.Skip("NOT RUN: nothing changes the source while it is copied, GOMAXPROCS is 1")
	}
	const pages, rounds = 32, 60
	order := make([]int, pages)
	for i := range order {
		order[i] = i
	}
	src := mapped(t, pages, order)
	dst := mapped(t, pages, order)
	var writer sync.WaitGroup
	var over atomic.Bool
	writer.Go(func() {
		random := rand.New(rand.NewPCG(15, 16))
		for !over.Load() {
			for range 1000 {
				src[random.IntN(len(src))]++
			}
		}
	})
	defer writer.Wait()
	defer over.Store(true)
	random := rand.New(rand.NewPCG(17, 18))
	changed := 0
	for _, c := range cores(t) {
		m := prepare(c, &Key{5})
		for round := range rounds {
			stores := bothStores[round%2]
			if c.by == portable {
				if round%10 > 0 {
					continue // it is slow
				}
				stores = bothStores[round/10%2]
			}
			from, to := random.IntN(200), 32*random.IntN(3)
			size := len(src) - 200 - random.IntN(100)
			var h Hash
			var before, want, got [Size]byte
			m.Sum(&before, nil, src[from:from+size])
			m.Begin(&h, nil)
			h.Copy(dst[to:to+size], src[from:from+size], stores)
			h.Sum(&got)
			m.Sum(&want, nil, dst[to:to+size])
			require.Equal(t, want, got, "%s, %s, round %d", c, stores, round)
			if got != before {
				changed++
			}
		}
	}
	if changed == 0 {
		t.Skip("NOT RUN: the source never changed while it was read")
	}
	t.Logf("the source changed in %d rounds", changed)
}

// Copies do not allocate.
func TestCopyDoesNotAllocate(t *testing.T) {
	src, dst := make([]byte, 10_000), make([]byte, 10_000)
	for _, c := range cores(t) {
		for _, stores := range bothStores {
			m := prepare(c, &Key{6})
			require.Zero(t, testing.AllocsPerRun(20, func() {
				var h Hash
				var sum [Size]byte
				m.Begin(&h, src[:96])
				h.Copy(dst, src, stores)
				h.Sum(&sum)
			}), "%s, %s", c, stores)
		}
	}
}

func TestStoresString(t *testing.T) {
	require.Equal(t, "cached non-temporal", fmt.Sprint(Cached, " ", NonTemporal))
}

// FuzzCopy compares the copies of every implementation with Sum, which FuzzSum compares with the reference.
func FuzzCopy(f *testing.F) {
	all := cores(f)
	f.Add([]byte("context"), []byte("data"), uint16(2), uint8(0))
	f.Add([]byte{}, make([]byte, 64), uint16(0), uint8(0))
	f.Add(make([]byte, 57), make([]byte, 9000), uint16(31), uint8(33))
	f.Fuzz(func(t *testing.T, context, data []byte, split uint16, offset uint8) {
		at := min(int(split), len(data))
		for _, c := range all {
			m := prepare(c, &Key{7})
			var want [Size]byte
			m.Sum(&want, context, data)
			for _, stores := range bothStores {
				var h Hash
				var got [Size]byte
				room := make([]byte, int(offset)+len(data)+1)
				room[len(room)-1] = canary
				to := room[offset : len(room)-1]
				m.Begin(&h, context)
				h.Copy(to[:at], data[:at], stores)
				h.Copy(to[at:], data[at:], stores)
				h.Sum(&got)
				require.Equal(t, want, got, "%s, %s", c, stores)
				require.True(t, bytes.Equal(data, to) && room[len(room)-1] == canary, "%s, %s", c, stores)
			}
		}
	})
}

// TestCopyPast: whatever the length and where it lies, all bytes are copied, and nothing else is written.
func TestCopyPast(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 8))
	for range 500 {
		size := random.IntN(5000)
		from, to := newGuarded(random, size), newGuarded(random, size)
		for i := range from.bytes() {
			from.bytes()[i] = byte(random.Uint32())
		}
		CopyPast(to.bytes(), from.bytes())
		require.Equal(t, from.bytes(), to.bytes())
		require.True(t, to.intact())
	}
}
