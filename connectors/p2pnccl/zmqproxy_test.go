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
	got chan map[string]string

	mu    sync.Mutex
	conns []net.Conn
	tasks sync.WaitGroup
}

// listenAsProxy listens at an address until the test ends or cut is called.
func listenAsProxy(t *testing.T, address string) *proxyEnd {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", address)
	require.NoError(t, err)
	p := &proxyEnd{Listener: l, got: make(chan map[string]string, 1000)}
	p.tasks.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			p.mu.Lock()
			p.conns = append(p.conns, conn)
			p.mu.Unlock()
			p.tasks.Go(func() { p.read(t, conn) })
		}
	})
	t.Cleanup(p.cut)
	return p
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
		p.got <- m
	}
}

// cut ends the proxy and all its connections.
func (p *proxyEnd) cut() {
	_ = p.Close()
	p.mu.Lock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.mu.Unlock()
	p.tasks.Wait()
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
	p := listenAsProxy(t, "127.0.0.1:0")
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
	for _, kind := range []string{"P", "D", "P", "D"} {
		require.Equal(t, want(kind), p.next(t))
	}
	p.cut()
	require.Eventually(t, func() bool { _, failed := r.Counts(); return failed > 0 }, time.Minute, 5*time.Millisecond, "it is not there")
	again := listenAsProxy(t, address)
	require.Contains(t, []map[string]string{want("P"), want("D")}, again.next(t))
	require.Eventually(t, func() bool { good, _ := r.Counts(); return good >= 5 }, time.Minute, 5*time.Millisecond)
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
	p := listenAsProxy(t, "127.0.0.1:0")
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
	require.True(t, slices.ContainsFunc(peers.Stats(), func(s connector.Stat) bool {
		return s.Name == "registrations_total" && s.Labels[0] == "ok" && s.Value > 0
	}))
	require.NoError(t, l.Close())
	require.NoError(t, peers.Close())
	c.Peers = []string{"nonsense"}
	_, err = Open(t.Context(), connector.Env{Role: connector.RoleProducer, LinkKey: key, RouterKey: key}, *c)
	require.ErrorIs(t, err, connector.ErrIncompatible)
}
