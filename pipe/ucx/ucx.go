// Package ucx is a pipe over UCX: copies between processes or shared memory on one host, and RDMA between hosts.
// UCX's TCP is used only where [Network.TrustNetwork] or [Network.Transports] says so: it opens ports at which
// anybody can write any memory of the process.
//
// Payload is written into landing memory of the receiver that nothing but the pipe uses (UCX's put), and
// announced over a TCP connection, which also carries headers, order, acknowledgements and the end of either
// process. That connection is where a link is authenticated: with [Network.TLS] both ends show that they
// have the shared key. UCX itself authenticates and encrypts nothing: payload can be read by whoever can read the
// network. What is changed on its way is found by a digest that is seeded over the connection.
//
// A link that loses its peer ends with connector.ErrGone. Landing memory that a peer may still write is not
// used for anything else for a while, and never for anything but landing.
package ucx

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
	native "github.com/kvport/kvport/native/ucx"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/internal/staged"
)

// Network makes links over UCX. It must not be changed once it is used.
type Network struct {
	Address    string      // to listen at, for words; empty: 127.0.0.1 with a port that the system chooses
	Advertise  string      // what peers dial, where that differs; ":0" at its end stands for the port taken
	TLS        *tls.Config // mutual TLS for words; nil: none, and loopback only
	Dir        string      // folder of the library; empty: where native/ucx looks
	Transports string      // UCX's list, taken as it is; empty: those that open no port, see Far and TrustNetwork
	Far        bool        // RDMA, for peers on other hosts, instead of shared memory
	// TrustNetwork lets UCX use whatever UCX_TLS says, or all that it has, TCP too: whoever can reach its
	// ports can write the memory of this process.
	TrustNetwork bool
	Devices      string        // network devices; empty: UCX_NET_DEVICES, or all
	Piece        int           // bytes that are moved at a time; 0: 512 KiB
	Slots        int           // pieces that each direction of a link holds; 0: 8
	Patience     time.Duration // for the peer to make progress with a piece; 0: 3 s
	NoDigest     bool          // leaves payload to the host's digests

	mu     sync.Mutex
	engine *engine // nil: not started
	closed bool
}

const (
	defaultPiece = 512 << 10
	defaultSlots = 8
	dialTimeout  = 5 * time.Second
)

// Start loads UCX and makes a worker, which Listen and Dial do otherwise. Its error wraps
// ucx.ErrUnavailable of native/ucx if there is no UCX.
func (n *Network) Start() error {
	_, err := n.start()
	return err
}

func (n *Network) start() (*engine, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, pipe.ErrClosed
	}
	if n.engine != nil {
		return n.engine, nil
	}
	room, err := staged.Room{Piece: n.Piece, Slots: n.Slots}.Settle(staged.Room{Piece: defaultPiece, Slots: defaultSlots})
	if err != nil {
		return nil, err
	}
	lib, err := native.Open(n.Dir)
	if err != nil {
		return nil, err
	}
	o := native.Options{Transports: n.Transports, Devices: n.Devices, PeerErrors: true}
	if o.Transports == "" && !n.TrustNetwork {
		if o.Transports, err = n.portless(); err != nil {
			return nil, err
		}
	}
	n.engine, err = newEngine(lib, o, room)
	return n.engine, err
}

// portless are the transports that open no port. Errors wrap connector.ErrIncompatible.
func (n *Network) portless() (string, error) {
	if n.Far && !native.HasRDMA() {
		return "", fmt.Errorf("ucx: this machine has no RDMA device: %w: %w", native.ErrOpenPort, connector.ErrIncompatible)
	}
	list, _, err := native.Closed(os.Getenv("UCX_TLS"), n.Far)
	if err != nil {
		return "", fmt.Errorf("ucx: %w: %w", err, connector.ErrIncompatible)
	}
	return list, nil
}

// Close ends what is left of links, which should be closed before, and UCX. Closing twice does nothing.
func (n *Network) Close() error {
	n.mu.Lock()
	e := n.engine
	n.engine, n.closed = nil, true
	n.mu.Unlock()
	if e == nil {
		return nil
	}
	return e.close()
}

func (n *Network) staged() *staged.Network {
	return &staged.Network{Side: pipe.Side{Address: n.Address, Advertise: n.Advertise, TLS: n.TLS}, Timeout: dialTimeout, Start: n.Start, Shake: n.shake}
}

// Listen implements pipe.Network.
func (n *Network) Listen(ctx context.Context) (pipe.Listener, error) { return n.staged().Listen(ctx) }

// Dial implements pipe.Network.
func (n *Network) Dial(ctx context.Context, address string) (pipe.Link, error) {
	return n.staged().Dial(ctx, address)
}

// shake makes a link of a connection. On an error the connection is the caller's.
func (n *Network) shake(ctx context.Context, conn net.Conn, _ bool) (_ pipe.Link, err error) {
	e, err := n.start()
	if err != nil {
		return pipe.Link{}, err
	}
	m, err := e.mover(staged.Patience(n.Patience))
	if err != nil {
		return pipe.Link{}, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Free(true))
			e.links.Done()
		}
	}()
	mine := hello{room: e.room, seed: staged.Seed(), landing: m.slab.address() + uint64(e.half()), key: m.slab.key, worker: e.address}
	b, err := staged.Exchange(ctx, conn, mine.encode())
	if err != nil {
		return pipe.Link{}, err
	}
	theirs, err := parseHello(b)
	if err != nil {
		return pipe.Link{}, err
	}
	if err := e.room.Agree(theirs.room); err != nil {
		return pipe.Link{}, err
	}
	m.peer = theirs
	return staged.New(conn, m, staged.Options{
		Room: e.room, Patience: staged.Patience(n.Patience), NoDigest: n.NoDigest, SeedOut: mine.seed, SeedIn: theirs.seed,
	}, e.links.Done), nil
}

// hello is what the ends of a link tell each other.
type hello struct {
	room    staged.Room
	seed    uint64 // of the digests that this end sends
	landing uint64 // address of the landing memory
	key     []byte // that opens it
	worker  []byte // address of UCX's worker
}

// helloHead is the fixed part: what speaks, piece, slots, seed, landing, length of key.
const helloHead = 3 + 4 + 4 + 8 + 8 + 2

func (h *hello) encode() []byte {
	b := append(make([]byte, 0, helloHead+len(h.key)+len(h.worker)), "ucx"...)
	b = binary.LittleEndian.AppendUint32(b, uint32(h.room.Piece))
	b = binary.LittleEndian.AppendUint32(b, uint32(h.room.Slots))
	b = binary.LittleEndian.AppendUint64(b, h.seed)
	b = binary.LittleEndian.AppendUint64(b, h.landing)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(h.key)))
	return append(append(b, h.key...), h.worker...)
}

func parseHello(b []byte) (*hello, error) {
	if len(b) < helloHead || string(b[:3]) != "ucx" {
		return nil, fmt.Errorf("the peer does not speak UCX: %w", connector.ErrIncompatible)
	}
	h := &hello{room: staged.Room{Piece: int(binary.LittleEndian.Uint32(b[3:])), Slots: int(binary.LittleEndian.Uint32(b[7:]))}}
	h.seed, h.landing = binary.LittleEndian.Uint64(b[11:]), binary.LittleEndian.Uint64(b[19:])
	n, rest := int(binary.LittleEndian.Uint16(b[27:])), b[helloHead:]
	if n == 0 || n >= len(rest) {
		return nil, fmt.Errorf("the peer's hello has a key of %d bytes in %d: %w", n, len(rest), connector.ErrIncompatible)
	}
	h.key, h.worker = rest[:n], rest[n:]
	return h, nil
}
