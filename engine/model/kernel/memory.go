package kernel

import "unsafe"

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
