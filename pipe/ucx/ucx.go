// Package ucx is a pipe over UCX, which copies between processes or uses shared memory on one host, and
// uses RDMA between hosts. UCX uses TCP only if [Network.TrustNetwork] or [Network.Transports] says so,
// because its TCP transport opens ports at which anybody can write any memory of the process.
//
// UCX's put writes payload into landing memory of the receiver, which only the pipe uses. A TCP connection
// announces it; that connection also carries headers, order and acknowledgements, and shows the end of
// either process. The link is authenticated on that connection: with [Network.TLS] both ends prove that
// they have the shared key. UCX itself neither authenticates nor encrypts: whoever can read the network can
// read the payload. A digest that is seeded over the connection finds what was changed on its way.
//
// A link that loses its peer ends with connector.ErrGone. Landing memory that a peer may still write is
// left unused for a while, and is never used for anything except landing.
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

// Network makes links over UCX. It must not be changed once it is in use.
type Network struct {
	Address    string      // to listen at, for control messages; empty means 127.0.0.1 with a port that the system chooses
	Advertise  string      // what peers dial, if that differs; ":0" at its end stands for the port that the listener has
	TLS        *tls.Config // mutual TLS for control messages; nil means none, and then only loopback
	Dir        string      // folder of the library; empty means where native/ucx looks
	Transports string      // UCX's list of transports, used as it is; empty means those that open no port, see Far and TrustNetwork
	Far        bool        // RDMA, for peers on other hosts, instead of shared memory
	// TrustNetwork lets UCX use whatever UCX_TLS says, or every transport it has, including TCP. Whoever
	// can reach UCX's ports can then write the memory of this process.
	TrustNetwork bool
	Devices      string        // network devices; empty means UCX_NET_DEVICES, or all
	Piece        int           // bytes that are moved at a time; 0 means 512 KiB
	Slots        int           // pieces that each direction of a link holds; 0 means 8
	Patience     time.Duration // how long the peer may make no progress with a piece; 0 means 3 s
	NoDigest     bool          // leaves the check of payload to the host's digests

	mu     sync.Mutex
	engine *engine // nil until Start
	closed bool
}

const (
	defaultPiece = 512 << 10
	defaultSlots = 8
	dialTimeout  = 5 * time.Second
)

// Start loads UCX and makes a worker. Without it, Listen and Dial do that. The error wraps
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

// portless lists the transports that open no port. Errors wrap connector.ErrIncompatible.
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

// Close ends what is left of the links, which should be closed first, and then UCX. A second Close does
// nothing.
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

// shake makes a link of a connection. If it fails, the caller still owns the connection.
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
	mine := hello{landing: m.slab.address() + uint64(e.half()), key: m.slab.key, worker: e.address}
	b, o, err := e.room.Meet(ctx, conn, "ucx", mine.encode())
	if err != nil {
		return pipe.Link{}, err
	}
	if m.peer, err = parseHello(b); err != nil {
		return pipe.Link{}, err
	}
	o.Patience, o.NoDigest = m.patience, n.NoDigest
	return staged.New(conn, m, o, e.links.Done), nil
}

// hello is what the ends of a link tell each other.
type hello struct {
	landing uint64 // address of the landing memory
	key     []byte // opens the landing memory
	worker  []byte // address of UCX's worker
}

// helloHead is the size of the fixed part: landing, length of key.
const helloHead = 8 + 2

func (h *hello) encode() []byte {
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, helloHead+len(h.key)+len(h.worker)), h.landing)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(h.key)))
	return append(append(b, h.key...), h.worker...)
}

func parseHello(b []byte) (*hello, error) {
	if len(b) < helloHead {
		return nil, fmt.Errorf("the peer's hello has %d bytes: %w", len(b), connector.ErrIncompatible)
	}
	n, rest := int(binary.LittleEndian.Uint16(b[8:])), b[helloHead:]
	if n == 0 || n >= len(rest) {
		return nil, fmt.Errorf("the peer's hello has a key of %d bytes in %d: %w", n, len(rest), connector.ErrIncompatible)
	}
	return &hello{landing: binary.LittleEndian.Uint64(b), key: rest[:n], worker: rest[n:]}, nil
}
