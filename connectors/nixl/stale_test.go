package nixl

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

var (
	flagHandles = flag.Int("handles", 0, "stale handles to load with; default 100, with KVPORT_SOAK=1 1000")
	flagSeed    = flag.Uint64("seed", 1, "of handles and blocks")
)

// staleScene is a producer whose holds go wrong in every way of vllm#52234, and a consumer that tries them.
type staleScene struct {
	*testing.T
	rng  *rand.Rand
	p, d *side
}

// forge gives the ticket of a hold, changed.
func (s *staleScene) forge(raw []byte, change func(*ticket)) []byte {
	var t ticket
	require.NoError(s, json.Unmarshal(raw, &t))
	change(&t)
	data, err := t.encode()
	require.NoError(s, err)
	return data
}

// handle makes a handle of one kind for a prompt, whose blocks the producer has or had.
func (s *staleScene) handle(kind string, prefix byte, n int) []byte {
	theirs, hold := s.p.finish(s.rng, prefix, n)
	holds := s.p.node.holds
	switch kind {
	case "unknown id":
		return s.forge(hold.Ticket, func(t *ticket) { t.Hold += connector.HoldID(1000 + s.rng.IntN(1e6)) })
	case "out of range":
		wild := slices.Clone(theirs)
		wild[s.rng.IntN(len(wild))].ID = connector.BlockID(testBlocks + s.rng.IntN(1<<20))
		return s.p.end(wild, n).Ticket
	case "consumed":
		_, err := s.d.load(s.rng, prefix, n, hold.Ticket)
		require.NoError(s, err)
		s.p.fetched(hold.ID)
	case "reused":
		holds.settle([]connector.HoldID{hold.ID}) // the host has given the blocks back
		s.p.fill(s.rng, theirs)
	case "expired":
		holds.mu.Lock()
		n := holds.open[hold.ID]
		n.expires = time.Now().Add(-time.Duration(s.rng.Int64N(1e9)))
		holds.next = n.expires
		holds.board.set(n.slot, n.sum, n.expires) // as the board shows it once it is over
		holds.mu.Unlock()
		s.p.fill(s.rng, theirs)
	case "forged":
		return s.forge(hold.Ticket, func(t *ticket) { t.Secret[s.rng.IntN(secretSize)] ^= byte(1 + s.rng.IntN(255)) })
	case "replayed":
		var t ticket
		require.NoError(s, json.Unmarshal(hold.Ticket, &t))
		require.NoError(s, holds.done(&question{Hold: t.Hold, Secret: t.Secret}, time.Now()))
		s.p.fetched(hold.ID)
		s.p.fill(s.rng, theirs)
	case "another prompt":
		_, other := s.p.finish(s.rng, prefix+100, n)
		return other.Ticket
	case "reused meanwhile": // after the consumer has heard where the blocks are
		over := func() {
			holds.settle([]connector.HoldID{hold.ID})
			s.p.fill(s.rng, theirs)
		}
		s.p.node.told, s.p.node.moved, s.d.node.moved = over, over, over
	}
	return hold.Ticket
}

// TestStaleHandles: whatever is wrong with a handle, its load fails with a reason, names the blocks that did not
// come, or has brought what belongs there.
func TestStaleHandles(t *testing.T) { eachMode(t, testStaleHandles) }

func testStaleHandles(t *testing.T, mode string) {
	kinds := []string{"unknown id", "out of range", "consumed", "reused", "expired", "forged", "replayed", "another prompt", "reused meanwhile"}
	n := 100
	if os.Getenv("KVPORT_SOAK") != "" {
		n = 1000
	}
	if *flagHandles > 0 {
		n = *flagHandles
	}
	rng := rand.New(rand.NewPCG(*flagSeed, 52234))
	s := &staleScene{T: t, rng: rng, p: open(t, connector.RoleProducer, Config{}, nil), d: open(t, connector.RoleConsumer, Config{Mode: mode}, nil)}
	outcome := map[string]int{}
	for i := range n {
		kind, blocks := kinds[i%len(kinds)], 2+rng.IntN(12)
		prefix := byte(rng.IntN(100))
		raw := s.handle(kind, prefix, blocks)
		ours, err := s.d.load(rng, prefix, blocks, raw)
		s.p.node.told, s.p.node.moved, s.d.node.moved = nil, nil, nil
		var some *connector.BlockError
		switch {
		case errors.As(err, &some):
			require.NotEmpty(t, some.Blocks, kind)
			require.Subset(t, ids(ours), some.Blocks, kind)
			outcome[kind+": some blocks"]++
		case err != nil:
			require.True(t, errors.Is(err, connector.ErrGone) || errors.Is(err, connector.ErrIncompatible), "%s: %v", kind, err)
			outcome[kind+": refused"]++
		default:
			t.Fatalf("%s: the load says that all is there", kind)
		}
	}
	t.Logf("%d handles, 0 served:", n)
	for _, k := range sortedKeys(outcome) {
		t.Logf("%5d  %s", outcome[k], k)
	}
	theirs, hold := s.p.finish(rng, 1, 5)
	ours, err := s.d.load(rng, 1, 5, hold.Ticket)
	require.NoError(t, err, "a good one after all that")
	require.True(t, slices.EqualFunc(s.p.bytes(theirs), s.d.bytes(ours), bytes.Equal))
}

func sortedKeys(m map[string]int) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}
