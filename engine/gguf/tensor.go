package gguf

import (
	"encoding/binary"
	"fmt"
	"math"
)

// Type is how a tensor's numbers are stored; the numbers are the format's.
type Type uint32

// The supported types. A quantised row is a sequence of blocks of 32 numbers.
const (
	F32  Type = 0
	F16  Type = 1
	Q4_0 Type = 2 // block: f16 scale, 32 nibbles; value = scale * (nibble - 8)
	Q4_1 Type = 3 // block: f16 scale, f16 minimum, 32 nibbles; value = scale * nibble + minimum
	Q8_0 Type = 8 // block: f16 scale, 32 int8; value = scale * int8
)

// String is the type's name in ggml, or its number.
func (t Type) String() string {
	names := map[Type]string{
		F32: "F32", F16: "F16", Q4_0: "Q4_0", Q4_1: "Q4_1", Q8_0: "Q8_0",
		6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
		16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
		24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
	}
	if n, ok := names[t]; ok {
		return n
	}
	return fmt.Sprintf("number %d", uint32(t))
}

// block gives the numbers in a block and its bytes; 0 for an unsupported type.
func (t Type) block() (numbers, bytes int) {
	switch t {
	case F32:
		return 1, 4
	case F16:
		return 1, 2
	case Q4_0:
		return 32, 2 + 16
	case Q4_1:
		return 32, 4 + 16
	case Q8_0:
		return 32, 2 + 32
	}
	return 0, 0
}

// Tensor is an array of numbers in a file.
type Tensor struct {
	Name string
	Type Type
	Dims []int // the length of a row first

	offset, bytes uint64
	data          []byte
}

// Cols is the length of a row.
func (t *Tensor) Cols() int { return t.Dims[0] }

// Rows is the number of rows over all further dimensions.
func (t *Tensor) Rows() int {
	n := 1
	for _, d := range t.Dims[1:] {
		n *= d
	}
	return n
}

// Raw is the tensor's encoded data. The caller must not change it.
func (t *Tensor) Raw() []byte { return t.data }

// Clone copies the tensor's data, so that it outlives its file.
func (t *Tensor) Clone() *Tensor {
	c := *t
	c.data = append([]byte(nil), t.data...)
	return &c
}

// Row dequantises one row into dst, which is Cols long. The result has the same bits on every
// machine: products are rounded before they are added.
func (t *Tensor) Row(dst []float32, row int) {
	per, size := t.Type.block()
	n := t.Cols() / per * size
	src := t.data[row*n : (row+1)*n]
	dst = dst[:t.Cols()]
	switch t.Type {
	case F32:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		}
	case F16:
		for i := range dst {
			dst[i] = half(src[2*i:])
		}
	case Q4_0:
		for ; len(dst) > 0; dst, src = dst[per:], src[size:] {
			unpackNibbles(dst[:32], src[2:18], half(src), 8, 0)
		}
	case Q4_1:
		for ; len(dst) > 0; dst, src = dst[per:], src[size:] {
			unpackNibbles(dst[:32], src[4:20], half(src), 0, half(src[2:]))
		}
	case Q8_0:
		for ; len(dst) > 0; dst, src = dst[per:], src[size:] {
			scale := half(src)
			for j, q := range src[2:34] {
				dst[j] = float32(int8(q)) * scale
			}
		}
	}
}

// unpackNibbles writes scale*(nibble-zero)+minimum: low nibbles are the first half of a block.
func unpackNibbles(dst []float32, src []byte, scale float32, zero int, minimum float32) {
	for j, q := range src[:16] {
		dst[j] = float32(float32(int(q&15)-zero)*scale) + minimum
		dst[j+16] = float32(float32(int(q>>4)-zero)*scale) + minimum
	}
}

func half(b []byte) float32 { return Half(binary.LittleEndian.Uint16(b)) }

// Half widens an IEEE 754 half-precision number. It is exact.
func Half(h uint16) float32 {
	sign, exponent, fraction := uint32(h>>15)<<31, uint32(h>>10)&31, uint32(h)&1023
	switch exponent {
	case 0: // zero or subnormal: fraction * 2^-24
		return math.Float32frombits(sign | math.Float32bits(float32(fraction)/(1<<24)))
	case 31: // infinity or NaN
		return math.Float32frombits(sign | 0x7f800000 | fraction<<13)
	}
	return math.Float32frombits(sign | (exponent+127-15)<<23 | fraction<<13)
}
