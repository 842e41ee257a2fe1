package nixl

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

const (
	maxQuestion = 8 << 20 // of which a push of very many runs needs most
	maxConns    = 1024
	idleConn    = time.Minute // a consumer that asks nothing for so long dials again
)

// listen opens the side channel.
func (n *Node) listen(ctx context.Context) error {
	var lc net.ListenConfig
	address := net.JoinHostPort(n.config.Host, strconv.Itoa(n.config.Port))
	inner, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("side_channel_host, side_channel_port: %w", err)
	}
	n.listener = pipe.NewAcceptor(inner, n.greet)
	return nil
}

// address is what tickets name.
func (n *Node) address() string {
	_, port, err := net.SplitHostPort(n.listener.Addr().String())
	if err != nil || n.config.Advertise == "" {
		return n.listener.Addr().String()
	}
	return net.JoinHostPort(n.config.Advertise, port)
}

// keep notes a connection. When there are too many, the one goes that has been silent for longest.
func (n *Node) keep(c net.Conn) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	select {
	case <-n.stop:
		return false
	default:
	}
	if len(n.conns) >= maxConns {
		var silent net.Conn
		for other, heard := range n.conns {
			if silent == nil || heard.Before(n.conns[silent]) {
				silent = other
			}
		}
		delete(n.conns, silent)
		_ = silent.Close() // which ends its serve
	}
	n.conns[c] = time.Now()
	return true
}

// heard notes that a consumer says something.
func (n *Node) heard(c net.Conn) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, known := n.conns[c]; known {
		n.conns[c] = time.Now()
	}
}

func (n *Node) forget(c net.Conn) {
	_ = c.Close()
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.conns, c)
}

// serve answers the questions of one connection until that ends.
func (n *Node) serve(c net.Conn) {
	for {
		_ = c.SetDeadline(time.Now().Add(idleConn))
		var q question
		if err := readMessage(c, maxQuestion, &q); err != nil {
			return
		}
		n.heard(c)
		a, err := n.reply(&q)
		if err != nil {
			n.log.Info("a consumer is refused", "peer", c.RemoteAddr().String(), "hold", q.Hold, "reason", err)
			a = refuse(err)
		}
		_ = c.SetDeadline(time.Now().Add(askTimeout)) // a push may have taken its time
		if err := writeMessage(c, a); err != nil {
			return
		}
	}
}

// reply answers one question. Errors that wrap connector.ErrIncompatible are for good.
func (n *Node) reply(q *question) (*answer, error) {
	switch {
	case q.Version != protocolVersion:
		return nil, fmt.Errorf("you speak version %d, I %d: %w", q.Version, protocolVersion, connector.ErrIncompatible)
	case !bytes.Equal(q.Model, n.env.Model[:]):
		return nil, fmt.Errorf("another model: %w", connector.ErrIncompatible)
	}
	if err := n.sameShape(q); err != nil {
		return nil, err
	}
	if len(q.Beats) > 0 {
		return n.hear(q.Beats)
	}
	if q.Follow != nil {
		return n.follow(q)
	}
	if q.Done {
		return &answer{}, n.holds.done(q, time.Now())
	}
	e, err := n.holds.find(q.Hold, q.Secret)
	if err == nil {
		err = q.mayReshape(&e)
	}
	if err != nil {
		return nil, err
	}
	r, err := n.rankOf(q.producerRank())
	if err != nil {
		return nil, err
	}
	if q.Push != nil {
		if err := n.holds.verify(q); err != nil {
			return nil, err
		}
		return n.pushes.once(q, func() (*answer, error) { return n.push(r, q, &e) })
	}
	r.wake()
	a := r.cache().answer()
	n.describe(q, a)
	n.introduce(a)
	a.Tokens = e.Tokens
	for _, b := range e.Blocks {
		a.Blocks = append(a.Blocks, heldBlock{Group: b.Group, ID: b.ID, Key: b.Key[:]})
	}
	if n.told != nil {
		n.told()
	}
	return a, nil
}

// introduce adds what a consumer needs to do without such an answer next time.
func (n *Node) introduce(a *answer) {
	a.Life, a.Clock, a.Now = n.life, clockName(), monotonic()
	a.Board, a.Slots = n.board.addr(), boardSlots
}

// hear takes the signs of life of consumers.
func (n *Node) hear(beats []beat) (*answer, error) {
	if len(beats) > maxBeats {
		return nil, fmt.Errorf("%d signs of life, the limit is %d: %w", len(beats), maxBeats, connector.ErrIncompatible)
	}
	a := &answer{}
	for _, b := range beats {
		if n.holds.renew(b.Hold, b.Secret) != nil {
			a.Over = append(a.Over, b.Hold)
		}
	}
	return a, nil
}
