// Package nccl is a pipe over NCCL, between two processes that have a GPU each: NVLink, PCIe or the network
// cards, as NCCL finds best.
//
// There is no world of all processes: each direction of a link is a communicator of two, whose id goes from
// the dialer to the listener over a TCP connection, that also carries headers, order, acknowledgements and
// the end of either process. With [Network.TLS] both ends show on it that they have the shared key. Payload is
// staged in memory of the GPU, piece by piece; NCCL encrypts nothing, and what is changed on its way is found
// by a digest that is seeded over the connection.
//
// Without a GPU everything fails with [ErrNoDevice]. The package is complete and compared with NCCL's headers;
// its words, order and cancelling are tested over another mover (pipe/internal/staged). It has not yet been run
// on two GPUs.
package nccl

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/cuda"
	native "github.com/kvport/kvport/native/nccl"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/internal/staged"
)

// ErrNoDevice says that this machine has no GPU that NCCL can use, or lacks a library for it. The error that
// wraps it says which.
var ErrNoDevice = errors.New("no GPU for NCCL")

// Network makes links over NCCL. It must not be changed once it is used.
type Network struct {
	Address   string        // to listen at, for words; empty: 127.0.0.1 with a port that the system chooses
	Advertise string        // what peers dial, where that differs; ":0" at its end stands for the port taken
	TLS       *tls.Config   // mutual TLS for words; nil: none, and loopback only
	Dir       string        // folder of libnccl; empty: where native/nccl looks
	CUDADir   string        // folder of libcudart; empty: where native/cuda looks
	Device    int           // of the GPU to use, as CUDA numbers them
	Piece     int           // bytes that are moved at a time; 0: 4 MiB
	Slots     int           // pieces that each direction of a link holds; 0: 4
	Patience  time.Duration // for the peer to make progress with a piece; 0: 3 s
	NoDigest  bool          // leaves payload to the host's digests

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

// Start loads the libraries and looks for the GPU, which Listen and Dial do otherwise.
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

// stayLocal keeps NCCL's own listeners off the network where the pipe's are.
func stayLocal(address string) error {
	host, _, err := net.SplitHostPort(address)
	local := address == "" || err == nil && pipe.IsLoopback(host)
	if _, set := os.LookupEnv("NCCL_SOCKET_IFNAME"); set || !local {
		return nil
	}
	return os.Setenv("NCCL_SOCKET_IFNAME", "lo")
}

// Close waits for what is left of links, which should be closed before.
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

// shake makes a link of a connection. On an error the connection is the caller's.
func (n *Network) shake(ctx context.Context, conn net.Conn, dialer bool) (pipe.Link, error) {
	m, err := n.start()
	if err != nil {
		return pipe.Link{}, err
	}
	mine := hello{room: m.room, seed: staged.Seed()}
	if dialer {
		for i := range mine.ids {
			if mine.ids[i], err = m.nccl.NewID(); err != nil {
				return pipe.Link{}, err
			}
		}
	}
	b, err := staged.Exchange(ctx, conn, mine.encode())
	if err != nil {
		return pipe.Link{}, err
	}
	theirs, err := parseHello(b)
	if err != nil {
		return pipe.Link{}, err
	}
	if err := m.room.Agree(theirs.room); err != nil {
		return pipe.Link{}, err
	}
	ids := mine.ids
	if !dialer {
		ids = theirs.ids
	}
	mv, err := m.join(ctx, ids, dialer, staged.Patience(n.Patience))
	if err != nil {
		return pipe.Link{}, err
	}
	n.links.Add(1)
	return staged.New(conn, mv, staged.Options{
		Room: m.room, Early: true, Patience: staged.Patience(n.Patience), NoDigest: n.NoDigest, SeedOut: mine.seed, SeedIn: theirs.seed,
	}, n.links.Done), nil
}

// hello is what the ends of a link tell each other.
type hello struct {
	room staged.Room
	seed uint64       // of the digests that this end sends
	ids  [2]native.ID // from the dialer: of the communicators, first the one to the listener
}

const (
	idSize    = len(native.ID{})
	helloSize = 4 + 4 + 4 + 8 + 2*idSize // what speaks, piece, slots, seed, ids
)

func (h *hello) encode() []byte {
	b := append(make([]byte, 0, helloSize), "nccl"...)
	b = binary.LittleEndian.AppendUint32(b, uint32(h.room.Piece))
	b = binary.LittleEndian.AppendUint32(b, uint32(h.room.Slots))
	b = binary.LittleEndian.AppendUint64(b, h.seed)
	return append(append(b, h.ids[0][:]...), h.ids[1][:]...)
}

func parseHello(b []byte) (*hello, error) {
	if len(b) != helloSize || string(b[:4]) != "nccl" {
		return nil, fmt.Errorf("the peer does not speak NCCL: %w", connector.ErrIncompatible)
	}
	return &hello{
		room: staged.Room{Piece: int(binary.LittleEndian.Uint32(b[4:])), Slots: int(binary.LittleEndian.Uint32(b[8:]))}, seed: binary.LittleEndian.Uint64(b[12:]),
		ids: [2]native.ID{native.ID(b[20 : 20+idSize]), native.ID(b[20+idSize:])},
	}, nil
}
