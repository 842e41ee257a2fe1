package router

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/engine/router/policy"
)

// cpuSeconds is what the process has used of its cores.
func cpuSeconds(b *testing.B) float64 {
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// BenchmarkRouter is the router's time beside that of httputil.ReverseProxy, for the same request to the same instance
// that answers at once: requests take turns, so that both see the same machine. Without a prefill instance both do
// the same; with one the router makes two requests. At the end it prints the rows of the table in docs/router.md.
func BenchmarkRouter(b *testing.B) {
	var rows strings.Builder
	for _, size := range []int{1 << 10, 32 << 10} {
		body := fmt.Sprintf(`{"model":"m","max_tokens":8,"messages":[{"role":"user","content":%q}]}`, strings.Repeat("some words ", size/11))
		for _, tt := range []struct {
			policy  string
			prefill bool
		}{{policy.RoundRobin, false}, {policy.PrefixAware, false}, {policy.PDAware, false}, {policy.RoundRobin, true}, {policy.PrefixAware, true}} {
			b.Run(fmt.Sprintf("%s,prefill=%v,prompt=%d", tt.policy, tt.prefill, size), func(b *testing.B) {
				p, d := httptest.NewServer(ticket("t")), httptest.NewServer(http.HandlerFunc(whole200))
				defer p.Close()
				defer d.Close()
				c := Config{Decode: []string{d.URL}, Policy: tt.policy}
				if tt.prefill {
					c.Prefill = []string{p.URL}
				}
				r, err := New(c)
				require.NoError(b, err)
				defer r.Close()
				u, err := url.Parse(d.URL)
				require.NoError(b, err)
				proxy := httputil.NewSingleHostReverseProxy(u)
				transport := &http.Transport{MaxIdleConnsPerHost: 256}
				defer transport.CloseIdleConnections()
				proxy.Transport = transport
				fronts := []*httptest.Server{httptest.NewServer(proxy), httptest.NewServer(r)}
				times, cpu := make([][]time.Duration, len(fronts)), make([]float64, len(fronts))
				for b.Loop() {
					for i, f := range fronts {
						start, used := time.Now(), cpuSeconds(b)
						resp, err := f.Client().Post(f.URL+"/v1/chat/completions", "application/json", strings.NewReader(body))
						require.NoError(b, err)
						_, err = io.Copy(io.Discard, resp.Body)
						require.NoError(b, err)
						resp.Body.Close()
						times[i] = append(times[i], time.Since(start))
						cpu[i] += cpuSeconds(b) - used
					}
				}
				for i, f := range fronts {
					f.Close()
					slices.Sort(times[i])
				}
				middle := func(i int) float64 { return float64(times[i][len(times[i])/2].Microseconds()) }
				b.ReportMetric(middle(0), "µs-proxy")
				b.ReportMetric(middle(1), "µs-router")
				b.ReportMetric(middle(1)/middle(0), "ratio")
				b.ReportMetric(cpu[1]/cpu[0], "cpu-ratio") // with client and instance, on a machine that is busy
				fmt.Fprintf(&rows, "| `%s` | %s | %d KiB | %.0f µs | %.0f µs | %.2f |\n", tt.policy, map[bool]string{true: "yes", false: "no"}[tt.prefill], size>>10, middle(0), middle(1), middle(1)/middle(0))
			})
		}
	}
	fmt.Fprint(os.Stdout, rows.String())
}
