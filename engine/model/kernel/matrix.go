package kernel

import (
	"math"
	"unsafe"
)

// panelWidth is how many outputs are computed side by side: two AVX-512 registers, four of AVX2.
const panelWidth = 32

// DType is how weights are kept in memory. Arithmetic is float32 either way.
type DType uint8

// The weight types.
const (
	F32 DType = iota
	F16       // rounded to nearest even; half the memory traffic
)

// String is the type's name.
func (d DType) String() string {
	if d == F16 {
		return "f16"
	}
	return "f32"
}

// Matrix is N rows of K weights, packed in panels: panel, k, then 32 rows side by side.
type Matrix struct {
	N, K  int
	float []float32 // one of the two is set
	half  []uint16
}

// Stride is N rounded up to whole panels: the least length of a row of output.
func (w *Matrix) Stride() int { return w.panels() * panelWidth }

func (w *Matrix) panels() int { return (w.N + panelWidth - 1) / panelWidth }

// MatrixBytes is the memory that a packed matrix of n rows of k weights takes.
func MatrixBytes(n, k int, d DType) int {
	size := 4
	if d == F16 {
		size = 2
	}
	return (n + panelWidth - 1) / panelWidth * panelWidth * k * size
}

// Pack builds a matrix in memory of m; row writes one row of weights and is called on all threads at once,
// or not at all if the memory came from an image.
func (c *Compute) Pack(m *Memory, n, k int, d DType, row func(dst []float32, row int)) *Matrix {
	w := &Matrix{N: n, K: k}
	size := w.Stride() * k
	if d == F16 {
		w.half = m.half(size)
	} else {
		w.float = m.float(size)
	}
	if m.full {
		return w
	}
	c.Run(w.panels(), 1, func(_, from, to int) {
		buf := make([]float32, k)
		for i := from * panelWidth; i < min(to*panelWidth, n); i++ {
			row(buf, i)
			w.set(i, buf)
		}
	})
	return w
}

// set stores row i.
func (w *Matrix) set(i int, row []float32) {
	at := i/panelWidth*panelWidth*w.K + i%panelWidth
	if w.half != nil {
		for _, v := range row {
			w.half[at] = toHalf(v)
			at += panelWidth
		}
		return
	}
	for _, v := range row {
		w.float[at] = v
		at += panelWidth
	}
}

// tile is a part of a matrix product: panels [from,to) of rows [row,end).
type tile struct{ from, to, row, end int }

// rowBlock is how many rows of x are multiplied by a panel before the next: they stay in the L2 cache.
const rowBlock = 240

// MatMul computes y = x*W for the given number of rows. x has rows of K, y has rows of w.Stride(), of which the first N
// are outputs.
func (c *Compute) MatMul(y, x []float32, rows int, w *Matrix) {
	panels := w.panels()
	// Parts of several panels: short enough to balance the threads, long enough to stream weights.
	grain := max(1, min(16, panels/(4*c.Threads())))
	if rows == 1 {
		grain = (grain + 3) / 4 * 4 // a single row is computed four panels at a time
	}
	parts := (panels + grain - 1) / grain
	blocks := (rows + rowBlock - 1) / rowBlock
	c.pool.run(parts*blocks, 1, func(_, i, end int) {
		for ; i < end; i++ {
			t := tile{from: i % parts * grain, row: i / parts * rowBlock}
			t.to, t.end = min(t.from+grain, panels), min(t.row+rowBlock, rows)
			c.isa.matMul(y, w.Stride(), x, w, t)
		}
	})
}

// toHalf rounds to half precision, nearest even, as VCVTPS2PH does.
func toHalf(f float32) uint16 {
	b := math.Float32bits(f)
	sign := uint16(b>>16) & 0x8000
	switch magnitude := b & 0x7fffffff; {
	case magnitude > 0x7f800000:
		return sign | 0x7e00 // NaN
	case magnitude >= 0x477ff000:
		return sign | 0x7c00 // rounds beyond 65504
	case magnitude >= 0x38800000: // normal: rebias, round the 13 bits that go
		magnitude -= (127 - 15) << 23
		return sign | uint16((magnitude+0xfff+magnitude>>13&1)>>13)
	default: // subnormal: the sum with 0.5 has the wanted bits at its end, rounded by the hardware
		sum := math.Float32frombits(magnitude) + 0.5
		return sign | uint16(math.Float32bits(sum)-math.Float32bits(0.5))
	}
}

// Memory holds the weights of a model, outside the garbage collector's reach.
type Memory struct {
	data, free []byte
	full       bool // it came from an image: the matrices are there already
	release    func([]byte) error
}

const alignment = 64

// Close frees the memory; no matrix in it may be used after that.
func (m *Memory) Close() error {
	data := m.data
	if data == nil {
		return nil
	}
	m.data, m.free = nil, nil
	return m.release(data)
}

// take cuts off bytes; asking for more than was reserved is a bug and fails like a slice index.
func (m *Memory) take(bytes int) unsafe.Pointer {
	p := unsafe.Pointer(&m.free[:bytes][0])
	m.free = m.free[(bytes+alignment-1)/alignment*alignment:]
	return p
}

func (m *Memory) float(n int) []float32 { return unsafe.Slice((*float32)(m.take(n*4)), n) }

func (m *Memory) half(n int) []uint16 { return unsafe.Slice((*uint16)(m.take(n*2)), n) }
