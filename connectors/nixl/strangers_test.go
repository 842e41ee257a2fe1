package nixl

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

func otherKey(e *connector.Env) { e.LinkKey = bytes.Repeat([]byte{4}, 32) }

// raw is a connection of somebody who need not be a consumer.
func (x *side) raw() net.Conn {
	x.Helper()
	conn, err := net.Dial("tcp", x.node.address())
	require.NoError(x, err)
	x.Cleanup(func() { _ = conn.Close() })
	require.NoError(x, conn.SetDeadline(time.Now().Add(time.Minute)))
	return conn
}

func (x *side) followers() int {
	x.node.layers.mu.Lock()
	defer x.node.layers.mu.Unlock()
	return len(x.node.layers.followers)
}

// Whoever has not proven the link key is told nothing: not where the cache lies, nor what is being computed.
func TestSideChannelAnswersNoStranger(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	p := open(t, connector.RoleProducer, Config{}, nil)
	_, h := p.finish(rng, 1, 3)
	good, err := parseTicket(h.Ticket)
	require.NoError(t, err)

	env := testEnv(connector.RoleConsumer, 1)
	following := newQuestion(&env)
	following.Follow = &follow{ID: "stranger"}
	asking := newQuestion(&env)
	asking.Hold, asking.Secret = good.Hold, good.Secret // even of somebody who has seen a ticket
	for name, q := range map[string]*question{"follow": following, "hold": asking} {
		conn := p.raw()
		require.NoError(t, writeMessage(conn, q), name)
		var a answer
		require.NoError(t, readMessage(conn, maxMessage, &a), name)
		require.ErrorContains(t, a.err(), "link key", name)
		require.Empty(t, a.Blocks, name)
		a.Blocks = nil
		require.Equal(t, answer{Refusal: a.Refusal, Gone: a.Gone}, a, "nothing else is said")
		_ = conn.(*net.TCPConn).CloseWrite()
		rest, _ := io.ReadAll(conn)
		require.Empty(t, rest, name)
	}
	guess := p.raw()
	nonce := append(greeting(), make([]byte, 32)...)
	_, err = guess.Write(append(append(append(nonce, byte(len(p.node.address()))), p.node.address()...), make([]byte, 32)...))
	require.NoError(t, err)
	require.NoError(t, writeMessage(guess, following))
	answer, _ := io.ReadAll(guess)
	require.LessOrEqual(t, len(answer), greetSize+1+32+32, "a nonce, the producer's proof and no more")

	stranger := open(t, connector.RoleConsumer, Config{Subscribe: []string{p.node.address()}}, otherKey)
	_, err = stranger.load(rng, 1, 3, h.Ticket)
	require.ErrorIs(t, err, connector.ErrGone)
	require.ErrorContains(t, err, "kvport.ticket_key_file")
	require.Zero(t, p.followers())

	d := open(t, connector.RoleConsumer, Config{}, nil)
	_, err = d.load(rng, 1, 3, h.Ticket)
	require.NoError(t, err)
}

// A consumer asks nothing of whoever has taken the address of its producer.
func TestConsumerAsksNoStranger(t *testing.T) {
	p := open(t, connector.RoleProducer, Config{}, otherKey)
	d := open(t, connector.RoleConsumer, Config{}, nil)
	rng := rand.New(rand.NewPCG(1, 1))
	_, h := p.finish(rng, 1, 3)
	_, err := d.load(rng, 1, 3, h.Ticket)
	require.ErrorIs(t, err, connector.ErrGone)
	require.ErrorContains(t, err, "kvport.ticket_key_file")
}

// Strangers who say nothing keep no consumer out.
func TestSilentStrangersKeepNobodyOut(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	p := open(t, connector.RoleProducer, Config{}, nil)
	d := open(t, connector.RoleConsumer, Config{}, nil)
	for range maxConns + 76 {
		p.raw()
	}
	_, h := p.finish(rng, 1, 3)
	_, err := d.load(rng, 1, 3, h.Ticket)
	require.NoError(t, err)
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	require.Less(t, len(p.node.conns), maxConns)
}

// At the limit of connections the one that has been silent for longest makes room, and none that is being answered: if
// all are, the new one is refused and counted.
func TestConnectionsMakeRoom(t *testing.T) {
	n := &Node{tally: newTally(), conns: map[net.Conn]time.Time{}, stop: make(chan struct{})}
	var conns []net.Conn
	add := func() error {
		ours, theirs := net.Pipe()
		t.Cleanup(func() {
			_ = ours.Close()
			_ = theirs.Close()
		})
		conns = append(conns, ours)
		return n.keep(ours)
	}
	for range maxConns {
		require.NoError(t, add())
		n.mark(conns[len(conns)-1], time.Time{})
	}
	require.ErrorIs(t, add(), errFull)
	require.ErrorIs(t, add(), connector.ErrGone, "a consumer computes the prompt")
	require.InDelta(t, 2, n.tally.values[series{name: "connections_refused_total"}], 0)
	now := time.Now()
	n.mark(conns[3], now.Add(-time.Second))
	n.mark(conns[5], now.Add(-time.Hour))
	require.NoError(t, add())
	require.NotContains(t, n.conns, conns[5])
	require.Contains(t, n.conns, conns[0], "it has been answered for longest")
	require.NoError(t, add())
	require.NotContains(t, n.conns, conns[3])
	require.Len(t, n.conns, maxConns)
	close(n.stop)
	require.Error(t, add())
	require.InDelta(t, 2, n.tally.values[series{name: "connections_refused_total"}], 0)
}

// A release that knows no link keys is told so.
func TestOldSideChannel(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer inner.Close()
	done := make(chan error, 1)
	go func() { // as an older release reads a question
		conn, err := inner.Accept()
		if err != nil {
			done <- err
			return
		}
		defer conn.Close()
		var q question
		done <- readMessage(conn, maxQuestion, &q)
	}()
	l := &connPool{key: bytes.Repeat([]byte{3}, 32)}
	_, err = l.dial(t.Context(), inner.Addr().String())
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "older release")
	require.ErrorContains(t, <-done, "the limit is")
}

// Without any key nothing begins.
func TestNeedsKey(t *testing.T) {
	env := testEnv(connector.RoleProducer, 1)
	env.LinkKey = nil
	_, err := Open(t.Context(), env, Config{LibDir: libDir(t)})
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "key_file")
	require.NotErrorIs(t, err, connector.ErrGone)
}
