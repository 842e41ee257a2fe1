package shm

import (
	"errors"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// warmStep is how much is mapped in one go, in bytes: Close waits for one at most.
const warmStep = 16 << 20

// The pauses between two looks at memory that its owner has not allocated yet.
const (
	firstLook = 50 * time.Millisecond
	lastLook  = 5 * time.Second
)

// Warm maps the pages of a region into this process in the background, from the first to the last, as the owner allocates
// them: then their first use costs no page fault. It allocates none, since that would be charged to this process's memory
// limit. It ends with the last page, and with Close; where the kernel cannot do it (Linux 5.14) it ends at once. It is called
// once.
func (r *Region) Warm() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.data == nil {
		return
	}
	data, done := r.data, make(chan struct{})
	r.stop = done
	r.warming.Go(func() {
		for pause := firstLook; len(data) > 0; {
			step := data[:min(warmStep, len(data))]
			began := time.Now()
			ok, err := populate(step)
			if err != nil {
				return
			}
			wait := 3 * time.Since(began) // a quarter of one processor at most: whatever else starts comes first
			if ok {
				data, pause = data[len(step):], firstLook
			} else {
				wait, pause = pause, min(2*pause, lastLook)
			}
			select {
			case <-done:
				return
			case <-time.After(wait):
			}
		}
	})
}

// endWarm ends Warm. The caller holds mu.
func (r *Region) endWarm() {
	if r.stop != nil {
		close(r.stop)
		r.stop = nil
	}
	r.warming.Wait()
}

// populate maps pages into this process if all of them have memory that is zeroed, and says whether they have. Allocate alone
// leaves that to the first use, and to Populate.
func populate(pages []byte) (bool, error) {
	size := os.Getpagesize()
	present := make([]byte, (len(pages)+size-1)/size)
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&pages[0])), uintptr(len(pages)), uintptr(unsafe.Pointer(&present[0]))) //nolint:gosec // the system call takes addresses
	if errno != 0 {
		return false, os.NewSyscallError("mincore", errno)
	}
	for _, p := range present {
		if p&1 == 0 {
			return false, nil
		}
	}
	return true, touch(pages)
}

// Populate zeroes the pages of a part of the region that have not been used yet and maps them into this process. Where the
// kernel cannot do it (before Linux 5.14) it does nothing, and their first use takes longer. A part begins at a page.
func (r *Region) Populate(from, size int64) error {
	err := touch(r.Bytes()[from : from+size])
	if errors.Is(err, unix.EINVAL) {
		return nil
	}
	return err
}

func touch(pages []byte) error {
	return os.NewSyscallError("madvise", retry(func() error { return unix.Madvise(pages, unix.MADV_POPULATE_READ) }))
}
