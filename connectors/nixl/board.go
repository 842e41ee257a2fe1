package nixl

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/crc64"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
)

// board is where a producer writes down which holds are open, for consumers on the same machine: they look
// themselves instead of asking, which needs no process to wake. Each hold has a slot: the sum of its ticket,
// the moment of this machine's clock at which it ends by itself, and a check of both.
//
// What ends a hold clears its slot first, and a hold that nobody ends is over by the clock that both ends
// see; so a slot that a consumer finds right after a read says what the producer's answer would (record 129 in docs/adr).
type board struct {
	words []uint64
	free  []int // slots, counted from 1
}

const (
	boardSlots = 4096
	slotWords  = 4 // two of the sum, the end in nanoseconds, the check
	slotBytes  = 8 * slotWords
)

// ticketSum stands for a ticket and for everything in it.
type ticketSum [16]byte

func sumOf(t connector.Ticket) ticketSum {
	sum := sha256.Sum256(t)
	return ticketSum(sum[:16])
}

func newBoard() (*board, error) {
	memory, err := unix.Mmap(-1, 0, boardSlots*slotBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("memory for holds: %w", os.NewSyscallError("mmap", err))
	}
	b := &board{words: unsafe.Slice((*uint64)(unsafe.Pointer(&memory[0])), boardSlots*slotWords)}
	for i := boardSlots; i > 0; i-- {
		b.free = append(b.free, i)
	}
	return b, nil
}

// close gives the memory back. No hold is open any more that anybody could ask for.
func (b *board) close() error {
	memory := unsafe.Slice((*byte)(unsafe.Pointer(&b.words[0])), len(b.words)*8)
	return unix.Munmap(memory)
}

func (b *board) addr() uint64 { return uint64(uintptr(unsafe.Pointer(&b.words[0]))) }

// take is a slot that is free; 0 if none is, or there is no board.
func (b *board) take() int {
	if b == nil || len(b.free) == 0 {
		return 0
	}
	slot := b.free[len(b.free)-1]
	b.free = b.free[:len(b.free)-1]
	return slot
}

// set says until when a hold lasts.
func (b *board) set(slot int, sum ticketSum, end time.Time) {
	if slot == 0 {
		return
	}
	now := monotonic() // before what Until sees: a hold is never said to last longer than it does
	at := now + uint64(max(0, time.Until(end)))
	var raw [slotBytes]byte
	copy(raw[:], sum[:])
	binary.NativeEndian.PutUint64(raw[16:], at)
	binary.NativeEndian.PutUint64(raw[24:], crc64.Checksum(raw[:24], crc64.MakeTable(crc64.ECMA)))
	for i := range slotWords {
		atomic.StoreUint64(&b.words[(slot-1)*slotWords+i], binary.NativeEndian.Uint64(raw[8*i:]))
	}
}

// clear ends a hold, for whoever looks from now on.
func (b *board) clear(slot int) {
	if slot == 0 {
		return
	}
	for i := range slotWords {
		atomic.StoreUint64(&b.words[(slot-1)*slotWords+i], 0)
	}
	b.free = append(b.free, slot)
}

// slotSays finds out whether a slot that was copied from a board says that a ticket's hold is open. What was
// copied while it was written is no yes.
func slotSays(raw []byte, sum ticketSum) bool {
	return ticketSum(raw[:16]) == sum &&
		binary.NativeEndian.Uint64(raw[24:]) == crc64.Checksum(raw[:24], crc64.MakeTable(crc64.ECMA)) &&
		monotonic() < binary.NativeEndian.Uint64(raw[16:])
}

// monotonic is this machine's clock in nanoseconds, the one that Go's timers go by.
func monotonic() uint64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return ^uint64(0) // whatever ends by it is over
	}
	return uint64(t.Nano())
}

// clockName names this machine's monotonic clock: two processes with equal names see the same one. Empty: it
// cannot be told.
func clockName() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	space, err := os.Readlink("/proc/self/ns/time")
	if err != nil && !os.IsNotExist(err) { // kernels before 5.6 have one for all
		return ""
	}
	return string(boot) + space
}
