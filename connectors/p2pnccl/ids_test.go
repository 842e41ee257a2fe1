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
	for _, good := range [][4]string{ // whom an id names, and as the list has them
		{"10.0.0.1:14579", "10.0.0.255:14579", "10.0.0.1:14579", "10.0.0.255:14579"},
		{"10.0.0.1:14579", "[fd00::7]:1", "10.0.0.1:14579", "[fd00::7]:1"},
		{"decode-0.EXAMPLE:21001", "[fd00:0:0:0::7]:65535", "Decode-0.example:21001", "[fd00::7]:65535"},
		{"192.0.2.7:1", "[::ffff:192.0.2.7]:2", "192.0.2.7:1", "192.0.2.7:2"},
		{"10.0.0.1:14579", "[FD00::7]:80", "10.0.0.1:14579", "[fd00::7]:80"},
	} {
		n++
		id := pair(good[0], good[1], n)
		want := addresses{prefill: good[2], decode: good[3]}
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
		{"[::ffff:169.254.169.254]:14579", "10.0.0.2:14579"},
		{"[::10.0.0.1]:14579", "10.0.0.2:14579"},
		{"[::]:14579", "10.0.0.2:14579"},
	} {
		n++
		require.Equal(t, addresses{}, r.read(pair(bad[0], bad[1], n)), bad)
	}
	for _, id := range []connector.RequestID{
		pair("10.0.0.1%eth0:14579", "10.0.0.2:14579", 90), pair("10.0.0.1:0", "10.0.0.2:14579", 91), pair("10.0.0.1:65536", "10.0.0.2:14579", 92), pair("10.0.0.1:014579", "10.0.0.2:14579", 93), "x" + pair("10.0.0.1:14579", "10.0.0.2:14579", 94), "___prefill_addr_10.0.0.1:14579___decode_addr_10.0.0.2:14579", "___prefill_addr_", "cmpl-___prefill_addr_10.0.0.1:14579",
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
	require.Equal(t, map[string]float64{"signed": 1, "trusted": 5, "unsigned": 0, "unlisted": 16, "forged": 1, "replayed": 5, "malformed": 8}, counts)
}

// TestWhatIsRememberedOfIDs: there is a limit to it, and whoever writes any number of ids of one class has nothing forgotten of another.
func TestWhatIsRememberedOfIDs(t *testing.T) {
	key := bytes.Repeat([]byte("k"), 32)
	r := newReader(list(t, "10.0.0.1:*"), discard(), key)
	signed := func(n int) connector.RequestID {
		text := string(pair("203.0.113.1:1", "203.0.113.2:2", n))
		return connector.RequestID(text + "_" + ticket.SignText(key, ticket.RequestIDText, text))
	}
	trusted := func(n int) connector.RequestID { return pair("10.0.0.1:1", "10.0.0.1:2", n) }
	count := func(kind string) (n float64) {
		for _, s := range r.stats() {
			if s.Labels[0] == kind {
				n = s.Value
			}
		}
		return n
	}
	require.NotEmpty(t, r.read(signed(0)+"-a-0"))
	for i := range maxIDs + 10 {
		require.NotEmpty(t, r.read(trusted(i)+"-a-0"))
		require.Empty(t, r.read(trusted(i)+"-b-0"))
	}
	require.Empty(t, r.read(signed(0)+"-b-0"), "it is still known whose it is")
	require.NotEmpty(t, r.read(signed(0)+"-a-0"))
	last := trusted(maxIDs + 9)
	for i := range maxIDs + 10 {
		require.NotEmpty(t, r.read(signed(i+1)+"-a-0"))
	}
	require.Empty(t, r.read(last+"-c-0"), "and so it is of the others")
	require.NotEmpty(t, r.read(last+"-a-0"))
	for _, s := range []*seen{&r.signed, &r.trusted, &r.ignored} {
		require.Len(t, s.of, maxIDs)
		require.Len(t, s.order, maxIDs)
	}
	require.Equal(t, float64(maxIDs+11), count("signed"))
	require.Equal(t, float64(maxIDs+10), count("trusted"), "each counts once")
	require.Equal(t, float64(maxIDs+12), count("replayed"))
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
	for i, words := range [][]string{{"kind=unsigned", "unsigned_ids", "peers"}, {"kind=forged", "prefill=10.0.0.1:1", "decode=10.0.0.2:2"}, {"kind=malformed", "it has no ___decode_addr_"}} {
		for _, w := range words {
			require.Contains(t, lines[i], w)
		}
	}
}

// TestLogSaysWhichAddress: of an id that names an engine as no id can, the log says which address that is and what is wanted.
func TestLogSaysWhichAddress(t *testing.T) {
	for address, says := range map[string]string{
		"prefill_1:14579":      "prefill engine is \\\"prefill_1:14579\\\", want HOST:PORT",
		"[fe80::1%eth0]:14579": "prefill engine is \\\"[fe80::1%eth0]:14579\\\", want HOST:PORT",
		"10.0.0.1":             "prefill engine is \\\"10.0.0.1\\\", want HOST:PORT",
	} {
		var log bytes.Buffer
		r := newReader(list(t, "10.0.0.0/24:*"), slog.New(slog.NewTextHandler(&log, nil)))
		for i := range 100 {
			require.Empty(t, r.read(pair(address, "10.0.0.2:2", i)))
		}
		require.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
		require.Contains(t, log.String(), says)
		require.Less(t, log.Len(), 1024)
	}
}

// TestLogSaysWhoCannotBeNamed: an engine that registers with an address which no id can have says so when it starts.
func TestLogSaysWhoCannotBeNamed(t *testing.T) {
	for config, says := range map[string]bool{
		`{}`: false, `{"advertise":"prefill_1"}`: false,
		`{"advertise":"prefill-1","proxy_ip":"127.0.0.1","proxy_port":1,"http_port":1}`:                        false,
		`{"advertise":"fe80::1","proxy_ip":"127.0.0.1","proxy_port":1,"http_port":1}`:                          false,
		`{"advertise":"prefill_1","proxy_ip":"127.0.0.1","proxy_port":1,"http_port":1}`:                        true,
		`{"advertise":"prefill_1","proxy_ip":"127.0.0.1","proxy_port":1,"http_port":1,"proxy_protocol":"zmq"}`: true,
		`{"advertise":"fe80::1%eth0","routers":["127.0.0.1:1"],"http_port":1}`:                                 true,
	} {
		var log bytes.Buffer
		c, err := sdk.DecodeConfig[Config]([]byte(config))
		require.NoError(t, err, config)
		c.tellAddress(slog.New(slog.NewTextHandler(&log, nil)))
		require.Equal(t, says, strings.Contains(log.String(), "no request id can name this engine"), config)
	}
}

func TestPeersOfAConfig(t *testing.T) {
	for _, bad := range []string{
		"", "10.0.0.1", "10.0.0.1:", ":1", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:http", "10.0.0.0/33:1", "fd00::1:1", "[fe80::1%eth0]:1", "a b:1", "a/b:1", "*:1", "http://a:1", "10.0.0.1:**",
		"10.0.0.1:01", "10.0.0.1:+1", "0.0.0.0:1", "[::]:1", "[::ffff:10.0.0.0/104]:1", "[::ffff:0.0.0.0/96]:*", "[fe80::%eth0/64]:1",
	} {
		raw, err := json.Marshal(map[string]any{"unsigned_ids": trustProxy, "peers": []string{"10.0.0.1:1", bad}})
		require.NoError(t, err)
		_, err = sdk.DecodeConfig[Config](raw)
		require.ErrorIs(t, err, connector.ErrIncompatible, bad)
		require.ErrorContains(t, err, fmt.Sprintf("peers: %q is not HOST:PORT", bad))
	}
	for _, all := range []string{"0.0.0.0/0:*", "[::/0]:*", "0.0.0.0/0:14579", "0.0.0.0/1:1", "128.0.0.0/7:1", "[2000::/3]:1"} {
		_, err := (&Config{Peers: []string{all}}).listed()
		require.ErrorIs(t, err, connector.ErrIncompatible, all)
		require.ErrorContains(t, err, "lists everybody", all)
	}
	open := Config{Peers: []string{"127.0.0.1:*", "[::1]:*", "localhost:*", "10.0.0.0/24:1", "a:1", "10.0.0.0/24:*", "b:*"}}
	require.Equal(t, []string{"10.0.0.0/24:*", "b:*"}, open.anywhere())
	_, err := (&Config{Peers: make([]string, maxPeers+1)}).listed()
	require.ErrorContains(t, err, "at most 4096")
	require.Empty(t, peers(nil).find("10.0.0.1:1"))
	require.Empty(t, list(t, "a:*").find("nonsense"))
	require.Empty(t, list(t, "224.0.0.0/8:*").find("224.0.0.1:1"))
	require.Empty(t, list(t, "0.0.0.0/8:*").find("0.0.0.0:1"), "it means this machine")
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
