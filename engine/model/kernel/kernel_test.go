package kernel

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/engine/gguf"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newCompute(t testing.TB, threads int, id ISA) *Compute {
	t.Helper()
	c, err := New(Options{Threads: threads, ISA: id})
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

// random numbers of mixed magnitude, so that roundings and cancellations happen.
func random(r *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64() * math.Pow(2, float64(r.IntN(8)-4)))
	}
	return x
}

// pack makes a matrix with rows of k.
func pack(t testing.TB, c *Compute, w []float32, k int, d DType) *Matrix {
	t.Helper()
	n := len(w) / k
	m, err := NewMemory(MatrixBytes(n, k, d))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return c.Pack(m, n, k, d, func(dst []float32, row int) { copy(dst, w[row*k:]) })
}

func requireSameBits(t testing.TB, want, got []float32, what string) {
	t.Helper()
	require.Len(t, got, len(want), what)
	for i := range want {
		if math.Float32bits(want[i]) != math.Float32bits(got[i]) {
			require.Failf(t, what, "element %d is %v (%08x), want %v (%08x)", i,
				got[i], math.Float32bits(got[i]), want[i], math.Float32bits(want[i]))
		}
	}
}

// TestFMA compares with arbitrary precision, on inputs made to hit halfway cases, subnormals and overflow.
func TestFMA(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	pick := func() float32 {
		bits := r.Uint32()
		switch r.IntN(4) {
		case 0: // few significant bits: products and sums land on halfway points
			bits &= 0xffff0000
		case 1: // near one
			bits = bits&0x807fffff | uint32(120+r.IntN(14))<<23
		case 2: // small, so that products are subnormal
			bits = bits&0x807fffff | uint32(r.IntN(70))<<23
		}
		f := math.Float32frombits(bits)
		if math.IsNaN(float64(f)) || math.IsInf(float64(f), 0) {
			return 1
		}
		return f
	}
	slow := 0
	for range 300_000 {
		a, b, c := pick(), pick(), pick()
		if r.IntN(3) == 0 { // halfway by construction: c is half an ulp of the product or so
			c = math.Float32frombits(math.Float32bits(a*b) - uint32(24+r.IntN(3))<<23)
		}
		if math.IsNaN(float64(c)) || math.IsInf(float64(c), 0) {
			continue
		}
		want, _ := wide(0).Add(wide(0).Mul(wide(a), wide(b)), wide(c)).Float32()
		got := fma(a, b, c)
		if want == 0 && got == 0 {
			continue // the sign of an exact zero is not big.Float's business
		}
		require.Equal(t, math.Float32bits(want), math.Float32bits(got), "fma(%v, %v, %v)", a, b, c)
		if s := float64(a)*float64(b) + float64(c); math.Float64bits(s)&(1<<29-1) == 1<<28 {
			slow++
		}
	}
	require.Greater(t, slow, 500, "too few halfway cases to mean anything")
	require.True(t, math.IsInf(float64(fma(float32(math.Inf(1)), 1, 1)), 1))
	require.True(t, math.IsNaN(float64(fma(float32(math.NaN()), 1, 1))))
}

func wide(f float32) *big.Float { return new(big.Float).SetPrec(2000).SetFloat64(float64(f)) }

func TestHalf(t *testing.T) {
	for h := range 1 << 16 {
		f := gguf.Half(uint16(h))
		if math.IsNaN(float64(f)) {
			continue
		}
		require.Equal(t, uint16(h), toHalf(f), "half %04x is %v", h, f)
		if h&0x7fff < 0x7bff { // halfway to the next goes to the even one, less goes down, more goes up
			next := gguf.Half(uint16(h + 1))
			middle := float32((float64(f) + float64(next)) / 2)
			require.Equal(t, uint16(h+h&1), toHalf(middle), "middle above %04x", h)
			require.Equal(t, uint16(h), toHalf(math.Nextafter32(middle, f)))
			require.Equal(t, uint16(h+1), toHalf(math.Nextafter32(middle, next)))
		}
	}
	require.Equal(t, uint16(0x7c00), toHalf(65520))
	require.Equal(t, uint16(0xfc00), toHalf(float32(math.Inf(-1))))
	require.Equal(t, uint16(0x7e00), toHalf(float32(math.NaN())))
}

// TestMatMul compares every tile height, both weight types and every instruction set with float64.
func TestMatMul(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	const n, k, most = 7*panelWidth - 5, 48, 27
	w, x := random(r, n*k), random(r, most*k)
	reference := newCompute(t, 1, Portable)
	var others []*Compute
	for _, id := range Supported() {
		others = append(others, newCompute(t, 1, id), newCompute(t, 2, id))
	}
	for _, d := range []DType{F32, F16} {
		m := pack(t, others[1], w, k, d)
		want := make([]float32, most*m.Stride())
		reference.MatMul(want, x, most, m)
		for i := range most {
			for j := range n {
				var exact, size float64
				for z := range k {
					weight := float64(w[j*k+z])
					if d == F16 {
						weight = float64(gguf.Half(toHalf(w[j*k+z])))
					}
					exact += float64(x[i*k+z]) * weight
					size += math.Abs(float64(x[i*k+z]) * weight)
				}
				require.InDelta(t, exact, want[i*m.Stride()+j], 1e-5*size)
			}
		}
		for rows := 1; rows <= most; rows++ {
			for _, c := range others {
				got := make([]float32, rows*m.Stride())
				c.MatMul(got, x, rows, m)
				requireSameBits(t, want[:rows*m.Stride()], got, fmt.Sprint(c.ISA(), d, rows))
			}
		}
	}
}

// TestRowBlocks crosses the border between two row blocks.
func TestRowBlocks(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	const n, k, rows = 64, 16, rowBlock + 13
	for _, id := range Supported() {
		c := newCompute(t, 2, id)
		m, x := pack(t, c, random(r, n*k), k, F32), random(r, rows*k)
		all, one := make([]float32, rows*n), make([]float32, n)
		c.MatMul(all, x, rows, m)
		for i := range rows {
			c.MatMul(one, x[i*k:], 1, m)
			requireSameBits(t, one, all[i*n:(i+1)*n], fmt.Sprint(id, " row ", i))
		}
	}
}

// assembly lists the kernels that are compared with the portable ones.
func assembly(t *testing.T) []*isa {
	all := native()
	if len(all) == 0 {
		t.Skip("this machine runs the portable path only")
	}
	return all
}

func TestElementwise(t *testing.T) {
	for _, fast := range assembly(t) {
		t.Run(fast.id.String(), func(t *testing.T) { testElementwise(t, fast) })
	}
}

func testElementwise(t *testing.T, fast *isa) {
	r, plain := rand.New(rand.NewPCG(7, 8)), portable()
	for range 200 {
		n := Lanes * (1 + r.IntN(9))
		x, u, w := random(r, n), random(r, n), random(r, n)
		for i := range x {
			x[i] *= 8 // some beyond the range of exp
		}
		both := func(what string, f func(i *isa) []float32) {
			requireSameBits(t, f(plain), f(fast), what)
		}
		both("siluMul", func(i *isa) []float32 { d := make([]float32, n); i.siluMul(d, x, u); return d })
		both("add", func(i *isa) []float32 { d := append([]float32(nil), x...); i.add(d, u); return d })
		both("scaleMul", func(i *isa) []float32 { d := make([]float32, n); i.scaleMul(d, x, w, 0.37); return d })
		both("rotate", func(i *isa) []float32 { d := append([]float32(nil), x...); i.rotate(d, u, w); return d })
		both("sumSquares", func(i *isa) []float32 {
			lanes := new([Lanes]float32)
			i.sumSquares(x, lanes)
			return lanes[:]
		})
		both("top", func(i *isa) []float32 {
			lanes := new([Lanes]float32)
			i.top(x, lanes)
			return lanes[:]
		})
		both("expSum", func(i *isa) []float32 {
			d, sum := append([]float32(nil), x...), new([Lanes]float32)
			d[0] = masked
			i.expSum(d, 3, sum)
			require.Zero(t, d[0])
			return append(d, sum[:]...)
		})
	}
}

// TestExpBits walks over the whole range of exp and its two ends, number by number where it is cut off.
func TestExpBits(t *testing.T) {
	var x []float32
	for v := float32(-90); v <= 90; v += 0.00093 {
		x = append(x, v)
	}
	for _, v := range []float32{-87, -86.99, 88, 0} {
		for from := range 300 {
			x = append(x, math.Float32frombits(math.Float32bits(v)+uint32(from)), math.Float32frombits(math.Float32bits(v)-uint32(from)))
		}
	}
	x = append(x, float32(math.Inf(1)), float32(math.Inf(-1)), math.MaxFloat32, -math.MaxFloat32)
	for len(x)%Lanes != 0 {
		x = append(x, 0)
	}
	want := make([]float32, len(x))
	for i, v := range x {
		want[i] = v
		if math.IsNaN(float64(v)) {
			want[i], x[i] = 0, 0
		}
	}
	expSumPortable(want, 0, new([Lanes]float32))
	for _, fast := range assembly(t) {
		got := append([]float32(nil), x...)
		fast.expSum(got, 0, new([Lanes]float32))
		requireSameBits(t, want, got, fast.id.String())
		got = make([]float32, Lanes)
		got[5] = float32(math.NaN())
		fast.expSum(got, 0, new([Lanes]float32))
		require.True(t, math.IsNaN(float64(got[5])), "%v hides a NaN", fast.id)
		require.InDelta(t, 1, got[6], 0)
	}
}

// TestISA: what is asked for is what runs, and what cannot run is refused.
func TestISA(t *testing.T) {
	all := Supported()
	require.Equal(t, Portable, all[len(all)-1])
	require.Equal(t, all[0], newCompute(t, 1, Auto).ISA())
	for _, id := range all {
		require.Equal(t, id, newCompute(t, 1, id).ISA())
		require.Positive(t, newCompute(t, 1, id).Peak(1000))
	}
	require.Zero(t, newCompute(t, 1, Auto).Peak(0))
	_, err := New(Options{ISA: 99})
	require.ErrorContains(t, err, "ISA(99)")
	require.ErrorContains(t, err, "portable")
}

func TestExp(t *testing.T) {
	for x := float32(-87); x <= 88; x += 0.00371 {
		require.InEpsilon(t, math.Exp(float64(x)), exp(x), 3e-7, "exp(%v)", x)
	}
	require.InDelta(t, 1, exp(0), 0)
	require.Zero(t, exp(-87.01))
	require.True(t, math.IsNaN(float64(exp(float32(math.NaN())))))
}

// TestAttend compares with float64 and demands the same bits for every block size and path.
func TestAttend(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	const kvHeads = 2
	for _, dim := range HeadDims() {
		for i, position := range []int{0, 1, 15, 16, 17, 40, 63, 64, 100} {
			group := 1 + i
			q := random(r, group*dim)
			keys, values := random(r, (position+1)*kvHeads*dim), random(r, (position+1)*kvHeads*dim)
			var want []float32
			for _, size := range []int{16, 1, 12, 32, 64} {
				cache := newCache(size, kvHeads, dim, position+1)
				for p := range position + 1 {
					at := p * kvHeads * dim
					cache.Put(p, keys[at:at+kvHeads*dim], values[at:at+kvHeads*dim])
				}
				for _, id := range Supported() {
					c, got := newCompute(t, 1, id), make([]float32, group*dim)
					c.Attend(0, got, q, cache, Query{1, position})
					if want == nil {
						want = got
						requireNear(t, exactAttention(q, keys, values, cache, 1), got)
					}
					requireSameBits(t, want, got, fmt.Sprint(id, dim, position, size))
				}
			}
		}
	}
}

// newCache has NaN in every slot, so that reading one that was not written shows.
func newCache(size, kvHeads, dim, tokens int) *Cache {
	c := &Cache{BlockTokens: size, KVHeads: kvHeads, HeadDim: dim}
	for range (tokens + size - 1) / size {
		b := make([]float32, 2*size*kvHeads*dim)
		for i := range b {
			b[i] = float32(math.NaN())
		}
		c.Blocks = append(c.Blocks, b)
	}
	return c
}

func exactAttention(q, keys, values []float32, c *Cache, head int) []float64 {
	dim, stride := c.HeadDim, c.KVHeads*c.HeadDim
	out := make([]float64, len(q))
	for h := 0; h < len(q); h += dim {
		var weights []float64
		top, total := math.Inf(-1), 0.0
		for at := head * dim; at < len(keys); at += stride {
			dot := 0.0
			for d := range dim {
				dot += float64(q[h+d]) * float64(keys[at+d])
			}
			weights = append(weights, dot/math.Sqrt(float64(dim)))
			top = max(top, weights[len(weights)-1])
		}
		for i := range weights {
			weights[i] = math.Exp(weights[i] - top)
			total += weights[i]
		}
		for i, w := range weights {
			for d := range dim {
				out[h+d] += w / total * float64(values[i*stride+head*dim+d])
			}
		}
	}
	return out
}

func requireNear(t *testing.T, want []float64, got []float32) {
	t.Helper()
	for i := range want {
		require.InDelta(t, want[i], got[i], 2e-3, "element %d", i)
	}
}

func TestRMSNormAndRotate(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	c := newCompute(t, 1, Auto)
	x, w, got := random(r, 96), random(r, 96), make([]float32, 96)
	c.RMSNorm(0, got, x, w, 1e-5)
	squares := 0.0
	for _, v := range x {
		squares += float64(v) * float64(v)
	}
	for i := range x {
		want := float64(x[i]) / math.Sqrt(squares/96+1e-5) * float64(w[i])
		require.InDelta(t, want, got[i], 1e-5*(1+math.Abs(want)))
	}
	cos, sin := make([]float32, 64), make([]float32, 64)
	Angles(cos, sin, 7, 10000)
	y := random(r, 128)
	before := append([]float32(nil), y...)
	c.Rotate(y, cos, sin)
	for i := 0; i < 128; i += 2 {
		a := 7 * math.Pow(10000, -float64(i%64)/64)
		p, q := float64(before[i]), float64(before[i+1])
		require.InDelta(t, p*math.Cos(a)-q*math.Sin(a), y[i], 1e-4)
		require.InDelta(t, p*math.Sin(a)+q*math.Cos(a), y[i+1], 1e-4)
	}
}
