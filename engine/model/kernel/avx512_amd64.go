package kernel

func avx512() *isa {
	r := &routines{
		float: panelRoutines{4, tilesFloat(), rowFloatZ, 4},
		half:  panelRoutines{2, tilesHalf(), rowHalfZ, 4},
		dots:  dotsAVX512, weigh: weighAVX512,
		top: topZ, expSum: expSumZ, siluMul: siluMulZ, add: addZ, sumSquares: sumSquaresZ, scaleMul: scaleMulZ, rotate: rotateZ,
		peak: peakZ, lanes: 16,
	}
	return r.isa(AVX512)
}

func tilesFloat() []tileFunc {
	return []tileFunc{
		tile1FloatZ, tile2FloatZ, tile3FloatZ, tile4FloatZ, tile5FloatZ, tile6FloatZ,
		tile7FloatZ, tile8FloatZ, tile9FloatZ, tile10FloatZ, tile11FloatZ, tile12FloatZ,
	}
}

func tilesHalf() []tileFunc {
	return []tileFunc{
		tile1HalfZ, tile2HalfZ, tile3HalfZ, tile4HalfZ, tile5HalfZ, tile6HalfZ,
		tile7HalfZ, tile8HalfZ, tile9HalfZ, tile10HalfZ, tile11HalfZ, tile12HalfZ,
	}
}

func dotsAVX512(scores, q, keys []float32, stride int, scale float32) {
	_ = keys[(len(scores)-1)*stride+len(q)-1]
	many, one := dots64Z, dot64Z
	if len(q) == 128 {
		many, one = dots128Z, dot128Z
	}
	whole := len(scores) / Lanes * Lanes
	if whole > 0 {
		many(at(q), at(keys), whole/Lanes, uintptr(stride)*4, at(scores), scale)
	}
	if rest := scores[whole:]; len(rest) > 0 {
		one(at(q), at(keys[whole*stride:]), len(rest), uintptr(stride)*4, at(rest), scale)
	}
}

// maxHeads is how many heads of 64 the generated kernels weigh at a time.
const maxHeads = 4

func weighAVX512(acc []float32, dim int, p weights, values []float32, stride int) {
	heads := len(acc) / dim
	_, _ = values[(p.n-1)*stride+dim-1], p.scores[(heads-1)*p.row+p.n-1]
	row, step := uintptr(p.row)*4, uintptr(stride)*4
	most := maxHeads * 64 / dim
	for first := 0; first < heads; first += most {
		s, v, a := at(p.scores[first*p.row:]), at(values), at(acc[first*dim:])
		switch n := min(most, heads-first); {
		case dim == 64 && n == 1:
			weigh64x1Z(s, row, v, p.n, step, a)
		case dim == 64 && n == 2:
			weigh64x2Z(s, row, v, p.n, step, a)
		case dim == 64 && n == 3:
			weigh64x3Z(s, row, v, p.n, step, a)
		case dim == 64:
			weigh64x4Z(s, row, v, p.n, step, a)
		case n == 1:
			weigh128x1Z(s, row, v, p.n, step, a)
		default:
			weigh128x2Z(s, row, v, p.n, step, a)
		}
	}
}
