package acceptance

import (
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

// The campaigns run sim, whose tokens depend on every byte of the cache, and are fast. Their full
// counts are for make soak; without it, or a flag, a run has a small part of them and says so.
var (
	flagSimKills   = flag.Int("simkills", 0, "plugin kills on sim; default 20, in soak 1000")
	flagSimStops   = flag.Int("simstops", 0, "plugin stops on sim; default 2, in soak 20")
	flagSimDamages = flag.Int("simdamages", 0, "damaged blocks on sim; default 200, in soak 10000")
	flagTickets    = flag.Int("tickets", 0, "forged, stale and replayed tickets on sim; default 100, in soak 10000")
)

// TestSimKilled: plugins of both engines are killed and stopped while requests run.
func TestSimKilled(t *testing.T) {
	kills, stops := rig.Count(t, "simkills", *flagSimKills, 20, 1000), rig.Count(t, "simstops", *flagSimStops, 2, 20)
	for i, trust := range []string{"in-place", "staged"} {
		share := func(n int) int { return (n + 1 - i) / 2 }
		t.Run(trust, func(t *testing.T) { testSimKilled(rig.New(t), trust, share(kills), share(stops)) })
	}
}

func testSimKilled(r *rig.Rig, trust string, kills, stops int) {
	r.Helper()
	level := fmt.Sprintf(`,"kvport":{"trust":%q,"breaker":{"deaths":100000,"backoff_max":"20ms"},"deadlines":{"transfer":"1s"},"heartbeat":{"limit":"1s"}}`, trust)
	rng := rand.New(rand.NewPCG(*rig.Seed, 9))
	faults := slices.Concat(slices.Repeat([]syscall.Signal{syscall.SIGKILL}, kills), slices.Repeat([]syscall.Signal{syscall.SIGSTOP}, stops))
	rng.Shuffle(len(faults), func(i, j int) { faults[i], faults[j] = faults[j], faults[i] })

	node := r.ServeModel("sim", "single", "")
	p := r.ServeModel("sim", "prefill", r.Config("kv_producer", "", level), "--enable-prefix-caching=false")
	d := r.ServeModel("sim", "decode", r.Config("kv_consumer", "", level), "--enable-prefix-caching=false")
	router := r.Route(p, d)
	engines := []*cluster.Process{p, d}
	r.All(router.URL, rig.Texts(r.T, *rig.Seed+20000, 2, 400, 400), 1)
	var before []cluster.Resources
	for _, e := range engines {
		r.Idle(e)
		before = append(before, rig.Settled(r.T, e))
	}
	prompts := rig.Texts(r.T, *rig.Seed+21000, 8, 600, 3000)
	want := r.All(node.URL, prompts, 4)
	tokens, met := 0, 0
	for i, signal := range faults {
		hit, got := r.SignalAmid(rng, router, engines[i%2], signal, prompts)
		tokens += rig.Compare(r.T, fmt.Sprintf("fault %d, %v", i, signal), want, got)
		if hit {
			met++
		}
		if i%50 == 49 { // it takes minutes
			fmt.Fprintf(os.Stderr, "level %s: %d of %d faults, %d tokens compared\n", trust, i+1, len(faults), tokens)
		}
	}
	r.Logf("level %s: %d kills and %d stops happened, %d of them while a transfer ran; %d tokens compared, 0 differ, 0 of %d requests lost",
		trust, kills, stops, met, tokens, len(faults)*len(prompts))
	require.Greater(r, met, len(faults)/4)
	for i, e := range engines {
		r.Idle(e)
		require.Eventually(r, func() bool {
			h, err := r.Client.Health(r.Context(), e.URL)
			return err == nil && h.Connector.State == "ready"
		}, time.Minute, 20*time.Millisecond)
		require.Eventually(r, func() bool { return cluster.Usage(e.PID()) == before[i] }, time.Minute, 50*time.Millisecond,
			"resources of %s: before %+v, after %+v", e.Name, before[i], cluster.Usage(e.PID()))
		r.Logf("resources of %s before and after: %+v", e.Name, before[i])
	}
}

// TestSimDamaged: stored blocks are damaged; each is noticed, and no token is wrong.
func TestSimDamaged(t *testing.T) {
	n := rig.Count(t, "simdamages", *flagSimDamages, 200, 10000)
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed+30000, 12, 500, 900)
	for i := range prompts { // a byte is a token: no prompt ends with a full block
		prompts[i] = prompts[i][:len(prompts[i])/16*16-7]
	}
	node := r.ServeModel("sim", "single", "")
	want := r.All(node.URL, prompts, 4)
	p := r.ServeModel("sim", "prefill", r.Config("kv_producer", "", ""))
	for _, prompt := range prompts {
		_, err := r.Client.Complete(t.Context(), p.URL, cluster.Request{Prompt: prompt, MaxTokens: 1})
		require.NoError(t, err)
	}
	r.Idle(p)
	r.Stop(p)
	files := r.BlockFiles()
	require.NotEmpty(t, files)
	contents := make([][]byte, len(files))
	for i, path := range files {
		var err error
		contents[i], err = os.ReadFile(path)
		require.NoError(t, err)
	}
	var readers []*cluster.Process
	for _, trust := range []string{"in-place", "staged"} {
		readers = append(readers, r.ServeModel("sim", trust, r.Config("kv_consumer", "", fmt.Sprintf(`,"kvport":{"trust":%q}`, trust)), "--enable-prefix-caching=false"))
	}
	rng := rand.New(rand.NewPCG(*rig.Seed, 2))
	kinds, tokens, counted := map[string]int{}, 0, 0.0
	for done, round := 0, 0; done < n; round++ {
		batch := min(20, n-done)
		struck := rng.Perm(len(files))[:batch]
		for _, i := range struck {
			damaged := damageSmall(t, rng, contents[i], contents[(i+1)%len(files)], kinds)
			require.NoError(t, os.WriteFile(files[i], damaged, 0o600))
		}
		d := readers[round%len(readers)]
		was := noticed(r, d)
		tokens += rig.Compare(t, fmt.Sprintf("damaged blocks %d-%d", done+1, done+batch), want, r.All(d.URL, prompts, 4))
		now := noticed(r, d) - was
		require.Equal(t, float64(batch), now, "every damaged block that was read is counted once")
		counted += now
		done += batch
		for _, i := range struck {
			require.NoError(t, os.WriteFile(files[i], contents[i], 0o600))
		}
	}
	for _, d := range readers {
		r.Idle(d)
	}
	t.Logf("%d damages of %d kinds, half at each trust level, %v noticed, %d tokens compared, 0 differ: %v", n, len(kinds), counted, tokens, kinds)
}

// noticed is how many blocks an engine has found damaged. One in the head of whose digests a bit is changed may seem to be of another key, or
// of another version.
func noticed(r *rig.Rig, d *cluster.Process) (blocks float64) {
	r.Helper()
	for _, n := range r.Unread(d) {
		blocks += n
	}
	return blocks
}

// damageSmall damages a block that may be smaller than a page.
func damageSmall(t *testing.T, rng *rand.Rand, whole, other []byte, kinds map[string]int) []byte {
	t.Helper()
	kind := damages[rng.IntN(len(damages))]
	for kind.name == "zeroed page" && len(whole) <= 4096 {
		kind = damages[rng.IntN(len(damages))]
	}
	damaged := kind.do(rng, bytes.Clone(whole), other)
	require.NotEqual(t, whole, damaged, "%s changed nothing", kind.name)
	kinds[kind.name]++
	return damaged
}

// TestSimTickets: tickets that are forged, of an earlier life of the producer, of another key, or
// used before are refused and counted; the answer is right all the same.
func TestSimTickets(t *testing.T) {
	n := rig.Count(t, "tickets", *flagTickets, 100, 10000)
	r := rig.New(t)
	prompts := rig.Texts(t, *rig.Seed+40000, 8, 200, 600)
	node := r.ServeModel("sim", "single", "")
	want := r.All(node.URL, prompts, 4)
	key := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(key, []byte("a key that only a stranger has ...."), 0o600))
	d := r.ServeModel("sim", "decode", r.Config("kv_consumer", "", ""), "--enable-prefix-caching=false")

	// Two lives of one producer, and a producer with another key.
	old := tickets(r, "earlier life", `,"engine_id":"P"`, prompts)
	good := tickets(r, "prefill", `,"engine_id":"P"`, prompts)
	strange := tickets(r, "stranger", fmt.Sprintf(`,"kvport":{"ticket_key_file":%q}`, key), prompts)
	for i, prompt := range prompts { // the first use is fine, every other is a replay
		r.UseTicket(d, prompt, good[i], want[i])
	}
	refused := func() float64 { return r.Metrics(d).Sum("kvport_tickets_refused_total") }
	require.Zero(t, refused())
	rng := rand.New(rand.NewPCG(*rig.Seed, 3))
	kinds := map[string]int{}
	for i := range n {
		at := rng.IntN(len(prompts))
		kind, ticket := wrongTicket(rng, good[at], old[at], strange[at])
		kinds[kind]++
		r.UseTicket(d, prompts[at], ticket, want[at])
		require.Equal(t, float64(i+1), refused(), "ticket %d: %s", i, kind)
	}
	r.Idle(d)
	m := r.Metrics(d)
	t.Logf("%d tickets refused (%v), by reason: forged %.0f, replayed %.0f, stale %.0f; %d answers compared, 0 differ", n, kinds,
		m.Sum("kvport_tickets_refused_total", `reason="forged"`), m.Sum("kvport_tickets_refused_total", `reason="replayed"`),
		m.Sum("kvport_tickets_refused_total", `reason="stale"`), n)
}

func wrongTicket(rng *rand.Rand, good, old, strange []byte) (kind string, ticket []byte) {
	ticket = bytes.Clone(good)
	switch rng.IntN(7) {
	case 0:
		ticket[rng.IntN(len(ticket))] ^= 1 << rng.IntN(8)
		return "bit flip", ticket
	case 1:
		return "cut", ticket[:1+rng.IntN(len(ticket)-1)]
	case 2:
		return "grown", append(ticket, byte(rng.Int()))
	case 3:
		for i := range ticket {
			ticket[i] = byte(rng.Int())
		}
		return "noise", ticket
	case 4:
		return "stale", old
	case 5:
		return "another key", strange
	}
	return "replayed", ticket
}

// tickets runs a producer for a while and gives its tickets for the prompts.
func tickets(r *rig.Rig, name, config string, prompts []string) (out [][]byte) {
	r.Helper()
	p := r.ServeModel("sim", name, r.Config("kv_producer", "", config))
	for _, prompt := range prompts {
		out = append(out, r.Ticket(p, prompt))
	}
	r.Idle(p)
	r.Stop(p)
	return out
}
