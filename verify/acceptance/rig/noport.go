package rig

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/testkit"
)

// NoPort checks that engines with the default of a connector that may use UCX have no TCP or UDP port except those that
// the connector's page names, and UCX's frame that writes memory without a word before, sent to every port, writes
// nothing and harms nobody. Where ucx_tcp takes the risk, which open says, the test sees the ports, and the write.
func NoPort(t *testing.T, config func(port string) string, open bool) {
	r := New(t)
	r.Tokens = 8
	side := FreePort(t)
	prompts := Texts(t, *Seed, 4, 200, 400)
	node := r.ServeModel("sim", "single", "")
	want := r.All(node.URL, prompts, 1)
	r.Stop(node)
	p := r.ServeModel("sim", "prefill", strings.Replace(config(side), "@ROLE@", "kv_producer", 1))
	d := r.ServeModel("sim", "decode", strings.Replace(config("0"), "@ROLE@", "kv_consumer", 1))
	router := r.Route(p, d)
	Same(t, "before the attacks", want[:2], r.All(router.URL, prompts[:2], 1)) // what opens late is open
	opened, wrote := 0, false
	for _, e := range []*cluster.Process{p, d} {
		plugins := cluster.Plugins(e.PID())
		require.Len(t, plugins, 1)
		at, size := CacheOf(t, plugins[0])
		last := at + size - 64
		before := memory(t, plugins[0], last)
		for _, port := range testkit.BoundPorts(t, plugins[0]) {
			if _, number, _ := net.SplitHostPort(port); number != side && !speaksTLS(t, port) {
				opened++
				t.Logf("%s: %s is open", e.Name, port)
			}
			testkit.PutFrame(t, port, uint64(last))
		}
		if open && opened > 0 && !wrote { // UCX takes its time
			deadline := time.Now().Add(10 * time.Second)
			for ; !wrote && time.Now().Before(deadline); wrote = !bytes.Equal(before, memory(t, plugins[0], last)) {
				_, err := r.Complete(router.URL, prompts[0]) // it works within calls
				require.NoError(t, err)
			}
		}
		wrote = wrote || !bytes.Equal(before, memory(t, plugins[0], last))
	}
	require.Equal(t, open, opened > 0, "open ports that the page does not name: %d", opened)
	require.Equal(t, open, wrote, "a stranger has written the cache")
	if open {
		return
	}
	pids := append(cluster.Plugins(p.PID()), cluster.Plugins(d.PID())...)
	Same(t, "after the attacks", want[2:], r.All(router.URL, prompts[2:], 1))
	require.Equal(t, pids, append(cluster.Plugins(p.PID()), cluster.Plugins(d.PID())...), "the plugins live")
	require.Positive(t, r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`))
	require.Zero(t, r.Metrics(d).Sum("kvport_failed_loads_total"))
}

// speaksTLS says whether what listens at an address answers with TLS, and refuses whoever has no certificate.
func speaksTLS(t *testing.T, address string) bool {
	t.Helper()
	conn, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(t.Context(), "tcp", address)
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(5*time.Second)))
	client := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}) //nolint:gosec // a stranger has no certificate to compare with
	if err := client.HandshakeContext(t.Context()); err != nil {
		return false
	}
	_, err = client.Read(make([]byte, 1))
	return err != nil && strings.Contains(err.Error(), "certificate required")
}

// memory is 64 bytes of a process.
func memory(t *testing.T, pid int, at uintptr) []byte {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	require.NoError(t, err)
	defer f.Close()
	b := make([]byte, 64)
	_, err = f.ReadAt(b, int64(at))
	require.NoError(t, err)
	return b
}

// CacheOf is where a plugin has mapped the engine's cache.
func CacheOf(t *testing.T, pid int) (at, size uintptr) {
	t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	require.NoError(t, err)
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "kvport-cache") {
			var end uintptr
			_, err := fmt.Sscanf(line, "%x-%x", &at, &end)
			require.NoError(t, err)
			return at, end - at
		}
	}
	require.Fail(t, "the plugin has not mapped the cache")
	return 0, 0
}
