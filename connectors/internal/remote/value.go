package remote

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/kvport/kvport/connector"
)

// A value is a header and the block's spans one after the other. The header says whose block it is
// and how long, so that a value of another key or shape is never taken for it:
//
//	0   8  magic "kvport/1"
//	8   8  length of what follows the header, little endian
//	16 32  the store key
const (
	magic      = "kvport/1"
	headerSize = len(magic) + 8 + 32
)

// appendValue appends the value of an item to b.
func appendValue(b []byte, it connector.Item) []byte {
	b = appendHeader(b, it)
	for _, s := range it.Spans {
		b = append(b, s...)
	}
	return b
}

// appendHeader appends the header of an item's value to b.
func appendHeader(b []byte, it connector.Item) []byte {
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint64(b, uint64(it.Size()))
	return append(b, it.Key[:]...)
}

// checkHeader says what is wrong with a value's header.
func checkHeader(h []byte, it connector.Item) error {
	size := binary.LittleEndian.Uint64(h[len(magic):])
	switch {
	case string(h[:len(magic)]) != magic:
		return fmt.Errorf("value of %s is none of ours: %w", short(it.Key), connector.ErrCorrupt)
	case !bytes.Equal(h[len(magic)+8:headerSize], it.Key[:]):
		return fmt.Errorf("value of %s belongs to another key: %w", short(it.Key), connector.ErrCorrupt)
	case size != uint64(it.Size()):
		return fmt.Errorf("value of %s has %d bytes, want %d: %w", short(it.Key), size, it.Size(), connector.ErrCorrupt)
	}
	return nil
}

// short is enough of a key for messages.
func short(k connector.StoreKey) string { return k.String()[:16] }

// scatter takes the raw reply to a GET and reads the value straight into an item's spans. It never
// fails itself, so that the connection stays in step with the server: what was wrong is in err.
type scatter struct {
	item   connector.Item
	length int   // that the server announced
	err    error // why the spans do not hold the block; nil once they do
	server error // what the server answered instead of a value
	begun  bool  // the first line was seen
}

var errNoReply = errors.New("no reply")

// newScatter makes the receiver of one item. Its err says that nothing came until something did.
func newScatter(it connector.Item) *scatter { return &scatter{item: it, err: errNoReply} }

// Write takes the reply's first line, and its end.
func (s *scatter) Write(line []byte) (int, error) {
	if s.begun || len(line) == 0 {
		return len(line), nil
	}
	s.begun = true
	kind, rest := line[0], string(bytes.TrimSpace(line[1:]))
	switch kind {
	case '-':
		s.server = errors.New(rest)
		s.err = s.server
		return len(line), nil
	case '$':
		n, err := strconv.Atoi(rest)
		if err == nil && n < 0 {
			s.err = fmt.Errorf("%s is not stored: %w", short(s.item.Key), connector.ErrGone)
			return len(line), nil
		}
		if s.length = n; err == nil {
			return len(line), nil
		}
	}
	s.length, s.err = -1, fmt.Errorf("reply to GET begins with %q: %w", kind, connector.ErrCorrupt)
	return len(line), nil
}

// ReadFrom implements io.ReaderFrom: it takes the value and the line end behind it.
func (s *scatter) ReadFrom(r io.Reader) (n int64, err error) {
	counted := &counter{r: r}
	err = s.value(counted)
	if err == nil {
		_, err = io.Copy(io.Discard, counted)
	}
	return counted.n, err
}

// value reads the value if it is the item's. It gives an error only if reading failed.
func (s *scatter) value(r io.Reader) error {
	if want := headerSize + s.item.Size(); s.length != want {
		s.err = fmt.Errorf("value of %s has %d bytes, want %d: %w", short(s.item.Key), s.length, want, connector.ErrCorrupt)
		return nil
	}
	var header [headerSize]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return err
	}
	if s.err = checkHeader(header[:], s.item); s.err != nil {
		return nil //nolint:nilerr // what was wrong with the value is in s.err; reading worked
	}
	s.err = errNoReply
	for _, span := range s.item.Spans {
		if _, err := io.ReadFull(r, span); err != nil {
			return err
		}
	}
	s.err = nil
	return nil
}

// counter counts what was read.
type counter struct {
	r io.Reader
	n int64
}

// Read implements io.Reader.
func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}
