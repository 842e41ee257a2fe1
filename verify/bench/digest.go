package bench

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/mac"
)

// DigestOptions say what Digest works with.
type DigestOptions struct {
	Quick bool // a few rounds, to see that it works
	Emit  Emit
}

// The size of a measurement of digests.
const (
	digestWork    = 4 << 20  // bytes that each way covers in its turn, at least
	digestBuffer  = 64 << 20 // more than a core's share of the caches
	digestContext = 96       // bytes, as many as digests are bound to
)

// digester computes a digest of data. The pieces of a message come one after the other.
type digester struct {
	name  string
	sum   func(data []byte)
	begin func()
	add   func(piece []byte)
	end   func()
	copy  func(dst, src []byte, stores mac.Stores) // in one pass; set only for the keyed digester
}

// hashing makes and checks digests of an engine with one rank: of edition 2, or of edition 1.
func hashing(model, shape connector.Fingerprint, keyed bool) *digest.Hasher {
	keys := digest.XXH3()
	if keyed {
		keys = digest.Keyed(keyring.Fixed(keyring.Of(make([]byte, 32))), nil)
	}
	return digest.New(keys, model, shape, connector.Shard{World: 1})
}

// digesters are the digests of package digest, the unkeyed one first and the keyed one last, and what else could have been the keyed one.
func digesters() ([]digester, error) {
	var model, shape connector.Fingerprint
	plain, err := hashing(model, shape, false).Maker()
	if err != nil {
		return nil, err
	}
	keyed, err := hashing(model, shape, true).Maker()
	if err != nil {
		return nil, err
	}
	key, block := mac.Key{1}, make([]byte, digestContext)
	hash, code := xxh3.New(), hmac.New(sha256.New, key[:])
	all := []digester{
		{
			name: "XXH3-128", sum: func(data []byte) { plain.Sum(data, &digest.Binding{}) },
			begin: hash.Reset, add: func(piece []byte) { _, _ = hash.Write(piece) }, end: func() { hash.Sum128() },
		},
		{name: "HMAC-SHA256", sum: func(data []byte) {
			code.Reset()
			code.Write(block)
			code.Write(data)
			code.Sum(nil)
		}},
	}
	for _, m := range []struct {
		name string
		*mac.MAC
	}{{"AEGIS-128L", mac.NewL(&key)}, {"AEGIS-128X2", mac.New(&key)}} {
		var h mac.Hash
		var tag [mac.Size]byte
		name := fmt.Sprintf("%s (%s)", m.name, mac.Implementation())
		all = append(all, digester{
			name: name, sum: func(data []byte) { m.Sum(&tag, block, data) },
			begin: func() { m.Begin(&h, block) }, add: h.Add, end: func() { h.Sum(&tag) },
		})
	}
	last := &all[len(all)-1]
	last.sum = func(data []byte) { keyed.Sum(data, &digest.Binding{}) }
	last.copy = func(dst, src []byte, stores mac.Stores) { keyed.Copy(dst, src, true, &digest.Binding{}, stores) }
	return all, nil
}

// digesting is one measurement of digests.
type digesting struct {
	DigestOptions
	digesters []digester
	from, to  []byte // of digestBuffer bytes
}

// Digest measures, on one core and by its time, the digests of bytes that the cache holds beside XXH3-128, and a copy that is digested
// in one pass or several beside the copy alone.
func Digest(ctx context.Context, o DigestOptions) error {
	runtime.LockOSThread() // whose time is measured
	defer runtime.UnlockOSThread()
	list, err := digesters()
	if err != nil {
		return err
	}
	d := &digesting{DigestOptions: o, digesters: list, from: make([]byte, digestBuffer), to: make([]byte, digestBuffer)}
	fill(d.from)
	fill(d.to)
	for _, size := range []int{64, 24 << 10, 1 << 20, 8 << 20} {
		if err := d.bare(ctx, size); err != nil {
			return err
		}
	}
	for _, size := range []int{24 << 10, 1 << 20, 8 << 20} {
		for _, span := range []int{size, digestBuffer} {
			if err := d.fused(ctx, size, span); err != nil {
				return err
			}
		}
	}
	return nil
}

// digestWay is one way to treat size bytes that begin at an offset of the buffers.
type digestWay struct {
	name string
	run  func(from, to []byte)
	budget
}

// bare compares digests of the same bytes, and a copy of them, with XXH3-128.
func (d *digesting) bare(ctx context.Context, size int) error {
	var ways []digestWay
	for _, s := range d.digesters {
		ways = append(ways, digestWay{name: s.name, run: func(from, _ []byte) { s.sum(from) }})
	}
	if size > digestContext { // less is all context
		ways[len(ways)-1].budget = atLeast(0.5)
	}
	ways = append(ways, digestWay{name: "copy", run: func(from, to []byte) { copy(to, from) }})
	return d.compare(ctx, "digest "+byteSize(size), size, size, ways)
}

// fused compares a copy that is digested in the same pass, one whose pieces are digested at once, and one that is digested as a whole, with
// the copy alone. Blocks of size bytes come one after the other out of the first span bytes of the buffers. Rows in one
// pass are named after what a host copies so: a save goes through the caches, and a load of 1 MiB or more in all past them. Both have the budget.
// A load is measured only with cold blocks, as those are that an engine has not used for a while.
func (d *digesting) fused(ctx context.Context, size, span int) error {
	ways := []digestWay{{name: "alone", run: func(from, to []byte) { copy(to, from) }}}
	for _, s := range d.digesters {
		if s.begin == nil {
			continue
		}
		ways = append(ways, digestWay{name: s.name + " after all", run: func(from, to []byte) {
			copy(to, from)
			s.sum(to)
		}})
		for _, piece := range []int{4 << 10, 16 << 10} {
			way := digestWay{name: fmt.Sprintf("%s in %s", s.name, byteSize(piece)), run: func(from, to []byte) {
				s.begin()
				for at := 0; at < size; at += piece {
					end := min(at+piece, size)
					copy(to[at:end], from[at:end])
					s.add(to[at:end])
				}
				s.end()
			}}
			ways = append(ways, way)
		}
	}
	where, last := "hot", d.digesters[len(d.digesters)-1]
	onePass := func(move string, stores mac.Stores) digestWay {
		return digestWay{name: last.name + " in one pass, " + move, budget: atLeast(0.8), run: func(from, to []byte) { last.copy(to, from, stores) }}
	}
	ways = append(ways, onePass("save", mac.Cached))
	if span > size {
		where = "cold"
		ways = append(ways, onePass("load", digest.StoresForLoad(digestBuffer)))
	}
	return d.compare(ctx, fmt.Sprintf("copy %s, %s", byteSize(size), where), size, span, ways)
}

// compare emits the speed of each way beside the first one, and between what the ratio of all rounds is said to be.
func (d *digesting) compare(ctx context.Context, name string, size, span int, ways []digestWay) error {
	count := max(1, digestWork/size)
	var runs []func(int) error
	at := 0 // of all ways, so that none finds in a cache what the one before it has read
	for _, way := range ways {
		runs = append(runs, func(int) error {
			for range count {
				way.run(d.from[at:at+size], d.to[at:at+size])
				if at += size; at+size > span {
					at = 0
				}
			}
			return nil
		})
	}
	t := turns{few: 41, clock: threadTime}
	if d.Quick {
		t.few, t.budget = 2, 1
	}
	rounds, err := t.rounds(ctx, runs...)
	if err != nil {
		return err
	}
	for i, way := range ways {
		ratios := make([]float64, len(rounds[i]))
		for round, time := range rounds[i] {
			ratios[round] = float64(rounds[0][round]) / float64(time)
		}
		low, median, high := medianInterval(ratios)
		value, limit := slices.Clone(rounds[i]), slices.Clone(rounds[0])
		slices.Sort(value)
		slices.Sort(limit)
		row := faster(name+", "+way.name, int64(size), value.speed(int64(size*count)), limit.speed(int64(size*count)), "GB/CPU-s")(way.budget)
		if i > 0 {
			row.judge(median, way.budget)
		}
		list := []Row{row} // the first one's ratio is 1
		if i > 0 {
			list = row.Between(median, low, high)
		}
		if err := d.Emit.all(list); err != nil {
			return err
		}
	}
	return nil
}

// medianInterval is the median of ratios, and between what the median of all that could have been is, with a probability of at least
// 95 %: each ratio is above that or below, as a coin falls, whose standard deviation is half the root of their number.
func medianInterval(ratios []float64) (low, median, high float64) {
	slices.Sort(ratios)
	n := len(ratios)
	left := max(0, int(float64(n)/2-0.98*math.Sqrt(float64(n)))-1)
	return ratios[left], (ratios[(n-1)/2] + ratios[n/2]) / 2, ratios[n-1-left]
}

// threadTime is what this thread has computed so far.
func threadTime() time.Duration { return clockTime(unix.CLOCK_THREAD_CPUTIME_ID) }

// clockTime is the processor time that a clock shows: that of a thread, of this process or of another.
func clockTime(clock int32) time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(clock, &now); err != nil {
		return 0
	}
	return time.Duration(now.Nano())
}

// byteSize is a size for people.
func byteSize(n int) string {
	switch {
	case n >= 1<<20:
		return fmt.Sprintf("%d MB", n>>20)
	case n >= 1<<10:
		return fmt.Sprintf("%d KB", n>>10)
	}
	return fmt.Sprintf("%d bytes", n)
}
