package mac

import (
	"crypto/aes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/kvport/kvport/connector"
)

// cores are both algorithms by every implementation that this machine can run; what it lacks is logged.
func cores(t testing.TB) (all []core) {
	for _, by := range []implementation{portable, aesni, vaes} {
		if !slices.Contains(available(), by) {
			t.Logf("NOT RUN: %s, which this machine lacks", by)
			continue
		}
		all = append(all, core{1, by}, core{2, by})
	}
	return all
}

func (c core) String() string { return fmt.Sprintf("%s, %d lanes", c.by, c.lanes) }

// raw is the MAC of the RFC, without a context.
func raw(m *MAC, data ...[]byte) (tag [Size]byte) {
	h := Hash{core: m.core, state: m.start}
	for _, span := range data {
		h.Add(span)
	}
	h.Sum(&tag)
	return tag
}

// hexBytes are bytes in JSON.
type hexBytes []byte

func (b *hexBytes) UnmarshalText(text []byte) (err error) {
	*b, err = hex.AppendDecode(nil, text)
	return err
}

// TestVectors checks the vectors of RFC 10032 (those of appendix A that concern AEGIS-128L and AEGIS-128X2 as MACs), as the repository
// cfrg/draft-irtf-cfrg-aegis-aead has them in test-vectors at commit 35cf57d.
func TestVectors(t *testing.T) {
	text, err := os.ReadFile("testdata/rfc10032.json")
	require.NoError(t, err)
	var vectors []struct {
		Name                                           string
		Lanes                                          int
		In, RK, Out, Key, Nonce, Data, Tags128, Tag128 hexBytes
		State                                          []hexBytes
	}
	require.NoError(t, json.Unmarshal(text, &vectors))
	reference, ran := newRefAES(), 0
	for _, v := range vectors {
		if v.In != nil {
			require.Equal(t, [16]byte(v.Out), reference.AESRound([16]byte(v.In), [16]byte(v.RK)), v.Name)
			continue
		}
		g := &refAEGIS{refAES: reference, D: v.Lanes}
		tags, tag := g.Mac(v.Data, [16]byte(v.Key), [16]byte(v.Nonce))
		if v.Tags128 != nil {
			require.EqualValues(t, v.Tags128, slices.Concat(tags[0][:], tags[1][:]), v.Name)
		}
		if v.Tag128 != nil {
			require.EqualValues(t, v.Tag128, tag[:], v.Name)
		}
		for _, c := range cores(t) {
			if c.lanes != v.Lanes {
				continue
			}
			key := Key(slices.Concat(v.Key, v.Nonce))
			m := prepare(c, &key)
			if v.Tag128 != nil {
				tag := raw(m, v.Data)
				require.EqualValues(t, v.Tag128, tag[:], "%s: %s", v.Name, c)
			}
			for i, block := range v.State {
				require.EqualValues(t, block, m.start[i/2][i%2][:], "%s: %s", v.Name, c)
			}
			ran++
		}
	}
	require.Positive(t, ran)
}

// The reference's rounds are AES: ten of them, the last without MixColumns, encrypt as crypto/aes does.
func TestReferenceIsAES(t *testing.T) {
	a := newRefAES()
	require.Equal(t, []byte{0x63, 0x7c, 0x77, 0x7b}, a.sbox[:4])
	require.EqualValues(t, 0x16, a.sbox[255])
	key := [16]byte{}
	cipher, err := aes.NewCipher(key[:])
	require.NoError(t, err)
	in := [16]byte{1, 2, 3}
	var want [16]byte
	cipher.Encrypt(want[:], in[:])

	state, round, rcon := in, key, byte(1)
	for n := range 10 {
		var next [16]byte // FIPS 197, section 5.2
		for i := range next {
			before := round[i]
			switch {
			case i == 0:
				next[i] = before ^ a.sbox[round[13]] ^ rcon
			case i < 3:
				next[i] = before ^ a.sbox[round[13+i]]
			case i == 3:
				next[i] = before ^ a.sbox[round[12]]
			default:
				next[i] = before ^ next[i-4]
			}
		}
		rcon = refXtime(rcon)
		state = refXOR(state, round)
		if n < 9 {
			state = a.AESRound(state, [16]byte{})
		} else {
			var last [16]byte
			for i := range last {
				last[i] = a.sbox[state[(i+4*(i%4))%16]]
			}
			state = refXOR(last, next)
		}
		round = next
	}
	require.Equal(t, want, state)
}

// The circuit of the S-box is the S-box, and a round on planes is AES's, in each of the four blocks.
func TestPlanes(t *testing.T) {
	a := newRefAES()
	random := rand.New(rand.NewPCG(1, 2))
	for first := 0; first < 256; first += 64 {
		var blocks, rounds [4][16]byte
		for b := range blocks {
			for i := range blocks[b] {
				blocks[b][i] = byte(first + 16*b + i)
			}
		}
		random.Shuffle(64, func(i, j int) { blocks[i/16][i%16], blocks[j/16][j%16] = blocks[j/16][j%16], blocks[i/16][i%16] })
		var q planes
		q.pack(&blocks[0], &blocks[1], &blocks[2], &blocks[3])
		boxed := q
		boxed.subBytes()
		boxed.unpack(&rounds[0], &rounds[1], &rounds[2], &rounds[3])
		for b := range blocks {
			for i, x := range blocks[b] {
				require.Equal(t, a.sbox[x], rounds[b][i], "S-box of %d", x)
			}
		}
		q.round()
		q.unpack(&rounds[0], &rounds[1], &rounds[2], &rounds[3])
		for b := range blocks {
			require.Equal(t, a.AESRound(blocks[b], [16]byte{}), rounds[b])
		}
	}
}

// shape is a message in spans, each of which begins at any address.
type shape struct {
	key     Key
	context []byte
	spans   [][]byte
}

// drawShape makes short messages as often as long ones.
func drawShape(random *rand.Rand) shape {
	var s shape
	text := func(size int) []byte {
		b := make([]byte, size+random.IntN(65))
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		return b[len(b)-size:]
	}
	copy(s.key[:], text(KeySize))
	s.context = text(random.IntN(200))
	length := random.IntN(70_001)
	if random.IntN(2) == 0 {
		length = random.IntN(400)
	}
	for length > 0 {
		n := 1 + random.IntN(length)
		s.spans = append(s.spans, text(n))
		if random.IntN(4) == 0 {
			s.spans = append(s.spans, nil)
		}
		length -= n
	}
	return s
}

// TestImplementationsAgree: whatever the length, the context, the spans and where they lie, every implementation gives the reference's
// code.
func TestImplementationsAgree(t *testing.T) {
	shapes := 2_000
	if os.Getenv("KVPORT_SOAK") != "" {
		shapes = 10_000
	}
	if testing.Short() {
		shapes = 200
	}
	reference, all := newRefAES(), cores(t)
	random := rand.New(rand.NewPCG(3, 4))
	for n := range shapes {
		s := drawShape(random)
		message := refMessage(s.context, slices.Concat(s.spans...))
		var want [maxLanes + 1][16]byte
		for lanes := 1; lanes <= maxLanes; lanes++ {
			g := &refAEGIS{refAES: reference, D: lanes}
			_, want[lanes] = g.Mac(message, [16]byte(s.key[:16]), [16]byte(s.key[16:]))
		}
		for _, c := range all {
			var got [Size]byte
			prepare(c, &s.key).Sum(&got, s.context, s.spans...)
			require.Equal(t, want[c.lanes], got, "shape %d, %s, context of %d bytes, %d spans, message of %d bytes", n, c, len(s.context), len(s.spans), len(message))
		}
	}
	t.Logf("%d shapes: %v and the reference give the same codes", shapes, all)
}

// Constructors take what the machine does best.
func TestNew(t *testing.T) {
	key := Key{1, 2, 3}
	require.Equal(t, core{2, available()[0]}, New(&key).core)
	require.Equal(t, core{1, available()[0]}, NewL(&key).core)
	require.Equal(t, available()[0].String(), Implementation())
	require.Equal(t, portable, available()[len(available())-1])
}

// Any change of the key, the context or the data, and any byte that moves from one to the other, changes the code.
func TestEveryChangeCounts(t *testing.T) {
	all := cores(t)
	rapid.Check(t, func(t *rapid.T) {
		c := rapid.SampledFrom(all).Draw(t, "core")
		key := Key(rapid.SliceOfN(rapid.Byte(), KeySize, KeySize).Draw(t, "key"))
		context := rapid.SliceOfN(rapid.Byte(), 1, 150).Draw(t, "context")
		data := rapid.SliceOfN(rapid.Byte(), 1, 300).Draw(t, "data")
		code := func(key Key, context, data []byte) (tag [Size]byte) {
			prepare(c, &key).Sum(&tag, context, data)
			return tag
		}
		want := code(key, context, data)
		flip := func(b []byte, name string) {
			b[rapid.IntRange(0, len(b)-1).Draw(t, name)] ^= rapid.ByteMin(1).Draw(t, "flip")
		}
		otherKey := key
		flip(otherKey[:], "in key")
		require.NotEqual(t, want, code(otherKey, context, data))
		for _, part := range [][]byte{context, data} {
			before := slices.Clone(part)
			flip(part, "at")
			require.NotEqual(t, want, code(key, context, data))
			copy(part, before)
		}
		require.Equal(t, want, code(key, context, data))
		require.NotEqual(t, want, code(key, slices.Concat(context, data[:1]), data[1:]))
		require.NotEqual(t, want, code(key, context[:len(context)-1], slices.Concat(context[len(context)-1:], data)))
		require.NotEqual(t, want, code(key, context, append(data, 0)))
		require.NotEqual(t, want, code(key, append(context, 0), data))
		require.NotEqual(t, want, code(key, nil, slices.Concat(context, data)))
	})
}

// One MAC may be used by many goroutines, and makes codes without allocating.
func TestParallelUseWithoutAllocation(t *testing.T) {
	context, data := make([]byte, 96), make([]byte, 1000)
	for _, c := range cores(t) {
		m := prepare(c, &Key{7})
		var want [Size]byte
		m.Sum(&want, context, data[:500], data[500:])
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				for range 50 {
					var got [Size]byte
					if m.Sum(&got, context, data); got != want {
						t.Errorf("%s: %x, want %x", c, got, want)
					}
				}
			})
		}
		all.Wait()
		var got [Size]byte
		require.Zero(t, testing.AllocsPerRun(100, func() { m.Sum(&got, context, data[:500], data[500:]) }), c)
	}
}

// Codes stay the same forever, because stores keep them. These were computed with the Python of the RFC's repository.
func TestGolden(t *testing.T) {
	var key Key
	for i := range key {
		key[i] = byte(i)
	}
	for lanes, want := range map[int]string{1: "feeed4ea355722e16f4d7beb46061b74", 2: "2107748ae5f14abd4e9432088c9c53b6"} {
		for _, c := range cores(t) {
			if c.lanes == lanes {
				var got [Size]byte
				prepare(c, &key).Sum(&got, []byte("context"), []byte("some "), []byte("data"))
				require.Equal(t, want, hex.EncodeToString(got[:]), c)
			}
		}
	}
}

// The golden key was computed with Python's hmac, from RFC 5869.
func TestSubkey(t *testing.T) {
	secret := []byte("a secret of 24 bytes ...")
	scope := Scope{Purpose: "digest/2", Model: connector.NewFingerprint("model"), Shape: connector.NewFingerprint("shape"), Shard: connector.Shard{Rank: 1, World: 2, First: 3, Count: 4}}
	keys := map[Key]string{}
	add := func(name string, secret []byte, s Scope) Key {
		key, err := Subkey(secret, s)
		require.NoError(t, err, name)
		require.NotContains(t, keys, key, name)
		keys[key] = name
		return key
	}
	key := add("base", secret, scope)
	require.Equal(t, "f23e19fedf94372cf5caf2b1ae7f4a943aeb2b2cdcc5e5191e2a8b5d6b024615", hex.EncodeToString(key[:]))
	add("secret", []byte("a secret of 24 bytes ..!"), scope)
	for name, change := range map[string]func(*Scope){
		"purpose": func(s *Scope) { s.Purpose = "digest/3" }, "no purpose": func(s *Scope) { s.Purpose = "" },
		"model": func(s *Scope) { s.Model[31] ^= 1 }, "shape": func(s *Scope) { s.Shape[0] ^= 1 },
		"swapped": func(s *Scope) { s.Model, s.Shape = s.Shape, s.Model },
		"rank":    func(s *Scope) { s.Shard.Rank++ }, "world": func(s *Scope) { s.Shard.World++ },
		"first": func(s *Scope) { s.Shard.First++ }, "count": func(s *Scope) { s.Shard.Count++ },
	} {
		other := scope
		change(&other)
		add(name, secret, other)
	}
	for _, short := range [][]byte{nil, secret[:minSecret-1]} {
		_, err := Subkey(short, scope)
		require.ErrorContains(t, err, "want at least 16")
	}
}

// FuzzSum compares every implementation with the reference.
func FuzzSum(f *testing.F) {
	reference, all := newRefAES(), cores(f)
	f.Add([]byte("key"), []byte("context"), []byte("data"), uint16(2))
	f.Add([]byte{}, make([]byte, 56), make([]byte, 64), uint16(0))
	f.Add(make([]byte, KeySize), make([]byte, 57), make([]byte, 129), uint16(31))
	f.Fuzz(func(t *testing.T, keyBytes, context, data []byte, split uint16) {
		var key Key
		copy(key[:], keyBytes)
		at := min(int(split), len(data))
		message := refMessage(context, data)
		for _, c := range all {
			g := &refAEGIS{refAES: reference, D: c.lanes}
			_, want := g.Mac(message, [16]byte(key[:16]), [16]byte(key[16:]))
			var got [Size]byte
			prepare(c, &key).Sum(&got, context, data[:at], data[at:])
			require.Equal(t, want, got, c)
		}
	})
}

// BenchmarkSum also reports the time of its thread, which other programs disturb less.
func BenchmarkSum(b *testing.B) {
	now := func() int64 {
		var t unix.Timespec
		require.NoError(b, unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t))
		return t.Nano()
	}
	context := make([]byte, 120)
	for _, c := range cores(b) {
		m := prepare(c, &Key{1})
		for _, size := range []int{0, 24 << 10, 1 << 20} {
			data := make([]byte, size)
			b.Run(fmt.Sprintf("%s/%d", c, size), func(b *testing.B) {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				var sum [Size]byte
				begin := now()
				for b.Loop() {
					m.Sum(&sum, context, data)
				}
				took := float64(now()-begin) / float64(b.N)
				b.ReportMetric(took, "CPU-ns/op")
				b.ReportMetric(float64(size)/took, "GB/CPU-s")
			})
		}
	}
}
