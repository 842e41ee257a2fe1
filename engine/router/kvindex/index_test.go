package kvindex

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvport/kvport/engine/kvevents"
)

// secret makes what a test does the same in every run.
func secret() *[2]uint64 { return &[2]uint64{0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9} }

// hashed is an engine's hash of some text.
func hashed(text string) kvevents.Hash { return kvevents.BytesHash([]byte(text)) }

// chain are the events of a prompt's blocks, as an engine that names blocks by their place would tell.
func chain(name string, size int, tokens []int32) kvevents.Event {
	ev := kvevents.Event{Kind: kvevents.Stored, BlockSize: size, Medium: kvevents.GPU}
	for i := size; i <= len(tokens); i += size {
		ev.Hashes = append(ev.Hashes, hashed(fmt.Sprint(name, i)))
	}
	ev.Tokens = tokens[:len(ev.Hashes)*size]
	return ev
}

func removed(medium string, hashes ...kvevents.Hash) kvevents.Event {
	return kvevents.Event{Kind: kvevents.Removed, Hashes: hashes, Medium: medium}
}

func apply(x *Index, number int, events ...kvevents.Event) Result { return x.Apply(number, events) }

func count(n int) []int32 {
	list := make([]int32, n)
	for i := range list {
		list[i] = int32(i)
	}
	return list
}

func TestPrefix(t *testing.T) {
	x := New(Config{})
	require.Empty(t, x.Prefix(&Prompt{Tokens: count(8)}))
	require.Equal(t, Result{Stored: 4}, apply(x, 3, chain("a", 4, count(16))))
	require.Equal(t, Result{Stored: 1}, apply(x, 70, chain("b", 8, count(8))))
	require.Equal(t, 5, x.Blocks())
	ask := func(n int) []Held { return x.Prefix(&Prompt{Tokens: count(n)}) }
	require.Empty(t, ask(3))
	require.Equal(t, []Held{{3, 4, 4, 4, 0}}, ask(7))
	require.Equal(t, []Held{{3, 16, 16, 16, 0}, {70, 8, 8, 8, 0}}, ask(100), "engines with blocks of other sizes agree")
	require.Empty(t, x.Prefix(&Prompt{Tokens: count(100)[1:]}))

	// A block in the middle goes, and what is behind it is of no use.
	require.Equal(t, Result{Removed: 1}, apply(x, 3, removed(kvevents.GPU, hashed("a8"))))
	require.Equal(t, []Held{{3, 4, 4, 4, 0}, {70, 8, 8, 8, 0}}, ask(100))
	require.Equal(t, Result{}, apply(x, 3, removed(kvevents.GPU, hashed("a8"), hashed("z"))))
	again := chain("a", 4, count(16))
	again.Hashes, again.Tokens, again.Parent = again.Hashes[1:2], again.Tokens[4:8], hashed("a4")
	require.Equal(t, Result{Stored: 1}, apply(x, 3, again))
	require.Equal(t, []Held{{3, 16, 16, 16, 0}, {70, 8, 8, 8, 0}}, ask(100))

	require.Equal(t, Result{Removed: 4}, apply(x, 3, kvevents.Event{Kind: kvevents.Cleared}))
	require.Equal(t, []Held{{70, 8, 8, 8, 0}}, ask(100))
	require.Equal(t, 1, x.Forget(70))
	require.Zero(t, x.Forget(70))
	require.Zero(t, x.Blocks())
	require.Empty(t, ask(100))
	require.Equal(t, Result{}, x.Apply(Instances, []kvevents.Event{chain("a", 4, count(16))}))
	require.Zero(t, x.Forget(-1))
}

// What is in the engine's own cache, beside it and in a remote store counts apart. What is remote counts by itself, too, from
// the first token on: others have nothing of what lies between its blocks. What nobody calls remote is beside the engine.
func TestMedia(t *testing.T) {
	x := New(Config{})
	ask := func() []Held { return x.Prefix(&Prompt{Tokens: count(24)}) }
	gpu := chain("a", 4, count(8))
	cpu, disk, store := chain("a", 4, count(16)), chain("a", 4, count(20)), chain("a", 4, count(4))
	cpu.Medium, disk.Medium, disk.Locality = kvevents.CPU, kvevents.Storage, kvevents.Local
	store.Medium, store.Locality = kvevents.Storage, kvevents.Remote
	apply(x, 0, gpu, cpu, store)
	require.Equal(t, []Held{{0, 8, 16, 16, 4}}, ask())
	require.Equal(t, 4, x.Blocks(), "a block counts once")
	apply(x, 0, disk)
	require.Equal(t, []Held{{0, 8, 20, 20, 4}}, ask())
	behind := chain("a", 4, count(24))
	behind.Hashes, behind.Tokens, behind.Medium, behind.Locality, behind.Parent = behind.Hashes[5:], behind.Tokens[20:], "tape", kvevents.Remote, behind.Hashes[4]
	apply(x, 0, behind)
	require.Equal(t, []Held{{0, 8, 20, 24, 4}}, ask(), "of the store others have only its first block")
	apply(x, 0, removed(kvevents.GPU, gpu.Hashes...))
	require.Equal(t, []Held{{0, 0, 20, 24, 4}}, ask())
	apply(x, 0, removed("cpu", cpu.Hashes...))
	require.Equal(t, []Held{{0, 0, 20, 24, 4}}, ask(), "the disk has these blocks as well")
	apply(x, 0, removed("flash", disk.Hashes...))
	require.Equal(t, []Held{{0, 0, 0, 4, 4}}, ask(), "media without a name of vLLM's are one")
	gone := removed("tape", append(store.Hashes, behind.Hashes...)...)
	apply(x, 0, gone)
	require.Equal(t, []Held{{0, 0, 0, 4, 4}}, ask(), "beside the engine they are not")
	gone.Locality = kvevents.Remote
	apply(x, 0, gone)
	require.Empty(t, ask())
	require.Zero(t, x.Blocks())
}

// A block counts as long as one group has it: groups with a window lose what the group with full attention keeps.
func TestGroups(t *testing.T) {
	x := New(Config{})
	full, window := chain("a", 4, count(16)), chain("a", 4, count(16))
	window.Group = 1
	apply(x, 0, full, window)
	gone := removed(kvevents.GPU, window.Hashes[:3]...)
	gone.Group = 1
	apply(x, 0, gone)
	require.Equal(t, []Held{{0, 16, 16, 16, 0}}, x.Prefix(&Prompt{Tokens: count(16)}))
	gone.Group = groups
	window.Group = groups
	require.Equal(t, Result{Unplaced: 4}, apply(x, 0, window, gone))
	apply(x, 0, removed(kvevents.GPU, full.Hashes...))
	require.Empty(t, x.Prefix(&Prompt{Tokens: count(16)}), "of the window only the last block is left")
	require.Equal(t, 1, x.Blocks())
}

// Adapters, salts and images keep prompts apart whose tokens are the same.
func TestDependencies(t *testing.T) {
	x := New(Config{})
	of := func(name, adapter string, extra ...string) kvevents.Event {
		ev := chain(name, 4, count(8))
		ev.LoRAName, ev.Extra = adapter, make([][]string, 2)
		if adapter != "" {
			ev.Extra[0], ev.Extra[1] = []string{kvevents.Text(adapter)}, []string{kvevents.Text(adapter)}
		}
		ev.Extra[0] = append(ev.Extra[0], extra...)
		return ev
	}
	apply(x, 0, of("plain", ""))
	apply(x, 1, of("salt", "", kvevents.Text("s")))
	apply(x, 2, of("adapter", "tuned"))
	apply(x, 3, of("both", "tuned", kvevents.Text("s")))
	apply(x, 4, of("image", "", "\x92\xa1i\x00"))
	for n, p := range []Prompt{{}, {Salt: "s"}, {Model: "tuned"}, {Model: "tuned", Salt: "s"}} {
		p.Tokens = count(8)
		want := []Held{{n, 8, 8, 8, 0}}
		if n >= 2 { // to those that have not named the adapter it is a name of the base model
			want = []Held{{n - 2, 8, 8, 8, 0}, {n, 8, 8, 8, 0}}
		}
		require.Equal(t, want, x.Prefix(&p), p)
	}
	require.Equal(t, []Held{{0, 8, 8, 8, 0}}, x.Prefix(&Prompt{Tokens: count(8), Model: "base"}), "a name that no adapter has")
	require.Empty(t, x.Prefix(&Prompt{Tokens: count(8), Salt: "other"}))
}

// What an instance says about adapters concerns itself alone.
func TestAdaptersOfInstances(t *testing.T) {
	x := New(Config{})
	ask := func() []Held { return x.Prefix(&Prompt{Tokens: count(8), Model: "base"}) }
	apply(x, 1, chain("a", 4, count(8)))
	odd := chain("a", 4, count(4))
	odd.LoRAName = "base"
	apply(x, 0, odd)
	apply(x, 70, odd)
	require.Equal(t, []Held{{0, 4, 4, 4, 0}, {1, 8, 8, 8, 0}, {70, 4, 4, 4, 0}}, ask())
	for i := range maxAdapters + 1 {
		odd.LoRAName = fmt.Sprint(i)
		require.Equal(t, i >= maxAdapters-1, apply(x, 0, odd).Unplaced == 1)
	}
	odd.LoRAName = "another"
	require.Zero(t, apply(x, 2, odd).Unplaced)
	x.Forget(0)
	require.Zero(t, apply(x, 0, odd).Unplaced, "with an instance its adapters are forgotten")
	require.Equal(t, []Held{{1, 8, 8, 8, 0}, {70, 4, 4, 4, 0}}, ask())
	x.Forget(0)
	apply(x, 0, chain("a", 4, count(8)))
	require.Equal(t, []Held{{0, 8, 8, 8, 0}, {1, 8, 8, 8, 0}, {70, 4, 4, 4, 0}}, ask())
}

// A block whose extra keys were too long to be read has no place, and neither has what is behind it.
func TestUntoldExtraKeys(t *testing.T) {
	x := New(Config{})
	ev := chain("a", 4, count(16))
	ev.Extra = [][]string{nil, {""}, nil, nil}
	require.Equal(t, Result{Stored: 1, Unplaced: 3}, apply(x, 0, ev))
	next := chain("b", 4, count(4))
	next.Parent = hashed("a16")
	require.Equal(t, Result{Unplaced: 1}, apply(x, 0, next))
	require.Equal(t, []Held{{0, 4, 4, 4, 0}}, x.Prefix(&Prompt{Tokens: count(16)}))
}

// What cannot be placed is left out, whatever a hostile publisher says.
func TestLeftOut(t *testing.T) {
	x := New(Config{MaxBlocks: 4})
	orphan := chain("a", 4, count(8))
	orphan.Parent = hashed("unknown")
	require.Equal(t, Result{Unplaced: 2}, apply(x, 0, orphan))
	untold := chain("a", 4, count(8))
	untold.Tokens = nil
	require.Equal(t, Result{Unplaced: 2}, apply(x, 0, untold), "tokens are not told where tenants have secrets")
	masked := chain("a", 4, count(8))
	masked.Hashes = masked.Hashes[:1]
	require.Equal(t, Result{Unplaced: 1}, apply(x, 0, masked), "vLLM leaves hashes out for blocks that a window does not need")
	sized := chain("a", 4, count(8))
	sized.BlockSize = 0
	require.Equal(t, Result{Unplaced: 2}, apply(x, 0, sized))
	require.Equal(t, Result{Stored: 4, Full: 2}, apply(x, 0, chain("a", 4, count(24))))
	require.Equal(t, Result{Stored: 4, Full: 2}, apply(x, 0, chain("a", 4, count(24))), "those that are known are not full")
	require.Equal(t, 4, x.Blocks())
	for size := 1; size < 20; size++ {
		if r := apply(x, 1, chain(fmt.Sprint(size), size, count(size))); size > maxSizes {
			require.Equal(t, Result{Unplaced: 1}, r)
		}
	}
	for i := range maxAdapters + 1 {
		ev := chain("a", 4, count(4))
		ev.LoRAName = fmt.Sprint(i)
		require.Equal(t, i == maxAdapters, apply(x, 2, ev).Unplaced == 1)
	}

	// A hash that comes to mean something else means only that.
	x = New(Config{})
	apply(x, 0, chain("a", 4, count(8)))
	other := chain("a", 4, []int32{9, 9, 9, 9})
	apply(x, 0, other)
	require.Empty(t, x.Prefix(&Prompt{Tokens: count(8)}))
	require.Equal(t, []Held{{0, 4, 4, 4, 0}}, x.Prefix(&Prompt{Tokens: []int32{9, 9, 9, 9}}))
}

// All instances together have a limit. One that has less than its share of a full index gets the room of the one that has
// most; one that has more gets none.
func TestTotal(t *testing.T) {
	x := New(Config{Total: 100})
	has := func(blocks int) kvevents.Event { return chain("a", 4, count(4*blocks)) }
	require.Equal(t, Result{Stored: 80}, apply(x, 0, has(80)))
	require.Equal(t, Result{Stored: 30, Evicted: 80, Forgotten: []int{0}}, apply(x, 1, has(30)))
	require.Equal(t, []Held{{1, 120, 120, 120, 0}}, x.Prefix(&Prompt{Tokens: count(400)}))
	require.Equal(t, Result{Stored: 70, Full: 10}, apply(x, 0, has(80)))
	require.Equal(t, Result{Stored: 30}, apply(x, 1, has(30)), "what is known needs no room")
	require.Equal(t, Result{Removed: 30}, apply(x, 1, removed(kvevents.GPU, has(30).Hashes...)))
	require.Equal(t, Result{Stored: 40, Evicted: 70, Forgotten: []int{0}}, apply(x, 2, has(40)))
	require.Equal(t, Result{Stored: 35}, apply(x, 0, has(35)))
	require.Equal(t, Result{Stored: 25}, apply(x, 3, has(25)))
	require.Equal(t, Result{Stored: 25, Full: 10}, apply(x, 3, has(35)), "35 of 100 is no share of three")
	require.Equal(t, Result{Stored: 33, Evicted: 40, Forgotten: []int{2}}, apply(x, 3, has(33)))
	require.Equal(t, 35+33, x.Blocks())

	x = New(Config{MaxBlocks: 10, Total: 20})
	apply(x, 0, has(10))
	apply(x, 1, has(10))
	require.Equal(t, Result{Stored: 10, Full: 1}, apply(x, 0, has(11)), "it has too many by itself")
}

// model is the index written again, with nothing but maps.
type model struct {
	blocks map[[2]string]*modelBlock // by instance and the engine's hash
	where  [media]map[[2]string]bool // instance and prefix, by medium
	sizes  map[string]map[int]bool
}

type modelBlock struct {
	prefix string
	where  map[[2]string]bool // medium and group
}

func newModel() *model {
	return &model{map[[2]string]*modelBlock{}, [media]map[[2]string]bool{{}, {}, {}, {}}, map[string]map[int]bool{}}
}

func (m *model) apply(in string, ev *kvevents.Event) {
	switch ev.Kind {
	case kvevents.Cleared:
		for _, list := range m.where {
			maps.DeleteFunc(list, func(k [2]string, _ bool) bool { return k[0] == in })
		}
		maps.DeleteFunc(m.blocks, func(k [2]string, _ *modelBlock) bool { return k[0] == in })
		delete(m.sizes, in)
	case kvevents.Stored:
		m.store(in, ev)
	case kvevents.Removed:
		for _, h := range ev.Hashes {
			b := m.blocks[[2]string{in, h.String()}]
			if b == nil {
				continue
			}
			where := [2]string{ev.Medium + ev.Locality, fmt.Sprint(ev.Group)}
			if !b.where[where] {
				continue
			}
			delete(b.where, where)
			m.see(in, b, mediumOf(where[0]))
			if len(b.where) == 0 {
				delete(m.blocks, [2]string{in, h.String()})
			}
		}
	}
}

// see notes whether a block is still in a medium.
func (m *model) see(in string, b *modelBlock, medium int) {
	for w := range b.where {
		if mediumOf(w[0]) == medium {
			return
		}
	}
	delete(m.where[medium], [2]string{in, b.prefix})
}

func mediumOf(name string) int {
	return map[string]int{kvevents.GPU: own, kvevents.CPU: memory, kvevents.Storage: local, kvevents.Storage + kvevents.Remote: remote}[name]
}

func (m *model) store(in string, ev *kvevents.Event) {
	prefix := ""
	if !ev.Parent.IsZero() {
		b := m.blocks[[2]string{in, ev.Parent.String()}]
		if b == nil {
			return
		}
		prefix = b.prefix
	}
	if m.sizes[in] == nil {
		m.sizes[in] = map[int]bool{}
	}
	m.sizes[in][ev.BlockSize] = true
	for i, h := range ev.Hashes {
		prefix += fmt.Sprint(ev.Tokens[i*ev.BlockSize : (i+1)*ev.BlockSize])
		prefix = string(slices.DeleteFunc([]byte(prefix), func(c byte) bool { return c == '[' || c == ']' })) + " "
		b := m.blocks[[2]string{in, h.String()}]
		if b != nil && b.prefix != prefix {
			for i := range m.where {
				delete(m.where[i], [2]string{in, b.prefix})
			}
			b = nil
		}
		if b == nil {
			b = &modelBlock{prefix, map[[2]string]bool{}}
			m.blocks[[2]string{in, h.String()}] = b
		}
		b.where[[2]string{ev.Medium + ev.Locality, fmt.Sprint(ev.Group)}] = true
		m.where[mediumOf(ev.Medium+ev.Locality)][[2]string{in, prefix}] = true
	}
}

func (m *model) prefix(numbers int, tokens []int32) (list []Held) {
	for n := range numbers {
		in := fmt.Sprint(n)
		var best [4]int // in the engine's own cache, there and beside it, anywhere, in a remote store alone
		for size := range m.sizes[in] {
			text, is := "", [4]bool{true, true, true, true}
			for i := size; i <= len(tokens); i += size {
				for _, t := range tokens[i-size : i] {
					text += fmt.Sprint(t, " ")
				}
				var has [media]bool
				for medium := range has {
					has[medium] = m.where[medium][[2]string{in, text}]
				}
				near := has[own] || has[memory] || has[local]
				for k, now := range [4]bool{has[own], near, near || has[remote], has[remote]} {
					if is[k] = is[k] && now; is[k] {
						best[k] = max(best[k], i)
					}
				}
			}
		}
		if best[2] == 0 {
			continue
		}
		list = append(list, Held{n, best[0], best[1], best[2], best[3]})
	}
	return list
}

// The index answers as one would that has nothing but maps.
func TestAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x, m := New(Config{secret: secret()}), newModel()
		const numbers = 3
		tokens := rapid.SliceOfN(rapid.Int32Range(0, 1), 0, 12)
		for range rapid.IntRange(1, 40).Draw(t, "events") {
			n := rapid.IntRange(0, numbers-1).Draw(t, "instance")
			ev := kvevents.Event{
				Kind:   rapid.SampledFrom([]kvevents.Kind{kvevents.Stored, kvevents.Stored, kvevents.Stored, kvevents.Removed, kvevents.Removed, kvevents.Cleared}).Draw(t, "kind"),
				Medium: rapid.SampledFrom([]string{kvevents.GPU, kvevents.GPU, kvevents.CPU, kvevents.Storage}).Draw(t, "medium"),
				Group:  rapid.IntRange(0, 1).Draw(t, "group"),
			}
			if ev.Medium == kvevents.Storage && rapid.Bool().Draw(t, "remote") {
				ev.Locality = kvevents.Remote
			}
			some := tokens.Draw(t, "tokens")
			size := rapid.SampledFrom([]int{1, 2, 3}).Draw(t, "size")
			keep := rapid.IntRange(0, len(some)/size).Draw(t, "first")
			whole := chain(fmt.Sprint(some[:len(some)/size*size], size), size, some)
			for i := range whole.Hashes { // content addresses, now and then a wrong one
				whole.Hashes[i] = hashed(fmt.Sprint(size, some[:(i+1)*size], rapid.IntRange(0, 9).Draw(t, "twin") == 0))
			}
			ev.Hashes = whole.Hashes[keep:]
			if ev.Kind == kvevents.Stored {
				ev.BlockSize, ev.Tokens = size, whole.Tokens[keep*size:]
				if keep > 0 {
					ev.Parent = whole.Hashes[keep-1]
				}
				if len(ev.Hashes) == 0 {
					continue
				}
			}
			apply(x, n, ev)
			m.apply(fmt.Sprint(n), &ev)
			ask := tokens.Draw(t, "ask")
			require.Equal(t, m.prefix(numbers, ask), x.Prefix(&Prompt{Tokens: ask}))
			require.Equal(t, len(m.blocks), x.Blocks())
		}
		for n := range numbers {
			x.Forget(n)
		}
		require.Zero(t, x.Blocks())
		if p := x.planes[0]; p != nil {
			require.Zero(t, p.media[own].size+p.media[memory].size+p.media[local].size+p.media[remote].size+len(p.sizes)+len(p.adapters), "nothing is left behind")
		}
	})
}

// The table answers as a map does, also when keys share a place.
func TestTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var table table[int]
		m := map[uint64]int{}
		keys := rapid.OneOf(rapid.Uint64Range(1, 40), rapid.Uint64Range(1<<63, 1<<63+5), rapid.Uint64Range(1<<64-20, 1<<64-1))
		for i := range rapid.IntRange(1, 200).Draw(t, "steps") {
			key := keys.Draw(t, "key")
			if rapid.IntRange(0, 2).Draw(t, "remove") == 0 {
				table.remove(key)
				delete(m, key)
			} else {
				*table.put(key) = i
				m[key] = i
			}
			require.Equal(t, len(m), table.size)
		}
		for key, value := range m {
			require.Equal(t, value, *table.get(key))
		}
		for key := range uint64(50) {
			if _, known := m[key+1]; !known {
				require.Nil(t, table.get(key+1))
			}
		}
	})
}

// fill gives an instance that many blocks, no two of which are alike.
func fill(x *Index, number, blocks int) {
	const run = 500
	ev := kvevents.Event{Kind: kvevents.Stored, BlockSize: 16, Medium: kvevents.GPU, Hashes: make([]kvevents.Hash, run), Tokens: make([]int32, run*16)}
	for made := 0; made < blocks; made += run {
		ev.Tokens[0], ev.Tokens[1] = int32(number), int32(made)
		for i := range ev.Hashes {
			var h [32]byte
			binary.LittleEndian.PutUint64(h[:], uint64(made+i))
			ev.Hashes[i] = kvevents.BytesHash(h[:])
		}
		x.Apply(number, []kvevents.Event{ev})
	}
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// A block takes at most 64 bytes, however full the tables just are.
func TestBytesOfABlock(t *testing.T) {
	const limit = 64
	blocks, instances := 300_000, 10
	if os.Getenv("KVPORT_SOAK") != "" {
		blocks = 10_000_000
	}
	x := New(Config{})
	before, worst := heap(), 0.0
	for n := range instances {
		for half := 1; half <= 2; half++ {
			fill(x, n, blocks/instances*half/2)
			each := float64(heap()-before) / float64(x.Blocks())
			worst = max(worst, each)
		}
	}
	require.Equal(t, blocks, x.Blocks())
	t.Logf("%d blocks of %d instances: %.1f bytes a block, at most %.1f on the way", blocks, instances, float64(heap()-before)/float64(blocks), worst)
	require.Less(t, worst, float64(limit))
	require.InDelta(t, float64(heap()-before)/float64(blocks), float64(x.Bytes())/float64(blocks), 8, "the allocator rounds up")
	require.Equal(t, blocks/instances, x.BlocksOf(0))
	require.Zero(t, x.BlocksOf(instances))
	runtime.KeepAlive(x)
}

// Instances come and go while others are asked about, also where one needs the room of another.
func TestConcurrently(t *testing.T) {
	for _, total := range []int{0, 150} {
		comeAndGo(t, New(Config{Total: total}))
	}
}

func comeAndGo(t *testing.T, x *Index) {
	var writers, readers sync.WaitGroup
	stop := make(chan struct{})
	for n := range 4 {
		writers.Go(func() {
			for range 30 {
				apply(x, n, chain("a", 4, count(400)))
				apply(x, n, removed(kvevents.GPU, hashed("a200")))
				x.Forget(n)
			}
		})
	}
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				for _, h := range x.Prefix(&Prompt{Tokens: count(400)}) {
					if h.Instance > 3 || h.Node > 400 || h.Own > h.Node {
						t.Error(h)
						return
					}
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
	require.Zero(t, x.Blocks())
	p := x.planes[0]
	require.Zero(t, p.media[own].size+p.media[memory].size+p.media[local].size+p.media[remote].size+len(p.sizes)+len(p.adapters), "nothing is left behind")
}

// Whatever events say, the index keeps its account and forgets all of it.
func FuzzApply(f *testing.F) {
	ev := chain("a", 4, count(16))
	payload, err := (&kvevents.Batch{Events: []kvevents.Event{ev, removed(kvevents.GPU, ev.Hashes[0])}}).Append(nil)
	require.NoError(f, err)
	f.Add(payload)
	f.Fuzz(func(t *testing.T, payload []byte) {
		events, err := kvevents.Decode(payload)
		if err != nil {
			return
		}
		x := New(Config{MaxBlocks: 1000})
		x.Apply(65, events)
		x.Apply(66, events)
		x.Prefix(&Prompt{Tokens: count(100)})
		x.Forget(65)
		x.Forget(66)
		require.Zero(t, x.Blocks())
		if p := x.planes[1]; p != nil {
			require.Zero(t, p.media[own].size+p.media[memory].size+p.media[local].size+p.media[remote].size+len(p.sizes))
		}
	})
}

// BenchmarkPrefix asks about a prompt of 8,192 tokens of which all instances have all blocks.
func BenchmarkPrefix(b *testing.B) {
	for _, instances := range []int{8, 64, 256} {
		b.Run(fmt.Sprint(instances), func(b *testing.B) {
			x := New(Config{})
			r := rand.New(rand.NewPCG(1, 2))
			tokens := make([]int32, 8192)
			for i := range tokens {
				tokens[i] = r.Int32N(50_000)
			}
			for n := range instances {
				fill(x, n, 10_000)
				apply(x, n, chain("shared", 16, tokens))
			}
			b.ResetTimer()
			for b.Loop() {
				if list := x.Prefix(&Prompt{Tokens: tokens}); len(list) != instances || list[0].Own != 8192 {
					b.Fatal(list)
				}
			}
		})
	}
}

// BenchmarkApply takes in a block at a time, of 16 tokens.
func BenchmarkApply(b *testing.B) {
	x := New(Config{MaxBlocks: 1 << 30})
	for made := 0; b.Loop(); made++ {
		if made%500 == 0 {
			fill(x, made/500%64, 500)
		}
	}
}
