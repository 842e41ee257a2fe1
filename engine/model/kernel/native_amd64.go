package kernel

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// pointer is what the generator's declarations pass.
type pointer = unsafe.Pointer

// native lists the assembly that this machine can run, the fastest first. The cpu package reports a
// feature only if the operating system saves its registers.
func native() []*isa {
	var all []*isa
	avx2 := cpu.X86.HasAVX2 && cpu.X86.HasFMA && cpu.X86.HasF16C
	if avx2 && cpu.X86.HasAVX512F {
		all = append(all, avx512())
	}
	if avx2 {
		all = append(all, avx2ISA())
	}
	return all
}

// routines are generated functions. Those without a comment are described in isa.
type routines struct {
	float, half panelRoutines
	dots        func(scores, q, keys []float32, stride int, scale float32)
	weigh       func(acc []float32, dim int, p weights, values []float32, stride int)

	top        func(s pointer, n int, lanes pointer)
	expSum     func(s pointer, n int, top float32, sum pointer)
	siluMul    func(dst, gate, up pointer, n int)
	add        func(dst, x pointer, n int)
	sumSquares func(x pointer, n int, lanes pointer)
	scaleMul   func(dst, x, w pointer, n int, scale float32)
	rotate     func(x, cos, sin pointer, n int)
	peak       func(n int)
	lanes      int // of a register
}

// peakChains is how many FMA instructions the generated peak repeats.
const peakChains = 12

// panelRoutines multiply rows by panels of one type of weights.
type panelRoutines struct {
	size   uintptr    // bytes of a weight
	tiles  []tileFunc // tiles[r-1] computes r rows of one panel
	row    func(k int, x, panels pointer, stride uintptr, y pointer)
	panels int // that row computes at a time
}

type tileFunc func(k int, x, panel, y pointer, ldy uintptr)

// isa checks slices and hands addresses to the routines.
func (r *routines) isa(id ISA) *isa {
	return &isa{
		id: id,
		matMul: func(y []float32, ldy int, x []float32, w *Matrix, t tile) {
			if w.half != nil {
				r.half.matMul(y, ldy, x, packed{at(w.half), w.K}, t)
			} else {
				r.float.matMul(y, ldy, x, packed{at(w.float), w.K}, t)
			}
		},
		dots:  r.dots,
		weigh: r.weigh,
		top:   func(s []float32, lanes *[Lanes]float32) { r.top(at(s), len(s)/Lanes, pointer(lanes)) },
		expSum: func(s []float32, top float32, sum *[Lanes]float32) {
			r.expSum(at(s), len(s)/Lanes, top, pointer(sum))
		},
		siluMul: func(dst, gate, up []float32) {
			_, _ = dst[len(gate)-1], up[len(gate)-1]
			r.siluMul(at(dst), at(gate), at(up), len(gate)/Lanes)
		},
		add: func(dst, x []float32) {
			_ = dst[len(x)-1]
			r.add(at(dst), at(x), len(x)/Lanes)
		},
		sumSquares: func(x []float32, lanes *[Lanes]float32) { r.sumSquares(at(x), len(x)/Lanes, pointer(lanes)) },
		scaleMul: func(dst, x, w []float32, scale float32) {
			_, _ = dst[len(x)-1], w[len(x)-1]
			r.scaleMul(at(dst), at(x), at(w), len(x)/Lanes, scale)
		},
		rotate: func(x, cos, sin []float32) {
			_, _ = cos[len(x)-1], sin[len(x)-1]
			r.rotate(at(x), at(cos), at(sin), len(x)/Lanes)
		},
		peak: func(n int) float64 {
			r.peak(n)
			return 2 * peakChains * float64(r.lanes) * float64(n)
		},
	}
}

// at is the address of a slice that is not empty.
func at[T any](s []T) pointer { return pointer(&s[0]) }

// packed are the panels of a matrix, rows of k.
type packed struct {
	weights pointer
	k       int
}

func (r *panelRoutines) matMul(y []float32, ldy int, x []float32, w packed, t tile) {
	_, _ = x[t.end*w.k-1], y[(t.end-1)*ldy+t.to*panelWidth-1]
	ldyBytes := uintptr(ldy) * 4
	stride := uintptr(w.k) * panelWidth * r.size
	i := t.from
	if t.end-t.row == 1 {
		for ; i+r.panels <= t.to; i += r.panels {
			r.row(w.k, at(x[t.row*w.k:]), unsafe.Add(w.weights, uintptr(i)*stride), stride, at(y[t.row*ldy+i*panelWidth:]))
		}
	}
	tiles := (t.end - t.row + len(r.tiles) - 1) / len(r.tiles)
	for ; i < t.to; i++ {
		panel := unsafe.Add(w.weights, uintptr(i)*stride)
		row := t.row
		for left := tiles; left > 0; left-- { // of heights as equal as can be: low tiles are slow
			height := (t.end - row + left - 1) / left
			r.tiles[height-1](w.k, at(x[row*w.k:]), panel, at(y[row*ldy+i*panelWidth:]), ldyBytes)
			row += height
		}
	}
}
