package p2pnccl

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvport/kvport/internal/register"
	"github.com/kvport/kvport/internal/zmtp"
)

const (
	zmqHandshake = 5 * time.Second // for a proxy to answer
	maxZMQ       = 4 << 10         // bytes of a message of a proxy, which has nothing to say
)

// zmqRegistrar registers one engine with vLLM's proxy for P2P NCCL: over ZeroMQ, from a DEALER to the proxy's ROUTER, which
// believes every message and answers none. The proxy never forgets an engine, so nothing is said when this one ends.
type zmqRegistrar struct {
	address string // HOST:PORT of the proxy
	every   time.Duration
	log     *slog.Logger

	link         *zmqLink // nil: there is none
	good, failed atomic.Int64
}

func newZMQRegistrar(c *Config, log *slog.Logger) *zmqRegistrar {
	return &zmqRegistrar{address: c.proxy(), every: c.registerEvery(), log: log}
}

// Counts are the registrations that were sent, and those that could not be.
func (r *zmqRegistrar) Counts() (good, failed int64) { return r.good.Load(), r.failed.Load() }

// run registers as each of the types, at once and then regularly, until ctx ends.
func (r *zmqRegistrar) run(ctx context.Context, types []string, httpAddress, kvAddress string) {
	defer r.hangUp()
	say := func(ctx context.Context, as string) error {
		err := r.say(ctx, zmqMessage(as, httpAddress, kvAddress))
		switch {
		case ctx.Err() != nil: // nobody counts any more
		case err == nil:
			r.good.Add(1)
		default:
			r.failed.Add(1)
			r.hangUp()
		}
		return err
	}
	register.Repeat(ctx, func() time.Duration { return r.every }, types, say, func(err error) {
		r.log.Warn("registration with the proxy has changed", "proxy", r.address, "well", err == nil, "error", err)
	})
}

// say sends one registration, over a new connection if the last one has ended.
func (r *zmqRegistrar) say(ctx context.Context, message []byte) error {
	if r.link != nil && r.link.isOver() {
		r.hangUp()
	}
	if r.link == nil {
		link, err := dialZMQ(ctx, r.address)
		if err != nil {
			return fmt.Errorf("proxy_ip and proxy_port: %s: %w", r.address, err)
		}
		r.link = link
	}
	if err := r.link.conn.SetWriteDeadline(time.Now().Add(zmqHandshake)); err != nil {
		return err
	}
	if err := r.link.z.Send(message); err != nil {
		return err
	}
	return r.link.conn.SetWriteDeadline(time.Time{}) // answers to the proxy's pings are written at any time
}

// hangUp ends the connection, if there is one.
func (r *zmqRegistrar) hangUp() {
	if r.link != nil {
		r.link.close()
		r.link = nil
	}
}

// zmqMessage is a registration as the proxy reads it: a map of msgpack.
func zmqMessage(kind, httpAddress, kvAddress string) []byte {
	var out bytes.Buffer
	e := msgpack.NewEncoder(&out) // to memory, which does not fail
	_ = e.EncodeMapLen(3)
	for _, field := range [][2]string{{"type", kind}, {"http_address", httpAddress}, {"zmq_address", kvAddress}} {
		_, _ = e.EncodeString(field[0]), e.EncodeString(field[1])
	}
	return out.Bytes()
}

// zmqLink is a connection to a proxy.
type zmqLink struct {
	conn net.Conn
	z    *zmtp.Conn
	stop func() bool
	over chan struct{} // closed when the proxy has ended it
}

// dialZMQ connects to a proxy. The connection ends with ctx.
func dialZMQ(ctx context.Context, address string) (*zmqLink, error) {
	dialing, cancel := context.WithTimeout(ctx, zmqHandshake)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(dialing, "tcp", address)
	if err != nil {
		return nil, err
	}
	l := &zmqLink{conn: conn, over: make(chan struct{})}
	l.stop = context.AfterFunc(ctx, func() { _ = conn.Close() })
	if err = conn.SetDeadline(time.Now().Add(zmqHandshake)); err == nil {
		l.z, err = zmtp.Open(conn, maxZMQ, zmtp.Dealer, zmtp.Router)
	}
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	if err != nil {
		l.stop()
		_ = conn.Close()
		return nil, err
	}
	go l.drain()
	return l, nil
}

// drain answers what the protocol asks, passes over what else comes, and notices the end.
func (l *zmqLink) drain() {
	defer close(l.over)
	for {
		if _, err := l.z.Receive(); err != nil {
			_ = l.conn.Close()
			return
		}
	}
}

func (l *zmqLink) isOver() bool {
	select {
	case <-l.over:
		return true
	default:
		return false
	}
}

// close ends the connection and waits until nobody reads from it.
func (l *zmqLink) close() {
	l.stop()
	_ = l.conn.Close()
	<-l.over
}
