// Package nccl is a pipe over NCCL between two processes that have a GPU each. NCCL chooses between NVLink,
// PCIe and the network cards.
//
// No communicator spans all processes: each direction of a link is a communicator of two, whose id goes
// from the dialer to the listener over a TCP connection. That connection also carries headers, order and
// acknowledgements, and shows the end of either process. With [Network.TLS] both ends prove on it that they
// have the shared key. Payload is staged in memory of the GPU, piece by piece. NCCL encrypts nothing; a
// digest that is seeded over the connection finds what was changed on its way.
//
// Without a GPU everything fails with [ErrNoDevice]. The package is complete and compared with NCCL's
// headers; its control messages, order and cancelling are tested over another mover (pipe/internal/staged).
// It has not yet run on two GPUs.
package nccl

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/cuda"
	native "github.com/kvport/kvport/native/nccl"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/internal/staged"
)

// ErrNoDevice says that this machine has no GPU that NCCL can use, or lacks a library for it. The error
// that wraps it says what is missing.
var ErrNoDevice = errors.New("no GPU for NCCL")

// Network makes links over NCCL. It must not be changed once it is in use.
type Network struct {
	Address   string        // to listen at, for control messages; empty means 127.0.0.1 with a port that the system chooses
	Advertise string        // what peers dial, if that differs; ":0" at its end stands for the port that the listener has
	TLS       *tls.Config   // mutual TLS for control messages; nil means none, and then only loopback
	Dir       string        // folder of libnccl; empty means where native/nccl looks
	CUDADir   string        // folder of libcudart; empty means where native/cuda looks
	Device    int           // of the GPU to use, as CUDA numbers them
	Piece     int           // bytes that are moved at a time; 0 means 4 MiB
	Slots     int           // pieces that each direction of a link holds; 0 means 4
	Patience  time.Duration // how long the peer may make no progress with a piece; 0 means 3 s
	NoDigest  bool          // leaves the check of payload to the host's digests

	mu      sync.Mutex
	machine *machine // nil: not started
	links   sync.WaitGroup
}

const (
	defaultPiece = 4 << 20
	defaultSlots = 4
	joinTimeout  = 30 * time.Second // NCCL's start takes seconds
)

// machine is what NCCL works with.
type machine struct {
	nccl   *native.Library
	cuda   *cuda.Library
	device int
	room   staged.Room
}

// Start loads the libraries and looks for the GPU. Without it, Listen and Dial do that.
func (n *Network) Start() error {
	_, err := n.start()
	return err
}

func (n *Network) start() (*machine, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.machine != nil {
		return n.machine, nil
	}
	room, err := staged.Room{Piece: n.Piece, Slots: n.Slots}.Settle(staged.Room{Piece: defaultPiece, Slots: defaultSlots})
	if err != nil {
		return nil, err
	}
	m := &machine{device: n.Device, room: room}
	if m.cuda, err = cuda.Open(n.CUDADir); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoDevice, err)
	}
	devices, err := m.cuda.Devices()
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrNoDevice, err)
	case n.Device < 0 || n.Device >= devices:
		return nil, fmt.Errorf("%w: device %d of %d", ErrNoDevice, n.Device, devices)
	}
	if err := stayLocal(n.Address); err != nil {
		return nil, err
	}
	if m.nccl, err = native.Open(n.Dir); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoDevice, err)
	}
	n.machine = m
	return m, nil
}

// stayLocal keeps NCCL's own listeners off the network if the pipe's listener is on loopback.
func stayLocal(address string) error {
	host, _, err := net.SplitHostPort(address)
	local := address == "" || err == nil && pipe.IsLoopback(host)
	if _, set := os.LookupEnv("NCCL_SOCKET_IFNAME"); set || !local {
		return nil
	}
	return os.Setenv("NCCL_SOCKET_IFNAME", "lo")
}

// Close waits for what is left of the links, which should be closed first.
func (n *Network) Close() error {
	n.links.Wait()
	return nil
}

func (n *Network) staged() *staged.Network {
	return &staged.Network{Side: pipe.Side{Address: n.Address, Advertise: n.Advertise, TLS: n.TLS}, Timeout: joinTimeout, Start: n.Start, Shake: n.shake}
}

// Listen implements pipe.Network.
func (n *Network) Listen(ctx context.Context) (pipe.Listener, error) { return n.staged().Listen(ctx) }

// Dial implements pipe.Network.
func (n *Network) Dial(ctx context.Context, address string) (pipe.Link, error) {
	return n.staged().Dial(ctx, address)
}

// shake makes a link of a connection. If it fails, the caller still owns the connection.
func (n *Network) shake(ctx context.Context, conn net.Conn, dialer bool) (pipe.Link, error) {
	m, err := n.start()
	if err != nil {
		return pipe.Link{}, err
	}
	var ids [2]native.ID // of the communicators, the one to the listener first; the dialer makes them
	if dialer {
		for i := range ids {
			if ids[i], err = m.nccl.NewID(); err != nil {
				return pipe.Link{}, err
			}
		}
	}
	theirs, o, err := m.room.Meet(ctx, conn, "nccl", slices.Concat(ids[0][:], ids[1][:]))
	if err == nil && len(theirs) != 2*idSize {
		err = fmt.Errorf("the peer's hello has %d bytes of ids: %w", len(theirs), connector.ErrIncompatible)
	}
	if err != nil {
		return pipe.Link{}, err
	}
	if !dialer {
		ids = [2]native.ID{native.ID(theirs[:idSize]), native.ID(theirs[idSize:])}
	}
	o.Early, o.Patience, o.NoDigest = true, staged.Patience(n.Patience), n.NoDigest
	mv, err := m.join(ctx, ids, dialer, o.Patience)
	if err != nil {
		return pipe.Link{}, err
	}
	n.links.Add(1)
	return staged.New(conn, mv, o, n.links.Done), nil
}

const idSize = len(native.ID{})
