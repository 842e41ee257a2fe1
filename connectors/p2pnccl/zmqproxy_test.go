package p2pnccl

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/zmtp"
	"github.com/kvport/kvport/sdk"
)

// proxyEnd is the end of vLLM's proxy at which engines register: a ROUTER.
type proxyEnd struct {
	net.Listener
	got       chan map[string]string
	accepting sync.WaitGroup
	readers   sync.WaitGroup

	mu    sync.Mutex
	away  bool // who connects is cut off
	conns []net.Conn
}

// listenAsProxy listens until the test ends.
func listenAsProxy(t *testing.T) *proxyEnd {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxyEnd{Listener: l, got: make(chan map[string]string, 1000)}
	p.accepting.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			p.enter(t, conn)
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		p.accepting.Wait()
		p.leave()
	})
	return p
}

func (p *proxyEnd) enter(t *testing.T, conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.away {
		_ = conn.Close()
		return
	}
	p.conns = append(p.conns, conn)
	p.readers.Go(func() { p.read(t, conn) })
}

// leave ends all connections, and those that come from now on.
func (p *proxyEnd) leave() {
	p.mu.Lock()
	p.away = true
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
	p.mu.Unlock()
	p.readers.Wait()
}

// comeBack forgets what it was told before, and listens again.
func (p *proxyEnd) comeBack() {
	for len(p.got) > 0 {
		<-p.got
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.away = false
}

func (p *proxyEnd) read(t *testing.T, conn net.Conn) {
	z, err := zmtp.Open(conn, 1<<10, zmtp.Router, zmtp.Dealer)
	if err != nil {
		return
	}
	for {
		frames, err := z.Receive()
		if err != nil {
			return
		}
		var m map[string]string
		if len(frames) != 1 || msgpack.Unmarshal(frames[0], &m) != nil {
			t.Errorf("a registration is %q", frames)
			return
		}
		select {
		case p.got <- m:
		default: // the test has seen enough of them
		}
	}
}

func (p *proxyEnd) next(t *testing.T) map[string]string {
	t.Helper()
	select {
	case m := <-p.got:
		return m
	case <-time.After(time.Minute):
		require.Fail(t, "nobody registers")
		return nil
	}
}

// toProxy is a config that registers with a proxy.
func toProxy(t *testing.T, address, more string) *Config {
	t.Helper()
	host, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	c, err := sdk.DecodeConfig[Config](json.RawMessage(fmt.Sprintf(`{"proxy_ip":%q,"proxy_port":%q,"http_port":"8100","proxy_protocol":"zmq","register_ms":50%s}`, host, port, more)))
	require.NoError(t, err)
	return &c
}

// An engine registers over ZeroMQ at once and then again and again, and also with a proxy that was away.
func TestRegisterByZMQ(t *testing.T) {
	p := listenAsProxy(t)
	address := p.Addr().String()
	c := toProxy(t, address, "")
	require.Empty(t, c.registrars(), "it is no router of kvport")
	r := newZMQRegistrar(c, discard())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.run(ctx, types(connector.RoleBoth), c.httpAddress(), "127.0.0.1:14579")
	}()
	want := func(kind string) map[string]string {
		return map[string]string{"type": kind, "http_address": "127.0.0.1:8100", "zmq_address": "127.0.0.1:14579"}
	}
	both := func() {
		for n, seen := 0, map[string]int{}; seen["P"] < 2 || seen["D"] < 2; n++ {
			require.Less(t, n, 100, "one of the types is missing")
			m := p.next(t)
			require.Equal(t, want(m["type"]), m)
			seen[m["type"]]++
		}
	}
	both()
	p.leave()
	_, before := r.Counts()
	require.Eventually(t, func() bool { _, failed := r.Counts(); return failed > before }, time.Minute, 5*time.Millisecond, "it is not there")
	p.comeBack()
	both()
	require.Eventually(t, func() bool { good, _ := r.Counts(); return good >= 8 }, time.Minute, 5*time.Millisecond)
	cancel()
	<-done
	require.Nil(t, r.link)
}

// The bytes of a registration are those of Python's msgpack.
func TestZMQMessage(t *testing.T) {
	long := strings.Repeat("h", 40) + ":14579"
	require.Equal(t, "\x83\xa4type\xa1P\xachttp_address\xaea.example:8100\xabzmq_address\xd9\x2e"+long, string(zmqMessage("P", "a.example:8100", long)))
}

// What is no proxy is counted and said, and holds up nobody.
func TestRegisterWithNoProxy(t *testing.T) {
	web, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer web.Close()
	go func() {
		for {
			conn, err := web.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte(strings.Repeat("HTTP/1.1 400 Bad Request\r\n", 4)))
			_ = conn.Close()
		}
	}()
	for name, address := range map[string]string{"nobody": "127.0.0.1:1", "a web server": web.Addr().String()} {
		r := newZMQRegistrar(toProxy(t, address, ""), discard())
		err := r.say(t.Context(), nil)
		require.ErrorContains(t, err, "proxy_ip and proxy_port: "+address, name)
		require.Nil(t, r.link)
	}
}

// Engines that a config opens register with both kinds of routers that it names, and what the config trusts is checked again.
func TestOpenWithProxy(t *testing.T) {
	p := listenAsProxy(t)
	key := []byte(strings.Repeat("k", 32))
	c := toProxy(t, p.Addr().String(), `,"transports":["tcp"],"unsigned_ids":"trusted-proxy","peers":["127.0.0.1:*"]`)
	peers, err := Open(t.Context(), connector.Env{Role: connector.RoleProducer, LinkKey: key, RouterKey: key}, *c)
	require.NoError(t, err)
	l, err := peers.Network.Listen(t.Context())
	require.NoError(t, err)
	require.Equal(t, map[string]string{"type": "P", "http_address": "127.0.0.1:8100", "zmq_address": l.Address()}, p.next(t))
	require.Equal(t, "127.0.0.1:2", peers.Push(pair("127.0.0.1:1", "127.0.0.1:2", 1)))
	require.Equal(t, []string{"127.0.0.1:1"}, peers.Find(pair("127.0.0.1:1", "127.0.0.1:2", 1)))
	require.Empty(t, peers.Push(pair("127.0.0.1:1", "127.0.0.2:2", 2)))
	require.Empty(t, peers.Find(pair("127.0.0.2:1", "127.0.0.1:2", 3)))
	require.Eventually(t, func() bool {
		return slices.ContainsFunc(peers.Stats(), func(s connector.Stat) bool {
			return s.Name == "registrations_total" && s.Labels[0] == "ok" && s.Value > 0
		})
	}, time.Minute, 5*time.Millisecond)
	require.NoError(t, l.Close())
	require.NoError(t, peers.Close())
	c.Peers = []string{"nonsense"}
	_, err = Open(t.Context(), connector.Env{Role: connector.RoleProducer, LinkKey: key, RouterKey: key}, *c)
	require.ErrorIs(t, err, connector.ErrIncompatible)
}
