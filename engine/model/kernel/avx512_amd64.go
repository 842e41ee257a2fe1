package kernel

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// pointer is what the generator's declarations pass.
type pointer = unsafe.Pointer

// native is the assembly this machine can run, or nil. The cpu package reports a feature only if the
// operating system saves its registers.
func native() *isa {
	if !cpu.X86.HasAVX512F || !cpu.X86.HasAVX2 {
		return nil
	}
	float, half := tilesFloat(), tilesHalf()
	return &isa{
		name: "avx512",
		matMul: func(y []float32, ldy int, x []float32, w *Matrix, t tile) {
			if w.half != nil {
				matMulTiles(y, ldy, x, t, panels{at(w.half), w.K, 2, half, rowHalf})
			} else {
				matMulTiles(y, ldy, x, t, panels{at(w.float), w.K, 4, float, rowFloat})
			}
		},
		dots:  dotsAVX512,
		weigh: weighAVX512,
		top:   func(s []float32, lanes *[Lanes]float32) { top(at(s), len(s)/Lanes, pointer(lanes)) },
		expSum: func(s []float32, top float32, sum *[Lanes]float32) {
			expSum(at(s), len(s)/Lanes, top, pointer(sum))
		},
		siluMul: func(dst, gate, up []float32) {
			_, _ = dst[len(gate)-1], up[len(gate)-1]
			siluMul(at(dst), at(gate), at(up), len(gate)/Lanes)
		},
		add: func(dst, x []float32) {
			_ = dst[len(x)-1]
			add(at(dst), at(x), len(x)/Lanes)
		},
		sumSquares: func(x []float32, lanes *[Lanes]float32) { sumSquares(at(x), len(x)/Lanes, pointer(lanes)) },
		scaleMul: func(dst, x, w []float32, scale float32) {
			_, _ = dst[len(x)-1], w[len(x)-1]
			scaleMul(at(dst), at(x), at(w), len(x)/Lanes, scale)
		},
		rotate: func(x, cos, sin []float32) {
			_, _ = cos[len(x)-1], sin[len(x)-1]
			rotate(at(x), at(cos), at(sin), len(x)/Lanes)
		},
	}
}

// at is the address of a slice that is not empty.
func at[T any](s []T) pointer { return pointer(&s[0]) }

func dotsAVX512(scores, q, keys []float32, stride int, scale float32) {
	_ = keys[(len(scores)-1)*stride+len(q)-1]
	many, one := dots64, dot64
	if len(q) == 128 {
		many, one = dots128, dot128
	}
	whole := len(scores) / Lanes * Lanes
	if whole > 0 {
		many(at(q), at(keys), whole/Lanes, uintptr(stride)*4, at(scores), scale)
	}
	if rest := scores[whole:]; len(rest) > 0 {
		one(at(q), at(keys[whole*stride:]), len(rest), uintptr(stride)*4, at(rest), scale)
	}
}

func weighAVX512(acc []float32, dim int, p weights, values []float32, stride int) {
	heads := len(acc) / dim
	_, _ = values[(p.n-1)*stride+dim-1], p.scores[(heads-1)*p.row+p.n-1]
	row, step := uintptr(p.row)*4, uintptr(stride)*4
	most := maxHeads * 64 / dim
	for first := 0; first < heads; first += most {
		s, v, a := at(p.scores[first*p.row:]), at(values), at(acc[first*dim:])
		switch n := min(most, heads-first); {
		case dim == 64 && n == 1:
			weigh64x1(s, row, v, p.n, step, a)
		case dim == 64 && n == 2:
			weigh64x2(s, row, v, p.n, step, a)
		case dim == 64 && n == 3:
			weigh64x3(s, row, v, p.n, step, a)
		case dim == 64:
			weigh64x4(s, row, v, p.n, step, a)
		case n == 1:
			weigh128x1(s, row, v, p.n, step, a)
		default:
			weigh128x2(s, row, v, p.n, step, a)
		}
	}
}

// maxHeads is how many heads of 64 the generated kernels weigh at a time.
const maxHeads = 4

// maxRows is the height of the tallest generated tile.
const maxRows = 12

type tileFunc func(k int, x, panel, y pointer, ldy uintptr)

// panels are packed weights with the kernels for their type; tiles[r-1] computes r rows.
type panels struct {
	weights pointer
	k       int
	size    uintptr // bytes of a weight
	tiles   [maxRows]tileFunc
	row     func(k int, x pointer, panels pointer, stride uintptr, y pointer)
}

func matMulTiles(y []float32, ldy int, x []float32, t tile, p panels) {
	_, _ = x[t.end*p.k-1], y[(t.end-1)*ldy+t.to*panelWidth-1]
	ldyBytes := uintptr(ldy) * 4
	stride := uintptr(p.k) * panelWidth * p.size
	i := t.from
	if t.end-t.row == 1 {
		for ; i+4 <= t.to; i += 4 {
			p.row(p.k, at(x[t.row*p.k:]), unsafe.Add(p.weights, uintptr(i)*stride), stride, at(y[t.row*ldy+i*panelWidth:]))
		}
	}
	for ; i < t.to; i++ {
		panel := unsafe.Add(p.weights, uintptr(i)*stride)
		for r := t.row; r < t.end; r += maxRows {
			p.tiles[min(maxRows, t.end-r)-1](p.k, at(x[r*p.k:]), panel, at(y[r*ldy+i*panelWidth:]), ldyBytes)
		}
	}
}

func tilesFloat() [maxRows]tileFunc {
	return [...]tileFunc{
		tile1Float, tile2Float, tile3Float, tile4Float, tile5Float, tile6Float,
		tile7Float, tile8Float, tile9Float, tile10Float, tile11Float, tile12Float,
	}
}

func tilesHalf() [maxRows]tileFunc {
	return [...]tileFunc{
		tile1Half, tile2Half, tile3Half, tile4Half, tile5Half, tile6Half,
		tile7Half, tile8Half, tile9Half, tile10Half, tile11Half, tile12Half,
	}
}
