package simulate

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const steps = 1000

func soaking() bool { return os.Getenv("KVPORT_SOAK") != "" }

// explain shows how the first failed seed failed, as small as it gets.
func explain(t *testing.T, r *Report) {
	t.Helper()
	for i := range r.Failed {
		t.Errorf("seed %d: %v", r.Failed[i].Seed, r.Failed[i].Violation)
	}
	if len(r.Failed) > 0 {
		var b bytes.Buffer
		Minimise(Draw(r.Failed[0].Seed), steps).Transcript(&b)
		t.Log(b.String())
	}
}

func TestSeeds(t *testing.T) {
	seeds := 2000
	switch {
	case soaking():
		seeds = 10_000
	case testing.Short():
		seeds = 200
	}
	r := Run(0, seeds, steps, 5)
	explain(t, &r)
	t.Logf("%d seeds, %d steps, digest %016x: %s", r.Seeds, r.Steps, r.Digest, r.Stats.String())
	for _, f := range r.Stats.fields() {
		assert.Positive(t, *f.n, "%s never happened", f.name)
	}
	for _, p := range r.Stats.Powers() {
		t.Logf("met %6d times: %s", p.Met, p.Name)
		if !testing.Short() {
			assert.GreaterOrEqual(t, p.Met, 1000, "%s", p.Name)
		}
	}
}

// TestSeedsThatFailed: seeds beyond those that TestSeeds plays without soak, each of which has failed once.
func TestSeedsThatFailed(t *testing.T) {
	for _, seed := range []uint64{5376, 5926, 6782} { // a load came back with blocks by another key when it had been given up
		r := Run(seed, 1, steps, 1)
		explain(t, &r)
	}
}

// TestEqualSeedsEqualLogs: no map order, clock or address gets into a run.
func TestEqualSeedsEqualLogs(t *testing.T) {
	for seed := range uint64(60) {
		var logs [2]bytes.Buffer
		var digests [3]uint64
		for i := range logs {
			o := Draw(seed)
			o.Trace = &logs[i]
			digests[i] = Play(o, steps).Digest
		}
		digests[2] = Play(Draw(seed), steps).Digest // without a transcript
		require.Equal(t, logs[0].String(), logs[1].String(), "seed %d", seed)
		require.Equal(t, digests[0], digests[1], "seed %d", seed)
		require.Equal(t, digests[0], digests[2], "seed %d", seed)
	}
	once, again := Run(0, 100, steps, 0), Run(0, 100, steps, 0)
	require.Equal(t, once, again)
	require.NotEqual(t, Run(0, 1, steps, 0).Digest, Run(1, 1, steps, 0).Digest)
}

// TestAnyOptionsSameTokens: the same prompts in worlds of any size, topology, connector and fault
// give the same tokens as a single engine without a connector and as the oracle.
func TestAnyOptionsSameTokens(t *testing.T) {
	seeds, compared, partly := 40, 0, 0
	if testing.Short() {
		seeds = 5
	}
	if soaking() {
		seeds = 1000
	}
	for seed := range uint64(seeds) {
		prompts := Workload(seed, 40)
		for i, o := range Variants(seed, 8) {
			answers, v := Answers(o, prompts, steps/2)
			if v != nil {
				t.Fatalf("workload %d, variant %d (seed %d): %v", seed, i, o.Seed, v)
			}
			for n, got := range answers {
				if got == nil {
					partly++
					continue
				}
				require.Equal(t, oracle(prompts[n].Tokens, prompts[n].Max), got, "workload %d, variant %d, client %d", seed, i, n)
				compared++
			}
		}
	}
	t.Logf("%d answers compared, %d clients left or got an error", compared, partly)
	require.Greater(t, compared, 2*partly)
}

// TestSaltOnlyChangesHits: a salt keeps prompts apart and changes no token.
func TestSaltOnlyChangesHits(t *testing.T) {
	for seed := range uint64(20) {
		plain := Workload(seed, 30)
		salted := Workload(seed, 30)
		for i := range salted {
			salted[i].Salt = strings.Repeat("s", 1+i)
		}
		o := Variants(seed, 2)[1]
		o.Rough, o.FaultRate = 0, 0
		a, v := Answers(o, plain, steps)
		require.Nil(t, v)
		b, v := Answers(o, salted, steps)
		require.Nil(t, v)
		for i := range a {
			if a[i] != nil && b[i] != nil {
				require.Equal(t, a[i], b[i])
			}
		}
	}
}

func TestMinimise(t *testing.T) {
	require.Nil(t, Minimise(Draw(0), 50))
	for _, m := range []Mutant{FreeOnAbort, NoDigest, PublishEarly, DoubleUnpin} {
		var o Options
		for seed := uint64(0); ; seed++ {
			o = Draw(seed)
			o.Mutant = m
			if Play(o, steps).Violation != nil {
				break
			}
		}
		small := Minimise(o, steps)
		require.NotNil(t, small)
		assert.LessOrEqual(t, len(small.Ops), 60, "mutant %d", m)
		again := play(small.Options, small.Ops)
		require.Equal(t, small.Violation, again.Violation)
		var b strings.Builder
		small.Transcript(&b)
		require.Contains(t, b.String(), "VIOLATION")
		t.Logf("mutant %d: %d steps left after %d tries", m, len(small.Ops), small.Tries)
	}
}
