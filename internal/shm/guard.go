package shm

import (
	"errors"
	"fmt"
	"runtime/debug"
)

// ErrFault says that memory could not be read: it has no page, and the machine has none to give.
var ErrFault = errors.New("no memory behind a shared page")

// Guard runs a function that reads memory which another process may have emptied, and turns a fault there (SIGBUS) into ErrFault.
// The function must hold no lock without a deferred unlock, and start no goroutine that reads.
func Guard(run func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		if at, ok := p.(interface{ Addr() uintptr }); ok {
			err = fmt.Errorf("address %#x: %w", at.Addr(), ErrFault)
			return
		}
		panic(p) // it is not a fault of memory
	}()
	return run()
}
