package p2pnccl

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// Engines know one address of each other: there they meet, show each other over TLS that they have the key,
// and agree on a transport, whose own address the one that listens names. Both must be of one version.
const (
	meetVersion = 1
	maxMeet     = 8 << 10
	meetTimeout = 5 * time.Second
	quarantine  = 30 * time.Second // how long a way that failed towards a peer is not tried
)

// offer is what the dialer says.
type offer struct {
	Version int      `json:"version"`
	Host    string   `json:"host"` // equal on one host, for one user
	Ways    []string `json:"ways"`
}

// deal is the answer.
type deal struct {
	Way     string `json:"way"`
	Address string `json:"address"`
	Error   string `json:"error,omitempty"`
}

// network is the pipe.Network over all transports.
type network struct {
	config Config
	tls    *tls.Config
	ways   []*way
	host   string
	log    *slog.Logger

	mu          sync.Mutex
	quarantined map[string]time.Time // address and way: until when it is not tried
}

func (c *Config) network(keyed *tls.Config, log *slog.Logger) (*network, error) {
	if err := c.setChannels(); err != nil {
		return nil, err
	}
	usable, reasons := c.makeWays(keyed)
	for name, err := range reasons {
		if slices.Contains(c.Transports, name) && len(usable) == 0 {
			return nil, fmt.Errorf("transports: %s: %w: %w", name, err, connector.ErrIncompatible)
		}
		say := log.Info
		if slices.Contains(c.Transports, name) {
			say = log.Warn // it was asked for
		}
		say("a transport cannot be used here", "transport", name, "reason", err)
	}
	if c.UCXTCP == trustNetwork {
		log.Warn("UCX may use TCP: whoever can reach its ports can read and write the memory of this plugin", "ucx_tcp", trustNetwork)
	}
	n := &network{config: *c, tls: keyed, ways: usable, host: thisHost(), log: log, quarantined: map[string]time.Time{}}
	log.Info("transports that can be used here, the best first", "transports", n.names())
	return n, nil
}

func (n *network) names() []string {
	names := make([]string, 0, len(n.ways))
	for _, w := range n.ways {
		names = append(names, w.name)
	}
	return names
}

func (n *network) find(name string) *way {
	for _, w := range n.ways {
		if w.name == name {
			return w
		}
	}
	return nil
}

// close ends the transports.
func (n *network) close() error {
	var errs []error
	for _, w := range n.ways {
		if w.close != nil {
			errs = append(errs, w.close())
		}
	}
	return errors.Join(errs...)
}

// listener listens where peers meet, and for each transport.
type listener struct {
	*pipe.Acceptor
	network *network
	inner   map[string]pipe.Listener
	cancel  context.CancelFunc
	tasks   sync.WaitGroup
}

// Listen implements pipe.Network.
func (n *network) Listen(ctx context.Context) (_ pipe.Listener, err error) {
	meet, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort(n.config.host(), strconv.Itoa(n.config.Port)))
	if err != nil {
		return nil, fmt.Errorf("kv_ip and kv_port: %w", err)
	}
	l := &listener{network: n, inner: map[string]pipe.Listener{}}
	accepting, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	for _, w := range n.ways {
		inner, err := w.network.Listen(ctx)
		if err != nil {
			n.log.Warn("a transport cannot listen", "transport", w.name, "error", err)
			continue
		}
		l.inner[w.name] = inner
	}
	l.Acceptor = pipe.NewAcceptor(meet, l.greet)
	for name, inner := range l.inner {
		l.tasks.Go(func() { l.forward(accepting, n.find(name), inner) })
	}
	return l, nil
}

// forward hands the links of one transport on.
func (l *listener) forward(ctx context.Context, w *way, inner pipe.Listener) {
	for {
		link, err := inner.Accept(ctx)
		switch {
		case err == nil:
			l.network.log.Info("a peer has connected", "transport", w.name)
			_ = l.Offer(w.counted(link))
		case ctx.Err() != nil, errors.Is(err, pipe.ErrClosed):
			return
		}
	}
}

// Address implements pipe.Listener.
func (l *listener) Address() string {
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return net.JoinHostPort(l.network.config.reach(), port)
}

// Close implements pipe.Listener.
func (l *listener) Close() error {
	l.cancel()
	var errs []error
	for _, inner := range l.inner {
		errs = append(errs, inner.Close())
	}
	l.tasks.Wait()
	return errors.Join(append(errs, l.Acceptor.Close())...)
}

// greet tells one peer how to go on. The connection ends with that.
func (l *listener) greet(ctx context.Context, raw net.Conn, _ *pipe.Acceptor) error {
	conn := tls.Server(raw, l.network.tls)
	if err := conn.HandshakeContext(ctx); err != nil {
		l.network.log.Warn("a peer was refused", "error", err)
		return err
	}
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	var o offer
	if err := json.NewDecoder(io.LimitReader(conn, maxMeet)).Decode(&o); err != nil {
		return err
	}
	d := l.answer(&o)
	return errors.Join(json.NewEncoder(conn).Encode(&d), conn.Close())
}

func (l *listener) answer(o *offer) deal {
	n := l.network
	if o.Version != meetVersion {
		return deal{Error: fmt.Sprintf("you speak version %d, we %d", o.Version, meetVersion)}
	}
	can := slices.DeleteFunc(slices.Clone(o.Ways), func(name string) bool { return l.inner[name] == nil })
	w, err := choose(n.ways, n.config.Transports, can, o.Host != "" && o.Host == n.host)
	if err != nil {
		return deal{Error: err.Error()}
	}
	return deal{Way: w.name, Address: l.inner[w.name].Address()}
}

// Dial implements pipe.Network. A transport that turns out not to reach the peer is left out for a while.
func (n *network) Dial(ctx context.Context, address string) (pipe.Link, error) {
	var failed error
	can := n.usable(address)
	for len(can) > 0 {
		d, err := n.meet(ctx, address, can)
		if err != nil {
			return pipe.Link{}, errors.Join(err, failed)
		}
		w := n.find(d.Way)
		if w == nil || !slices.Contains(can, d.Way) {
			return pipe.Link{}, fmt.Errorf("%s names transport %q: %w", address, d.Way, connector.ErrIncompatible)
		}
		link, err := w.network.Dial(ctx, d.Address)
		if err == nil {
			n.log.Info("connected to a peer", "address", address, "transport", w.name)
			return w.counted(link), nil
		}
		if ctx.Err() != nil {
			return pipe.Link{}, err
		}
		w.failed.Add(1)
		failed = errors.Join(failed, fmt.Errorf("%s: %w", w.name, err))
		n.log.Warn("a transport does not reach a peer, the next one is tried", "address", address, "transport", w.name, "error", err)
		n.mu.Lock()
		n.quarantined[address+" "+w.name] = time.Now().Add(quarantine)
		n.mu.Unlock()
		can = slices.DeleteFunc(can, func(name string) bool { return name == w.name })
	}
	return pipe.Link{}, errors.Join(fmt.Errorf("%s: %w", address, connector.ErrGone), failed)
}

// usable are the ways that have not just failed towards a peer; all, if all have.
func (n *network) usable(address string) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	for k, until := range n.quarantined {
		if now.After(until) {
			delete(n.quarantined, k)
		}
	}
	can := slices.DeleteFunc(n.names(), func(name string) bool { _, failed := n.quarantined[address+" "+name]; return failed })
	if len(can) == 0 {
		return n.names()
	}
	return can
}

// meet asks a peer how to connect.
func (n *network) meet(ctx context.Context, address string, can []string) (*deal, error) {
	ctx, cancel := context.WithTimeout(ctx, meetTimeout)
	defer cancel()
	raw, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if errors.Is(err, syscall.ECONNREFUSED) {
		err = fmt.Errorf("%w: %w", err, connector.ErrGone)
	}
	if err != nil {
		return nil, err
	}
	defer raw.Close()
	stop := context.AfterFunc(ctx, func() { _ = raw.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	conn := tls.Client(raw, n.tls)
	if err := conn.HandshakeContext(ctx); err != nil {
		return nil, fmt.Errorf("%s does not have our key: both engines need the same kvport.ticket_key_file, or run as one user of one machine: %w: %w", address, err, connector.ErrIncompatible)
	}
	if err := json.NewEncoder(conn).Encode(&offer{Version: meetVersion, Host: n.host, Ways: can}); err != nil {
		return nil, err
	}
	var d deal
	if err := json.NewDecoder(io.LimitReader(conn, maxMeet)).Decode(&d); err != nil {
		return nil, fmt.Errorf("%s answers nothing: %w: %w", address, err, connector.ErrGone)
	}
	if d.Error != "" {
		return nil, fmt.Errorf("%s: %s: %w", address, d.Error, connector.ErrIncompatible)
	}
	return &d, nil
}

// stats shows what goes over which transport.
func (n *network) stats() []connector.Stat {
	var out []connector.Stat
	for _, w := range n.ways {
		add := func(name string, v int64, labels ...string) {
			out = append(out, connector.Stat{Name: name, Labels: append([]string{w.name}, labels...), Value: float64(v)})
		}
		add("links", w.links.Load())
		add("links_total", w.total.Load())
		add("link_failures_total", w.failed.Load())
		add("link_bytes_total", w.sent.Load(), "sent")
		add("link_bytes_total", w.received.Load(), "received")
	}
	return out
}
