package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

// xpyd is prefill and decode engines that register with a router by themselves.
type xpyd struct {
	*rig.Rig
	router            *cluster.Process
	at                string // port for registrations
	extra, host       string // more of the connector's config, and of the host's
	prefills, decodes []*cluster.Process
	ports             map[*cluster.Process]string
	prompts           []string // what is asked again and again
	want              []*cluster.Completion
}

// engine starts an engine; port may be one of an engine that was killed.
func (x *xpyd) engine(role, port string) *cluster.Process {
	x.Helper()
	config := fmt.Sprintf(`{"kv_connector":"P2pNcclConnector","kv_role":%q,"kv_connector_extra_config":{"kv_buffer_size":"268435456","proxy_ip":"127.0.0.1",`+
		`"proxy_port":%q,"http_port":%q,"register_ms":200%s}%s}`, role, x.at, port, x.extra, x.host)
	e := x.Start(role+" "+port, "serve", "--model", rig.Simulated(), "--port", port, "--kv-transfer-config", config)
	x.ports[e] = port
	return e
}

func newXPYD(t *testing.T, extra, host string, each int) *xpyd {
	t.Helper()
	x := &xpyd{Rig: rig.New(t), at: rig.FreePort(t), extra: extra, host: host, ports: map[*cluster.Process]string{}}
	x.router = x.Start("router", "route", "--port", "0", "--register", "127.0.0.1:"+x.at)
	for range each {
		x.prefills = append(x.prefills, x.engine("kv_producer", rig.FreePort(t)))
		x.decodes = append(x.decodes, x.engine("kv_consumer", rig.FreePort(t)))
	}
	x.await(2 * each)
	return x
}

// await waits until the router knows n instances.
func (x *xpyd) await(n int) {
	x.Helper()
	require.Eventually(x, func() bool {
		resp, err := http.Get(x.router.URL + "/health")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		var h struct {
			Instances []struct{ State string }
		}
		up := 0
		if json.NewDecoder(resp.Body).Decode(&h) == nil {
			for _, i := range h.Instances {
				if i.State == "up" {
					up++
				}
			}
		}
		return up == n
	}, time.Minute, 20*time.Millisecond, "%d instances register", n)
}

// sum adds a metric of some engines up.
func (x *xpyd) sum(engines []*cluster.Process, name string, labels ...string) (total float64) {
	x.Helper()
	for _, e := range engines {
		total += x.Metrics(e).Sum(name, labels...)
	}
	return total
}

// whole sends a prompt without streaming, so that the router may try again wherever an engine dies.
func (x *xpyd) whole(prompt string) (*cluster.Completion, error) {
	data, err := json.Marshal(map[string]any{"prompt": prompt, "max_tokens": x.Tokens, "temperature": 0, "ignore_eos": true, "return_token_ids": true})
	if err != nil {
		return nil, err
	}
	resp, err := http.Post(x.router.URL+"/v1/completions", "application/json", bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var a struct {
		Choices []struct {
			Tokens []int32 `json:"token_ids"`
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&a); err != nil || resp.StatusCode != http.StatusOK || len(a.Choices) != 1 {
		return nil, fmt.Errorf("status %d: %w", resp.StatusCode, err)
	}
	return &cluster.Completion{Tokens: a.Choices[0].Tokens}, nil
}

// TestP2pNccl: two prefill and two decode engines that register, every way to send, over every transport
// that this host has.
func TestP2pNccl(t *testing.T) {
	single := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed, *rig.Prompts, 400, 1200)
	want := single.All(single.ServeModel(rig.Simulated(), "single", "").URL, prompts, 4)
	transports := []string{"shm", "tcp", "ucx"}
	if !rig.Have(t, "nixl") {
		t.Log("UCX IS NOT TESTED: it is not in .deps/nixl; run make deps")
		transports = transports[:2]
	}
	for i, send := range []string{"PUT", "PUT_ASYNC", "GET"} {
		transport := transports[i%len(transports)]
		t.Run(send+" "+transport, func(t *testing.T) {
			x := newXPYD(t, fmt.Sprintf(`,"send_type":%q,"transports":[%q]`, send, transport), "", 2)
			rig.Same(t, "2P2D", want, x.All(x.router.URL, prompts, 4))
			external := x.sum(x.decodes, "kvport_prompt_tokens_total", `source="external"`)
			introduced := x.Metrics(x.router).Sum("kvport_router_introductions_total")
			require.Positive(t, external)
			require.GreaterOrEqual(t, introduced, float64(len(prompts)))
			pushed := func() float64 { return x.sum(x.prefills, "kvport_connector_pushed_blocks_total") }
			served := func() float64 { return x.sum(x.prefills, "kvport_connector_served_blocks_total") }
			sent := func() float64 {
				return x.sum(x.prefills, "kvport_connector_link_bytes_total", fmt.Sprintf("transport=%q", transport), `direction="sent"`)
			}
			require.Eventually(t, func() bool { return (pushed() > 0) == (send != "GET") && pushed()+served() > 0 && sent() > 0 }, time.Minute, 100*time.Millisecond)
			if send == "GET" {
				require.Zero(t, pushed())
			} else {
				require.Greater(t, pushed(), served(), "blocks are sent, not asked for")
			}
			t.Logf("%.0f tokens from peers, %.0f ids signed, %.0f blocks pushed, %.0f asked for, %.0f bytes over %s", external, introduced, pushed(), served(), sent(), transport)
			for _, e := range append(x.prefills, x.decodes...) {
				x.Idle(e)
			}
		})
	}
}

// TestP2pNcclKilled: plugins and engines die in turn; another instance of the role is up all the time. A
// decode plugin that stops holds a prefill engine no longer than its deadline.
func TestP2pNcclKilled(t *testing.T) {
	x := newXPYD(t, `,"peer_timeout_ms":500,"transports":["tcp"]`, `,"kvport":{"breaker":{"deaths":100000,"backoff_max":"20ms"},"heartbeat":{"limit":"60s"}}`, 2)
	x.prompts = rig.Texts(t, *rig.Seed+5, 8, 400, 2000)
	x.want = x.All(x.ServeModel(rig.Simulated(), "single", "").URL, x.prompts, 4)
	x.All(x.router.URL, x.prompts, 4)
	rng := rand.New(rand.NewPCG(*rig.Seed, 7))
	kills, requests := rig.Count(t, "kills", *rig.Kills, 2, 100), 0
	for round := range kills {
		for _, list := range []*[]*cluster.Process{&x.prefills, &x.decodes} {
			for _, whole := range []bool{false, true} {
				victim := rng.IntN(2)
				requests += x.struck((*list)[victim], whole, time.Duration(rng.IntN(40))*time.Millisecond)
				if whole {
					role := map[bool]string{true: "kv_producer", false: "kv_consumer"}[list == &x.prefills]
					(*list)[victim] = x.engine(role, x.ports[(*list)[victim]])
					x.await(4)
				}
			}
		}
		t.Logf("round %d: a plugin and an engine of each role killed, %d requests so far, 0 lost, 0 tokens differ", round, requests)
	}
	x.stopped()
}

// struck sends prompts and kills an engine, or its plugin, in the midst of them.
func (x *xpyd) struck(victim *cluster.Process, engine bool, after time.Duration) int {
	x.Helper()
	got := make([]*cluster.Completion, len(x.prompts))
	errs := make([]error, len(x.prompts))
	var wg sync.WaitGroup
	for i, p := range x.prompts {
		wg.Go(func() { got[i], errs[i] = x.whole(p) })
	}
	<-time.After(after)
	if engine {
		victim.Kill()
	} else {
		for _, plugin := range cluster.Plugins(victim.PID()) {
			require.NoError(x, syscall.Kill(plugin, syscall.SIGKILL))
		}
	}
	wg.Wait()
	for i, err := range errs {
		require.NoError(x, err, "prompt %d is lost", i)
	}
	rig.Compare(x.T, "killed", x.want, got)
	return len(x.prompts)
}

// stopped stops the decode plugins, so that whatever prefill engines send goes nowhere.
func (x *xpyd) stopped() {
	x.Helper()
	more := rig.Texts(x.T, *rig.Seed+uint64(time.Now().UnixNano()), 4, 400, 1200)
	var plugins []int
	for _, d := range x.decodes {
		plugins = append(plugins, cluster.Plugins(d.PID())...)
	}
	signal := func(s syscall.Signal) {
		for _, p := range plugins {
			if err := syscall.Kill(p, s); s == syscall.SIGSTOP {
				require.NoError(x, err) // afterwards its host may have killed it, for not answering
			}
		}
	}
	before := x.sum(x.prefills, "kvport_connector_peers_cut_total")
	signal(syscall.SIGSTOP)
	began := time.Now()
	x.All(x.router.URL, more, 2)
	took := time.Since(began)
	require.Eventually(x, func() bool { return x.sum(x.prefills, "kvport_connector_peers_cut_total") > before }, time.Minute, 50*time.Millisecond, "a stopped peer is cut")
	signal(syscall.SIGCONT)
	x.Logf("stopped decode plugins: %d requests took %v, %.0f links cut", len(more), took, x.sum(x.prefills, "kvport_connector_peers_cut_total")-before)
	pushed := x.sum(x.prefills, "kvport_connector_pushed_blocks_total")
	require.Eventually(x, func() bool {
		rig.Same(x.T, "after the stop", x.want, x.All(x.router.URL, x.prompts, 4))
		return x.sum(x.prefills, "kvport_connector_pushed_blocks_total") > pushed
	}, time.Minute, 100*time.Millisecond, "and sent to again")
}

// TestP2pNcclForged: what a request id says counts only if a router has signed it, and once.
func TestP2pNcclForged(t *testing.T) {
	r := rig.New(t)
	p := r.ServeModel(rig.Simulated(), "prefill", `{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer"}`)
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var calls atomic.Int64
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			calls.Add(1)
			_ = conn.Close()
		}
	}()
	deployment, err := keyring.OpenAt("", nil)
	require.NoError(t, err)
	key, err := ticket.RouterKey(deployment.Ring().First().Secret)
	require.NoError(t, err)
	n := 0
	ask := func(id string) {
		n++
		prompt := rig.Texts(t, *rig.Seed+uint64(n), 1, 400, 600)[0]
		data, err := json.Marshal(map[string]any{"prompt": prompt, "max_tokens": 1, "kv_transfer_params": map[string]any{"do_remote_decode": true, "do_remote_prefill": false}})
		require.NoError(t, err)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.URL+"/v1/completions", bytes.NewReader(data))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Request-Id", id)
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, http.StatusOK, resp.StatusCode)
	}
	counted := func(kind string) float64 {
		return r.Metrics(p).Sum("kvport_connector_request_ids_total", fmt.Sprintf("kind=%q", kind))
	}
	text := func(i int) string {
		return fmt.Sprintf("___prefill_addr_127.0.0.1:1___decode_addr_%s_%032x", l.Addr(), i)
	}
	const each = 5
	for i := range each {
		ask(text(i))
		ask(text(i) + "_" + ticket.SignText([]byte("another key that is long enough..."), ticket.RequestIDText, text(i)))
		ask(text(i) + "_" + ticket.SignText(key, ticket.RegisterText, text(i)))
	}
	require.Eventually(t, func() bool { return counted("unsigned") == each && counted("forged") == 2*each }, time.Minute, 50*time.Millisecond)
	require.Zero(t, calls.Load(), "nobody is called because a client says so")
	good := text(99) + "_" + ticket.SignText(key, ticket.RequestIDText, text(99))
	ask(good)
	require.Eventually(t, func() bool { return calls.Load() > 0 && counted("signed") == 1 }, time.Minute, 50*time.Millisecond, "who has the key may say so")
	ask(good)
	require.Eventually(t, func() bool { return counted("replayed") == 1 }, time.Minute, 50*time.Millisecond)
	t.Logf("%d unsigned and %d forged ids: nobody called; 1 signed: called; 1 replayed: counted", each, 2*each)
}
