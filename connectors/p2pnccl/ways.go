package p2pnccl

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/kvport/kvport/connector"
	native "github.com/kvport/kvport/native/ucx"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/nccl"
	"github.com/kvport/kvport/pipe/shm"
	"github.com/kvport/kvport/pipe/tcp"
	"github.com/kvport/kvport/pipe/ucx"
)

// way is one transport, as this process can use it.
type way struct {
	name    string
	network pipe.Network
	start   func() error // fails if this machine cannot use it; nil: it always can
	close   func() error // nil: there is nothing to close
	plain   bool         // it encrypts nothing: beyond one host the config must name it
	near    bool         // it is for one host only

	links                         atomic.Int64 // open
	total, failed, sent, received atomic.Int64
}

// makeWays gives the transports of a config that work here, the best first, and why others do not.
func (c *Config) makeWays(keyed *tls.Config) (usable []*way, reasons map[string]error) {
	listen := net.JoinHostPort(c.host(), "0")
	advertise := ""
	if c.Advertise != "" {
		advertise = net.JoinHostPort(c.Advertise, "0")
	}
	names := c.Transports
	if len(names) == 0 {
		names = ways()
	}
	reasons = map[string]error{}
	for _, name := range names {
		w := &way{name: name}
		switch name {
		case "nccl":
			n := &nccl.Network{Address: listen, Advertise: advertise, TLS: keyed, Device: c.Device, NoDigest: !c.Digest, Patience: c.timeout()}
			w.network, w.start, w.close, w.plain = n, n.Start, n.Close, true
		case "ucx":
			n := c.ucx()
			n.Address, n.Advertise, n.TLS = listen, advertise, keyed
			w.network, w.start, w.close, w.plain, w.near = n, n.Start, n.Close, true, !n.Far && !n.TrustNetwork
		case "shm":
			w.network, w.near = &shm.Network{Dir: c.SocketDir}, true
		case "tcp":
			w.network = &tcp.Network{Address: listen, Advertise: advertise, TLS: keyed, NoDigest: !c.Digest}
		}
		if w.start != nil {
			err := w.start()
			if errors.Is(err, native.ErrOpenPort) {
				err = fmt.Errorf("%w: use the transport tcp, which is inside TLS, or take the risk, on a network that you trust, with \"ucx_tcp\": \"trusted-network\"", err)
			}
			if err != nil {
				reasons[name] = err
				continue
			}
		}
		usable = append(usable, w)
	}
	return usable, reasons
}

// ucx is UCX with the transports that it may use: shared memory on this host, or RDMA beyond it where the config
// names UCX. By TCP it would open a port at which anybody writes the memory of this process.
func (c *Config) ucx() *ucx.Network {
	n := &ucx.Network{NoDigest: !c.Digest, Patience: c.timeout(), TrustNetwork: c.UCXTCP == trustNetwork}
	n.Far = !n.TrustNetwork && !c.local() && slices.Contains(c.Transports, "ucx")
	if n.TrustNetwork || n.Far {
		n.Devices = c.devices()
	}
	return n
}

// devices are the network devices for UCX.
func (c *Config) devices() string {
	if c.NetDevices == "" && c.local() && os.Getenv("UCX_NET_DEVICES") == "" {
		return "lo"
	}
	return c.NetDevices
}

// setChannels tells NCCL how many channels it may use, which is what its buffers on the GPU grow with.
func (c *Config) setChannels() error {
	if c.Channels == 0 {
		return nil
	}
	return os.Setenv("NCCL_MAX_NCHANNELS", strconv.Itoa(int(c.Channels)))
}

// choose gives the first of our ways that a peer can use too: one of its list, and none that is for one
// host, or unencrypted and not named in the config, if the peer is on another.
func choose(ours []*way, named, theirs []string, sameHost bool) (*way, error) {
	for _, w := range ours {
		far := w.near || w.plain && !slices.Contains(named, w.name)
		if slices.Contains(theirs, w.name) && (sameHost || !far) {
			return w, nil
		}
	}
	return nil, errors.Join(errNoWay, connector.ErrIncompatible)
}

// thisHost tells hosts and users apart, as far as shared memory goes.
func thisHost() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	space, spaceErr := os.Readlink("/proc/self/ns/mnt")
	if err != nil || spaceErr != nil {
		return ""
	}
	return strings.TrimSpace(string(boot)) + "/" + space + "/" + strconv.Itoa(os.Getuid())
}

// counted is a link that is counted.
func (w *way) counted(l pipe.Link) pipe.Link {
	w.total.Add(1)
	w.links.Add(1)
	ends := &atomic.Int32{}
	return pipe.Link{Out: &countedPipe{Pipe: l.Out, way: w, ends: ends}, In: &countedPipe{Pipe: l.In, way: w, ends: ends}}
}

// countedPipe counts what goes through a pipe.
type countedPipe struct {
	pipe.Pipe
	way    *way
	ends   *atomic.Int32 // pipes of the link that were closed
	closed atomic.Bool
}

// Send implements pipe.Pipe.
func (p *countedPipe) Send(ctx context.Context, header []byte, spans [][]byte) error {
	err := p.Pipe.Send(ctx, header, spans)
	if err == nil {
		p.way.sent.Add(int64(pipe.Size(spans)))
	}
	return err
}

// Recv implements pipe.Pipe.
func (p *countedPipe) Recv(ctx context.Context, place pipe.Place) error {
	got := 0
	err := p.Pipe.Recv(ctx, func(header []byte, size int) ([][]byte, error) {
		got = size
		return place(header, size)
	})
	if err == nil {
		p.way.received.Add(int64(got))
	}
	return err
}

// Close implements pipe.Pipe.
func (p *countedPipe) Close() error {
	if p.closed.CompareAndSwap(false, true) && p.ends.Add(1) == 2 {
		p.way.links.Add(-1)
	}
	return p.Pipe.Close()
}
