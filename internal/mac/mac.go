// Package mac makes message authentication codes of 128 bits: AEGIS-128X2 and AEGIS-128L as MACs, RFC 10032.
//
// A code says that whoever made it knew the key, and binds the data to a context. It is not a hash: somebody who
// knows the key can easily make two messages with the same code. All implementations give the same bits, and none has a branch
// or an address that depends on the key or the data.
package mac

import "encoding/binary"

//go:generate go run gen.go

// Size is the length of a code in bytes.
const Size = 16

// KeySize is the length of a key in bytes.
const KeySize = 32

// Key is the key of AEGIS and after it the nonce, which may be secret too. As a MAC, AEGIS may use both for many messages.
type Key [KeySize]byte

// The algorithm in numbers.
const (
	blockSize = 16 // of AES
	rows      = 8  // blocks of a state
	maxLanes  = 2  // states that run side by side
	maxRate   = 2 * blockSize * maxLanes
	warmUp    = 10 // updates that mix the key in
	coolDown  = 7  // updates between the data and the code
)

// state has a row for each block of AEGIS-128L's state, with a column for each lane: V[j,i] of the RFC.
type state [rows][maxLanes][blockSize]byte

// fibonacci are the constants C0 and C1 of the RFC.
var fibonacci = [2][blockSize]byte{
	{0x00, 0x01, 0x01, 0x02, 0x03, 0x05, 0x08, 0x0d, 0x15, 0x22, 0x37, 0x59, 0x90, 0xe9, 0x79, 0x62},
	{0xdb, 0x3d, 0x18, 0x55, 0x6d, 0xc2, 0x2f, 0xf1, 0x20, 0x11, 0x31, 0x42, 0x73, 0xb5, 0x28, 0xdd},
}

// core is which algorithm runs, and by which implementation.
type core struct {
	lanes int // 1: AEGIS-128L, 2: AEGIS-128X2
	by    implementation
}

// rate is how many bytes one update absorbs.
func (c core) rate() int { return 2 * blockSize * c.lanes }

// MAC makes codes with one key. It is safe for concurrent use.
type MAC struct {
	core
	start state // after Init
}

// New prepares AEGIS-128X2 with a key.
func New(k *Key) *MAC { return prepare(core{2, available()[0]}, k) }

// NewL prepares AEGIS-128L, which needs only registers of 128 bits, with a key.
func NewL(k *Key) *MAC { return prepare(core{1, available()[0]}, k) }

// Implementation names what this machine computes codes with: vaes, aesni or portable.
func Implementation() string { return available()[0].String() }

// prepare is Init of the RFC.
func prepare(c core, k *Key) *MAC {
	m := &MAC{core: c}
	key, nonce := k[:blockSize], k[blockSize:]
	c0, c1 := fibonacci[0][:], fibonacci[1][:]
	sums := [rows][2][]byte{{key, nonce}, {c1}, {c0}, {c1}, {key, nonce}, {key, c0}, {key, c1}, {key, c0}}
	var update [maxRate]byte
	for lane := range c.lanes {
		for row, parts := range sums {
			for _, part := range parts {
				xor(&m.start[row][lane], part)
			}
		}
		copy(update[blockSize*lane:], nonce)
		copy(update[blockSize*(c.lanes+lane):], key)
	}
	for range warmUp {
		if c.lanes > 1 { // AEGIS-128L has no context separator
			for lane := range c.lanes {
				separator := []byte{byte(lane), byte(c.lanes - 1)}
				xor(&m.start[3][lane], separator)
				xor(&m.start[7][lane], separator)
			}
		}
		c.absorb(&m.start, update[:], 1, 0)
	}
	return m
}

func xor(to *[blockSize]byte, b []byte) {
	for i, x := range b {
		to[i] ^= x
	}
}

// Sum writes the code of the data, which is the spans one after the other, within a context. It does not allocate.
func (m *MAC) Sum(dst *[Size]byte, context []byte, data ...[]byte) {
	var h Hash
	m.Begin(&h, context)
	for _, span := range data {
		h.Add(span)
	}
	h.Sum(dst)
}

// Hash is a message whose data comes in pieces. Begin comes first.
type Hash struct {
	core
	state  state
	buf    [maxRate]byte // the first filled bytes of the block that is not full
	filled int
	length uint64 // of the message, in bytes
}

// Begin makes h a new message. The message begins with the context: its length in 8 bytes, little-endian, its bytes, and zeros
// up to a multiple of 64 bytes. So no two pairs of context and data make the same message.
func (m *MAC) Begin(h *Hash, context []byte) {
	h.core, h.state, h.filled, h.length = m.core, m.start, 0, 0
	var size [8]byte
	binary.LittleEndian.PutUint64(size[:], uint64(len(context)))
	h.Add(size[:])
	h.Add(context)
	var zeros [maxRate]byte
	h.Add(zeros[:-h.length%maxRate])
}

// Add appends data to the message.
func (h *Hash) Add(p []byte) {
	h.length += uint64(len(p))
	rate := h.rate()
	if h.filled > 0 {
		n := copy(h.buf[h.filled:rate], p)
		h.filled += n
		p = p[n:]
		if h.filled < rate {
			return
		}
		h.absorb(&h.state, h.buf[:rate], 1, 0)
	}
	if n := len(p) / rate; n > 0 {
		h.absorb(&h.state, p, n, rate)
		p = p[n*rate:]
	}
	h.filled = copy(h.buf[:], p)
}

// Sum writes the code of the message. The message is over then: only Begin may be called.
func (h *Hash) Sum(dst *[Size]byte) {
	if h.filled > 0 {
		clear(h.buf[h.filled:])
		h.absorb(&h.state, h.buf[:], 1, 0)
	}
	h.cool(h.lanes, 8*h.length, 8*Size)
	if h.lanes > 1 { // the lanes' codes go into lane 0, which alone counts from here on
		var tags [maxRate]byte
		for lane := range h.lanes {
			tag := h.state.tag(lane)
			copy(tags[blockSize*h.lanes*lane:], tag[:])
		}
		h.absorb(&h.state, tags[:], 1, 0)
		h.cool(1, uint64(h.lanes), 8*Size)
	}
	*dst = h.state.tag(0)
}

// cool hides the state: some updates with row 2 and two numbers, in the first lanes.
func (h *Hash) cool(lanes int, a, b uint64) {
	var update [maxRate]byte
	for lane := range lanes {
		row := &h.state[2][lane]
		first, second := update[blockSize*lane:], update[blockSize*(h.lanes+lane):]
		binary.LittleEndian.PutUint64(first, binary.LittleEndian.Uint64(row[:])^a)
		binary.LittleEndian.PutUint64(first[8:], binary.LittleEndian.Uint64(row[8:])^b)
		copy(second[:blockSize], first)
	}
	h.absorb(&h.state, update[:], coolDown, 0)
}

// tag is the sum of the first seven rows of one lane.
func (s *state) tag(lane int) (t [Size]byte) {
	var low, high uint64
	for row := range rows - 1 {
		b := &s[row][lane]
		low ^= binary.LittleEndian.Uint64(b[:])
		high ^= binary.LittleEndian.Uint64(b[8:])
	}
	binary.LittleEndian.PutUint64(t[:], low)
	binary.LittleEndian.PutUint64(t[8:], high)
	return t
}

// implementation is a way to compute updates.
type implementation uint8

// The implementations, the slowest first.
const (
	portable implementation = iota
	aesni                   // AES on registers of 128 bits
	vaes                    // AES on registers of 256 bits
)

func (i implementation) String() string { return [...]string{"portable", "aesni", "vaes"}[i] }
