package kernel

func avx2ISA() *isa {
	r := &routines{
		float: panelRoutines{4, []tileFunc{tile1FloatY, tile2FloatY, tile3FloatY, tile4FloatY, tile5FloatY, tile6FloatY}, rowFloatY, 2},
		half:  panelRoutines{2, []tileFunc{tile1HalfY, tile2HalfY, tile3HalfY, tile4HalfY, tile5HalfY, tile6HalfY}, rowHalfY, 2},
		dots:  dotsAVX2, weigh: weighAVX2,
		top: topY, expSum: expSumY, siluMul: siluMulY, add: addY, sumSquares: sumSquaresY, scaleMul: scaleMulY, rotate: rotateY,
		peak: peakY, lanes: 8,
	}
	return r.isa(AVX2)
}

func dotsAVX2(scores, q, keys []float32, stride int, scale float32) {
	_ = keys[(len(scores)-1)*stride+len(q)-1]
	const together = 8
	many, one := dots64Y, dot64Y
	if len(q) == 128 {
		many, one = dots128Y, dot128Y
	}
	whole := len(scores) / together * together
	if whole > 0 {
		many(at(q), at(keys), whole/together, uintptr(stride)*4, at(scores), scale)
	}
	if rest := scores[whole:]; len(rest) > 0 {
		one(at(q), at(keys[whole*stride:]), len(rest), uintptr(stride)*4, at(rest), scale)
	}
}

func weighAVX2(acc []float32, dim int, p weights, values []float32, stride int) {
	heads := len(acc) / dim
	_, _ = values[(p.n-1)*stride+dim-1], p.scores[(heads-1)*p.row+p.n-1]
	for h := range heads {
		for d := 0; d < dim; d += 64 {
			weigh64Y(at(p.scores[h*p.row:]), at(values[d:]), p.n, uintptr(stride)*4, at(acc[h*dim+d:]))
		}
	}
}
