package ucx

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// stuck is a worker that has something to do and never does it, or that never runs out of things to do, as UCX
// after the death of a peer.
type stuck struct {
	busy   bool // what Progress says
	asked  int
	enough chan struct{} // closed once it was asked often
}

func (s *stuck) ask() {
	if s.asked++; s.asked == 3*progressRounds || !s.busy && s.asked == 6 {
		close(s.enough)
	}
}

func (s *stuck) Progress() (bool, error) {
	s.ask()
	return s.busy, nil
}

func (s *stuck) Arm() (bool, error) {
	s.ask()
	return false, nil
}

// A worker that refuses to be armed, or that always has something to do, does not keep its engine from closing.
func TestStuckWorker(t *testing.T) {
	for name, busy := range map[string]bool{"refuses to be armed": false, "never runs out of things to do": true} {
		t.Run(name, func(t *testing.T) {
			stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
			require.NoError(t, err)
			worker, ended := &stuck{busy: busy, enough: make(chan struct{})}, make(chan struct{})
			go func() {
				defer close(ended)
				progress(worker, -1, stop)
			}()
			<-worker.enough
			_, err = unix.Write(stop, []byte{1, 0, 0, 0, 0, 0, 0, 0})
			require.NoError(t, err)
			<-ended
			require.NoError(t, unix.Close(stop))
		})
	}
}
