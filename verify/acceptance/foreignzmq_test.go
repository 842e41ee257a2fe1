package acceptance

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/internal/zmtp"
	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// zmqProxy is the part of vLLM's proxy for P2P NCCL with which engines register: a ROUTER that keeps what it is told, for ever.
type zmqProxy struct {
	net.Listener
	tasks sync.WaitGroup

	mu      sync.Mutex
	conns   []net.Conn
	engines map[string]map[string]string // by type P or D and http_address: zmq_address
	last    []byte                       // the last registration
	err     error                        // of one that the proxy does not understand
}

func listenZMQ(t *testing.T) *zmqProxy {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	x := &zmqProxy{Listener: l, engines: map[string]map[string]string{"P": {}, "D": {}}}
	x.tasks.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			x.mu.Lock()
			x.conns = append(x.conns, conn)
			x.mu.Unlock()
			x.tasks.Go(func() { x.read(conn) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		x.mu.Lock()
		for _, c := range x.conns {
			_ = c.Close()
		}
		x.mu.Unlock()
		x.tasks.Wait()
	})
	return x
}

// read takes the registrations of one connection.
func (x *zmqProxy) read(conn net.Conn) {
	z, err := zmtp.Open(conn, 1<<10, zmtp.Router, zmtp.Dealer)
	for err == nil {
		var frames [][]byte
		if frames, err = z.Receive(); err != nil {
			return
		}
		x.mu.Lock()
		x.last = frames[0]
		if err = asProxies().take(frames, x.engines); err != nil {
			x.err = err
		}
		x.mu.Unlock()
	}
}

// reading is how a proxy reads a registration.
type reading struct {
	kind, http, zmq string // the names of the fields
	prefill, decode string // the values of the first
}

// asProxies is how vLLM's reads it.
func asProxies() reading { return reading{"type", "http_address", "zmq_address", "P", "D"} }

// take keeps what a registration says. Fields that a proxy looks for have to be there.
func (r reading) take(frames [][]byte, engines map[string]map[string]string) error {
	var m map[string]string
	if len(frames) != 1 {
		return fmt.Errorf("a registration has %d frames", len(frames))
	}
	if err := msgpack.Unmarshal(frames[0], &m); err != nil {
		return fmt.Errorf("a registration is %q: %w", frames[0], err)
	}
	for _, name := range []string{r.kind, r.http, r.zmq} {
		if m[name] == "" {
			return fmt.Errorf("a registration has no %s", name)
		}
	}
	kind, known := map[string]string{r.prefill: "P", r.decode: "D"}[m[r.kind]]
	if !known {
		return fmt.Errorf("a registration is of type %q", m[r.kind])
	}
	engines[kind][m[r.http]] = m[r.zmq]
	return nil
}

// await waits until an engine has registered, and gives where it takes blocks.
func (x *zmqProxy) await(t *testing.T, kind string, e *cluster.Process) (zmq string) {
	t.Helper()
	require.Eventually(t, func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		require.NoError(t, x.err)
		zmq = x.engines[kind][strings.TrimPrefix(e.URL, "http://")]
		return zmq != ""
	}, time.Minute, 20*time.Millisecond, "%s registers as %s", e.Name, kind)
	return zmq
}

// behindZMQ are engines that have registered with a proxy.
type behindZMQ struct {
	*contract
	proxy *zmqProxy
	p, d  string // where they take blocks
}

// newBehindZMQ starts engines with a setup, whose config may be changed for each.
func newBehindZMQ(t *testing.T, f *fixture.Fixture, setup fixture.Setup, change func(role string, config fields)) *behindZMQ {
	t.Helper()
	x := &behindZMQ{contract: &contract{Rig: rig.New(t)}, proxy: listenZMQ(t)}
	_, at, err := net.SplitHostPort(x.proxy.Addr().String())
	require.NoError(t, err)
	start := func(name, role string, args ...string) *cluster.Process {
		port := rig.FreePort(t)
		text, err := fixture.Fill(setup.Config, fixture.Values{"PORT": at, "HTTP_PORT": port})
		require.NoError(t, err)
		config := fields{}
		require.NoError(t, json.Unmarshal([]byte(text), &config))
		if change != nil {
			change(role, config)
		}
		whole, err := json.Marshal(fields{"kv_connector": f.Connector, "kv_role": role, "kv_connector_extra_config": config})
		require.NoError(t, err)
		return x.Start(name, append([]string{"serve", "--model", "sim", "--port", port, "--kv-transfer-config", string(whole)}, args...)...)
	}
	x.single = x.ServeModel("sim", "single", "")
	x.contract.p, x.contract.d = start("prefill", "kv_producer"), start("decode", "kv_consumer", "--enable-prefix-caching=false")
	x.p, x.d = x.proxy.await(t, "P", x.contract.p), x.proxy.await(t, "D", x.contract.d)
	return x
}

// router is the proxy, which makes ids of what engines have registered.
func (x *behindZMQ) router() *foreign {
	f := ncclProxy()
	id := f.id
	f.id = func(string, string) string { return id(x.p, x.d) }
	return f
}

// counted is how many ids of a kind an engine's connector has found.
func (x *behindZMQ) counted(e *cluster.Process, kind string) float64 {
	x.Helper()
	return x.Metrics(e).Sum("kvport_connector_request_ids_total", fmt.Sprintf("kind=%q", kind))
}

// finds waits until an engine has found n more ids of a kind than before.
func (x *behindZMQ) finds(e *cluster.Process, kind string, before float64, n int) {
	x.Helper()
	now := before
	defer func() {
		if now != before+float64(n) {
			x.Logf("%s finds %v ids of the kind %s; its plugin was restarted %v times", e.Name, now-before, kind, x.Metrics(e).Sum("kvport_plugin_restarts_total"))
		}
	}()
	require.Eventually(x, func() bool {
		now = x.counted(e, kind)
		return now == before+float64(n)
	}, time.Minute, 20*time.Millisecond, "%s finds %d ids of the kind %s", e.Name, n, kind)
}

// TestForeignZMQ: engines behind a replica of vLLM's proxy for P2P NCCL, with which they register over ZeroMQ. Where their config trusts
// it, its ids bring blocks to the decode engine: of whom they name, if it is listed, once.
func TestForeignZMQ(t *testing.T) {
	for _, f := range rig.Connectors(t, func(f *fixture.Fixture) bool { return len(f.Proxy) > 0 }) {
		for _, setup := range f.Proxy {
			t.Run(f.Connector+" "+setup.Name, func(t *testing.T) {
				x := newBehindZMQ(t, f, setup, nil)
				tries := x.holds(x.router, x.check)
				x.finds(x.contract.d, "trusted", 0, 3*tries)
				x.goes(way(setup.Name))
				if way(setup.Name) == pushed {
					x.finds(x.contract.p, "trusted", 0, 3*tries)
					x.plantedPush()
					return
				}
				x.plantedRegistration()
				x.planted(x.router, x.check, read())
				x.plantedIDs()
				x.short()
				x.flood()
			})
		}
	}
}

// way is how blocks get to the decode engine, as fixtures call it: it asks for them, or the prefill engine sends them.
type way string

const (
	fetched way = "fetched"
	pushed  way = "pushed"
)

// differs says that blocks did not go this way, by how many the prefill engine has sent unasked, and for how many it was asked.
func (w way) differs(unasked, asked float64) error {
	switch {
	case w == fetched && unasked > 0:
		return fmt.Errorf("the prefill engine sent %.0f blocks unasked", unasked)
	case w == fetched && asked == 0:
		return errors.New("the prefill engine was asked for no block")
	case w == pushed && unasked == 0:
		return errors.New("the prefill engine sent no block unasked")
	}
	return nil
}

// goes requires that blocks have gone one way, and that the other way would have been noticed. Blocks that are sent too late are asked for, too, so
// that where they are sent unasked any number may be asked for.
func (x *behindZMQ) goes(w way) {
	x.Helper()
	var unasked, asked float64
	require.Eventually(x, func() bool { // a plugin's counts come a moment later
		m := x.Metrics(x.contract.p)
		unasked, asked = m.Sum("kvport_connector_pushed_blocks_total"), m.Sum("kvport_connector_served_blocks_total")
		return unasked+asked > 0 && w.differs(unasked, asked) == nil
	}, time.Minute, 20*time.Millisecond, "blocks are %s", w)
	x.Logf("blocks are %s: %.0f sent unasked, %.0f asked for", w, unasked, asked)
	other := map[way]way{fetched: pushed, pushed: fetched}[w]
	require.ErrorContains(x, other.differs(unasked, asked), "unasked")
	require.Zero(x, x.Metrics(x.contract.d).Sum("kvport_connector_pushed_blocks_total"), "a decode engine sends nothing")
}

// TestForeignZMQDirections: behind the proxy the prefill engine's send_type decides alone whether it sends blocks unasked, whatever the decode
// engine's is; by default it does.
func TestForeignZMQDirections(t *testing.T) {
	type sends struct{ prefill, decode any } // or missing
	for _, f := range rig.Connectors(t, func(f *fixture.Fixture) bool { return len(f.Proxy) > 0 }) {
		for types, w := range map[sends]way{
			{missing{}, missing{}}: pushed, {"PUT", "GET"}: pushed, {"GET", "PUT"}: fetched,
		} {
			t.Run(fmt.Sprintf("%s %v", f.Connector, types), func(t *testing.T) {
				x := newBehindZMQ(t, f, f.Proxy[0], func(role string, config fields) {
					config["send_type"] = map[string]any{"kv_producer": types.prefill, "kv_consumer": types.decode}[role]
					maps.DeleteFunc(config, func(_ string, value any) bool { return value == (missing{}) })
				})
				x.holds(x.router, x.check)
				x.goes(w)
			})
		}
	}
}

// TestForeignZMQWithoutTrust: the ids of a proxy that the config does not trust are ignored, which the log says, unless it has the
// deployment's key and signs them.
func TestForeignZMQWithoutTrust(t *testing.T) {
	for _, f := range rig.Connectors(t, func(f *fixture.Fixture) bool { return len(f.Proxy) > 0 }) {
		t.Run(f.Connector, func(t *testing.T) {
			x := newBehindZMQ(t, f, f.Proxy[0], func(_ string, config fields) {
				delete(config, "unsigned_ids")
				delete(config, "peers")
			})
			require.ErrorContains(t, x.check(x.router()), "the decode engine loaded 0 of")
			x.finds(x.contract.d, "unsigned", 0, 3)
			require.NoError(t, x.contract.d.Logged(t.Context(), "a request id that names engines is ignored"))
			deployment, err := keyring.OpenAt("", nil)
			require.NoError(t, err)
			key, err := ticket.RouterKey(deployment.Ring().First().Secret)
			require.NoError(t, err)
			signs := x.router()
			id := signs.id
			signs.name, signs.id = signs.name+", with the key", func(p, d string) string {
				text := id(p, d)
				return text + "_" + ticket.SignText(key, ticket.RequestIDText, text)
			}
			// A proxy with the key says that a handover is meant, too.
			prefill := signs.prefill
			signs.prefill = func(r fields, chat bool) {
				prefill(r, chat)
				r["kv_transfer_params"] = noRemote()
			}
			tries := x.holds(func() *foreign { return signs }, x.check)
			x.finds(x.contract.d, "signed", 0, 3*tries)
		})
	}
}

// plantedRegistration: a proxy that looks for another field, or for another value of the type, learns of no engine.
func (x *behindZMQ) plantedRegistration() {
	x.Helper()
	x.proxy.mu.Lock()
	defer x.proxy.mu.Unlock()
	none := map[string]map[string]string{"P": {}, "D": {}}
	for says, change := range map[string]func(*reading){
		"has no kind":        func(r *reading) { r.kind = "kind" },
		"has no http":        func(r *reading) { r.http = "http" },
		"has no kv_address":  func(r *reading) { r.zmq = "kv_address" },
		"is of type \"":      func(r *reading) { r.prefill, r.decode = "prefill", "decode" },
		"a registration has": func(r *reading) { r.http, r.zmq = "zmq", "http" },
	} {
		r := asProxies()
		change(&r)
		require.ErrorContains(x, r.take([][]byte{x.proxy.last}, none), says)
	}
	require.ErrorContains(x, asProxies().take([][]byte{{}, x.proxy.last}, none), "2 frames")
	require.Empty(x, none["P"])
	require.Empty(x, none["D"])
	require.NoError(x, asProxies().take([][]byte{x.proxy.last}, none))
}

// named is an id that names two engines.
func named(p, d string) string { return ncclProxy().id(p, d) }

// trap is an address that counts who connects to it.
func (x *behindZMQ) trap(host string) (address string, calls *atomic.Int64) {
	x.Helper()
	l, err := new(net.ListenConfig).Listen(x.Context(), "tcp", net.JoinHostPort(host, "0"))
	require.NoError(x, err)
	x.Cleanup(func() { _ = l.Close() })
	calls = &atomic.Int64{}
	go func() {
		for {
			conn, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				calls.Add(1)
				_ = conn.Close()
			}
		}
	}()
	return l.Addr().String(), calls
}

// plantedIDs gives the decode engine ids that are not the proxy's, one change at a time. What it then makes of them is counted, and it
// loads nothing.
func (x *behindZMQ) plantedIDs() {
	x.Helper()
	listed, called := x.trap("127.0.0.1")
	unlisted, calledUnlisted := x.trap("127.0.0.2")
	again := named(x.p, x.d)
	for _, planted := range []struct {
		what, kind string
		n          int
		id         func() string
	}{
		{"no header", "", 0, nil},
		{"another prefix", "", 0, func() string { return named(x.p, x.d)[1:] }},
		{"no UUID", "malformed", 3, func() string { return named(x.p, x.d)[:len(again)-33] }},
		{"a digit less", "malformed", 3, func() string { return named(x.p, x.d)[:len(again)-1] }},
		{"upper case", "malformed", 3, func() string { return named(x.p, x.d)[:len(again)-1] + "F" }},
		{"another name of the second address", "malformed", 3, func() string { return strings.Replace(named(x.p, x.d), "___decode_addr_", "___decode_address_", 1) }},
		{"no port", "malformed", 3, func() string { return named("127.0.0.1", x.d) }},
		{"port 0", "malformed", 3, func() string { return named("127.0.0.1:0", x.d) }},
		{"a prefill engine that is not listed", "unlisted", 3, func() string { return named(unlisted, x.d) }},
		{"a decode engine that is not listed", "unlisted", 3, func() string { return named(x.p, unlisted) }},
		{"the engines swapped", "trusted", 3, func() string { return named(x.d, x.p) }},
		{"a signature of nobody", "forged", 3, func() string { return named(x.p, x.d) + "_" + strings.Repeat("0", 32) }},
		{"one for all requests", "replayed", 2, func() string { return again }},
		{"another engine that is listed", "trusted", 3, func() string { return named(listed, x.d) }},
	} {
		f, before := x.router(), x.counted(x.contract.d, planted.kind)
		f.name += ", " + planted.what
		f.alter = func(to leg, h http.Header, _ fields) {
			switch {
			case to != decodeLeg:
			case planted.id == nil:
				h.Del("X-Request-Id")
			default:
				h.Set("X-Request-Id", planted.id())
			}
		}
		require.ErrorContains(x, x.check(f), loadsLess, f.name)
		if planted.kind != "" {
			x.finds(x.contract.d, planted.kind, before, planted.n)
		}
	}
	require.Positive(x, called.Load(), "whoever an id names that is listed is called")
	require.Zero(x, calledUnlisted.Load(), "nobody else is")
}

// short asks for one token, as the proxy asks the prefill engine: the decode engine answers as for any other number, and holds nothing.
func (x *behindZMQ) short() {
	x.Helper()
	request := cluster.Request{Prompt: rig.Texts(x.T, *rig.Seed+9950, 1, 400, 700)[0], MaxTokens: 1, IgnoreEOS: true}
	before := x.counted(x.contract.d, "trusted")
	want, err := x.Client.Complete(x.Context(), x.single.URL, request)
	require.NoError(x, err)
	got, err := x.Client.Complete(x.Context(), x.replica(x.router()).start(x.T), request)
	require.NoError(x, err)
	require.True(x, got.Equal(want))
	x.finds(x.contract.d, "trusted", before, 1) // a plugin's counts come a moment later
	require.Zero(x, x.Metrics(x.contract.d).Sum("kvport_blocks", `state="held"`))
}

// floodOf is more producers than an engine remembers.
const floodOf = 320

// flood gives the decode engine ids that name many addresses which the config lists and where nobody is. The contract is kept after that: they
// take no room from engines that are there.
func (x *behindZMQ) flood() {
	x.Helper()
	router := x.replica(x.router())
	asked := httptest.NewRequestWithContext(x.Context(), http.MethodPost, "/v1/completions", nil)
	text, before := rig.Texts(x.T, *rig.Seed+9960, 1, 400, 700)[0], x.counted(x.contract.d, "trusted")
	for port := range floodOf {
		resp, err := router.post(decodeLeg, asked, router.d, named(fmt.Sprintf("127.0.0.1:%d", port+1), x.d), fields{"prompt": text, "max_tokens": 1})
		require.NoError(x, err)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(x, errors.Join(err, resp.Body.Close()))
		require.Equal(x, http.StatusOK, resp.StatusCode)
	}
	x.finds(x.contract.d, "trusted", before, floodOf)
	x.holds(x.router, x.check)
}

// plantedPush gives the prefill engine ids that name others than the decode engine: to whom it sends blocks.
func (x *behindZMQ) plantedPush() {
	x.Helper()
	listed, called := x.trap("127.0.0.1")
	unlisted, calledUnlisted := x.trap("127.0.0.2")
	for kind, id := range map[string]func() string{
		"unlisted":  func() string { return named(x.p, unlisted) },
		"malformed": func() string { return named(x.p, unlisted)[:60] },
		"trusted":   func() string { return named(x.p, listed) },
	} {
		f, before := x.router(), x.counted(x.contract.p, kind)
		f.name += ", the prefill engine's id is " + kind
		f.alter = func(to leg, h http.Header, _ fields) {
			if to == prefillLeg {
				h.Set("X-Request-Id", id())
			}
		}
		if err := x.check(f); err != nil { // what is not sent is asked for, if it is stored by then
			require.ErrorContains(x, err, loadsLess, f.name)
		}
		x.finds(x.contract.p, kind, before, 3)
	}
	require.Eventually(x, func() bool { return called.Load() > 0 }, time.Minute, 20*time.Millisecond, "blocks are sent to whom an id names that is listed")
	require.Zero(x, calledUnlisted.Load(), "and to nobody else")
}
