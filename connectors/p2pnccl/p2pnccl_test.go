package p2pnccl

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/register"
	"github.com/kvport/kvport/internal/ticket"
	native "github.com/kvport/kvport/native/ucx"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/pipetest"
	"github.com/kvport/kvport/pipe/ucx"
	"github.com/kvport/kvport/sdk"
)

func plugin() connector.Plugin {
	return sdk.FromPipe(sdk.Definition{Name: "P2pNcclConnector", Version: "1", Groups: true, LayerWise: true, Stats: slices.Concat(sdk.PeerStats(), sdk.LayerStats(), Stats())}, Open)
}

func TestMain(m *testing.M) {
	for k, v := range map[string]string{"KVPORT_UCX_DIR": filepath.Join("..", "..", ".deps", "nixl"), "UCX_MODULES": "^ib"} {
		if err := os.Setenv(k, v); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// transports that this machine has. UCX is left out, loudly, only where make deps has not put it.
func transports(t *testing.T) []string {
	t.Helper()
	if _, err := os.Stat(filepath.Join("..", "..", ".deps", "nixl", "lock.sha256")); err != nil && os.Getenv("KVPORT_NATIVE_TEST") == "" {
		t.Log("UCX IS NOT TESTED: it is not in .deps/nixl; run make deps")
		return []string{"shm", "tcp"}
	}
	return []string{"ucx", "shm", "tcp"}
}

func TestConformance(t *testing.T) {
	for i, transport := range transports(t) {
		t.Run(transport, func(t *testing.T) {
			if i > 0 && testing.Short() {
				t.Skip("one transport with -short, which the race stage uses; make test runs all")
			}
			config := json.RawMessage(fmt.Sprintf(`{"transports":[%q],"kv_buffer_size":"16777216","mem_pool_size_gb":"0.25"}`, transport))
			conformance.Run(t, conformance.Wire(plugin(), config), conformance.Pipe, conformance.Store, conformance.MultiRank, conformance.Groups, conformance.LayerWise)
		})
	}
}

// open makes a network for a config, with a key.
func open(t pipetest.T, c Config, key byte) *network {
	config, err := pipe.KeyTLS(bytes.Repeat([]byte{key}, 32))
	require.NoError(t, err)
	n, err := c.network(config, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, n.close()) })
	return n
}

func link(t pipetest.T, a, b *network) (dialed, accepted pipe.Link) {
	l, err := a.Listen(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	dialed, err = b.Dial(t.Context(), l.Address())
	require.NoError(t, err)
	accepted, err = l.Accept(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = dialed.Close(), accepted.Close() })
	return dialed, accepted
}

func (n *network) used() string {
	for _, w := range n.ways {
		if w.links.Load() > 0 {
			return w.name
		}
	}
	return ""
}

// The best way that both ends have is taken; one that does not connect them is left out.
func TestProbe(t *testing.T) {
	have := transports(t)
	for i, best := range have {
		a, b := open(t, Config{}, 1), open(t, Config{Transports: have[i:]}, 1)
		dialed, _ := link(t, a, b)
		require.Equal(t, best, b.used())
		require.Equal(t, best, a.used())
		require.NoError(t, dialed.Close())
		require.Empty(t, b.used())
	}
	a, b := open(t, Config{Transports: []string{"tcp"}}, 1), open(t, Config{Transports: []string{"shm"}}, 1)
	l, err := a.Listen(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	_, err = b.Dial(t.Context(), l.Address())
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, errNoWay.Error())

	a, b = open(t, Config{Transports: []string{"shm", "tcp"}}, 1), open(t, Config{Transports: []string{"shm", "tcp"}}, 1)
	b.find("shm").network = broken{b.find("shm").network}
	link(t, a, b)
	require.Equal(t, "tcp", b.used(), "the next one, when shared memory does not connect them")
	require.Equal(t, []string{"tcp"}, b.usable(aAddress(b)))
}

func aAddress(n *network) string {
	for k := range n.quarantined {
		return strings.Fields(k)[0]
	}
	return ""
}

// broken is a network that cannot dial.
type broken struct{ pipe.Network }

func (broken) Dial(context.Context, string) (pipe.Link, error) {
	return pipe.Link{}, fmt.Errorf("broken: %w", connector.ErrGone)
}

// TestUCX: within a host UCX has shared memory alone, beyond it RDMA if it is named, and TCP only on a network that
// the config calls trusted.
func TestUCX(t *testing.T) {
	if transports(t)[0] != "ucx" {
		t.Skip("UCX IS NOT TESTED: it is not in .deps/nixl; run make deps")
	}
	way := func(c Config) *way {
		usable, reasons := c.makeWays(nil)
		require.Empty(t, reasons)
		require.Len(t, usable, 1)
		t.Cleanup(func() { require.NoError(t, usable[0].close()) })
		return usable[0]
	}
	only := []string{"ucx"}
	w := way(Config{Transports: only})
	require.True(t, w.near, "for this host only")
	require.False(t, w.network.(*ucx.Network).TrustNetwork)
	w = way(Config{Transports: only, UCXTCP: trustNetwork})
	require.False(t, w.near)
	require.True(t, w.network.(*ucx.Network).TrustNetwork)
	require.False(t, (&Config{IP: "192.0.2.7"}).ucx().Far, "who does not name it has it for this host only")
	far := Config{IP: "192.0.2.7", Transports: only}
	require.True(t, far.ucx().Far)
	if !native.HasRDMA() {
		_, err := far.network(nil, slog.New(slog.DiscardHandler))
		require.ErrorIs(t, err, connector.ErrIncompatible)
		require.ErrorIs(t, err, native.ErrOpenPort)
		require.ErrorContains(t, err, "RDMA")
		require.ErrorContains(t, err, "trusted-network")
	}
}

// Another host gets neither shared memory nor, unless it is named, what encrypts nothing.
func TestOtherHosts(t *testing.T) {
	all := []*way{{name: "nccl", plain: true}, {name: "ucx", plain: true}, {name: "shm", near: true}, {name: "tcp"}}
	for _, c := range []struct {
		named, theirs []string
		same          bool
		want          string
	}{
		{nil, ways(), true, "nccl"},
		{nil, []string{"tcp", "shm"}, true, "shm"},
		{nil, ways(), false, "tcp"},
		{[]string{"ucx", "tcp"}, ways(), false, "ucx"},
		{[]string{"ucx", "tcp"}, []string{"tcp"}, false, "tcp"},
	} {
		w, err := choose(all, c.named, c.theirs, c.same)
		require.NoError(t, err)
		require.Equal(t, c.want, w.name)
	}
	_, err := choose(all, nil, []string{"shm"}, false)
	require.ErrorIs(t, err, connector.ErrIncompatible)
}

// Peers without the key, of another version, or that are none of ours are refused.
func TestStrangers(t *testing.T) {
	a := open(t, Config{Transports: []string{"tcp"}}, 1)
	l, err := a.Listen(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	_, err = open(t, Config{Transports: []string{"tcp"}}, 2).Dial(t.Context(), l.Address())
	require.ErrorIs(t, err, connector.ErrIncompatible)
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", l.Address())
	require.NoError(t, err)
	_, err = conn.Write(bytes.Repeat([]byte("GET / HTTP/1.1\r\n"), 10))
	require.NoError(t, err)
	_, _ = io.ReadAll(conn)
	require.NoError(t, conn.Close())
	inner, ok := l.(*listener)
	require.True(t, ok)
	require.NotEmpty(t, inner.answer(&offer{Version: 9}).Error)
	require.NotEmpty(t, inner.answer(&offer{Version: meetVersion, Ways: []string{"carrier pigeon"}}).Error)
	_, err = a.Dial(t.Context(), "127.0.0.1:1")
	require.ErrorIs(t, err, connector.ErrGone)
}

func TestPipe(t *testing.T) {
	a, b := open(t, Config{Transports: []string{"shm"}}, 1), open(t, Config{Transports: []string{"shm"}}, 1)
	pipetest.Run(t, pipetest.Harness{Open: func(t pipetest.T) pipetest.Ends {
		dialed, accepted := link(t, a, b)
		return pipetest.Ends{Out: dialed.Out, In: accepted.In}
	}})
	require.Positive(t, b.find("shm").sent.Load())
}

const (
	uuid = "0123456789abcdef0123456789abcdef"
	text = "___prefill_addr_10.0.0.1:14579___decode_addr_[fe80::1]:21001_" + uuid
)

// Addresses in a request id count when they are signed, for the first request that brings them.
func TestRequestIDs(t *testing.T) {
	key := bytes.Repeat([]byte("k"), 32)
	signed := text + "_" + ticket.SignText(key, ticket.RequestIDText, text)
	r := newReader(nil, discard(), key)
	want := addresses{prefill: "10.0.0.1:14579", decode: "[fe80::1]:21001"}
	for _, id := range []string{signed + "-abc-0", signed + "-abc-0"} {
		require.Equal(t, want, r.read(connector.RequestID(id)))
	}
	for name, id := range map[string]string{
		"plain": "cmpl-42", "unsigned": text, "upstream": "cmpl-" + text + "-0-a9a2cbf5", "replayed": signed + "-def-0",
		"other key":     text + "_" + ticket.SignText(key[1:], ticket.RequestIDText, text),
		"other purpose": text + "_" + ticket.SignText(key, ticket.RegisterText, text),
		"changed":       strings.Replace(signed, "10.0.0.1", "10.0.0.2", 1), "port": strings.Replace(signed, "14579", "99999", 1),
		"cut": signed[:len(signed)-1], "upper case": text + "_" + strings.ToUpper(signed[len(text)+1:]), "something before": "x" + signed,
	} {
		require.Equal(t, addresses{}, r.read(connector.RequestID(id)), name)
	}
	vllm := newReader(nil, discard(), key)
	require.Equal(t, want, vllm.read(connector.RequestID("cmpl-"+signed+"-0-a9a2cbf5")), "as vLLM makes ids")
	counts := map[string]float64{}
	for _, s := range r.stats() {
		counts[s.Labels[0]] = s.Value
	}
	require.Equal(t, map[string]float64{"signed": 1, "trusted": 0, "unsigned": 2, "unlisted": 0, "forged": 3, "replayed": 1, "malformed": 4}, counts)
}

// Layers go to the engine that a request names unless the config says otherwise; no id names one where blocks are asked for.
func TestLayersTo(t *testing.T) {
	key := bytes.Repeat([]byte("k"), 32)
	signed := connector.RequestID(text + "_" + ticket.SignText(key, ticket.RequestIDText, text))
	for config, want := range map[string]struct{ toTarget, named bool }{
		`{}`: {true, true}, `{"layers_to":"target"}`: {true, true}, `{"layers_to":"all"}`: {false, true}, `{"send_type":"GET"}`: {true, false},
	} {
		c, err := sdk.DecodeConfig[Config](json.RawMessage(config))
		require.NoError(t, err)
		c.Transports = []string{"tcp"}
		peers, err := Open(t.Context(), connector.Env{Role: connector.RoleProducer, LinkKey: key, RouterKey: key}, c)
		require.NoError(t, err)
		require.Equal(t, want.toTarget, peers.LayersToTarget, config)
		require.Equal(t, want.named, peers.Push != nil && peers.Push(signed) != "", config)
		require.NoError(t, peers.Close())
	}
}

func FuzzRequestID(f *testing.F) {
	key := bytes.Repeat([]byte("k"), 32)
	f.Add(text)
	f.Add(text + "_" + ticket.SignText(key, ticket.RequestIDText, text))
	f.Fuzz(func(t *testing.T, id string) {
		a := newReader(nil, discard(), key).read(connector.RequestID(id))
		require.Equal(t, a.prefill == "", a.decode == "")
		if a.prefill != "" {
			_, _, err := net.SplitHostPort(a.prefill)
			require.NoError(t, err)
		}
	})
}

// An engine registers at once and then again and again, signed; a router that was away learns about it later.
func TestRegister(t *testing.T) {
	key := bytes.Repeat([]byte("k"), 32)
	got := make(chan register.Message, 100)
	router := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var what register.Message
		if err != nil || !ticket.VerifyText(key, ticket.RegisterText, string(body), r.Header.Get(register.MacHeader)) || json.Unmarshal(body, &what) != nil {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		got <- what
	}))
	defer router.Close()
	host, port, err := net.SplitHostPort(strings.TrimPrefix(router.URL, "http://"))
	require.NoError(t, err)
	for _, with := range []byte("kx") {
		raw := fmt.Sprintf(`{"proxy_ip":%q,"proxy_port":%q,"http_port":8000,"register_ms":50,"register_group":"g"}`, host, port)
		c, err := sdk.DecodeConfig[Config](json.RawMessage(raw))
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		r := newRegistrar(&c, c.registrars()[0], bytes.Repeat([]byte{with}, 32), slog.New(slog.DiscardHandler))
		done := make(chan struct{})
		go func() {
			defer close(done)
			r.run(ctx, types(connector.RoleBoth), c.httpAddress(), "127.0.0.1:7")
		}()
		if with == 'k' {
			first, second, third := <-got, <-got, <-got
			require.Equal(t, []string{"P", "D", "P"}, []string{first.Type, second.Type, third.Type})
			require.Equal(t, "127.0.0.1:8000", first.HTTP)
			require.Equal(t, "127.0.0.1:7", first.KV)
			require.Equal(t, "g", first.Group)
			require.Greater(t, third.At, first.At)
		} else {
			require.Eventually(t, func() bool { _, failed := r.Counts(); return failed > 2 }, time.Minute, 5*time.Millisecond, "another key is refused")
			good, _ := r.Counts()
			require.Zero(t, good)
		}
		cancel()
		<-done
		if with == 'k' {
			left := false
			for len(got) > 0 { // a registration that was cut off may come to the router after it
				left = (<-got).Leave || left
			}
			require.True(t, left, "the router learns that it ends")
		}
	}
}

func TestConfig(t *testing.T) {
	for field, config := range map[string]string{
		"send_type": `{"send_type":"PUSH"}`, "kv_port": `{"kv_port":70000}`, "subscribe": `{"subscribe":["10.0.0.1"]}`, "key_file": `{"kv_ip":"0.0.0.0"}`, "kv_buffer_size": `{"kv_buffer_size":-1}`,
		"http_port": `{"proxy_port":1,"proxy_ip":"127.0.0.1"}`, "routers": `{"routers":["nowhere"],"http_port":1}`, "proxy_ip": `{"proxy_ip":"127.0.0.1"}`, "transports": `{"transports":["pigeon"]}`,
		"mem_pool_size_gb": `{"mem_pool_size_gb":"much"}`, "peer_timeout_ms": `{"peer_timeout_ms":1}`, "layers_to": `{"layers_to":"some"}`, "ucx_tcp": `{"ucx_tcp":"yes"}`,
		"register_group": `{"register_group":"a"}`,
		"proxy_protocol": `{"proxy_protocol":"zmq"}`, "unsigned_ids": `{"unsigned_ids":"yes","peers":["10.0.0.1:1"]}`, "peers": `{"unsigned_ids":"trusted-proxy"}`,
	} {
		_, err := sdk.DecodeConfig[Config](json.RawMessage(config))
		require.ErrorIs(t, err, connector.ErrIncompatible, config)
		require.ErrorContains(t, err, field)
	}
	for _, config := range []string{
		`{}`, `{"proxy_ip":"10.0.1.1","proxy_port":"30001","http_port":"20001","send_type":"PUT_ASYNC","nccl_num_channels":"16"}`,
		`{"kv_buffer_size":"1e9","mem_pool_size_gb":0,"kv_ip":"localhost","kv_port":"0"}`,
		`{"kv_buffer_size":"1e1","kv_port":"21001","proxy_ip":"0.0.0.0","proxy_port":"30001","http_port":"20001"}`,
		`{"proxy_ip":"10.0.1.1","proxy_port":"30001","http_port":"20001","proxy_protocol":"zmq","unsigned_ids":"trusted-proxy","peers":["10.0.0.0/24:*"]}`,
	} {
		_, err := sdk.DecodeConfig[Config](json.RawMessage(config))
		require.NoError(t, err, config)
	}
	c, err := sdk.DecodeConfig[Config](json.RawMessage(`{}`))
	require.NoError(t, err)
	require.Equal(t, int64(4<<30), c.spill())
	require.Equal(t, int64(1e9), c.buffer(slog.New(slog.DiscardHandler)))
	c, err = sdk.DecodeConfig[Config](json.RawMessage(`{"kv_buffer_size":"1e1","proxy_ip":"0.0.0.0","proxy_port":"30001","http_port":"20001"}`))
	require.NoError(t, err)
	require.Equal(t, int64(leastBuffer), c.buffer(slog.New(slog.DiscardHandler)), "ten bytes hold no block")
	require.Equal(t, []string{"127.0.0.1:30001"}, c.registrars())
	require.Equal(t, putAsync, c.SendType)
}

// A key file stands for the deployment's key: engines that have it there and engines whose hosts have it meet,
// and neither shows anybody the key itself. Without any key nothing begins.
func TestKeys(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(path, []byte(strings.Repeat("k", 32)), 0o600))
	links, routers, err := (&Config{KeyFile: path}).keys(&connector.Env{})
	require.NoError(t, err)
	ring, err := keyring.Load(path)
	require.NoError(t, err)
	root, err := ticket.LinkRoot(ring.First().Secret)
	require.NoError(t, err)
	byHost, err := ticket.LinkKey(root, plugin().Name)
	require.NoError(t, err)
	require.Equal(t, []connector.Secret{byHost}, links)
	byRouter, err := ticket.RouterKey(ring.First().Secret)
	require.NoError(t, err)
	require.Equal(t, []connector.Secret{byRouter}, routers)

	given, routers, err := new(Config).keys(&connector.Env{LinkKey: byHost, MoreLinkKeys: links, RouterKey: byRouter})
	require.NoError(t, err)
	require.Equal(t, []connector.Secret{byHost, byHost}, given)
	require.Equal(t, []connector.Secret{byRouter}, routers)
	_, _, err = new(Config).keys(&connector.Env{LinkKey: byHost})
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "key_file")
}
