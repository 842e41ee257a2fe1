package sharedstorage

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
)

// A block file is one header and then the spans, back to back. The header says what the file must
// be, so that a truncated, damaged, renamed or foreign file is told from a block without trusting
// any length it claims. The bytes themselves are covered by the host's digest, which is one of the
// spans. All numbers are little endian.
//
//	 0  8  magic
//	 8  4  version
//	12  4  number of spans
//	16  8  bytes after the header
//	24 32  store key
//	56 32  SHA-256 over the span lengths
//	88 36  zero
//	124 4  CRC-32C over everything before
const (
	headerSize = 128
	version    = 1
)

const magic = "kvport\x00b"

// header is the decoded form.
type header struct {
	key   connector.StoreKey
	spans uint32
	bytes uint64
	shape [32]byte
}

// headerOf is what the file of an item must begin with.
func headerOf(it connector.Item) header {
	lengths := make([]byte, 0, 8*len(it.Spans))
	for _, s := range it.Spans {
		lengths = binary.LittleEndian.AppendUint64(lengths, uint64(len(s)))
	}
	return header{key: it.Key, spans: uint32(len(it.Spans)), bytes: uint64(it.Size()), shape: sha256.Sum256(lengths)}
}

// encode gives the header's headerSize bytes.
func (h header) encode() []byte {
	b := make([]byte, 0, headerSize)
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint32(b, version)
	b = binary.LittleEndian.AppendUint32(b, h.spans)
	b = binary.LittleEndian.AppendUint64(b, h.bytes)
	b = append(b, h.key[:]...)
	b = append(b, h.shape[:]...)
	b = append(b, make([]byte, headerSize-4-len(b))...)
	return binary.LittleEndian.AppendUint32(b, checksum(b))
}

// decode reads a header. Errors wrap connector.ErrCorrupt.
func decode(b []byte) (header, error) {
	bad := func(what string) (header, error) {
		return header{}, fmt.Errorf("block file: %s: %w", what, connector.ErrCorrupt)
	}
	if len(b) != headerSize {
		return bad("short header")
	}
	if string(b[:8]) != magic {
		return bad("not a block file")
	}
	if checksum(b[:headerSize-4]) != binary.LittleEndian.Uint32(b[headerSize-4:]) {
		return bad("header checksum differs")
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != version {
		return bad(fmt.Sprintf("version %d, want %d", v, version))
	}
	return header{
		spans: binary.LittleEndian.Uint32(b[12:]),
		bytes: binary.LittleEndian.Uint64(b[16:]),
		key:   connector.StoreKey(b[24:56]),
		shape: [32]byte(b[56:88]),
	}, nil
}

func checksum(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }

// check reports how a file's header differs from the one that the item requires.
func (h header) check(want header) error {
	switch {
	case h.key != want.key:
		return fmt.Errorf("block file: holds key %s: %w", h.key, connector.ErrCorrupt)
	case h.bytes != want.bytes || h.spans != want.spans || h.shape != want.shape:
		return fmt.Errorf("block file: holds %d spans of %d bytes, want %d of %d: %w",
			h.spans, h.bytes, want.spans, want.bytes, connector.ErrCorrupt)
	}
	return nil
}

// readItem reads an open block file straight into the item's spans. The file's size is checked
// before a byte is read; the spans may be overwritten although an error is returned.
func readItem(fd int, size int64, it connector.Item) error {
	want := headerOf(it)
	if size != headerSize+int64(want.bytes) {
		return otherLength(fd, size, want)
	}
	if err := fault.Point("store.get.read"); err != nil {
		return fmt.Errorf("read block file: %w", err)
	}
	var raw [headerSize]byte
	n, err := vectored(unix.Preadv, fd, buffers(raw[:], it.Spans))
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("block file: ends after %d bytes: %w", n, connector.ErrCorrupt)
	}
	if err != nil {
		return fmt.Errorf("read block file: %w", err)
	}
	got, err := decode(raw[:])
	if err != nil {
		return err
	}
	return got.check(want)
}

// otherLength says why a file of another size is not the item's: it is whole, and another version has stored it, or it is damaged.
func otherLength(fd int, size int64, want header) error {
	err := connector.ErrCorrupt
	var raw [headerSize]byte
	if n, _ := unix.Pread(fd, raw[:], 0); n == len(raw) {
		if got, bad := decode(raw[:]); bad == nil && got.key == want.key && size == headerSize+int64(got.bytes) {
			err = connector.ErrOutdated
		}
	}
	return fmt.Errorf("block file: %d bytes, want %d: %w", size, headerSize+want.bytes, err)
}

// writeItem writes the whole block file of an item.
func writeItem(fd int, it connector.Item) error {
	if err := fault.Point("store.put.write"); err != nil {
		return fmt.Errorf("write block file: %w", err)
	}
	if _, err := vectored(unix.Pwritev, fd, buffers(headerOf(it).encode(), it.Spans)); err != nil {
		return fmt.Errorf("write block file: %w", err)
	}
	return nil
}

// buffers is head and then spans, without empty ones: a vector of only those would look like the
// end of the file.
func buffers(head []byte, spans [][]byte) [][]byte {
	all := append(make([][]byte, 0, 1+len(spans)), head)
	for _, s := range spans {
		if len(s) > 0 {
			all = append(all, s)
		}
	}
	return all
}

// iovMax is the most buffers that Linux takes in one call.
const iovMax = 1024

// vectored runs preadv or pwritev from offset 0 until every buffer is done, whatever the kernel
// does at a time. It changes the elements of bufs.
func vectored(call func(int, [][]byte, int64) (int, error), fd int, bufs [][]byte) (int64, error) {
	var done int64
	for len(bufs) > 0 {
		n, err := call(fd, bufs[:min(len(bufs), iovMax)], done)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return done, err
		}
		if n == 0 {
			return done, io.ErrUnexpectedEOF
		}
		done += int64(n)
		for n > 0 {
			if n < len(bufs[0]) {
				bufs[0] = bufs[0][n:]
				break
			}
			n -= len(bufs[0])
			bufs = bufs[1:]
		}
	}
	return done, nil
}
