package ucx

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// stuck is a worker that has something to do and never does it, as UCX after the death of a peer.
type stuck struct {
	asked  int
	enough chan struct{} // closed once it was asked three times
}

func (s *stuck) Progress() (bool, error) { return false, nil }

func (s *stuck) Arm() (bool, error) {
	if s.asked++; s.asked == 3 {
		close(s.enough)
	}
	return false, nil
}

// A worker that refuses to be armed does not keep its engine from closing.
func TestStuckWorker(t *testing.T) {
	stop, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	require.NoError(t, err)
	worker, ended := &stuck{enough: make(chan struct{})}, make(chan struct{})
	go func() {
		defer close(ended)
		progress(worker, -1, stop)
	}()
	<-worker.enough
	_, err = unix.Write(stop, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	require.NoError(t, err)
	<-ended
	require.NoError(t, unix.Close(stop))
}
