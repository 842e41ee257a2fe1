package nixl

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"

	"github.com/kvport/kvport/connector"
)

// The side channel carries one question and one answer at a time, each a length, a checksum, JSON and what is
// too much for that (see appendTail). TCP's own checksum misses one error in some thousands, and a wrong address
// here would be read without a word.
const (
	protocolVersion = 2
	maxMessage      = 64 << 20
	maxTokens       = 1 << 30
)

// question is what a consumer's rank asks about one hold: where its blocks are, or, with Done, whether the
// blocks that it has read were still held. With Beats it only says which holds it is still interested in. With
// Push it asks for the blocks to be written; Done, once they are, says that the hold has served.
type question struct {
	Version int              `json:"version"`
	Model   []byte           `json:"model"`
	Shape   []byte           `json:"shape"`
	Base    []byte           `json:"base,omitempty"` // who has one may have another shape
	Reshape bool             `json:"reshape,omitempty"`
	Of      int              `json:"of,omitempty"`   // with Reshape: the producer's rank
	Last    bool             `json:"last,omitempty"` // with Reshape and Done: the last read of the load
	Rank    int              `json:"rank"`
	World   int              `json:"world"`
	Hold    connector.HoldID `json:"hold"`
	Secret  []byte           `json:"secret"`
	Done    bool             `json:"done,omitempty"`
	Sum     []byte           `json:"sum,omitempty"`   // of the ticket, where its word was taken for where the blocks are
	Bytes   uint64           `json:"bytes,omitempty"` // with Done: that were read
	Load    string           `json:"load,omitempty"`  // with Done: names the read, so that asking again after a lost answer gives the same
	Beats   []beat           `json:"beats,omitempty"`
	Push    *push            `json:"push,omitempty"`   // write them, and then say whether they still were there; Load names it
	Follow  *follow          `json:"follow,omitempty"` // nothing but what is being computed
}

// push says where a producer is to write a consumer's blocks.
type push struct {
	Metadata []byte `json:"metadata"` // of the consumer's agent
	Host     string `json:"host"`     // of the consumer, and its process there: to tell the transport
	PID      int    `json:"pid"`
	Runs     []byte `json:"runs"`     // see packRuns
	LimitMS  int64  `json:"limit_ms"` // how long the consumer waits
}

// newQuestion is a question of a rank that says who asks and not yet what.
func newQuestion(e *connector.Env) *question {
	return &question{Version: protocolVersion, Model: e.Model[:], Shape: e.Shape[:], Rank: e.Rank, World: e.World}
}

// beat is a consumer's sign of life.
type beat struct {
	Hold   connector.HoldID `json:"hold"`
	Secret []byte           `json:"secret"`
}

// maxBeats bounds those of one question.
const maxBeats = 256

// answer is what the producer says. With a Refusal all else is empty.
type answer struct {
	Refusal  string             `json:"refusal,omitempty"`
	Gone     bool               `json:"gone,omitempty"` // not a matter of compatibility: compute it
	Metadata []byte             `json:"metadata,omitempty"`
	Host     string             `json:"host,omitempty"` // of the producer, and its process there: to tell the transport
	PID      int                `json:"pid,omitempty"`
	Segments []segment          `json:"segments,omitempty"`
	Life     string             `json:"life,omitempty"`  // of the producer: tickets of the same life need no such answer
	Clock    string             `json:"clock,omitempty"` // that its board goes by, and what it says now
	Now      uint64             `json:"now,omitempty"`
	Board    uint64             `json:"board,omitempty"` // its address, and its slots
	Slots    int                `json:"slots,omitempty"`
	Tokens   int                `json:"tokens,omitempty"`  // that the blocks end with
	Over     []connector.HoldID `json:"over,omitempty"`    // of Beats: those that are not there any more
	Blocks   []heldBlock        `json:"-"`                 // they are its tail
	Written  uint64             `json:"written,omitempty"` // bytes of a Push: all of them, and they were held
	Stale    bool               `json:"stale,omitempty"`   // with a Refusal: they were moved, and were not held until then
	Unsure   bool               `json:"unsure,omitempty"`  // with a Refusal: something may still be written
	Saves    []reached          `json:"saves,omitempty"`   // of Follow: what is new
	Kept     []uint64           `json:"kept,omitempty"`    // of Follow: saves that lasted until they were read whole
}

// segment is one of the producer's segments, by addresses of its agent's memory.
type segment struct {
	Group  uint16 `json:"group"`
	Addr   uint64 `json:"addr"` // of block 0
	Stride uint64 `json:"stride"`
	Bytes  uint64 `json:"bytes"`
}

// heldBlock is a block of the hold.
type heldBlock struct {
	Group uint16
	ID    connector.BlockID
	Key   []byte // all zero for a partial block
}

const (
	headSize  = 8
	firstRoom = 64 << 10
)

func checksum(data []byte) uint32 { return crc32.Checksum(data, crc32.MakeTable(crc32.Castagnoli)) }

func writeMessage(w io.Writer, m any) error {
	data, err := json.Marshal(m)
	if a, is := m.(*answer); is && err == nil {
		data, err = a.appendTail(append(data, 0))
	}
	if err != nil {
		return err
	}
	if len(data) > maxMessage {
		return fmt.Errorf("message of %d bytes, the limit is %d", len(data), maxMessage)
	}
	head := binary.LittleEndian.AppendUint32(make([]byte, 0, headSize+len(data)), uint32(len(data)))
	head = binary.LittleEndian.AppendUint32(head, checksum(data))
	_, err = w.Write(append(head, data...))
	return err
}

// readMessage reads one message of at most limit bytes into m.
func readMessage(r io.Reader, limit int, m any) error {
	var head [headSize]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n, sum := binary.LittleEndian.Uint32(head[:]), binary.LittleEndian.Uint32(head[4:])
	if int64(n) > int64(limit) {
		return fmt.Errorf("message of %d bytes, the limit is %d", n, limit)
	}
	room := bytes.NewBuffer(make([]byte, 0, min(int(n), firstRoom)+bytes.MinRead)) // grows with what comes, not with what is said
	_, err := room.ReadFrom(io.LimitReader(r, int64(n)))
	data := room.Bytes()
	if err == nil && len(data) < int(n) {
		err = io.ErrUnexpectedEOF
	}
	if err == nil && checksum(data) != sum {
		err = fmt.Errorf("message of %d bytes was changed on its way: %w", n, connector.ErrCorrupt)
	}
	if err != nil {
		return err
	}
	data, tail, _ := bytes.Cut(data, []byte{0}) // JSON has no zero byte
	if err := json.Unmarshal(data, m); err != nil {
		return err
	}
	if a, is := m.(*answer); is {
		return a.parseTail(tail)
	}
	return nil
}

// err is the refusal as an error, nil without one.
func (a *answer) err() error {
	switch {
	case a.Refusal == "":
		return nil
	case a.Stale:
		return fmt.Errorf("the producer says: %s: %w: %w", a.Refusal, errStale, connector.ErrGone)
	case a.Gone:
		return fmt.Errorf("the producer says: %s: %w", a.Refusal, connector.ErrGone)
	}
	return fmt.Errorf("the producer says: %s: %w", a.Refusal, connector.ErrIncompatible)
}

func refuse(err error) *answer {
	return &answer{
		Refusal: err.Error(), Gone: errors.Is(err, connector.ErrGone), Stale: errors.Is(err, errStale), Unsure: errors.Is(err, errUnsure),
	}
}

// The blocks of an answer follow its JSON, behind a zero byte: 38 bytes for each, its group and id (little
// endian) and its key. As JSON, those of a prompt of some thousand tokens took about as long as their read.
const (
	keySize   = len(connector.BlockKey{})
	blockSize = 2 + 4 + keySize
)

// appendTail appends the blocks.
func (a *answer) appendTail(to []byte) ([]byte, error) {
	to = slices.Grow(to, len(a.Blocks)*blockSize)
	for i, b := range a.Blocks {
		if len(b.Key) != keySize {
			return nil, fmt.Errorf("blocks[%d] has a key of %d bytes, want %d", i, len(b.Key), keySize)
		}
		to = binary.LittleEndian.AppendUint16(to, b.Group)
		to = binary.LittleEndian.AppendUint32(to, uint32(b.ID))
		to = append(to, b.Key...)
	}
	return to, nil
}

// parseTail reads the blocks. The answer keeps the tail.
func (a *answer) parseTail(tail []byte) error {
	if len(tail)%blockSize != 0 {
		return fmt.Errorf("%d bytes of blocks, want a multiple of %d", len(tail), blockSize)
	}
	a.Blocks = make([]heldBlock, 0, len(tail)/blockSize)
	for ; len(tail) > 0; tail = tail[blockSize:] {
		a.Blocks = append(a.Blocks, heldBlock{
			Group: binary.LittleEndian.Uint16(tail), ID: connector.BlockID(binary.LittleEndian.Uint32(tail[2:])), Key: tail[6:blockSize:blockSize],
		})
	}
	return nil
}
