package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/mutants"
	"github.com/kvport/kvport/connectors/p2p"
	"github.com/kvport/kvport/sdk"
	"github.com/kvport/kvport/verify/acceptance/rig"
)

// TestMain makes the tests' program a plugin, too: the connector in the hands of a forger.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && strings.HasPrefix(os.Args[1], "-test.") {
		os.Exit(m.Run())
	}
	sdk.Serve(mutants.Forger(sdk.FromPipe(sdk.Definition{
		Name: "PipeConnector", Version: "1.0.0", Groups: true, Needs: p2p.Needs(), Stats: sdk.PeerStats(),
	}, p2p.Open)))
}

// TestForgedPeers: blocks that a writer at the other end of a pipe forges, or a plugin of one's own that knows all that it is told
// and makes the digests again, are never used, and are counted by reason.
func TestForgedPeers(t *testing.T) {
	for who, forger := range map[string]string{"a writer at the other end of a pipe": "saves", "a plugin of one's own": "loads"} {
		transports := []string{"tcp", "shm"}
		if os.Getenv("KVPORT_SOAK") == "" {
			transports = transports[:1]
		}
		for _, transport := range transports {
			t.Run(who+", "+transport, func(t *testing.T) { testForged(t, forger, transport) })
		}
	}
}

func testForged(t *testing.T, forger, transport string) {
	r := rig.New(t)
	r.Tokens = 4
	all := r.Forged()
	prompts, want := r.Forgeable(*rig.Seed + 4600)
	record := filepath.Join(t.TempDir(), "record")
	ring, _ := r.Ring()
	program, err := os.Executable()
	require.NoError(t, err)
	config := func(role string, forges bool) string {
		own, module := fmt.Sprintf(`{"transport":%q}`, transport), ""
		if forges {
			own = fmt.Sprintf(`{"of":%s,%q:true,"seed":%d,"record":%q}`, own, forger, *rig.Seed, record)
			module = fmt.Sprintf(`"kv_connector_module_path":%q,`, program)
		}
		return fmt.Sprintf(`{"kv_connector":"PipeConnector","kv_role":%q,%s"kv_connector_extra_config":%s,"kvport":{"ticket_key_file":%q,"deadlines":{"later":"60s","transfer":"60s"}}}`,
			role, module, own, ring)
	}
	p := r.Serve("prefill", config("kv_producer", forger == "saves"), "--enable-prefix-caching=false")
	d := r.Serve("decode", config("kv_consumer", forger == "loads"), "--enable-prefix-caching=false")
	router := r.Route(p, d)
	tokens := 0
	forged, read := map[string]float64{}, map[string]float64{}
	rounds := 0
	for round := 1; sum(read) < float64(all); round++ {
		rounds = round
		tokens += rig.Compare(t, fmt.Sprintf("round %d", round), want, r.All(router.URL, prompts, 4))
		read = r.Unread(d) // first: what is read later may be forged later
		forged = recorded(t, record)
		require.GreaterOrEqual(t, sum(read), float64(2*len(prompts)*round), "a part of the blocks is forged in each round")
	}
	for reason, n := range read { // the producer may still have what it has sent in an earlier round, under the same key
		require.LessOrEqual(t, n, float64(rounds)*forged[reason], "nothing else counts as %s", reason)
	}
	if forger == "loads" { // what a writer has sent, not all of it is read
		require.Equal(t, forged, read, "every forged block is counted once, by its reason")
	}
	t.Logf("%.0f blocks forged and %.0f of them read, counted %v, %d tokens compared, 0 differ", sum(forged), sum(read), read, tokens)
	require.Positive(t, r.Metrics(d).Sum("kvport_prompt_tokens_total", `source="external"`), "the blocks before the first forged one are used")
	r.NobodyBlamed(d)
}

// recorded is what a forger has written down: how many blocks, by the reason by which they must be counted.
func recorded(t *testing.T, path string) map[string]float64 {
	t.Helper()
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	reasons := map[string]float64{"corrupt": 0, "foreign_key": 0, "edition": 0}
	for line := range strings.Lines(string(data)) {
		reason, _, _ := strings.Cut(line, "\t")
		reasons[reason]++
	}
	return reasons
}

// sum is that of all reasons.
func sum(reasons map[string]float64) float64 {
	return reasons["corrupt"] + reasons["foreign_key"] + reasons["edition"]
}
