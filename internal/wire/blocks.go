package wire

import (
	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

const keySize = len(connector.BlockKey{})

// BlocksToProto converts blocks to columns.
func BlocksToProto(blocks []connector.Block) *kvportv1.Blocks {
	if len(blocks) == 0 {
		return nil
	}
	m := &kvportv1.Blocks{Keys: make([]byte, 0, len(blocks)*keySize), Ids: make([]int32, len(blocks))}
	for i := range blocks {
		b := &blocks[i]
		m.Keys = append(m.Keys, b.Key[:]...)
		m.Ids[i] = int32(b.ID)
		if b.Group != 0 && m.Groups == nil {
			m.Groups = make([]uint32, len(blocks))
		}
		if m.Groups != nil {
			m.Groups[i] = uint32(b.Group)
		}
	}
	return m
}

// BlocksFromProto converts columns to blocks. That the ids exist is for the receiver to check.
func BlocksFromProto(m *kvportv1.Blocks) ([]connector.Block, error) {
	n := len(m.GetIds())
	if n > MaxBlocks {
		return nil, malformed("blocks: %d ids, limit %d", n, MaxBlocks)
	}
	if len(m.GetKeys()) != n*keySize {
		return nil, malformed("blocks: %d bytes of keys for %d ids", len(m.GetKeys()), n)
	}
	if len(m.GetGroups()) != 0 && len(m.GetGroups()) != n {
		return nil, malformed("blocks: %d groups for %d ids", len(m.GetGroups()), n)
	}
	if n == 0 {
		return nil, nil
	}
	blocks := make([]connector.Block, n)
	for i, id := range m.GetIds() {
		if id < 0 {
			return nil, malformed("blocks.ids[%d] is %d", i, id)
		}
		blocks[i] = connector.Block{Key: connector.BlockKey(m.GetKeys()[i*keySize:]), ID: connector.BlockID(id)}
		if len(m.GetGroups()) != 0 {
			if m.GetGroups()[i] >= connector.MaxGroups {
				return nil, malformed("blocks.groups[%d] is %d", i, m.GetGroups()[i])
			}
			blocks[i].Group = uint16(m.GetGroups()[i])
		}
	}
	return blocks, nil
}

func keysToProto(keys []connector.BlockKey) []byte {
	out := make([]byte, 0, len(keys)*keySize)
	for i := range keys {
		out = append(out, keys[i][:]...)
	}
	return out
}

func keysFromProto(b []byte) ([]connector.BlockKey, error) {
	if len(b)%keySize != 0 || len(b) > MaxBlocks*keySize {
		return nil, malformed("keys has %d bytes, want a multiple of %d up to %d", len(b), keySize, MaxBlocks*keySize)
	}
	if len(b) == 0 {
		return nil, nil
	}
	keys := make([]connector.BlockKey, len(b)/keySize)
	for i := range keys {
		copy(keys[i][:], b[i*keySize:])
	}
	return keys, nil
}
