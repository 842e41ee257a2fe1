package host

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/kvport/kvport/internal/place"
)

// placerEnv names the variable that makes the test binary a plugin that places, and nothing else.
const placerEnv = "KVPORT_TEST_PLACER"

// placerOrder is what that plugin is told.
type placerOrder struct {
	Slots         int
	SlotBytes     int64
	Epoch, Serial uint64
	ArenaBytes    int
	Keys          [][32]byte // of the blocks of the library, one behind the other in descriptor 4
	Seed          uint64
	Lies          bool
}

// placer is a plugin that places at the other end of two memories and two pipes: the arena is descriptor 3. After it has opened, it says
// how many blocks it found and how many slots were torn, and waits for a byte; then it gives slots other uses for ever, and names
// those that it has filled.
type placer struct {
	placerOrder
	arena, library []byte
	shelf          *place.Shelf
	lent           map[place.Slot]lentSlot // of the worker that lends

	mu sync.Mutex // of the pipe
}

// lentSlot is a slot that the host may write.
type lentSlot struct {
	word   place.Word
	serial uint64
}

// lentMark is in a word that names a slot which is lent: two words with its serial follow.
const lentMark = 1 << 31

// placerMain runs a placer until it is killed.
func placerMain(order string) error {
	p := &placer{}
	if err := json.Unmarshal([]byte(order), &p.placerOrder); err != nil {
		return err
	}
	var err error
	if p.arena, err = syscall.Mmap(3, 0, p.ArenaBytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED); err != nil {
		return err
	}
	if p.library, err = syscall.Mmap(4, 0, len(p.Keys)*int(p.SlotBytes), syscall.PROT_READ, syscall.MAP_SHARED); err != nil {
		return err
	}
	g := place.Geometry{Slots: p.Slots, SlotBytes: p.SlotBytes}
	memory, err := place.Map(p.arena[:g.ArenaBytes()])
	if err != nil {
		return err
	}
	shelf, found, torn, err := place.OpenShelf(memory, g, place.ShelfOpening{Epoch: p.Epoch, Serial: p.Serial}, time.Now().UnixMilli())
	if err != nil {
		return err
	}
	p.shelf, p.lent = shelf, map[place.Slot]lentSlot{}
	p.say(uint32(len(found)), uint32(torn))
	if _, err := io.ReadFull(os.Stdin, make([]byte, 1)); err != nil {
		return err
	}
	var workers sync.WaitGroup
	for worker := range placerWorkers {
		workers.Go(func() { p.work(worker) })
	}
	workers.Wait()
	return fmt.Errorf("the pipe is closed")
}

const placerWorkers = 3 // each has slots of its own; the last one lends half of them

// say names slots. A plugin whose host reads no more waits here.
func (p *placer) say(words ...uint32) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return binary.Write(os.Stdout, binary.LittleEndian, words) == nil
}

func (p *placer) work(worker int) {
	rng := rand.New(rand.NewPCG(p.Seed, uint64(worker)))
	for {
		number := rng.IntN(p.Slots / placerWorkers)
		slot := place.Slot(number*placerWorkers + worker)
		if p.Lies && rng.IntN(2) == 0 {
			p.lie(rng)
		}
		if worker == placerWorkers-1 && number%2 == 0 {
			if !p.lend(slot) {
				return
			}
			continue
		}
		if rng.IntN(8) == 0 { // evicted
			p.shelf.Retire(slot)
			continue
		}
		p.write(slot, rng.IntN(len(p.Keys)))
		if !p.say(uint32(slot)) {
			return
		}
	}
}

// lend lends a slot, or gives up what the host has written there, and lends it again.
func (p *placer) lend(slot place.Slot) bool {
	if was, lent := p.lent[slot]; lent {
		_, over, ok := p.shelf.Written(slot, was.word, was.serial)
		if !over {
			return true
		}
		if !ok && !p.Lies {
			panic(fmt.Sprintf("slot %d holds nothing that a host writes", slot))
		}
	}
	p.shelf.Retire(slot)
	serial := p.shelf.Draw(1)
	p.lent[slot] = lentSlot{word: p.shelf.Lend(slot), serial: serial}
	return p.say(uint32(slot)|lentMark, uint32(serial), uint32(serial>>32))
}

// write keeps a block in a slot that may have another, which somebody may be reading.
func (p *placer) write(slot place.Slot, n int) {
	data := p.library[n*int(p.SlotBytes):][:p.SlotBytes]
	p.shelf.Begin(slot)
	copy(p.shelf.Bytes(slot, len(data)), data)
	p.shelf.Publish(slot, &place.Header{Key: p.Keys[n], Length: uint32(len(data))})
}

// lie writes anything anywhere, or names any slot.
func (p *placer) lie(rng *rand.Rand) {
	headers := 4096 + 128*p.Slots
	switch rng.IntN(5) {
	case 0: // the first page and headers: a bit
		p.arena[rng.IntN(headers)] ^= 1 << rng.IntN(8)
	case 1: // a word of them
		binary.LittleEndian.PutUint64(p.arena[8*rng.IntN(headers/8):], rng.Uint64())
	case 2: // bytes of blocks
		p.arena[headers+rng.IntN(len(p.arena)-headers)] ^= 1 << rng.IntN(8)
	case 3: // the header of another slot
		from, to := rng.IntN(p.Slots), rng.IntN(p.Slots)
		copy(p.arena[4096+128*to:][:128], p.arena[4096+128*from:][:128])
	case 4:
		p.say(rng.Uint32N(uint32(2*p.Slots)), rng.Uint32())
	}
}
