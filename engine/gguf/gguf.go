// Package gguf reads model files in GGUF format, version 3 (the format's specification: ggml's
// docs/gguf.md). It is strict: a file is a hostile input, so every count is checked against the
// bytes that are left before anything is allocated, and every tensor against the end of the file.
package gguf

import (
	"errors"
	"fmt"
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
func (f *File) Keys() []string {
	keys := make([]string, 0, len(f.meta))
	for k := range f.meta {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

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
