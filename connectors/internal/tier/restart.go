package tier

import (
	"cmp"
	"encoding/binary"
	"errors"
	"io"
	"slices"

	"github.com/kvport/kvport/connector"
)

// restart takes over the blocks whose headers are whole. Whether their bytes are is found out when they
// are read.
func (d *Disk) restart() error {
	var whole []found
	best := map[connector.StoreKey]uint64{}
	buf := make([]byte, 4096*headerSize)
	for first := 0; first < d.slots; first += 4096 {
		n, err := d.readAt(buf, d.headerAt(uint32(first)))
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		for i := range min(n/headerSize, d.slots-first) {
			b := buf[i*headerSize:][:headerSize]
			f := found{id: uint32(first + i)}
			switch {
			case stateOf(b) == stateFree:
			case stateOf(b) != stateReady || !f.decode(b) || int64(f.length) > d.slotBytes:
				d.c.torn.Add(1)
			default:
				whole = append(whole, f)
				best[f.key] = max(best[f.key], f.generation)
			}
		}
	}
	slices.SortFunc(whole, func(a, b found) int { return cmp.Compare(a.generation, b.generation) })
	for _, f := range whole {
		if f.generation < best[f.key] {
			continue
		}
		d.serial.Store(f.generation)
		if d.expires != nil {
			d.expires[f.id].Store(f.expires)
		}
		d.index.adopt(f.id, f.key)
		d.c.adopted.Add(1)
	}
	return nil
}

func stateOf(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }

func putState(b []byte, state uint32) { binary.LittleEndian.PutUint32(b, state) }
