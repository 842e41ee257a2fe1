//go:build ignore

package main

import "fmt"

// The AVX2 kernels compute what the AVX-512 ones do: 16 lanes are two registers, the lower and the upper
// eight, and there are 16 registers in all.

// maxRowsY is the height of the tallest AVX2 tile: 6 rows of half a panel take 12 registers.
const maxRowsY = 6

func narrow() *generator {
	g := newGenerator("Y")
	for _, half := range []bool{false, true} {
		for rows := 1; rows <= maxRowsY; rows++ {
			g.tileY(rows, half)
		}
		g.rowY(half)
	}
	for _, dim := range []int{64, 128} {
		g.dotsY(dim)
		g.dotY(dim)
	}
	g.weighY()
	g.softmaxY()
	g.elementwiseY()
	g.peak(peakChains)
	return g
}

func (g *generator) zeroY(n int) {
	for i := range n {
		g.p("VXORPS Y%d, Y%d, Y%d", i, i, i)
	}
}

// tileY multiplies rows of x by one panel, 16 outputs after the other 16.
func (g *generator) tileY(rows int, half bool) {
	g.begin(fmt.Sprintf("tile%d%s", rows, suffix(half)), fmt.Sprintf("computes %d rows of one panel of 32 outputs.", rows),
		"k int CX", "x pointer R8", "panel pointer DI", "y pointer SI", "ldy uintptr BX")
	g.p("LEAQ (CX*4), AX") // bytes of a row of x
	base := []string{"R10", "R11"}[:(rows+2)/3]
	if len(base) == 2 {
		g.p("LEAQ (R8)(AX*2), R9")
		g.p("ADDQ AX, R9")
	}
	g.p("MOVQ $2, DX")
	g.label("side")
	g.p("MOVQ R8, R10")
	if len(base) == 2 {
		g.p("MOVQ R9, R11")
	}
	g.p("MOVQ DI, R13")
	g.p("MOVQ CX, R12")
	g.zeroY(2 * rows)
	g.label("loop")
	width := 128
	if half {
		width = 64
		g.p("VCVTPH2PS (R13), Y12")
		g.p("VCVTPH2PS 16(R13), Y13")
	} else {
		g.p("VMOVUPS (R13), Y12")
		g.p("VMOVUPS 32(R13), Y13")
	}
	g.p("ADDQ $%d, R13", width)
	for r := range rows {
		at := []string{"(%s)", "(%s)(AX*1)", "(%s)(AX*2)"}[r%3]
		g.p("VBROADCASTSS "+at+", Y%d", base[r/3], 14+r%2)
		g.p("VFMADD231PS Y12, Y%d, Y%d", 14+r%2, 2*r)
		g.p("VFMADD231PS Y13, Y%d, Y%d", 14+r%2, 2*r+1)
	}
	for _, b := range base {
		g.p("ADDQ $4, %s", b)
	}
	g.p("DECQ R12")
	g.p("JNZ loop")
	g.p("MOVQ SI, R12")
	for r := range rows {
		g.p("VMOVUPS Y%d, (R12)", 2*r)
		g.p("VMOVUPS Y%d, 32(R12)", 2*r+1)
		if r+1 < rows {
			g.p("ADDQ BX, R12")
		}
	}
	g.p("ADDQ $%d, DI", width/2)
	g.p("ADDQ $64, SI")
	g.p("DECQ DX")
	g.p("JNZ side")
	g.end()
}

// rowY multiplies one row by two panels at once.
func (g *generator) rowY(half bool) {
	g.begin("row"+suffix(half), "computes one row of two panels that lie stride bytes apart.",
		"k int CX", "x pointer R8", "panels pointer DI", "stride uintptr AX", "y pointer SI")
	g.zeroY(8)
	g.label("loop")
	g.p("VBROADCASTSS (R8), Y15")
	if half { // measured: a quarter of the time
		g.p("PREFETCHT0 4096(DI)")
		g.p("PREFETCHT0 4096(DI)(AX*1)")
	}
	for i := range 8 {
		at := []string{"(DI)", "(DI)(AX*1)"}[i/4]
		if half {
			g.p("VCVTPH2PS %d%s, Y%d", 16*(i%4), at, 8+i%4)
			g.p("VFMADD231PS Y%d, Y15, Y%d", 8+i%4, i)
		} else {
			g.p("VFMADD231PS %d%s, Y15, Y%d", 32*(i%4), at, i)
		}
	}
	if half {
		g.p("ADDQ $64, DI")
	} else {
		g.p("ADDQ $128, DI")
	}
	g.p("ADDQ $4, R8")
	g.p("DECQ CX")
	g.p("JNZ loop")
	for i := range 8 {
		g.p("VMOVUPS Y%d, %d(SI)", i, 32*i)
	}
	g.end()
}

// loadQuery keeps a query of 64 in Y0 to Y7; a longer one is read again for each key.
func (g *generator) loadQuery(dim int) {
	if dim > 64 {
		return
	}
	for i := range dim / 8 {
		g.p("VMOVUPS %d(R8), Y%d", 32*i, i)
	}
}

// lanesY writes the sums of lanes i and i+8 of one key to a register: the first step of the tree. It uses
// Y8 and Y9, and for long queries Y0 and Y1.
func (g *generator) lanesY(key string, dim, to int) {
	for i := range dim / 8 {
		q := i
		if dim > 64 {
			q = i % 2
			g.p("VMOVUPS %d(R8), Y%d", 32*i, q)
		}
		if i < 2 {
			g.p("VMULPS %d%s, Y%d, Y%d", 32*i, key, q, 8+i)
		} else {
			g.p("VFMADD231PS %d%s, Y%d, Y%d", 32*i, key, q, 8+i%2)
		}
	}
	g.p("VADDPS Y9, Y8, Y%d", to)
}

// dotsY is q·key for n keys, 8 at a time, with the additions of dots.
func (g *generator) dotsY(dim int) {
	g.begin(fmt.Sprintf("dots%d", dim), "writes scale * (q · key) for n*8 keys that lie stride bytes apart.",
		"q pointer R8", "keys pointer DI", "n int CX", "stride uintptr AX", "scores pointer SI", "scale float32 Y15")
	g.loadQuery(dim)
	// DI and R9 are keys 0 and 4; BX and DX are two and three strides.
	g.p("LEAQ (AX)(AX*1), BX")
	g.p("LEAQ (BX)(AX*1), DX")
	g.label("loop")
	g.p("LEAQ (DI)(AX*4), R9")
	for key, offset := range []string{"", "(AX*1)", "(BX*1)", "(DX*1)"} {
		// Keys key and key+4 end up in the 128-bit lanes of Y(10+key).
		g.lanesY("(DI)"+offset, dim, 10+key)
		g.lanesY("(R9)"+offset, dim, 14)
		g.p("VPERM2F128 $0x31, Y14, Y%d, Y8", 10+key)
		g.p("VPERM2F128 $0x20, Y14, Y%d, Y%d", 10+key, 10+key)
		g.p("VADDPS Y8, Y%d, Y%d", 10+key, 10+key)
	}
	for pair := range 2 {
		g.p("VUNPCKLPD Y%d, Y%d, Y8", 11+2*pair, 10+2*pair)
		g.p("VUNPCKHPD Y%d, Y%d, Y9", 11+2*pair, 10+2*pair)
		g.p("VADDPS Y9, Y8, Y%d", 10+2*pair)
	}
	g.p("VSHUFPS $0x88, Y12, Y10, Y8")
	g.p("VSHUFPS $0xdd, Y12, Y10, Y9")
	g.p("VADDPS Y9, Y8, Y8")
	g.p("VMULPS Y15, Y8, Y8")
	g.p("VMOVUPS Y8, (SI)")
	g.p("LEAQ (R9)(AX*4), DI")
	g.p("ADDQ $32, SI")
	g.p("DECQ CX")
	g.p("JNZ loop")
	g.end()
}

// dotY is dotsY for single keys.
func (g *generator) dotY(dim int) {
	g.begin(fmt.Sprintf("dot%d", dim), "writes scale * (q · key) for n keys that lie stride bytes apart.",
		"q pointer R8", "keys pointer DI", "n int CX", "stride uintptr AX", "scores pointer SI", "scale float32 Y15")
	g.loadQuery(dim)
	g.label("loop")
	g.lanesY("(DI)", dim, 10)
	g.p("VEXTRACTF128 $1, Y10, X11")
	g.p("VADDPS X11, X10, X10")
	g.p("VPERMILPS $0x0e, X10, X11")
	g.p("VADDPS X11, X10, X10")
	g.p("VPERMILPS $0x01, X10, X11")
	g.p("VADDSS X11, X10, X10")
	g.p("VMULSS X15, X10, X10")
	g.p("VMOVSS X10, (SI)")
	g.p("ADDQ AX, DI")
	g.p("ADDQ $4, SI")
	g.p("DECQ CX")
	g.p("JNZ loop")
	g.end()
}

// weighY is weigh for 64 dimensions of one head: 8 chains.
func (g *generator) weighY() {
	g.begin("weigh64", "adds p[i] * value[i] to 64 numbers of acc.",
		"p pointer R8", "values pointer DI", "n int CX", "stride uintptr AX", "acc pointer SI")
	for i := range 8 {
		g.p("VMOVUPS %d(SI), Y%d", 32*i, i)
	}
	g.label("loop")
	g.p("VBROADCASTSS (R8), Y15")
	for i := range 8 {
		g.p("VFMADD231PS %d(DI), Y15, Y%d", 32*i, i)
	}
	g.p("ADDQ AX, DI")
	g.p("ADDQ $4, R8")
	g.p("DECQ CX")
	g.p("JNZ loop")
	for i := range 8 {
		g.p("VMOVUPS Y%d, %d(SI)", i, 32*i)
	}
	g.end()
}

// Places of expConstants, and of the exponent's bias behind them.
const (
	log2e, ln2High, ln2Low, firstCoefficient, lastCoefficient, one, least, most, bias = 0, 1, 2, 3, 8, 9, 10, 11, 12
)

// constant is the address of a constant, written out for eight lanes: there are not enough registers.
func constant(i int) string { return fmt.Sprintf("expConstY<>+%d(SB)", 32*i) }

// expY turns register x into e**x like exp, with four registers from free on. VSCALEFPS is a product with
// a power of two, which is exact: what is not cut off is no subnormal.
func (g *generator) expY(x, free int) {
	n, p, square, kept := free, free+1, free+2, free+3
	g.p("VCMPPS $5, %s, Y%d, Y%d", constant(least), x, kept)
	g.p("VMOVUPS %s, Y%d", constant(most), n)
	g.p("VMINPS Y%d, Y%d, Y%d", x, n, x)
	g.p("VMULPS %s, Y%d, Y%d", constant(log2e), x, n)
	g.p("VROUNDPS $8, Y%d, Y%d", n, n)
	g.p("VFMADD231PS %s, Y%d, Y%d", constant(ln2High), n, x)
	g.p("VFMADD231PS %s, Y%d, Y%d", constant(ln2Low), n, x)
	g.p("VMOVUPS %s, Y%d", constant(firstCoefficient), p)
	for c := firstCoefficient + 1; c <= lastCoefficient; c++ {
		g.p("VFMADD213PS %s, Y%d, Y%d", constant(c), x, p)
	}
	g.p("VMULPS Y%d, Y%d, Y%d", x, x, square)
	g.p("VADDPS %s, Y%d, Y%d", constant(one), x, x)
	g.p("VFMADD231PS Y%d, Y%d, Y%d", square, p, x)
	g.p("VCVTPS2DQ Y%d, Y%d", n, n)
	g.p("VPADDD %s, Y%d, Y%d", constant(bias), n, n)
	g.p("VPSLLD $23, Y%d, Y%d", n, n)
	g.p("VMULPS Y%d, Y%d, Y%d", n, x, x)
	g.p("VANDPS Y%d, Y%d, Y%d", kept, x, x)
}

// bothExp does expY for Y0 and Y1.
func (g *generator) bothExp() {
	g.expY(0, 2)
	g.expY(1, 6)
}

func (g *generator) softmaxY() {
	for i, c := range append(append([]string(nil), expConstants...), "$127") {
		for lane := range 8 {
			fmt.Fprintf(&g.asm, "DATA expConstY<>+%d(SB)/4, %s\n", 32*i+4*lane, c)
		}
	}
	fmt.Fprintf(&g.asm, "GLOBL expConstY<>(SB), RODATA|NOPTR, $%d\n\n", 32*(len(expConstants)+1))

	g.begin("expSum", "replaces n*16 scores by exp(score-top) and adds them to the 16 lanes of sum.",
		"s pointer DI", "n int CX", "top float32 Y15", "sum pointer SI")
	g.p("VMOVUPS (SI), Y13")
	g.p("VMOVUPS 32(SI), Y14")
	g.loop("DI", func() {
		for side := range 2 {
			g.p("VMOVUPS %d(DI), Y%d", 32*side, side)
			g.p("VSUBPS Y15, Y%d, Y%d", side, side)
		}
		g.bothExp()
		for side := range 2 {
			g.p("VMOVUPS Y%d, %d(DI)", side, 32*side)
			g.p("VADDPS Y%d, Y%d, Y%d", side, 13+side, 13+side)
		}
	})
	g.p("VMOVUPS Y13, (SI)")
	g.p("VMOVUPS Y14, 32(SI)")
	g.end()

	g.begin("top", "writes 16 lanes of maxima over n*16 numbers.", "s pointer DI", "n int CX", "lanes pointer SI")
	g.p("VMOVUPS (DI), Y0")
	g.p("VMOVUPS 32(DI), Y1")
	g.loop("DI", func() {
		g.p("VMAXPS (DI), Y0, Y0")
		g.p("VMAXPS 32(DI), Y1, Y1")
	})
	g.p("VMOVUPS Y0, (SI)")
	g.p("VMOVUPS Y1, 32(SI)")
	g.end()
}

// sides is loop with body called for the lower and the upper half: offset and number.
func (g *generator) sides(pointers string, body func(at, side int)) {
	g.loop(pointers, func() {
		for side := range 2 {
			body(32*side, side)
		}
	})
}

func (g *generator) elementwiseY() {
	g.begin("siluMul", "writes gate/(1+exp(-gate)) * up for n*16 numbers.",
		"dst pointer BX", "gate pointer DI", "up pointer SI", "n int CX")
	g.p("VXORPS Y15, Y15, Y15")
	g.loop("DI SI BX", func() {
		for side := range 2 {
			g.p("VMOVUPS %d(DI), Y%d", 32*side, 10+side)
			g.p("VSUBPS Y%d, Y15, Y%d", 10+side, side)
		}
		g.bothExp()
		for side := range 2 {
			g.p("VADDPS %s, Y%d, Y%d", constant(one), side, side)
			g.p("VDIVPS Y%d, Y%d, Y%d", side, 10+side, side)
			g.p("VMULPS %d(SI), Y%d, Y%d", 32*side, side, side)
			g.p("VMOVUPS Y%d, %d(BX)", side, 32*side)
		}
	})
	g.end()

	g.begin("add", "adds n*16 numbers to dst.", "dst pointer DI", "x pointer SI", "n int CX")
	g.sides("DI SI", func(at, side int) {
		g.p("VMOVUPS %d(DI), Y%d", at, side)
		g.p("VADDPS %d(SI), Y%d, Y%d", at, side, side)
		g.p("VMOVUPS Y%d, %d(DI)", side, at)
	})
	g.end()

	g.begin("sumSquares", "writes 16 lanes of FMA chains over the squares of n*16 numbers.",
		"x pointer SI", "n int CX", "lanes pointer DI")
	g.zeroY(2)
	g.sides("SI", func(at, side int) {
		g.p("VMOVUPS %d(SI), Y%d", at, 2+side)
		g.p("VFMADD231PS Y%d, Y%d, Y%d", 2+side, 2+side, side)
	})
	g.p("VMOVUPS Y0, (DI)")
	g.p("VMOVUPS Y1, 32(DI)")
	g.end()

	g.begin("scaleMul", "writes x * scale * w for n*16 numbers.",
		"dst pointer DI", "x pointer SI", "w pointer BX", "n int CX", "scale float32 Y15")
	g.sides("DI SI BX", func(at, side int) {
		g.p("VMULPS %d(SI), Y15, Y%d", at, side)
		g.p("VMULPS %d(BX), Y%d, Y%d", at, side, side)
		g.p("VMOVUPS Y%d, %d(DI)", side, at)
	})
	g.end()

	g.begin("rotate", "turns n*8 pairs of x by cosines and signed sines that are written out for both of a pair.",
		"x pointer DI", "cos pointer SI", "sin pointer BX", "n int CX")
	g.sides("DI SI BX", func(at, side int) {
		g.p("VMOVUPS %d(DI), Y%d", at, side)
		g.p("VPERMILPS $0xb1, Y%d, Y%d", side, 2+side)
		g.p("VMULPS %d(BX), Y%d, Y%d", at, 2+side, 2+side)
		g.p("VFMADD231PS %d(SI), Y%d, Y%d", at, side, 2+side)
		g.p("VMOVUPS Y%d, %d(DI)", 2+side, at)
	})
	g.end()
}
