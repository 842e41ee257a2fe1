package tier

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
)

const blockBytes = 1000

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// item is a block of three spans whose bytes say which one it is, and which version.
func item(n uint64, version byte) connector.Item {
	data := content(n, version)
	return connector.Item{Key: storeKey(n), Spans: [][]byte{data[:400:400], data[400:984:984], data[984:]}}
}

func content(n uint64, version byte) []byte {
	data := make([]byte, blockBytes)
	rng := rand.New(rand.NewPCG(n, uint64(version)))
	for i := 0; i < blockBytes; i += 8 {
		binary.LittleEndian.PutUint64(data[i:], rng.Uint64())
	}
	return data
}

// empty is an item to be filled.
func empty(n uint64) connector.Item {
	it := item(n, 0)
	for _, s := range it.Spans {
		clear(s)
	}
	return it
}

// got is what an item holds.
func got(it connector.Item) (data []byte) {
	for _, s := range it.Spans {
		data = append(data, s...)
	}
	return data
}

func open(t *testing.T, o Options) *Store {
	t.Helper()
	if o.SlotBytes == 0 {
		o.SlotBytes = blockBytes
	}
	s, err := Open(o)
	require.NoError(t, err)
	return s
}

func disk(t *testing.T, path string, slots int) *Disk {
	t.Helper()
	d, err := OpenDisk(DiskOptions{Path: path, Bytes: ArenaBytes(slots, blockBytes+LowerHeader), SlotBytes: blockBytes + LowerHeader})
	require.NoError(t, err)
	require.Equal(t, slots, d.Slots())
	return d
}

func puts(t *testing.T, s connector.Store, ns ...uint64) {
	t.Helper()
	for _, n := range ns {
		require.NoError(t, s.Put(t.Context(), []connector.Item{item(n, 0)}))
	}
}

func gets(t *testing.T, s connector.Store, n uint64) error {
	t.Helper()
	it := empty(n)
	err := s.Get(t.Context(), []connector.Item{it})
	if err == nil {
		require.Equal(t, content(n, 0), got(it), "block %d", n)
	}
	return err
}

func present(t *testing.T, s connector.Store, n uint64) bool {
	t.Helper()
	found, err := s.Lookup(t.Context(), [][]connector.StoreKey{{storeKey(n)}})
	require.NoError(t, err)
	return found[0] == 1
}

func upTo(n uint64) (ns []uint64) {
	for i := range n {
		ns = append(ns, i)
	}
	return ns
}

func TestSlotsFit(t *testing.T) {
	for _, n := range []int{1, 7, 31, 32, 33, 1000} {
		for _, size := range []int64{1, 63, 64, 65, 1000, 1 << 20} {
			require.Equal(t, n, fit(need(n, size), size).slots)
			require.Equal(t, n-1, fit(need(n, size)-1, size).slots)
		}
	}
	require.Zero(t, fit(-5, 10).slots)
}

func TestOptionsAreChecked(t *testing.T) {
	good := Options{SlotBytes: 10, MemoryBytes: 1 << 20}
	require.NoError(t, good.Validate())
	for name, change := range map[string]func(*Options){
		"block": func(o *Options) { o.SlotBytes = 0 }, "memory": func(o *Options) { o.MemoryBytes = 0 }, "small": func(o *Options) { o.MemoryBytes = 100 },
		"policy": func(o *Options) { o.Policy = "random" }, "threshold": func(o *Options) { o.StoreThreshold = 256 },
		"ttl": func(o *Options) { o.TTL = -1 }, "admit": func(o *Options) { o.AdmitAfter = -1 }, "share": func(o *Options) { o.PinShare = 0.9 },
	} {
		o := good
		change(&o)
		_, err := Open(o)
		require.ErrorIs(t, err, connector.ErrIncompatible, name)
	}
}

// A new process takes over what is whole, in the order of writing, and nothing else.
func TestArenaOutlivesTheStore(t *testing.T) {
	arena := make([]byte, ArenaBytes(8, blockBytes))
	s := open(t, Options{Memory: arena})
	puts(t, s, upTo(7)...)
	require.NoError(t, gets(t, s, 0))
	require.NoError(t, s.Put(t.Context(), []connector.Item{{Key: storeKey(3), Replace: true, Spans: [][]byte{content(3, 0)}}}))
	require.NoError(t, s.Close())

	s = open(t, Options{Memory: arena})
	mem, _ := s.Counts()
	require.EqualValues(t, 7, mem.Adopted)
	require.Zero(t, mem.Torn)
	for n := range uint64(7) {
		require.NoError(t, gets(t, s, n))
	}
	puts(t, s, 100, 101)
	require.False(t, present(t, s, 0), "all were loaded once, in this order")
	require.NoError(t, s.Close())

	s = open(t, Options{Memory: arena, SlotBytes: blockBytes / 2})
	mem, _ = s.Counts()
	require.Zero(t, mem.Adopted, "slots of another size hold nothing")
}

// Whatever happens to a header or to the order of its writing, a slot is served whole or not at all.
func TestTornSlotsAreNotServed(t *testing.T) {
	fresh := func() ([]byte, *Store) {
		arena := make([]byte, ArenaBytes(4, blockBytes))
		s := open(t, Options{Memory: arena})
		puts(t, s, upTo(4)...)
		return arena, s
	}
	arena, s := fresh()
	f, known, wait, err := s.memory.begin(item(9, 0), blockBytes, 0) // dies in the middle of writing
	require.NoError(t, err)
	require.False(t, known)
	require.Nil(t, wait)
	copy(f.slot, content(9, 0)[:500])
	s = open(t, Options{Memory: arena})
	mem, _ := s.Counts()
	require.EqualValues(t, 3, mem.Adopted)
	require.EqualValues(t, 1, mem.Torn)
	require.False(t, present(t, s, 9))
	require.False(t, present(t, s, 0), "its slot was given to the block that was begun")

	rng := rand.New(rand.NewPCG(7, 0))
	torn := 0
	for range 300 {
		arena, _ := fresh()
		at := superSize + rng.IntN(4*headerSize)
		arena[at] ^= 1 << rng.IntN(8)
		s := open(t, Options{Memory: arena})
		mem, _ := s.Counts()
		torn += int(mem.Torn)
		for n := range uint64(4) {
			if present(t, s, n) {
				require.NoError(t, gets(t, s, n))
			}
		}
	}
	t.Logf("300 flipped bits in headers: %d met a slot, 0 served wrong bytes", torn)
	require.Greater(t, torn, 100)
}

func TestHeaderDamagedWhileOpen(t *testing.T) {
	arena := make([]byte, ArenaBytes(4, blockBytes))
	s := open(t, Options{Memory: arena})
	puts(t, s, 1)
	id := s.memory.index.entry(storeKey(1))
	arena[superSize+headerSize*int(id)+20] ^= 1
	require.ErrorIs(t, gets(t, s, 1), connector.ErrCorrupt)
	require.False(t, present(t, s, 1))
	puts(t, s, 1)
	require.NoError(t, gets(t, s, 1))
}

func TestQuotaThresholdAndPins(t *testing.T) {
	s := open(t, Options{MemoryBytes: ArenaBytes(20, blockBytes), TenantBytes: 2 * blockBytes, StoreThreshold: 2, PinAfter: 2})
	put := func(n, tenant uint64) error {
		it := item(n, 0)
		it.Tenant = tenant
		return s.Put(t.Context(), []connector.Item{it})
	}
	require.ErrorIs(t, put(1, 5), ErrThreshold)
	require.NoError(t, put(1, 5))
	_ = put(2, 5)
	require.NoError(t, put(2, 5))
	_ = put(3, 5)
	err := put(3, 5)
	require.ErrorIs(t, err, ErrQuota)
	require.ErrorIs(t, err, connector.ErrDeclined)
	var over *QuotaError
	require.ErrorAs(t, err, &over)
	require.Equal(t, QuotaError{Tenant: 5, Used: 2 * blockBytes, Limit: 2 * blockBytes}, *over)
	var items *connector.ItemError
	require.ErrorAs(t, err, &items)
	require.Equal(t, []int{0}, items.Items)
	for range 2 {
		require.NoError(t, gets(t, s, 1))
	}
	for n := range uint64(100) { // of others
		_ = put(100+n, 1000+n)
		require.NoError(t, put(100+n, 1000+n))
	}
	require.True(t, present(t, s, 1), "it was loaded twice")
	require.False(t, present(t, s, 2))
	require.NoError(t, put(3, 5), "what was evicted counts no more")
	mem, _ := s.Counts()
	require.EqualValues(t, 1, mem.NoQuota)
	require.EqualValues(t, 103, mem.BelowThreshold)
}

// What one call has stored it does not evict.
func TestPutLargerThanMemory(t *testing.T) {
	s := open(t, Options{MemoryBytes: ArenaBytes(4, blockBytes)})
	var items []connector.Item
	for n := range uint64(10) {
		items = append(items, item(n, 0))
	}
	var failed *connector.ItemError
	require.ErrorAs(t, s.Put(t.Context(), items), &failed)
	require.ErrorIs(t, failed, ErrPinned)
	require.Equal(t, []int{4, 5, 6, 7, 8, 9}, failed.Items)
	for n := range uint64(4) {
		require.NoError(t, gets(t, s, n))
	}
	require.ErrorIs(t, s.Put(t.Context(), []connector.Item{{Key: storeKey(50), Spans: [][]byte{make([]byte, blockBytes+1)}}}), connector.ErrIncompatible)
	require.ErrorIs(t, s.Get(t.Context(), []connector.Item{{Key: storeKey(0), Spans: [][]byte{make([]byte, 10)}}}), connector.ErrIncompatible)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, s.Put(ctx, []connector.Item{item(70, 0)}), context.Canceled)
	require.False(t, present(t, s, 70))
}

// TestPutKeepsWhatWasThere: a Put acknowledges a block that is there already, so the rest of the same Put does not push it out.
func TestPutKeepsWhatWasThere(t *testing.T) {
	for _, policy := range []string{LRU, ARC, S3FIFO} {
		s := open(t, Options{MemoryBytes: ArenaBytes(8, blockBytes), Policy: policy})
		puts(t, s, 0)
		items := make([]connector.Item, 9)
		for i := range items {
			items[i] = item(uint64(i), 0) //nolint:gosec // not negative
		}
		err := s.Put(t.Context(), items)
		declined, is := errors.AsType[*connector.ItemError](err)
		require.True(t, is, "%s: %v", policy, err)
		require.ErrorIs(t, err, ErrPinned)
		require.Equal(t, []int{8}, declined.Items, policy)
		for _, it := range items[:8] {
			require.True(t, s.Has(it.Key), policy)
		}
		puts(t, s, 8) // and nothing stays pinned
		require.True(t, s.Has(storeKey(8)))
		require.NoError(t, s.Close())
	}
}

func TestTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		arena := make([]byte, ArenaBytes(4, blockBytes))
		d, err := OpenDisk(DiskOptions{Path: t.TempDir(), Bytes: ArenaBytes(16, blockBytes+LowerHeader), SlotBytes: blockBytes + LowerHeader, TTL: true})
		require.NoError(t, err)
		o := Options{Memory: arena, TTL: time.Minute, Lower: d, AdmitAfter: 1}
		s := open(t, o)
		puts(t, s, 1)
		<-time.After(40 * time.Second)
		puts(t, s, 2, 3, 4, 5, 6) // 1 is on disk only
		require.NoError(t, s.Flush(t.Context()))
		require.NoError(t, gets(t, s, 1), "and in memory again")
		<-time.After(30 * time.Second)
		require.ErrorIs(t, gets(t, s, 1), connector.ErrGone)
		require.NoError(t, gets(t, s, 6))
		puts(t, s, 1)
		require.NoError(t, s.Flush(t.Context()))
		puts(t, s, 11, 12, 13, 14)
		require.NoError(t, gets(t, s, 1), "the new one has replaced the old one on disk")
		<-time.After(time.Hour)
		require.False(t, present(t, s, 14))
		require.NoError(t, s.Close())
		mem := newCounters(t, arena)
		require.Zero(t, mem.Adopted)
	})
}

func newCounters(t *testing.T, arena []byte) Stats {
	t.Helper()
	mem, _ := open(t, Options{Memory: arena}).Counts()
	return mem
}

func TestDiskKeepsWhatMemoryGivesUp(t *testing.T) {
	path := t.TempDir()
	d := disk(t, path, 64)
	s := open(t, Options{MemoryBytes: ArenaBytes(8, blockBytes), Lower: d, AdmitAfter: 1, SameSize: true, Prefetch: 4})
	for n := range uint64(40) {
		puts(t, s, n)
		require.NoError(t, s.Flush(t.Context()))
	}
	run := make([]connector.StoreKey, 40)
	for n := range run {
		run[n] = storeKey(uint64(n))
	}
	found, err := s.Lookup(t.Context(), [][]connector.StoreKey{run, run[5:9], {storeKey(99)}})
	require.NoError(t, err)
	require.Equal(t, []int{40, 4, 0}, found)
	for n := range uint64(40) {
		require.NoError(t, gets(t, s, n))
	}
	_, lower := s.Counts()
	require.Positive(t, lower.Prefetches)
	require.EqualValues(t, 40, lower.WriteBacks, "what came from disk is not written again")
	require.NoError(t, s.Close())

	d = disk(t, path, 64)
	require.EqualValues(t, 40, d.Counts().Adopted)
	other := disk(t, path, 64)
	require.Zero(t, other.Counts().Adopted, "the file has a user: this is another one")
	require.NoError(t, other.Close())
	for n := range uint64(40) {
		it := connector.Item{Key: storeKey(n), Spans: [][]byte{make([]byte, LowerHeader), make([]byte, blockBytes)}}
		require.NoError(t, d.Get(t.Context(), []connector.Item{it}))
		require.Equal(t, content(n, 0), it.Spans[1])
	}
	require.NoError(t, d.Close())
}

func TestAdmission(t *testing.T) {
	d := disk(t, t.TempDir(), 64)
	s := open(t, Options{MemoryBytes: ArenaBytes(8, blockBytes), Lower: d})
	puts(t, s, upTo(20)...)
	require.NoError(t, s.Flush(t.Context()))
	require.Zero(t, d.Counts().Stored, "nothing was used twice")
	require.NoError(t, gets(t, s, 19))
	puts(t, s, 3) // it was evicted and computed again
	require.NoError(t, s.Flush(t.Context()))
	require.EqualValues(t, 2, d.Counts().Stored)
	require.NoError(t, s.Close())
}

// Damage, cuts, errors and a full disk cost blocks, are counted, and never give wrong bytes.
func TestDiskFaults(t *testing.T) {
	path := t.TempDir()
	fill := func() (*Store, *Disk) {
		d := disk(t, path, 64)
		s := open(t, Options{MemoryBytes: ArenaBytes(2, blockBytes), Lower: d, AdmitAfter: 1})
		for n := range uint64(30) {
			require.NoError(t, s.Put(t.Context(), []connector.Item{item(n, 0)}))
			require.NoError(t, s.Flush(t.Context()))
		}
		return s, d
	}
	rng := rand.New(rand.NewPCG(11, 0))
	damaged := 0
	for range 20 {
		s, d := fill()
		data, err := os.ReadFile(filepath.Join(path, "tier-0.kv"))
		require.NoError(t, err)
		for range 10 {
			data[superSize+rng.IntN(len(data)-superSize)] ^= 1 << rng.IntN(8)
		}
		require.NoError(t, os.WriteFile(filepath.Join(path, "tier-0.kv"), data, 0o600))
		for n := range uint64(30) {
			if gets(t, s, n) != nil {
				damaged++
				require.False(t, present(t, s, n), "what is damaged is forgotten")
			}
		}
		require.Equal(t, damaged > 0, d.Counts().Corrupt+uint64(damaged) > 0)
		require.NoError(t, s.Close())
	}
	t.Logf("200 flipped bits: %d blocks lost, 0 wrong", damaged)
	require.Greater(t, damaged, 50)

	s, d := fill()
	require.NoError(t, os.Truncate(filepath.Join(path, "tier-0.kv"), 40000))
	for n := range uint64(30) {
		_ = gets(t, s, n)
	}
	require.Positive(t, d.Counts().Corrupt)
	d.readAt = func([]byte, int64) (int, error) { return 0, syscall.EIO }
	puts(t, s, 200)
	require.NoError(t, s.Flush(t.Context()))
	puts(t, s, 201, 202)
	require.ErrorIs(t, gets(t, s, 200), connector.ErrGone)
	require.Positive(t, d.Counts().Errors)

	require.NoError(t, s.Flush(t.Context())) // nobody is inside writeAt when it is replaced
	calls := 0
	d.writeAt = func([]byte, int64) (int, error) { calls++; return 0, syscall.ENOSPC }
	for n := range uint64(20) {
		puts(t, s, 300+n)
		require.NoError(t, s.Flush(t.Context()))
		require.NoError(t, gets(t, s, 300+n), "memory has it")
	}
	require.LessOrEqual(t, calls, 20, "a full disk is left alone for a while")
	require.NoError(t, s.Close())
}

func TestDiskStopsInTheMiddleOfAWrite(t *testing.T) {
	path := t.TempDir()
	d := disk(t, path, 4)
	for n := range uint64(4) {
		require.NoError(t, d.Put(t.Context(), []connector.Item{item(n, 0)}))
	}
	n, write := 0, d.writeAt
	d.writeAt = func(b []byte, at int64) (int, error) {
		if n++; n > 3 { // the victim's header, then two of three spans
			return 0, syscall.EIO
		}
		return write(b, at)
	}
	require.Error(t, d.Put(t.Context(), []connector.Item{item(50, 0)}))
	require.NoError(t, d.Close())
	d = disk(t, path, 4)
	require.EqualValues(t, 3, d.Counts().Adopted)
	for n := uint64(1); n < 4; n++ {
		require.NoError(t, gets(t, d, n))
	}
	require.ErrorIs(t, gets(t, d, 50), connector.ErrGone)
	require.NoError(t, d.Close())
}

func TestReset(t *testing.T) {
	path := t.TempDir()
	arena := make([]byte, ArenaBytes(8, blockBytes))
	s := open(t, Options{Memory: arena, Lower: disk(t, path, 64), AdmitAfter: 1, SameSize: true, Prefetch: 8})
	puts(t, s, upTo(30)...)
	var wg sync.WaitGroup
	for w := range uint64(2) { // calls under way end first
		wg.Go(func() {
			for n := range uint64(200) {
				_ = s.Put(t.Context(), []connector.Item{item(1000*(w+1)+n, 0)})
			}
		})
	}
	emptied, err := s.Reset(t.Context())
	require.NoError(t, err)
	require.True(t, emptied)
	for n := range uint64(30) {
		require.False(t, present(t, s, n))
	}
	wg.Wait()
	_, err = s.Reset(t.Context())
	require.NoError(t, err)
	require.NoError(t, s.Close())
	require.Zero(t, newCounters(t, arena).Adopted)
	d := disk(t, path, 64)
	require.Zero(t, d.Counts().Adopted)
	require.NoError(t, d.Close())
}

// A fresh arena is not touched to its end when it is opened: pages that nobody uses take no memory and no time.
func TestFreshArenaIsNotTouched(t *testing.T) {
	mem := make([]byte, 1<<20)
	mem[len(mem)-1] = 7
	last := fit(int64(len(mem)), 4096).headerAt(100)
	mem[last] = 7
	_, _, _, err := openArena(mem, 4096, nil)
	require.NoError(t, err)
	require.EqualValues(t, 7, mem[last])
	mem[100] = 1 // somebody has used it
	_, _, _, err = openArena(mem[:len(mem)-4096], 4096, nil)
	require.NoError(t, err)
	require.Zero(t, mem[last])
}

// A disk tier that can never have its room is refused in words that name the field, before its index is made.
func TestDiskThatDoesNotFit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "to", "be made")
	_, err := OpenDisk(DiskOptions{Path: path, Field: "disk_bytes", Bytes: 100 << 40, SlotBytes: 1 << 20})
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "disk_bytes is 109951162777600 bytes, the file system of "+path+" has ")
	require.ErrorContains(t, err, " free: set it lower")
	require.NoDirExists(t, path)

	d := &Disk{o: DiskOptions{Path: path, Field: "disk_bytes", Bytes: 1 << 30, Log: slog.New(slog.DiscardHandler)}, shape: fit(1<<30, 4096)}
	require.NoError(t, d.fits(int64(d.slots)*entryBytes))
	err = d.fits(int64(d.slots)*entryBytes - 1)
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, fmt.Sprintf("disk_bytes is 1073741824 bytes: the index of %d blocks of 4096 bytes takes %d bytes of memory, this machine has free %d: set it lower",
		d.slots, d.slots*entryBytes, d.slots*entryBytes-1))
}

// TestPutReplacesOtherKeys: a block that is there and was made with another key is written again, in memory and below.
func TestPutReplacesOtherKeys(t *testing.T) {
	marked := func(key byte) connector.Item {
		it := item(1, 0)
		copy(it.Spans[2], []byte{2, 0, 0, 0, 0, 0, 0, 0, key, 2, 3, 4, 5, 6, 7, 8})
		return it
	}
	path := t.TempDir()
	for n := range byte(3) { // a new store of the same folder each time
		d := disk(t, path, 8)
		s := open(t, Options{MemoryBytes: 1 << 16, Lower: d, AdmitAfter: 1, Digests: map[int]int{blockBytes: len(marked(1).Spans[2])}})
		for _, key := range []byte{2 * n, 2 * n, 2*n + 1} {
			require.NoError(t, s.Put(t.Context(), []connector.Item{marked(key)}))
			require.NoError(t, s.Flush(t.Context()))
			for _, from := range []connector.Store{s, lowerOf(d)} {
				it := empty(1)
				require.NoError(t, from.Get(t.Context(), []connector.Item{it}))
				require.Equal(t, got(marked(key)), got(it), "%T", from)
			}
		}
		memory, _ := s.Counts()
		require.Equal(t, uint64(1), memory.Known)
		require.NoError(t, s.Close())
	}
}

// lowerOf reads what the tier above has written.
func lowerOf(d *Disk) connector.Store { return withoutHead{d} }

type withoutHead struct{ *Disk }

func (w withoutHead) Get(ctx context.Context, items []connector.Item) error {
	for _, it := range items {
		it.Spans = append([][]byte{make([]byte, LowerHeader)}, it.Spans...)
		if err := w.Disk.Get(ctx, []connector.Item{it}); err != nil {
			return err
		}
	}
	return nil
}

// sizes is a tier below that notes how large its blocks are.
type sizes struct {
	connector.Store
	mu   sync.Mutex
	seen map[int]int
}

func (s *sizes) Put(_ context.Context, items []connector.Item) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, it := range items {
		s.seen[it.Size()]++
	}
	return nil
}

func (s *sizes) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	return make([]int, len(runs)), nil
}

func (s *sizes) Close() error { return nil }

// A block that is replaced while it is written to the tier below is written whole: its header is read when it is pinned, since its
// slot's header says nothing any more once another slot has the key.
func TestReplacedWhileItIsWrittenBelow(t *testing.T) {
	s := open(t, Options{MemoryBytes: ArenaBytes(4, blockBytes), Lower: &sizes{seen: map[int]int{}}, AdmitAfter: 2})
	puts(t, s, 1)
	id, h, err := s.memory.acquire(storeKey(1), -1, false)
	require.NoError(t, err)
	again := item(1, 1)
	again.Replace = true
	require.NoError(t, s.Put(t.Context(), []connector.Item{again}))
	_, valid := s.memory.header(id)
	require.False(t, valid)
	require.Equal(t, uint32(blockBytes), h.Length)
	require.Equal(t, content(1, 0), s.memory.block(id, int(h.Length)))
	s.memory.index.Release(id)
	require.NoError(t, s.Close())

	lower := &sizes{seen: map[int]int{}}
	s = open(t, Options{MemoryBytes: ArenaBytes(4, blockBytes), Lower: lower, AdmitAfter: 1})
	for n := range 3000 {
		again := item(1, byte(n))
		again.Replace = true
		require.NoError(t, s.Put(t.Context(), []connector.Item{again}))
	}
	require.NoError(t, s.Close())
	require.Len(t, lower.seen, 1)
	require.Positive(t, lower.seen[blockBytes+LowerHeader])
}
