package nixl

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
)

// The blocks of an answer follow its JSON, behind a zero byte: 38 bytes for each, its group and id (little
// endian) and its key. As JSON, those of a prompt of some thousand tokens took about as long as their read.
const (
	keySize   = len(connector.BlockKey{})
	blockSize = 2 + 4 + keySize
)

// tailed is a message of which a part is not JSON.
type tailed interface {
	appendTail(to []byte) ([]byte, error)
	parseTail(tail []byte) error
}

// appendTail implements tailed.
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

// parseTail implements tailed. The answer keeps the tail.
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
