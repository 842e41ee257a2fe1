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
	"crypto/rand"
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
	defaultPiece    = 4 << 20
	defaultSlots    = 4
	defaultPatience = 3 * time.Second
	joinTimeout     = 30 * time.Second // NCCL's start takes seconds
	maxMemory       = 1 << 30          // of one direction of a link
)

// machine is what NCCL works with.
type machine struct {
	nccl         *native.Library
	cuda         *cuda.Library
	device       int
	piece, slots int
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
	m := &machine{device: n.Device, piece: n.Piece, slots: n.Slots}
	if m.piece == 0 {
		m.piece = defaultPiece
	}
	if m.slots == 0 {
		m.slots = defaultSlots
	}
	if m.piece < 1 || m.slots < 1 || m.piece > maxMemory/m.slots {
		return nil, fmt.Errorf("%d pieces of %d bytes: %w", m.slots, m.piece, connector.ErrIncompatible)
	}
	var err error
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
	ip := net.ParseIP(host)
	local := address == "" || err == nil && (host == "localhost" || ip != nil && ip.IsLoopback())
	if _, set := os.LookupEnv("NCCL_SOCKET_IFNAME"); set || !local {
		return nil
	}
	return os.Setenv("NCCL_SOCKET_IFNAME", "lo")
}

func (n *Network) patience() time.Duration {
	if n.Patience > 0 {
		return n.Patience
	}
	return defaultPatience
}

func (n *Network) side() *staged.Side {
	return &staged.Side{Address: n.Address, Advertise: n.Advertise, TLS: n.TLS}
}

// Close waits for what is left of links, which should be closed before.
func (n *Network) Close() error {
	n.links.Wait()
	return nil
}

// listener is a listener of this network.
type listener struct {
	*pipe.Acceptor
	network *Network
}

// Address implements pipe.Listener.
func (l *listener) Address() string { return l.network.side().Reach(l.Addr()) }

// Listen implements pipe.Network.
func (n *Network) Listen(ctx context.Context) (pipe.Listener, error) {
	if err := n.Start(); err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	inner, err := n.side().Listen(ctx)
	if err != nil {
		return nil, err
	}
	return &listener{pipe.NewAcceptor(inner, func(ctx context.Context, raw net.Conn, a *pipe.Acceptor) error {
		conn, err := n.side().Secure(ctx, raw, true)
		if err != nil {
			return err
		}
		link, err := n.shake(ctx, conn, false)
		if err != nil {
			return err
		}
		return a.Offer(link)
	}), n}, nil
}

// Dial implements pipe.Network.
func (n *Network) Dial(ctx context.Context, address string) (pipe.Link, error) {
	if err := n.Start(); err != nil {
		return pipe.Link{}, fmt.Errorf("dial %s: %w", address, err)
	}
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	conn, err := n.side().Dial(ctx, address)
	if err != nil {
		return pipe.Link{}, fmt.Errorf("dial %s: %w", address, err)
	}
	link, err := n.shake(ctx, conn, true)
	if err != nil {
		return pipe.Link{}, errors.Join(fmt.Errorf("dial %s: %w", address, err), conn.Close())
	}
	return link, nil
}

// shake makes a link of a connection. On an error the connection is the caller's.
func (n *Network) shake(ctx context.Context, conn net.Conn, dialer bool) (pipe.Link, error) {
	m, err := n.start()
	if err != nil {
		return pipe.Link{}, err
	}
	mine := hello{piece: m.piece, slots: m.slots}
	var seed [8]byte
	_, _ = rand.Read(seed[:]) // never fails
	mine.seed = binary.LittleEndian.Uint64(seed[:])
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
	if theirs.piece != m.piece || theirs.slots != m.slots {
		return pipe.Link{}, fmt.Errorf("the peer has %d pieces of %d bytes, we %d of %d: %w", theirs.slots, theirs.piece, m.slots, m.piece, connector.ErrIncompatible)
	}
	ids := mine.ids
	if !dialer {
		ids = theirs.ids
	}
	mv, err := m.join(ctx, ids, dialer, n.patience())
	if err != nil {
		return pipe.Link{}, err
	}
	n.links.Add(1)
	return staged.New(conn, mv, staged.Options{
		Piece: m.piece, Slots: m.slots, Early: true, Patience: n.patience(), NoDigest: n.NoDigest, SeedOut: mine.seed, SeedIn: theirs.seed,
	}, n.links.Done), nil
}

// hello is what the ends of a link tell each other.
type hello struct {
	piece, slots int
	seed         uint64       // of the digests that this end sends
	ids          [2]native.ID // from the dialer: of the communicators, first the one to the listener
}

const (
	idSize    = len(native.ID{})
	helloSize = 4 + 4 + 4 + 8 + 2*idSize // what speaks, piece, slots, seed, ids
)

func (h *hello) encode() []byte {
	b := append(make([]byte, 0, helloSize), "nccl"...)
	b = binary.LittleEndian.AppendUint32(b, uint32(h.piece))
	b = binary.LittleEndian.AppendUint32(b, uint32(h.slots))
	b = binary.LittleEndian.AppendUint64(b, h.seed)
	return append(append(b, h.ids[0][:]...), h.ids[1][:]...)
}

func parseHello(b []byte) (*hello, error) {
	if len(b) != helloSize || string(b[:4]) != "nccl" {
		return nil, fmt.Errorf("the peer does not speak NCCL: %w", connector.ErrIncompatible)
	}
	return &hello{
		piece: int(binary.LittleEndian.Uint32(b[4:])), slots: int(binary.LittleEndian.Uint32(b[8:])), seed: binary.LittleEndian.Uint64(b[12:]),
		ids: [2]native.ID{native.ID(b[20 : 20+idSize]), native.ID(b[20+idSize:])},
	}, nil
}
