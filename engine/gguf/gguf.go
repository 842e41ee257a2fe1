// Package gguf reads model files in GGUF format, version 3 (the format's specification: ggml's
// docs/gguf.md). It is strict: a file is a hostile input, so every count is checked against the
// bytes that are left before anything is allocated, and every tensor against the end of the file.
package gguf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// What a file may hold at most.
const (
	MaxMetadata = 1 << 16 // metadata entries
	MaxTensors  = 1 << 16
	MaxName     = 1 << 10 // bytes of a key or tensor name
	MaxDims     = 4
)

// ErrFormat is wrapped by every error about a file's content.
var ErrFormat = errors.New("not a readable GGUF file")

// ErrMissing is wrapped when a metadata key or tensor is not there.
var ErrMissing = errors.New("missing in GGUF file")

// File is a parsed file. It is read-only and safe for concurrent use until Close.
type File struct {
	data    []byte
	mapped  bool
	meta    map[string]value
	tensors map[string]*Tensor
}

// Open maps and parses a file. Close unmaps it; no tensor may be used after that.
func Open(path string) (*File, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO must not block us
	if err != nil {
		return nil, fmt.Errorf("open model: %w", err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, fmt.Errorf("open model: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("model: %s is not a regular file: %w", path, ErrFormat)
	}
	if info.Size() < headerBytes {
		return nil, fmt.Errorf("model %s: too short: %w", path, ErrFormat)
	}
	data, err := unix.Mmap(int(file.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("map model %s: %w", path, err)
	}
	f, err := Parse(data)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("model %s: %w", path, err), unix.Munmap(data))
	}
	f.mapped = true
	return f, nil
}

// Close unmaps the file.
func (f *File) Close() error {
	data := f.data
	f.data = nil
	if !f.mapped || data == nil {
		return nil
	}
	return unix.Munmap(data)
}

// Data is the whole file. The caller must not change it.
func (f *File) Data() []byte { return f.data }

// Tensor finds a tensor by name; the error wraps ErrMissing.
func (f *File) Tensor(name string) (*Tensor, error) {
	t, ok := f.tensors[name]
	if !ok {
		return nil, fmt.Errorf("tensor %q: %w", name, ErrMissing)
	}
	return t, nil
}

// Has says whether a tensor of this name exists.
func (f *File) Has(tensor string) bool {
	_, ok := f.tensors[tensor]
	return ok
}

// Keys lists the metadata keys, sorted.
func (f *File) Keys() []string { return slices.Sorted(maps.Keys(f.meta)) }

const (
	magic       = "GGUF"
	version     = 3
	headerBytes = 24
	alignment   = 32 // unless general.alignment says otherwise
)

// Parse reads a file's header. It keeps data, which must not change while the File is in use.
func Parse(data []byte) (*File, error) {
	r := &reader{data: data}
	if string(r.bytes(4)) != magic {
		return nil, fmt.Errorf("no GGUF magic: %w", ErrFormat)
	}
	if v := r.u32(); v != version {
		return nil, fmt.Errorf("GGUF version %d, want %d (little endian): %w", v, version, ErrFormat)
	}
	tensors := r.count("tensors", MaxTensors, tensorInfoBytes)
	entries := r.count("metadata entries", MaxMetadata, metadataBytes)
	f := &File{data: data, meta: make(map[string]value, entries), tensors: make(map[string]*Tensor, tensors)}
	for i := 0; i < entries && r.err == nil; i++ {
		key := r.name()
		if _, twice := f.meta[key]; twice {
			r.fail("metadata key %q twice", key)
		}
		f.meta[key] = r.value(key)
	}
	list := make([]*Tensor, 0, tensors)
	for i := 0; i < tensors && r.err == nil; i++ {
		t := r.tensor()
		if f.Has(t.Name) {
			r.fail("tensor %q twice", t.Name)
		}
		f.tensors[t.Name] = t
		list = append(list, t)
	}
	if r.err != nil {
		return nil, r.err
	}
	return f, f.place(list, r.pos)
}

// place finds each tensor's bytes; the data section starts at the first aligned byte after the header.
func (f *File) place(list []*Tensor, header int) error {
	align := uint64(alignment)
	if _, ok := f.meta["general.alignment"]; ok {
		a, err := f.Uint("general.alignment")
		if err != nil {
			return err
		}
		if a < 8 || a > 1<<16 || bits.OnesCount64(a) != 1 {
			return fmt.Errorf("general.alignment is %d: %w", a, ErrFormat)
		}
		align = a
	}
	start := (uint64(header) + align - 1) &^ (align - 1)
	for _, t := range list {
		size := uint64(len(f.data))
		if start > size || t.offset > size-start || t.bytes > size-start-t.offset {
			return fmt.Errorf("tensor %q (%d bytes at %d) ends beyond the file of %d bytes: %w",
				t.Name, t.bytes, start+t.offset, size, ErrFormat)
		}
		if t.offset%align != 0 {
			return fmt.Errorf("tensor %q at %d is not aligned to %d: %w", t.Name, t.offset, align, ErrFormat)
		}
		end := start + t.offset + t.bytes
		t.data = f.data[start+t.offset : end : end]
	}
	return nil
}

// kind is a metadata value type; the numbers are the format's.
type kind uint32

const (
	kindU8 kind = iota
	kindI8
	kindU16
	kindI16
	kindU32
	kindI32
	kindF32
	kindBool
	kindString
	kindArray
	kindU64
	kindI64
	kindF64
)

// size is the encoded size of a scalar, or 0 for other types.
func (k kind) size() uint64 {
	sizes := [...]uint64{
		kindU8: 1, kindI8: 1, kindBool: 1, kindU16: 2, kindI16: 2, kindU32: 4, kindI32: 4, kindF32: 4, kindU64: 8, kindI64: 8, kindF64: 8,
	}
	if k >= kind(len(sizes)) {
		return 0
	}
	return sizes[k]
}

// value is a metadata value, still encoded.
type value struct {
	kind, elem kind
	count      uint64 // of an array
	raw        []byte
}

// get decodes a metadata value, which is no want if decode says so.
func get[T any](f *File, key, want string, decode func(value) (T, bool)) (T, error) {
	v, there := f.meta[key]
	if !there {
		var none T
		return none, fmt.Errorf("metadata key %q: %w", key, ErrMissing)
	}
	out, ok := decode(v)
	if !ok {
		var none T
		return none, fmt.Errorf("metadata key %q is no %s: %w", key, want, ErrFormat)
	}
	return out, nil
}

// String is a string value. Errors wrap ErrMissing or ErrFormat, here and below.
func (f *File) String(key string) (string, error) {
	return get(f, key, "string", func(v value) (string, bool) { return string(v.raw), v.kind == kindString })
}

// Uint is an integer value of any width that is not negative.
func (f *File) Uint(key string) (uint64, error) {
	return get(f, key, "unsigned integer", func(v value) (uint64, bool) {
		n, ok := v.kind.integer(v.raw)
		return uint64(n), ok && n >= 0
	})
}

// Float is a floating-point value.
func (f *File) Float(key string) (float64, error) {
	return get(f, key, "number", func(v value) (float64, bool) {
		switch v.kind {
		case kindF32:
			return float64(math.Float32frombits(binary.LittleEndian.Uint32(v.raw))), true
		case kindF64:
			return math.Float64frombits(binary.LittleEndian.Uint64(v.raw)), true
		default:
			return 0, false
		}
	})
}

// Bool is a truth value.
func (f *File) Bool(key string) (bool, error) {
	return get(f, key, "bool", func(v value) (bool, bool) {
		return v.kind == kindBool && v.raw[0] == 1, v.kind == kindBool && v.raw[0] <= 1
	})
}

// Strings is an array of strings, a new slice each time.
func (f *File) Strings(key string) ([]string, error) {
	return get(f, key, "array of strings", func(v value) ([]string, bool) {
		if v.kind != kindArray || v.elem != kindString {
			return nil, false
		}
		r := &reader{data: v.raw}
		out := make([]string, 0, v.count) // the parser has seen them all: 8 bytes each at least
		for range v.count {
			out = append(out, string(r.bytes(r.u64())))
		}
		return out, r.err == nil
	})
}

// Ints is an array of integers that fit 32 bits, a new slice each time.
func (f *File) Ints(key string) ([]int32, error) {
	return get(f, key, "array of 32-bit integers", func(v value) ([]int32, bool) {
		size := int(v.elem.size())
		if v.kind != kindArray || size == 0 {
			return nil, false
		}
		out := make([]int32, 0, v.count)
		for raw := range slices.Chunk(v.raw, size) {
			n, ok := v.elem.integer(raw)
			if !ok || n != int64(int32(n)) {
				return nil, false
			}
			out = append(out, int32(n))
		}
		return out, true
	})
}

// integer decodes a scalar; false for other types and for numbers beyond int64.
func (k kind) integer(raw []byte) (int64, bool) {
	le := binary.LittleEndian
	switch k {
	case kindU8:
		return int64(raw[0]), true
	case kindI8:
		return int64(int8(raw[0])), true
	case kindU16:
		return int64(le.Uint16(raw)), true
	case kindI16:
		return int64(int16(le.Uint16(raw))), true
	case kindU32:
		return int64(le.Uint32(raw)), true
	case kindI32:
		return int64(int32(le.Uint32(raw))), true
	case kindU64, kindI64:
		n := int64(le.Uint64(raw))
		return n, k == kindI64 || n >= 0
	default:
		return 0, false
	}
}

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

// Least bytes of an encoded tensor description and metadata entry: what bounds their counts.
const (
	tensorInfoBytes = 8 + 4 + 8 + 4 + 8
	metadataBytes   = 8 + 4 + 1
)

// reader walks a header. After the first error it returns zeros and keeps that error.
type reader struct {
	data []byte
	pos  int
	err  error
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("at byte %d: %s: %w", r.pos, fmt.Sprintf(format, args...), ErrFormat)
	}
}

func (r *reader) bytes(n uint64) []byte {
	if r.err != nil {
		return nil
	}
	if n > uint64(len(r.data)-r.pos) {
		r.fail("%d bytes wanted, %d left", n, len(r.data)-r.pos)
		return nil
	}
	b := r.data[r.pos : r.pos+int(n)]
	r.pos += int(n)
	return b
}

func (r *reader) u32() uint32 {
	if b := r.bytes(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (r *reader) u64() uint64 {
	if b := r.bytes(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// count reads a number of things of at least the given encoded size.
func (r *reader) count(what string, limit, size int) int {
	n := r.u64()
	if n > uint64(limit) || n > uint64(len(r.data)-r.pos)/uint64(size) {
		r.fail("%d %s, more than %d or than the file can hold", n, what, limit)
		return 0
	}
	return int(n)
}

func (r *reader) name() string {
	n := r.u64()
	if n == 0 || n > MaxName {
		r.fail("name of %d bytes, want 1..%d", n, MaxName)
		return ""
	}
	return string(r.bytes(n))
}

// value reads a metadata value. Arrays are only measured here and decoded when asked for.
func (r *reader) value(key string) value {
	v := value{kind: kind(r.u32())}
	switch v.kind {
	case kindString:
		v.raw = r.bytes(r.u64())
	case kindArray:
		v.elem = kind(r.u32())
		v.count = r.u64()
		v.raw = r.array(key, v.elem, v.count)
	default:
		size := v.kind.size()
		if size == 0 {
			r.fail("metadata key %q has unknown type %d", key, v.kind)
		}
		v.raw = r.bytes(size)
	}
	return v
}

func (r *reader) array(key string, elem kind, count uint64) []byte {
	if elem == kindString {
		start := r.pos
		for i := uint64(0); i < count && r.err == nil; i++ {
			r.bytes(r.u64())
		}
		return r.data[start:r.pos]
	}
	size := elem.size()
	if size == 0 {
		r.fail("metadata key %q is an array of unsupported type %d", key, elem)
		return nil
	}
	over, n := bits.Mul64(size, count)
	if over != 0 {
		r.fail("metadata key %q has %d elements", key, count)
		return nil
	}
	return r.bytes(n)
}

// tensor reads a tensor's description; its data are placed later.
func (r *reader) tensor() *Tensor {
	t := &Tensor{Name: r.name()}
	dims := r.u32()
	if dims == 0 || dims > MaxDims {
		r.fail("tensor %q has %d dimensions, want 1..%d", t.Name, dims, MaxDims)
		return t
	}
	elements := uint64(1)
	for range dims {
		d := r.u64()
		over, n := bits.Mul64(elements, d)
		if d == 0 || over != 0 || n > 1<<48 {
			r.fail("tensor %q has impossible dimensions", t.Name)
			return t
		}
		elements = n
		t.Dims = append(t.Dims, int(d))
	}
	t.Type = Type(r.u32())
	t.offset = r.u64()
	if r.err != nil {
		return t
	}
	perBlock, blockBytes := t.Type.block()
	switch {
	case perBlock == 0:
		r.fail("tensor %q has type %s; supported are F32, F16, Q4_0, Q4_1 and Q8_0", t.Name, t.Type)
	case t.Dims[0]%perBlock != 0:
		r.fail("tensor %q has rows of %d, want a multiple of %d for %s", t.Name, t.Dims[0], perBlock, t.Type)
	default:
		t.bytes = elements / uint64(perBlock) * uint64(blockBytes)
	}
	return t
}
