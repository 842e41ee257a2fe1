package acceptance

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// TestStrangersOnLoopback: an engine with another ticket key, as another user of the machine has, subscribes to
// a producer and gets nothing; 300 connections of others who say nothing keep no consumer out, after a restart
// either. The same consumer with the right key gets what is computed.
func TestStrangersOnLoopback(t *testing.T) {
	for _, f := range rig.Connectors(t, func(f *fixture.Fixture) bool { return f.LayerWise != nil }) {
		t.Run(f.Connector, func(t *testing.T) {
			r := rig.New(t)
			r.Tokens = 4
			strangers(r, f)
		})
	}
}

func strangers(r *rig.Rig, f *fixture.Fixture) {
	port := rig.FreePort(r.T)
	number, err := strconv.Atoi(port)
	require.NoError(r, err)
	address := net.JoinHostPort("127.0.0.1", port)
	key := filepath.Join(r.TempDir(), "another.key")
	require.NoError(r, os.WriteFile(key, []byte(strings.Repeat("another key ", 4)), 0o600))

	config := func(role string, own json.RawMessage, host string) string {
		extra, err := fixture.Fill(own, fixture.Values{"PORT": number})
		require.NoError(r, err)
		return fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"kv_connector_extra_config":%s%s}`, f.Connector, role, extra, host)
	}
	serve := func(name, config string) *cluster.Process {
		return r.ServeModel("tiny-random", name, config, "--enable-prefix-caching=false", "--max-num-batched-tokens", "128")
	}
	node := serve("single", "")
	p := serve("prefill", config("kv_producer", f.LayerWise.Producer, ""))
	stranger := serve("stranger", config("kv_consumer", f.LayerWise.Consumer, fmt.Sprintf(`,"kvport":{"ticket_key_file":%q}`, key)))

	prompts := rig.Texts(r.T, *rig.Seed+7000, 8, 600, 1200)
	silent(r, address, 300)
	r.All(p.URL, prompts, 2)
	require.Eventually(r, func() bool { // or it was one of those that made room for the silent ones
		return strings.Contains(stranger.Logs(), "kvport.ticket_key_file") || strings.Contains(stranger.Logs(), "it hung up where it had to prove the link key")
	}, time.Minute, 20*time.Millisecond, "the stranger's log says why")
	m := r.Metrics(p)
	require.Zero(r, m.Sum("kvport_connector_subscribers"))
	require.Zero(r, m.Sum("kvport_connector_layer_bytes_total"))
	require.Zero(r, m.Sum("kvport_connector_layer_confirmed_bytes_total"))

	for _, life := range []string{"decode", "decode again"} {
		d := serve(life, config("kv_consumer", f.LayerWise.Consumer, ""))
		router := r.Route(p, d)
		subscribed := func() bool { return r.Metrics(p).Sum("kvport_connector_subscribers") > 0 }
		if !f.Holds { // the other one begins with the first ticket
			require.Eventually(r, subscribed, time.Minute, 20*time.Millisecond)
		}
		rig.Same(r.T, life, r.All(node.URL, prompts, 2), r.All(router.URL, prompts, 2))
		require.Positive(r, r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`))
		r.Stop(d)
		if !f.Holds {
			require.Eventually(r, func() bool { return !subscribed() }, time.Minute, 20*time.Millisecond, "somebody else has subscribed")
		}
		silent(r, address, 300)
	}
	require.Zero(r, r.Metrics(stranger).Sum("kvport_prompt_tokens_total", `source="external"`))
}

// silent makes connections that say nothing.
func silent(r *rig.Rig, address string, n int) {
	for range n {
		conn, err := net.Dial("tcp", address)
		require.NoError(r, err)
		r.Cleanup(func() { _ = conn.Close() })
	}
}
