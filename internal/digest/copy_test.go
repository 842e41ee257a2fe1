package digest

import (
	"bytes"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/mac"
)

var bothStores = []mac.Stores{mac.Cached, mac.NonTemporal}

// slotsOf is other memory for blocks of a cache: the same segments, packed, in some slots.
func slotsOf(t testing.TB, kv *connector.KV, slots int) *connector.KV {
	layout := *kv.Layout()
	layout.Blocks, layout.Segments = slots, slices.Clone(layout.Segments)
	at := int64(0)
	for i := range layout.Segments {
		s := &layout.Segments[i]
		s.Offset, s.BlockStride = at, s.Bytes
		at += int64(slots) * s.Bytes
	}
	other, err := connector.NewKV(layout, [][]byte{make([]byte, at)})
	require.NoError(t, err)
	return other
}

// largeCache has segments of many blocks of the MAC, with odd ends.
func largeCache(t testing.TB, seed uint64) *connector.KV {
	layout := connector.Layout{Blocks: 3, Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}}}
	at := int64(0)
	for layer, size := range []int64{64 << 10, 12_345, 1, 4096, 63} {
		layout.Segments = append(layout.Segments, connector.Segment{Layer: layer, Offset: at, BlockStride: size, Bytes: size})
		at += 3 * size
	}
	layout, size := WithSegments(layout, at)
	region := make([]byte, size)
	random := rand.New(rand.NewPCG(seed, 1))
	for i := range region {
		region[i] = byte(random.Uint32())
	}
	kv, err := connector.NewKV(layout, [][]byte{region})
	require.NoError(t, err)
	return kv
}

// spans are all bytes of a block.
func spans(t testing.TB, kv *connector.KV, b connector.Block) []byte {
	all, err := kv.Spans(b)
	require.NoError(t, err)
	return slices.Concat(all...)
}

// What was copied out is what Make gives, in the cache and in the slot, and nothing else was written. It comes back as it was.
func TestCopyOutAndIn(t *testing.T) {
	for name, h := range hashers() {
		for _, stores := range bothStores {
			for _, of := range []func(testing.TB, uint64) *connector.KV{cache, largeCache} {
				kv, want := of(t, 11), of(t, 11)
				b := block(1, 0)
				m, err := h.Maker()
				require.NoError(t, err)
				require.NoError(t, m.Make(want, b))
				other := slotsOf(t, kv, 3)
				slot := Slot{other, 2}
				require.NoError(t, m.CopyOut(kv, b, kv.Segments(0), slot, stores))
				require.Equal(t, want.Region(0), kv.Region(0), "%s, %s", name, stores)
				inSlot := b
				inSlot.ID = 2
				require.Equal(t, spans(t, want, b), spans(t, other, inSlot), "%s, %s", name, stores)
				require.Zero(t, bytes.Trim(slices.Concat(spans(t, other, block(0, 0)), spans(t, other, block(1, 0))), "\x00"))

				before := bytes.Clone(other.Region(0))
				elsewhere := connector.Block{Key: b.Key, ID: 2}
				wanted := slices.Concat(spans(t, kv, block(0, 0)), spans(t, kv, block(1, 0)))
				require.NoError(t, h.CopyIn(kv, elsewhere, slot, stores), "%s, %s", name, stores)
				require.NoError(t, h.Check(kv, elsewhere))
				require.Equal(t, spans(t, want, b), spans(t, kv, elsewhere), "%s, %s", name, stores)
				require.Equal(t, wanted, slices.Concat(spans(t, kv, block(0, 0)), spans(t, kv, block(1, 0))), "others are as they were")
				require.Equal(t, before, other.Region(0), "the slot is as it was")
			}
		}
	}
}

// Segments that are copied one after the other make the same block; the digests come with their own segment.
func TestCopyOutByLayers(t *testing.T) {
	for name, h := range hashers() {
		kv, want := cache(t, 12), cache(t, 12)
		b := block(3, 0)
		m, err := h.Maker()
		require.NoError(t, err)
		require.NoError(t, m.Make(want, b))
		other := slotsOf(t, kv, 1)
		slot, digests := Slot{other, 0}, 3
		require.NoError(t, m.CopyOut(kv, b, []int{0}, slot, mac.Cached))
		require.Equal(t, want.View(0, 3), other.View(0, 0), name)
		require.Zero(t, bytes.Trim(slices.Concat(other.View(1, 0), other.View(digests, 0)), "\x00"), name)
		require.NoError(t, m.CopyOut(kv, b, []int{1, digests}, slot, mac.Cached))
		require.Equal(t, spans(t, want, b), spans(t, other, block(0, 0)), name)
	}
}

// Any damage in the slot is noticed in the cache.
func TestCopyInNoticesDamage(t *testing.T) {
	for name, h := range hashers() {
		rapid.Check(t, func(t *rapid.T) {
			kv := cacheOf(t, rapid.Uint64().Draw(t, "seed"))
			group := rapid.Uint16Max(1).Draw(t, "group")
			b := block(rapid.IntRange(0, 7).Draw(t, "block"), group)
			other := cacheOf(t, 1)
			slot := Slot{other, connector.BlockID(rapid.IntRange(0, 7).Draw(t, "slot"))}
			stores := rapid.SampledFrom(bothStores).Draw(t, "stores")
			m, err := h.Maker()
			require.NoError(t, err)
			require.NoError(t, m.CopyOut(kv, b, kv.Segments(group), slot, stores))
			require.NoError(t, h.CopyIn(kv, b, slot, stores), name)
			all, err := other.Spans(connector.Block{ID: slot.ID, Group: group})
			require.NoError(t, err)
			which := rapid.IntRange(0, len(all)-1).Draw(t, "span")
			at := rapid.IntRange(0, len(all[which])-1).Draw(t, "at")
			all[which][at] ^= rapid.ByteMin(1).Draw(t, "flip")
			err = h.CopyIn(kv, b, slot, stores)
			require.Error(t, err, name)
			if which < len(all)-1 || at >= headerSize { // a header may name another key or edition then
				require.ErrorIs(t, err, connector.ErrCorrupt, name)
			}
		})
	}
}

// TestCopyInReadsDigestsOnce: the digests in the slot change while the block is copied, because they are in memory that the copy
// writes. Those that came to the cache first are the ones that count.
func TestCopyInReadsDigestsOnce(t *testing.T) {
	for name, h := range hashers() {
		kv := cache(t, 13)
		b := block(1, 0)
		require.NoError(t, h.Make(kv, b))
		from := slotsOf(t, kv, 1)
		for _, s := range kv.Segments(0) {
			copy(from.View(s, 0), kv.View(s, 1))
		}
		layout := *from.Layout()
		layout.Segments = slices.Clone(layout.Segments)
		digests := &layout.Segments[3]
		digests.Region, digests.Offset = 1, kv.Layout().Segments[0].Offset+5*kv.Layout().Segments[0].BlockStride
		slots, err := connector.NewKV(layout, [][]byte{from.Region(0), kv.Region(0)})
		require.NoError(t, err)
		copy(slots.View(3, 0), kv.View(3, 1))

		to := connector.Block{Key: b.Key, ID: 5}
		require.NoError(t, h.CopyIn(kv, to, Slot{slots, 0}, mac.Cached), name)
		require.NotEqual(t, kv.View(3, 5), slots.View(3, 0), "they have changed")
		require.NoError(t, h.Check(kv, to), name)
	}
}

// Copy gives the digest of Sum, for every kind and length, and that of what it has written if the source changes meanwhile: here the
// destination overlaps it.
func TestMakerCopy(t *testing.T) {
	random := rand.New(rand.NewPCG(14, 1))
	data := make([]byte, 40_000)
	for i := range data {
		data[i] = byte(random.Uint32())
	}
	for name, h := range hashers() {
		m, err := h.Maker()
		require.NoError(t, err)
		bind := Binding{Key: connector.BlockKey{7}, Layer: 3}
		for n := range 400 {
			size, stores := random.IntN(300), bothStores[n%2]
			if n%4 == 0 {
				size = random.IntN(len(data))
			}
			src := data[random.IntN(len(data)-size+1):][:size]
			room := bytes.Repeat([]byte{9}, size+2)
			require.Equal(t, m.Sum(src, &bind), m.Copy(room[1:size+1], src, n%3 == 0, &bind, stores), "%s, %s, %d bytes", name, stores, size)
			require.True(t, bytes.Equal(src, room[1:size+1]) && room[0] == 9 && room[size+1] == 9, "%s, %s, %d bytes", name, stores, size)
		}
		for _, stores := range bothStores {
			for _, distance := range []int{64, 8192} {
				memory := bytes.Clone(data)
				to := memory[:len(memory)-distance]
				got := m.Copy(to, memory[distance:], true, &bind, stores)
				require.Equal(t, m.Sum(to, &bind), got, "%s, %s, %d bytes apart", name, stores, distance)
				require.True(t, bytes.Equal(data[distance:], to))
			}
		}
	}
}

// A destination that is too short is refused before anything is written, also if there is memory behind it.
func TestMakerCopyNeedsRoom(t *testing.T) {
	for name, h := range hashers() {
		m, err := h.Maker()
		require.NoError(t, err)
		for _, ownsDst := range []bool{false, true} {
			dst, src := make([]byte, 100), bytes.Repeat([]byte{1}, 100)
			require.Panics(t, func() { m.Copy(dst[:99], src, ownsDst, &Binding{}, mac.Cached) }, name)
			require.Equal(t, make([]byte, 100), dst, name)
		}
	}
}

// shifted is a slot whose first segment begins 64 bytes behind where a block's is in the cache, or before it. Its other segments are in memory of
// its own.
func shifted(t testing.TB, kv *connector.KV, id connector.BlockID, by int64) Slot {
	own := slotsOf(t, kv, 1)
	layout := *own.Layout()
	layout.Segments = slices.Clone(layout.Segments)
	first := &kv.Layout().Segments[0]
	layout.Segments[0].Region, layout.Segments[0].Offset = 1, first.Offset+int64(id)*first.BlockStride+by
	slots, err := connector.NewKV(layout, [][]byte{own.Region(0), kv.Region(0)})
	require.NoError(t, err)
	return Slot{slots, 0}
}

// TestCopyInDigestsTheCopy: the slot changes while it is copied, because the copy writes to it. The bytes that came to the cache are those that
// are checked.
func TestCopyInDigestsTheCopy(t *testing.T) {
	for name, h := range hashers() {
		for _, stores := range bothStores {
			for _, of := range []func(testing.TB, uint64) *connector.KV{cache, largeCache} {
				kv := of(t, 17)
				made, to := block(1, 0), connector.Block{Key: block(1, 0).Key, ID: 2}
				require.NoError(t, h.Make(kv, made))
				from := shifted(t, kv, to.ID, 64)
				for _, s := range kv.Segments(0) {
					copy(from.view(s), kv.View(s, made.ID))
				}
				require.NoError(t, h.CopyIn(kv, to, from, stores), "%s, %s", name, stores)
				require.False(t, bytes.Equal(kv.View(0, made.ID), from.view(0)), "the slot has changed")
				require.Equal(t, spans(t, kv, made), spans(t, kv, to), "%s, %s", name, stores)
				require.NoError(t, h.Check(kv, to), "%s, %s", name, stores)
			}
		}
	}
}

// TestCopyOutDigestsWhatItReads: the cache changes while it is copied, because the slot overlaps it. What was read before is in the slot, and is
// what the digests are those of.
func TestCopyOutDigestsWhatItReads(t *testing.T) {
	for name, h := range hashers() {
		for _, stores := range bothStores {
			for _, of := range []func(testing.TB, uint64) *connector.KV{cache, largeCache} {
				kv, want := of(t, 18), of(t, 18)
				b := block(1, 0)
				m, err := h.Maker()
				require.NoError(t, err)
				require.NoError(t, m.Make(want, b))
				to := shifted(t, kv, b.ID, -64)
				require.NoError(t, m.CopyOut(kv, b, kv.Segments(0), to, stores), "%s, %s", name, stores)
				require.False(t, bytes.Equal(want.View(0, b.ID), kv.View(0, b.ID)), "the cache has changed")
				inSlot := b
				inSlot.ID = to.ID
				require.Equal(t, spans(t, want, b), spans(t, to.KV, inSlot), "%s, %s", name, stores)
			}
		}
	}
}

// TestCopyOutDoesNotReadTheSlot: each page of the slot's first segment is the same memory, as if the plugin wrote what was just copied. The
// digests are those of the cache.
func TestCopyOutDoesNotReadTheSlot(t *testing.T) {
	page := os.Getpagesize()
	for name, h := range hashers() {
		for _, stores := range bothStores {
			kv, want := largeCache(t, 19), largeCache(t, 19)
			b := block(1, 0)
			m, err := h.Maker()
			require.NoError(t, err)
			require.NoError(t, m.Make(want, b))
			own := slotsOf(t, kv, 1)
			layout := *own.Layout()
			layout.Segments = slices.Clone(layout.Segments)
			layout.Segments[0].Region, layout.Segments[0].Offset = 1, 0
			slots, err := connector.NewKV(layout, [][]byte{own.Region(0), mapped(t, file(t, 1), make([]int, int(layout.Segments[0].Bytes)/page))})
			require.NoError(t, err)
			require.NoError(t, m.CopyOut(kv, b, kv.Segments(0), Slot{slots, 0}, stores), "%s, %s", name, stores)
			require.False(t, bytes.Equal(want.View(0, b.ID), slots.View(0, 0)), "the slot has changed")
			require.Equal(t, want.Region(0), kv.Region(0), "%s, %s", name, stores)
		}
	}
}

// TestCopyInTrustsOnlyTheCopy: the cache gets other bytes than the slot had at first, because the slot is the same memory under another address,
// one page before. What is checked is what has come to the cache, so the check fails; a digest of the slot made before the copy would be right.
func TestCopyInTrustsOnlyTheCopy(t *testing.T) {
	page := os.Getpagesize()
	for name, h := range hashers() {
		for _, stores := range bothStores {
			source := largeCache(t, 20)
			pages := len(source.Region(0))/page + 1
			order := make([]int, pages)
			for i := range order {
				order[i] = i
			}
			fd := file(t, pages)
			region, again := mapped(t, fd, order), mapped(t, fd, order)
			copy(region, source.Region(0))
			kv, err := connector.NewKV(*source.Layout(), [][]byte{region})
			require.NoError(t, err)
			made, to := block(0, 0), connector.Block{Key: block(0, 0).Key, ID: 2}
			require.NoError(t, h.Make(kv, made))
			own := slotsOf(t, kv, 1)
			layout := *own.Layout()
			layout.Segments = slices.Clone(layout.Segments)
			layout.Segments[0].Region, layout.Segments[0].Offset = 1, 2*layout.Segments[0].Bytes-int64(page)
			slots, err := connector.NewKV(layout, [][]byte{own.Region(0), again})
			require.NoError(t, err)
			for _, s := range kv.Segments(0) {
				copy(slots.View(s, 0), kv.View(s, made.ID))
			}
			require.ErrorIs(t, h.CopyIn(kv, to, Slot{slots, 0}, stores), connector.ErrCorrupt, "%s, %s", name, stores)
			require.False(t, bytes.Equal(kv.View(0, made.ID), kv.View(0, to.ID)), "other bytes have come")
		}
	}
}

// file is one of some pages, in memory.
func file(t testing.TB, pages int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("kvport-digest-test", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Close(fd)) })
	require.NoError(t, unix.Ftruncate(fd, int64(pages*os.Getpagesize())))
	return fd
}

// mapped is memory that consists of pages of a file, in any order.
func mapped(t testing.TB, fd int, order []int) []byte {
	t.Helper()
	size := os.Getpagesize()
	all, err := unix.Mmap(-1, 0, len(order)*size, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(all)) })
	for i, page := range order {
		_, err := unix.MmapPtr(fd, int64(page*size), unsafe.Pointer(&all[i*size]), uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
		require.NoError(t, err)
	}
	return all
}

func TestCopyRefuses(t *testing.T) {
	h, kv := hasher(by("a")), cache(t, 15)
	m, err := h.Maker()
	require.NoError(t, err)
	b := block(1, 0)
	require.NoError(t, m.Make(kv, b))
	before := bytes.Clone(kv.Region(0))
	other := slotsOf(t, kv, 2)
	for name, c := range map[string]struct {
		block connector.Block
		slot  Slot
	}{
		"partial": {connector.Block{ID: 1}, Slot{other, 0}}, "no slot": {b, Slot{other, 2}}, "negative": {b, Slot{other, -1}},
		"other segments": {b, Slot{cacheOfSmall(t), 0}},
	} {
		require.ErrorIs(t, m.CopyOut(kv, c.block, kv.Segments(0), c.slot, mac.Cached), connector.ErrIncompatible, name)
		require.ErrorIs(t, h.CopyIn(kv, c.block, c.slot, mac.Cached), connector.ErrIncompatible, name)
	}
	require.Equal(t, before, kv.Region(0))
	require.Zero(t, bytes.Trim(other.Region(0), "\x00"))
}

func cacheOfSmall(t testing.TB) *connector.KV {
	layout, size := WithSegments(*smallLayout(), 1024)
	kv, err := connector.NewKV(layout, [][]byte{make([]byte, size)})
	require.NoError(t, err)
	return kv
}

// Large loads go past the caches.
func TestStoresForLoad(t *testing.T) {
	for size, want := range map[int64]mac.Stores{0: mac.Cached, 1<<20 - 1: mac.Cached, 1 << 20: mac.NonTemporal, 1 << 30: mac.NonTemporal} {
		require.Equal(t, want, StoresForLoad(size), "%d bytes", size)
	}
}

// Only the segments that are copied must fit, and the digests.
func TestCopyOutChecksWhatItCopies(t *testing.T) {
	h, kv := hasher(by("a")), cache(t, 21)
	m, err := h.Maker()
	require.NoError(t, err)
	layout := *slotsOf(t, kv, 1).Layout()
	layout.Segments = slices.Clone(layout.Segments)
	layout.Segments[1].Bytes--
	layout.Segments[1].BlockStride--
	shorter, err := connector.NewKV(layout, [][]byte{make([]byte, 4096)})
	require.NoError(t, err)
	b, slot := block(1, 0), Slot{shorter, 0}
	require.NoError(t, m.CopyOut(kv, b, []int{0}, slot, mac.Cached))
	require.Equal(t, kv.View(0, 1), shorter.View(0, 0))
	require.ErrorIs(t, m.CopyOut(kv, b, []int{1}, slot, mac.Cached), connector.ErrIncompatible)
	require.ErrorIs(t, m.CopyOut(kv, b, kv.Segments(0), slot, mac.Cached), connector.ErrIncompatible)
	require.ErrorIs(t, h.CopyIn(kv, b, slot, mac.Cached), connector.ErrIncompatible)
}

func TestCopyDoesNotAllocate(t *testing.T) {
	for name, h := range hashers() {
		kv := cache(t, 16)
		m, err := h.Maker()
		require.NoError(t, err)
		slot, b := Slot{slotsOf(t, kv, 1), 0}, block(1, 0)
		require.Zero(t, testing.AllocsPerRun(100, func() {
			if m.CopyOut(kv, b, kv.Segments(0), slot, mac.Cached) != nil || h.CopyIn(kv, b, slot, mac.Cached) != nil {
				t.Error("a copy failed")
			}
		}), name)
	}
}

// Segments are copied in one after the other, and checked by the digests that were copied first, whatever lies in the slot by then.
func TestCopyInByLayers(t *testing.T) {
	for name, h := range hashers() {
		kv := cache(t, 13)
		b, to := block(3, 0), connector.Block{Key: block(3, 0).Key, ID: 5}
		m, err := h.Maker()
		require.NoError(t, err)
		other := slotsOf(t, kv, 1)
		slot, digests := Slot{other, 0}, 3
		require.NoError(t, m.CopyOut(kv, b, kv.Segments(0), slot, mac.Cached))
		require.NoError(t, CopyDigests(kv, to, slot))
		require.NoError(t, h.CopySegments(kv, to, []int{0}, slot, mac.Cached), name)
		clear(other.View(digests, 0))
		require.NoError(t, h.CopySegments(kv, to, []int{1, digests}, slot, mac.Cached), name)
		require.NoError(t, h.Check(kv, to), name)
		require.Equal(t, spans(t, kv, b), spans(t, kv, to), name)
		other.View(1, 0)[0] ^= 1
		require.ErrorIs(t, h.CopySegments(kv, to, []int{1, digests}, slot, mac.Cached), connector.ErrCorrupt, name)
	}
}
