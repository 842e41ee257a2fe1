package kernel

import (
	"math"
	"slices"

	"github.com/kvport/kvport/engine/gguf"
)

// portable is the reference: plain Go, exact float32 FMA.
func portable() *isa {
	return &isa{
		id: Portable, matMul: matMulPortable, dots: dotsPortable, weigh: weighPortable, top: topPortable, expSum: expSumPortable,
		siluMul: siluMulPortable, add: addPortable, sumSquares: sumSquaresPortable, scaleMul: scaleMulPortable,
		rotate: rotatePortable, peak: peakPortable,
	}
}

// fma is a*b+c rounded once. The float64 product is exact and the float64 sum is rounded to 53 bits;
// rounding that again to 24 bits is right unless the sum lies exactly between two float32 numbers, where
// the lost part decides.
func fma(a, b, c float32) float32 {
	product := float64(a) * float64(b)
	sum := product + float64(c)
	const tail, middle = 1<<29 - 1, 1 << 28 // the bits that a normal float32 does not have
	if math.Float64bits(sum)&tail != middle && math.Abs(sum) >= 0x1p-126 {
		return float32(sum)
	}
	return float32(roundToOdd(sum, product, float64(c)))
}

// roundToOdd turns sum, the rounded a+b, into the sum rounded to odd: truncated, with the last bit set if
// anything was lost. A later rounding to fewer bits is then exact.
func roundToOdd(sum, a, b float64) float64 {
	if math.IsInf(sum, 0) || math.IsNaN(sum) {
		return sum
	}
	back := sum - a
	lost := (a - (sum - back)) + (b - back) // Knuth's TwoSum
	bits := math.Float64bits(sum)
	if lost == 0 || bits&1 == 1 {
		return sum
	}
	if (lost > 0) == (sum > 0) {
		return math.Float64frombits(bits + 1)
	}
	return math.Float64frombits(bits - 1)
}

func matMulPortable(y []float32, ldy int, x []float32, w *Matrix, t tile) {
	panel := make([]float32, w.K*panelWidth)
	for p := t.from; p < t.to; p++ {
		if at := p * len(panel); w.half != nil {
			for i, h := range w.half[at : at+len(panel)] {
				panel[i] = gguf.Half(h)
			}
		} else {
			copy(panel, w.float[at:])
		}
		for r := t.row; r < t.end; r++ {
			var acc [panelWidth]float32
			for k, v := range x[r*w.K : (r+1)*w.K] {
				for j, weight := range panel[k*panelWidth : (k+1)*panelWidth] {
					acc[j] = fma(v, weight, acc[j])
				}
			}
			copy(y[r*ldy+p*panelWidth:], acc[:])
		}
	}
}

func dotsPortable(scores, q, keys []float32, stride int, scale float32) {
	for i := range scores {
		key := keys[i*stride : i*stride+len(q)]
		var lanes [Lanes]float32
		for d, v := range q {
			if d < Lanes {
				lanes[d] = v * key[d]
			} else {
				lanes[d%Lanes] = fma(v, key[d], lanes[d%Lanes])
			}
		}
		scores[i] = tree(&lanes) * scale
	}
}

func weighPortable(acc []float32, dim int, p weights, values []float32, stride int) {
	for h := range len(acc) / dim {
		head := acc[h*dim : (h+1)*dim]
		for i, weight := range p.scores[h*p.row:][:p.n] {
			for d, v := range values[i*stride : i*stride+dim] {
				head[d] = fma(weight, v, head[d])
			}
		}
	}
}

func topPortable(s []float32, lanes *[Lanes]float32) {
	copy(lanes[:], s)
	for i, v := range s {
		lanes[i%Lanes] = max(lanes[i%Lanes], v)
	}
}

func expSumPortable(s []float32, top float32, sum *[Lanes]float32) {
	for i, v := range s {
		s[i] = exp(v - top)
		sum[i%Lanes] += s[i]
	}
}

// exp is Cephes' expf with FMA: n = round(x/ln 2), a polynomial of the rest, times 2^n.
func exp(x float32) float32 {
	if x < -87 {
		return 0
	}
	if x > 88 {
		x = 88
	}
	n := float32(math.RoundToEven(float64(float32(x * 1.44269504088896340736))))
	x = fma(n, -0.693359375, x)
	x = fma(n, 2.12194440e-4, x)
	p := float32(1.9875691500e-4)
	for _, c := range [...]float32{1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1} {
		p = fma(x, p, c)
	}
	p = fma(float32(x*x), p, float32(x+1))
	return float32(math.Ldexp(float64(p), int(n)))
}

func siluMulPortable(dst, gate, up []float32) {
	for i, v := range gate {
		dst[i] = float32(v/(1+exp(0-v))) * up[i]
	}
}

func addPortable(dst, x []float32) {
	for i, v := range x {
		dst[i] += v
	}
}

func sumSquaresPortable(x []float32, lanes *[Lanes]float32) {
	*lanes = [Lanes]float32{}
	for i, v := range x {
		lanes[i%Lanes] = fma(v, v, lanes[i%Lanes])
	}
}

func scaleMulPortable(dst, x, w []float32, scale float32) {
	for i, v := range x {
		dst[i] = float32(v*scale) * w[i]
	}
}

func rotatePortable(x, cos, sin []float32) {
	for pair := range slices.Chunk(x, 2) {
		a, b := pair[0], pair[1]
		pair[0] = fma(a, cos[0], float32(b*sin[0]))
		pair[1] = fma(b, cos[1], float32(a*sin[1]))
		cos, sin = cos[2:], sin[2:]
	}
}

func peakPortable(n int) float64 {
	var x float32
	for range n {
		x = fma(x, x, x)
	}
	return 2 * float64(n)
}
