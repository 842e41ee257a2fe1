package main

import (
	"bufio"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/relay"
	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

var flagNetRounds = flag.Int("netrounds", 0, "rounds of all faults of the network between engines with P2pNcclConnector, for each way to send; default 1, in soak 20")

// outside is the host that engines tell each other. All of 127/8 is this machine, so a relay can listen there at the very
// ports that the engines have taken at 127.0.0.1.
const outside = "127.0.0.2"

// wires are relays in front of every port at which the plugins of engines listen.
type wires struct {
	*xpyd
	at map[string]*relay.Relay // by port
}

func (w *wires) engines() []*cluster.Process {
	return append(append([]*cluster.Process(nil), w.prefills...), w.decodes...)
}

// lay puts a relay in front of each port that has none yet: a plugin that was replaced has others.
func (w *wires) lay() {
	w.Helper()
	for _, e := range w.engines() {
		for _, pid := range cluster.Plugins(e.PID()) {
			for _, port := range listening(w.T, pid) {
				if w.at[port] != nil {
					continue
				}
				r, err := relay.NewAt(net.JoinHostPort(outside, port), net.JoinHostPort("127.0.0.1", port), *rig.Seed+uint64(len(w.at)))
				require.NoError(w, err)
				w.at[port] = r
			}
		}
	}
}

func (w *wires) each(f func(*relay.Relay)) {
	for _, r := range w.at {
		f(r)
	}
}

// count adds up how often something was hurt.
func (w *wires) count(of func(relay.Counts) int) (n int) {
	w.each(func(r *relay.Relay) { n += of(r.Count()) })
	return n
}

// calm ends all faults.
func (w *wires) calm() {
	w.each(func(r *relay.Relay) {
		r.Delay(0)
		r.DelaySent(0)
		r.CutAfter(0)
		r.CutSentAfter(0)
		r.Corrupt(0)
		r.CorruptSent(0)
		r.Stall(false, false)
		r.Shuffle(0)
		r.Drip(0)
		r.Refuse(false)
	})
}

// listening are the TCP ports at which a process listens.
func listening(t *testing.T, pid int) (ports []string) {
	t.Helper()
	mine := map[string]bool{}
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	require.NoError(t, err)
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && strings.HasPrefix(to, "socket:[") {
			mine[strings.Trim(to[len("socket:"):], "[]")] = true
		}
	}
	table, err := os.Open(fmt.Sprintf("/proc/%d/net/tcp", pid))
	require.NoError(t, err)
	defer table.Close()
	const local, state, inode, listens = 1, 3, 9, "0A"
	for lines := bufio.NewScanner(table); lines.Scan(); {
		f := strings.Fields(lines.Text())
		if len(f) <= inode || f[state] != listens || !mine[f[inode]] {
			continue
		}
		_, hex, _ := strings.Cut(f[local], ":")
		port, err := strconv.ParseUint(hex, 16, 16)
		require.NoError(t, err)
		ports = append(ports, strconv.FormatUint(port, 10))
	}
	return ports
}

// netFault is something that a network does to all that is sent between engines.
type netFault struct {
	name string
	on   func(*relay.Relay, *rand.Rand)
	hurt func(relay.Counts) int
}

func netFaults() []netFault {
	stalls := func(c relay.Counts) int { return c.Stalls }
	return []netFault{
		{"delayed", func(r *relay.Relay, rng *rand.Rand) {
			r.Delay(time.Duration(1+rng.IntN(30)) * time.Millisecond)
			r.DelaySent(time.Duration(1+rng.IntN(30)) * time.Millisecond)
		}, func(c relay.Counts) int { return c.Delayed }},
		{"cut", func(r *relay.Relay, rng *rand.Rand) {
			r.CutAfter(1 + rng.Int64N(8<<10))
			r.CutSentAfter(1 + rng.Int64N(64<<10))
		}, func(c relay.Counts) int { return c.Cuts }},
		{"half open, deaf", func(r *relay.Relay, _ *rand.Rand) { r.Stall(true, false) }, stalls},
		{"half open, dumb", func(r *relay.Relay, _ *rand.Rand) { r.Stall(false, true) }, stalls},
		{"corrupted", func(r *relay.Relay, rng *rand.Rand) {
			r.Corrupt(1 + rng.Int64N(4<<10))
			r.CorruptSent(1 + rng.Int64N(32<<10))
		}, func(c relay.Counts) int { return c.Corrupted }},
		{"reordered", func(r *relay.Relay, rng *rand.Rand) {
			r.Shuffle(time.Duration(20+rng.IntN(60)) * time.Millisecond)
			r.Cut() // so that new connections begin
		}, func(c relay.Counts) int { return c.Overtaken }},
		{"refused", func(r *relay.Relay, _ *rand.Rand) { r.Refuse(true) }, func(c relay.Counts) int { return c.Refused }},
	}
}

// TestP2pNcclNetwork: everything that goes between two prefill and two decode engines passes through relays that delay, cut,
// swallow, change and reorder it. No request is lost and no token is wrong; when the network is well again blocks
// come from peers again.
func TestP2pNcclNetwork(t *testing.T) {
	ways := []string{"PUT", "PUT_ASYNC", "GET"}
	rounds := rig.Count(t, "netrounds", *flagNetRounds, 1, 20)
	if rounds == 1 {
		ways = []string{ways[*rig.Seed%3]}
	}
	for _, send := range ways {
		t.Run(send, func(t *testing.T) { p2pNcclNetwork(t, send, rounds) })
	}
}

func p2pNcclNetwork(t *testing.T, send string, rounds int) {
	extra := fmt.Sprintf(`,"advertise":%q,"http_ip":"127.0.0.1","send_type":%q,"transports":["tcp"],"peer_timeout_ms":300`, outside, send)
	w := &wires{newXPYD(t, extra, fmt.Sprintf(`,"kvport":{"breaker":{"deaths":1000},"heartbeat":{"limit":"1m"},"deadlines":{"transfer":%q,"later":"300ms"}}`, rig.Unhurried), 2), map[string]*relay.Relay{}}
	t.Cleanup(func() {
		w.each(func(r *relay.Relay) { require.NoError(t, r.Close()) })
	})
	w.Tokens = 8
	w.lay()
	node := w.ServeModel(rig.Simulated(), "single", "")
	rng := rand.New(rand.NewPCG(*rig.Seed, 11))
	met, requests, tokens, prompt := map[string]int{}, 0, 0, *rig.Seed*1_000_000
	ask := func(n int) {
		prompt++
		prompts := rig.Texts(t, prompt, n, 400, 1200)
		tokens += rig.Compare(t, "behind relays", w.All(node.URL, prompts, n), w.All(w.router.URL, prompts, n))
		requests += n
	}
	external := func() float64 { return w.sum(w.decodes, "kvport_prompt_tokens_total", `source="external"`) }
	passed := func() int { return w.count(func(c relay.Counts) int { return int(c.Passed) }) }
	before := external()
	ask(4)
	require.Greater(t, external(), before)
	require.Positive(t, passed(), "blocks go through the relays")
	for range rounds {
		for _, f := range netFaults() {
			had := w.count(f.hurt)
			for try := 0; w.count(f.hurt) == had; try++ {
				require.Less(t, try, 20, "nothing was %s", f.name)
				w.each(func(r *relay.Relay) { f.on(r, rng) })
				ask(4)
			}
			met[f.name] += w.count(f.hurt) - had
			w.calm()
			w.lay()
			before := external()
			require.Eventually(t, func() bool {
				ask(1)
				return external() > before
			}, time.Minute, 10*time.Millisecond, "blocks come from peers again after they were %s", f.name)
		}
	}
	for _, e := range w.engines() {
		w.Idle(e)
	}
	t.Logf("%s: %d rounds, %d requests, %d tokens compared, 0 differ; hurt: %v; %.0f tokens from peers, %d bytes through relays",
		send, rounds, requests, tokens, met, external(), passed())
}
