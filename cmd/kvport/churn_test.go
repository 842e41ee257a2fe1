package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/testkit"
)

// traffic sends requests to a router without a pause until it is ended, streamed ones and others, and notes what fails.
type traffic struct {
	url     string
	streams atomic.Bool // also streamed requests: they cannot be made again once they have begun
	served  atomic.Int64
	busy    sync.RWMutex // held for reading by each streamed request

	mu     sync.Mutex
	failed []string
}

func (l *traffic) run(ctx context.Context, streamed bool) {
	for ctx.Err() == nil {
		if streamed {
			l.busy.RLock()
			if !l.streams.Load() {
				l.busy.RUnlock()
				select {
				case <-ctx.Done():
				case <-time.After(10 * time.Millisecond):
				}
				continue
			}
		}
		what := l.one(streamed)
		if streamed {
			l.busy.RUnlock()
		}
		if what == "" {
			l.served.Add(1)
			continue
		}
		l.mu.Lock()
		l.failed = append(l.failed, what)
		l.mu.Unlock()
	}
}

// onlyWhole ends streamed requests until the function that it gives is called.
func (l *traffic) onlyWhole() (again func()) {
	l.streams.Store(false)
	l.busy.Lock() // waits for those that run
	defer l.busy.Unlock()
	return func() { l.streams.Store(true) }
}

// one makes a request and says what is wrong with its answer.
func (l *traffic) one(streamed bool) string {
	body := fmt.Sprintf(`{"prompt":"some words of a prompt","max_tokens":24,"ignore_eos":true,"stream":%v}`, streamed)
	resp, err := http.Post(l.url+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	text := string(data)
	switch {
	case err != nil:
		return fmt.Sprintf("%v after %q", err, text)
	case resp.StatusCode != http.StatusOK || strings.Contains(text, `"error"`) || !strings.Contains(text, `"finish_reason":"length"`):
		return fmt.Sprintf("status %d: %s", resp.StatusCode, text)
	case streamed && !strings.HasSuffix(text, "data: [DONE]\n\n"):
		return fmt.Sprintf("it ended with %q", text)
	}
	return ""
}

// failures are what was wrong with answers so far.
func (l *traffic) failures() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.failed)
}

// wait waits until some more requests have been served.
func (l *traffic) wait(t *testing.T, n int64) {
	t.Helper()
	want := l.served.Load() + n
	if !assert.Eventually(t, func() bool { return l.served.Load() >= want }, time.Minute, 5*time.Millisecond) {
		require.FailNow(t, "too few requests are served", "%v", l.failures())
	}
}

// way is one way by which a router finds instances.
type way struct {
	name  string
	args  []string             // of kvport serve
	names func(urls ...string) // makes the router know exactly these; nil: instances do so by themselves
	drain func(drained string) // takes one out of service, nil: only its own end does
}

// Instances come, are drained, leave, end and are killed, as the file, DNS or they themselves say, while requests go on: none
// of them fails. The router chooses by what instances hold and reads their KV events meanwhile. A stream that a killed
// instance has begun cannot be made again, so while one is killed none runs.
func TestInstancesComeAndGoUnderLoad(t *testing.T) {
	file := filepath.Join(t.TempDir(), "route.json")
	stable := start(t, "serve", "--model", "sim", "--port", "0")
	write := func(urls []string, drained string) {
		type instance struct {
			URL   string `json:"url"`
			Role  string `json:"role"`
			Drain bool   `json:"drain"`
		}
		var list []instance
		for _, u := range append([]string{stable.URL, "dns+srv://_http._tcp.kvport.test.", "dns://kvport.test.:" + fixedPort(t)}, urls...) {
			list = append(list, instance{u, "decode", u == drained})
		}
		text, err := json.Marshal(struct {
			Instances []instance `json:"instances"`
		}{list})
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(file+".new", text, 0o600))
		require.NoError(t, os.Rename(file+".new", file))
	}
	write(nil, "")
	names := testkit.ServeDNS(t)
	r := start(t, "route", "--port", "0", "--policy", "prefix_aware", "--config", file, "--register", "127.0.0.1:0", "--dns-server", names.Address(), "--dns-interval", "100ms", "--dns-keep", "100ms")
	registrar := registrarOf(t, r)

	l := &traffic{url: r.URL}
	l.streams.Store(true)
	ctx, stop := context.WithCancel(t.Context())
	var tasks sync.WaitGroup
	for i := range 6 {
		tasks.Go(func() { l.run(ctx, i%3 == 0) })
	}
	defer tasks.Wait()
	defer stop()
	for _, w := range ways(t, write, names, registrar) {
		w.comeAndGo(t, r, l)
		require.Empty(t, l.failures(), "instances known by %s", w.name)
		t.Logf("%s: %d requests served so far, none failed", w.name, l.served.Load())
	}
	stop()
	tasks.Wait()
	require.Empty(t, l.failures())
	_, metrics := do(t, "GET", r.URL+"/metrics", "")
	require.Equal(t, 1, strings.Count(metrics, "kvport_router_instance_up{"), "series of instances that are gone are dropped")
	http.DefaultClient.CloseIdleConnections()
}

// ways are all ways there are.
func ways(t *testing.T, write func(urls []string, drained string), names *testkit.DNSServer, registrar string) []way {
	return []way{
		{
			name:  "file",
			names: func(urls ...string) { write(urls, "") },
			drain: func(drained string) { write([]string{drained}, drained) },
		},
		{
			name: "srv",
			names: func(urls ...string) {
				names.Set("_http._tcp.kvport.test.")
				for _, at := range urls {
					u, err := url.Parse(at)
					require.NoError(t, err)
					port, err := strconv.ParseUint(u.Port(), 10, 16)
					require.NoError(t, err)
					names.Set("pod-0.kvport.test.", testkit.AddressRecord("127.0.0.1"))
					names.Set("_http._tcp.kvport.test.", testkit.ServiceRecord("pod-0.kvport.test.", uint16(port)))
				}
			},
		},
		{
			name: "addresses", args: []string{"--host", "127.0.0.77", "--port", fixedPort(t)},
			names: func(urls ...string) {
				names.Set("kvport.test.")
				if len(urls) > 0 {
					names.Set("kvport.test.", testkit.AddressRecord("127.0.0.77"))
				}
			},
		},
		{name: "registration", args: []string{"--port", "0", "--register", registrar}},
	}
}

// fixedPort is a port for a server that must know it beforehand, of an address that no other test uses.
func fixedPort(t *testing.T) string {
	t.Helper()
	return strconv.Itoa(20000 + os.Getpid()%10000)
}

// comeAndGo lets instances join and leave in every way there is.
func (w *way) comeAndGo(t *testing.T, r *cluster.Process, l *traffic) {
	t.Helper()
	join := func() *cluster.Process {
		args := w.args
		if args == nil {
			args = []string{"--port", "0"}
		}
		in := startAny(t, append([]string{"serve", "--model", "sim", "--kv-events-config", `{"enable_kv_cache_events":true}`}, args...)...)
		w.say(in.URL)
		require.Eventually(t, func() bool {
			_, text := do(t, "GET", in.URL+"/metrics", "")
			return strings.Contains(text, `kvport_requests_total{reason="length"}`) && !strings.Contains(text, `kvport_requests_total{reason="length"} 0`)
		}, time.Minute, 20*time.Millisecond, "%s: it gets requests", w.name)
		l.wait(t, 20)
		return in
	}
	gone := func(in *cluster.Process) {
		u, err := url.Parse(in.URL)
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			_, text := do(t, "GET", r.URL+"/health", "")
			return !strings.Contains(text, ":"+u.Port()+`"`)
		}, time.Minute, 20*time.Millisecond, "%s: it is gone from /health", w.name)
		l.wait(t, 20)
	}
	if w.names != nil { // it is taken out first, and serves what it has
		in := join()
		if w.drain != nil {
			w.drain(in.URL)
			require.Eventually(t, func() bool {
				_, text := do(t, "GET", r.URL+"/health", "")
				return strings.Contains(text, `"draining"`)
			}, time.Minute, 20*time.Millisecond)
			l.wait(t, 20)
		}
		w.say()
		gone(in)
		require.NoError(t, in.Stop(t.Context()))
	}
	in := join() // it ends by itself
	require.NoError(t, in.Stop(t.Context()))
	l.wait(t, 20)
	w.say()
	gone(in)

	in = join() // and is killed
	again := l.onlyWhole()
	l.wait(t, 10)
	in.Kill()
	l.wait(t, 20)
	w.say()
	gone(in)
	again()
	l.wait(t, 20)
}

// say tells the router which instances there are.
func (w *way) say(urls ...string) {
	if w.names != nil {
		w.names(urls...)
	}
}
