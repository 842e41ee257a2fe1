package main

import (
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

// patience is the deadline of a request that must be answered: long enough for any machine.
const patience = 5 * time.Minute

var flagNixlAborts = flag.Int("nixlaborts", 0, "requests whose clients go away at random moments; default 60, in soak 1000")

// TestNixlAborts: clients go away at every moment of a request, of its prefill, its load and its decode. No block
// stays used, pinned or held, and the answers of those that stay are right.
func TestNixlAborts(t *testing.T) {
	rig.Need(t, "nixl")
	f := newNixlFleet(t, "sim", rig.Unhurried)
	n := rig.Count(t, "nixlaborts", *flagNixlAborts, 60, 1000)
	prompts := rig.Texts(t, *rig.Seed, n, 500, 3000)
	whole := prompts[:4]
	want := f.All(f.node.URL, whole, 1)
	began := time.Now()
	rig.Same(t, "before aborts", want, f.All(f.router.URL, whole, 1))
	longest := max(2*time.Since(began)/time.Duration(len(whole)), 50*time.Millisecond) // of a request
	rng := rand.New(rand.NewPCG(*rig.Seed, 1000))
	slots := make(chan struct{}, 4)
	var work sync.WaitGroup
	var mu sync.Mutex
	aborted, patient := 0, 0
	for i, prompt := range prompts {
		after := time.Duration(rng.Int64N(int64(longest)))
		if i%8 == 0 { // stays to the end, however slow the machine has become
			after = patience
			patient++
		}
		slots <- struct{}{}
		work.Go(func() {
			defer func() { <-slots }()
			ctx, cancel := context.WithTimeout(t.Context(), after)
			defer cancel()
			_, err := f.Client.Complete(ctx, f.router.URL, cluster.Request{Prompt: prompt, MaxTokens: f.Tokens, IgnoreEOS: true})
			if errors.Is(err, context.DeadlineExceeded) {
				mu.Lock()
				aborted++
				mu.Unlock()
			} else if err != nil {
				t.Errorf("a request that was not aborted failed: %v", err)
			}
		})
	}
	work.Wait()
	require.Positive(t, aborted)
	require.LessOrEqual(t, aborted, n-patient, "those that stay come to their end")
	f.ready()
	rig.Same(t, "after aborts", want, f.All(f.router.URL, whole, 2))
	for i := range f.p {
		f.Idle(f.p[i])
		f.Idle(f.d[i])
	}
	t.Logf("%d of %d requests aborted within %v; 0 blocks are still used, pinned or held", aborted, n, longest.Round(time.Millisecond))
}
