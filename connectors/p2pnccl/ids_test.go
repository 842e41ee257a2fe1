package p2pnccl

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/sdk"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// list is a list of engines as a config has it.
func list(t testing.TB, entries ...string) peers {
	t.Helper()
	l, err := (&Config{Peers: entries}).listed()
	require.NoError(t, err)
	require.Len(t, l, len(entries))
	return l
}

// pair is an id as vLLM's proxy makes it.
func pair(prefill, decode string, n int) connector.RequestID {
	return connector.RequestID(fmt.Sprintf("___prefill_addr_%s___decode_addr_%s_%032x", prefill, decode, n))
}

// Where the config trusts the proxy, an id that nobody has signed counts if both its engines are listed, once. Signed ones are as
// they were, and those of another key are not taken for unsigned ones.
func TestTrustedProxy(t *testing.T) {
	key := bytes.Repeat([]byte("k"), 32)
	r := newReader(list(t, "10.0.0.0/24:14579", "[fd00::/64]:*", "Decode-0.example:21001", "192.0.2.7:*"), discard(), key)
	n := 0
	for _, good := range [][2]string{
		{"10.0.0.1:14579", "10.0.0.255:14579"},
		{"10.0.0.1:14579", "[fd00::7]:1"},
		{"decode-0.EXAMPLE:21001", "[fd00:0:0:0::7]:65535"},
		{"192.0.2.7:1", "[::ffff:192.0.2.7]:2"},
		{"10.0.0.1:14579", "[fd00::7]:80"},
	} {
		n++
		id := pair(good[0], good[1], n)
		want := addresses{prefill: good[0], decode: good[1]}
		require.Equal(t, want, r.read(id+"-a-0"), id)
		require.Equal(t, want, r.read(id+"-a-0"), "it is asked for again")
		require.Equal(t, addresses{}, r.read(id+"-b-0"), "and is nobody else's")
	}
	for _, bad := range [][2]string{
		{"10.0.1.1:14579", "10.0.0.2:14579"},         // the first is not listed
		{"10.0.0.1:14579", "10.0.1.2:14579"},         // the second
		{"10.0.0.1:14580", "10.0.0.2:14579"},         // another port
		{"169.254.169.254:80", "169.254.169.254:80"}, // what servers are asked for by those who send them elsewhere
		{"127.0.0.1:14579", "10.0.0.2:14579"},
		{"localhost:14579", "10.0.0.2:14579"},
		{"0.0.0.0:14579", "10.0.0.2:14579"},
		{"010.0.0.1:14579", "10.0.0.2:14579"}, // octal for some
		{"10.1:14579", "10.0.0.2:14579"},      // 10.0.0.1 for some
		{"167772161:14579", "10.0.0.2:14579"}, // and this
		{"evil.decode-0.example:21001", "10.0.0.2:14579"},
		{"decode-0.example.:21001", "10.0.0.2:14579"},
		{"[fd00:0:0:1::1]:1", "10.0.0.2:14579"},
		{"10.0.0.1:0", "10.0.0.2:14579"},
		{"10.0.0.1:65536", "10.0.0.2:14579"},
	} {
		n++
		require.Equal(t, addresses{}, r.read(pair(bad[0], bad[1], n)), bad)
	}
	for _, id := range []connector.RequestID{
		pair("10.0.0.1%eth0:14579", "10.0.0.2:14579", 90), "___prefill_addr_10.0.0.1:14579___decode_addr_10.0.0.2:14579", "___prefill_addr_", "cmpl-___prefill_addr_10.0.0.1:14579",
	} {
		require.Equal(t, addresses{}, r.read(id))
	}
	signed := string(pair("203.0.113.1:1", "203.0.113.2:2", 95))
	require.Equal(t, addresses{"203.0.113.1:1", "203.0.113.2:2"}, r.read(connector.RequestID(signed+"_"+ticket.SignText(key, ticket.RequestIDText, signed))), "a router with the key names whom it likes")
	listed := string(pair("10.0.0.1:14579", "10.0.0.2:14579", 96))
	require.Equal(t, addresses{}, r.read(connector.RequestID(listed+"_"+ticket.SignText(key[1:], ticket.RequestIDText, listed))), "who signs has to have the key")
	require.Equal(t, addresses{}, r.read("cmpl-42"))
	counts := map[string]float64{}
	for _, s := range r.stats() {
		counts[s.Labels[0]] = s.Value
	}
	require.Equal(t, map[string]float64{"signed": 1, "trusted": 5, "unsigned": 0, "unlisted": 15, "forged": 1, "replayed": 5, "malformed": 4}, counts)
	for i := range maxIDs + 10 {
		r.read(pair("10.0.0.1:14579", "10.0.0.2:14579", 1000+i))
	}
	require.LessOrEqual(t, len(r.owner), maxIDs)
}

// Whatever clients send, the log has one line for each kind.
func TestIgnoredIDsAreLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	r := newReader(nil, slog.New(slog.NewTextHandler(&log, nil)), bytes.Repeat([]byte("k"), 32))
	for i := range 100 {
		r.read(pair("10.0.0.1:1", "10.0.0.2:2", i))
		r.read(connector.RequestID(fmt.Sprintf("%s_%032x", pair("10.0.0.1:1", "10.0.0.2:2", i), i)))
		r.read(connector.RequestID(fmt.Sprintf("___prefill_addr_%d", i)))
	}
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	require.Len(t, lines, 3)
	for i, words := range [][]string{{"kind=unsigned", "unsigned_ids", "peers"}, {"kind=forged"}, {"kind=malformed"}} {
		for _, w := range words {
			require.Contains(t, lines[i], w)
		}
	}
}

func TestPeersOfAConfig(t *testing.T) {
	for _, bad := range []string{
		"", "10.0.0.1", "10.0.0.1:", ":1", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:http", "10.0.0.0/33:1", "fd00::1:1", "[fe80::1%eth0]:1", "a b:1", "a/b:1", "*:1", "http://a:1", "10.0.0.1:**",
	} {
		raw, err := json.Marshal(map[string]any{"unsigned_ids": trustProxy, "peers": []string{"10.0.0.1:1", bad}})
		require.NoError(t, err)
		_, err = sdk.DecodeConfig[Config](raw)
		require.ErrorIs(t, err, connector.ErrIncompatible, bad)
		require.ErrorContains(t, err, fmt.Sprintf("peers: %q is not HOST:PORT", bad))
	}
	_, err := (&Config{Peers: make([]string, maxPeers+1)}).listed()
	require.ErrorContains(t, err, "at most 4096")
	require.False(t, peers(nil).have("10.0.0.1:1"))
	require.False(t, list(t, "a:*").have("nonsense"))
}

// FuzzTrustedID: whatever a client writes into its request's id, nobody is named whom the config does not list.
func FuzzTrustedID(f *testing.F) {
	f.Add(string(pair("10.0.0.1:14579", "[fd00::1]:2", 1)))
	f.Add(string(pair("10.0.0.1:14579", "169.254.169.254:80", 1)))
	f.Add("cmpl-" + string(pair("decode.local:7", "10.0.0.2:14579", 1)) + "-0")
	hosts := map[string]bool{"10.0.0.1:14579": true, "10.0.0.2:14579": true, "decode.local:7": true}
	l := list(f, "10.0.0.1:14579", "10.0.0.2:14579", "decode.local:7", "[fd00::/64]:*")
	f.Fuzz(func(t *testing.T, id string) {
		a := newReader(l, discard(), bytes.Repeat([]byte("k"), 32)).read(connector.RequestID(id))
		require.Equal(t, a.prefill == "", a.decode == "")
		for _, address := range []string{a.prefill, a.decode} {
			lower := strings.ToLower(address)
			require.True(t, address == "" || hosts[lower] || strings.HasPrefix(lower, "[fd00:"), address)
		}
	})
}
