package gguf

import (
	"bytes"
	"encoding/binary"
	"math"
)

// Writer builds a file in memory, for models made on the spot and for tests. Its zero value is an
// empty file.
type Writer struct {
	meta, infos, data bytes.Buffer
	entries, tensors  uint64
}

func (w *Writer) key(key string, k kind) {
	w.entries++
	writeString(&w.meta, key)
	writeInts(&w.meta, uint32(k))
}

// String adds a metadata string.
func (w *Writer) String(key, v string) {
	w.key(key, kindString)
	writeString(&w.meta, v)
}

// Uint32 adds a metadata integer.
func (w *Writer) Uint32(key string, v uint32) {
	w.key(key, kindU32)
	writeInts(&w.meta, v)
}

// Float32 adds a metadata number.
func (w *Writer) Float32(key string, v float32) {
	w.key(key, kindF32)
	writeInts(&w.meta, math.Float32bits(v))
}

// Strings adds a metadata array of strings.
func (w *Writer) Strings(key string, v []string) {
	w.key(key, kindArray)
	writeInts(&w.meta, uint32(kindString))
	writeLength(&w.meta, len(v))
	for _, s := range v {
		writeString(&w.meta, s)
	}
}

// Ints adds a metadata array of integers.
func (w *Writer) Ints(key string, v []int32) {
	w.key(key, kindArray)
	writeInts(&w.meta, uint32(kindI32))
	writeLength(&w.meta, len(v))
	for _, n := range v {
		writeInts(&w.meta, uint32(n))
	}
}

// Tensor adds a tensor with already encoded data; dims has the length of a row first.
func (w *Writer) Tensor(name string, t Type, dims []int, data []byte) {
	w.tensors++
	writeString(&w.infos, name)
	writeInts(&w.infos, uint32(len(dims)))
	for _, d := range dims {
		writeLength(&w.infos, d)
	}
	writeInts(&w.infos, uint32(t))
	writeLength(&w.infos, w.data.Len())
	w.data.Write(data)
	pad(&w.data)
}

// Bytes is the file.
func (w *Writer) Bytes() []byte {
	var out bytes.Buffer
	out.WriteString(magic)
	writeInts(&out, version)
	writeLength(&out, int(w.tensors))
	writeLength(&out, int(w.entries))
	out.Write(w.meta.Bytes())
	out.Write(w.infos.Bytes())
	pad(&out)
	out.Write(w.data.Bytes())
	return out.Bytes()
}

func pad(b *bytes.Buffer) {
	for b.Len()%alignment != 0 {
		b.WriteByte(0)
	}
}

func writeInts(b *bytes.Buffer, v ...uint32) {
	for _, n := range v {
		b.Write(binary.LittleEndian.AppendUint32(nil, n))
	}
}

func writeLength(b *bytes.Buffer, n int) { b.Write(binary.LittleEndian.AppendUint64(nil, uint64(n))) }

func writeString(b *bytes.Buffer, s string) {
	writeLength(b, len(s))
	b.WriteString(s)
}
