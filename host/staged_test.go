package host

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/leaktest"
)

// trustVariable names the environment variable that sets the trust level of every rig.
const trustVariable = "KVPORT_TEST_TRUST"

// landingBytes is the setting that gives a rig that many slots: two layers, digests and padding.
func landingBytes(slots int) int { return slots*(2*512+48) + 3*landingAlign }

// TestStaged runs the host's tests again with landing memory that is smaller than most transfers.
func TestStaged(t *testing.T) {
	t.Setenv(trustVariable, string(TrustStaged))
	for _, c := range []struct {
		name string
		test func(*testing.T)
	}{
		{"SaveMatchLoad", TestSaveMatchLoad},
		{"LoadFaults", TestLoadFaults},
		{"SaveFaults", TestSaveFaults},
		{"DamagedBlockIsReplaced", TestDamagedBlockIsReplaced},
		{"InnocentLoadIsRetried", TestInnocentLoadIsRetried},
		{"StoppedPluginIsKilled", TestStoppedPluginIsKilled},
		{"KillUnderLoad", TestKillUnderLoad},
		{"Breaker", TestBreaker},
		{"CloseWhileHanging", TestCloseWhileHanging},
		{"TicketMakesConsumerWait", TestTicketMakesConsumerWait},
		{"TicketOfMissingBlocks", TestTicketOfMissingBlocks},
		{"LossyIsNotVerified", TestLossyIsNotVerified},
		{"PlannerChooses", TestPlannerChooses},
		{"Reset", TestReset},
		{"StepAfterClose", TestStepAfterClose},
	} {
		t.Run(c.name, c.test)
	}
}

func staged(slots int) map[string]any {
	return map[string]any{"trust": "staged", "landing_bytes": landingBytes(slots)}
}

// The plugin maps landing memory and nothing else of ours: not the cache.
func TestStagedMapsNoCache(t *testing.T) {
	for trust, want := range map[Trust]string{TrustInPlace: "kvport-cache", TrustStaged: "kvport-landing"} {
		r := newRig(t, rigOptions{ranks: 2, settings: map[string]any{"trust": string(trust)}})
		r.save("a", keys(1, 2), 0)
		pid := r.Health().PID
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
		require.NoError(t, err)
		files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
		require.NoError(t, err)
		found := 0
		check := func(line string) {
			if strings.Contains(line, "memfd:") && !strings.Contains(line, "kvport-progress") && !strings.Contains(line, "kvport-rings") { // no KV
				require.Contains(t, line, want, "at level %s", trust)
				found++
			}
		}
		for line := range strings.Lines(string(maps)) {
			check(line)
		}
		for _, f := range files {
			target, err := os.Readlink(f)
			if err == nil && !strings.Contains(target, "kvport-arena") { // empty: it asked for none
				check(target)
			}
		}
		require.GreaterOrEqual(t, found, 2, "of memory that the plugin maps")
		require.Equal(t, trust, r.Health().Trust)
		require.Equal(t, trust == TrustStaged, r.Health().LandingSlots > 0)
	}
}

// A transfer larger than landing memory goes through it in parts, on every rank; many at once wait
// for their turn.
func TestStagedQueues(t *testing.T) {
	for _, slots := range []int{1, 2, 5} {
		r := newRig(t, rigOptions{ranks: 2, settings: staged(slots)})
		ks := keys(1, 16)
		require.Empty(t, r.save("a", ks, 0).Failed)
		step := &connector.Step{}
		var all []connector.Block
		for i := range 3 {
			tr := transfer(fmt.Sprint("b", i), ks, connector.BlockID(16*(i+1)))
			all = append(all, tr.Blocks...)
			step.Admitted = append(step.Admitted, tr)
		}
		r.wipe(all)
		r.send(step)
		for range 3 {
			require.Empty(t, r.next(Loaded).Failed)
		}
		require.True(t, r.same(all))
		require.Zero(t, r.Health().LandingUsed)
		require.Equal(t, 2*slots, r.Health().LandingSlots)
		require.InDelta(t, 4*16*2*(2*512+48), r.metric("kvport_landing_copied_bytes_total"), 0)
	}
}

// A plugin that writes on after it has said done cannot change the cache: what was checked is what
// is there. In place it can, which is why that level is for trusted plugins.
func TestStagedStandsLateWrites(t *testing.T) {
	r := newRig(t, rigOptions{extra: map[string]any{"fault": "flip_load", "at": 1, "once": true}, settings: staged(8)})
	ks := keys(1, 4)
	r.save("a", ks, 0)
	whole, damaged := 0, 0
	for i := range 24 {
		id := fmt.Sprint("b", i)
		blocks := blocksOf(ks, connector.BlockID(4+4*(i%8)))
		e := r.load(id, ks, blocks[0].ID)
		failed := map[connector.BlockID]bool{}
		for _, f := range e.Failed {
			failed[f] = true
		}
		for _, b := range blocks {
			if failed[b.ID] {
				damaged++
				continue
			}
			whole++
			require.True(t, r.same([]connector.Block{b}), "block %d of load %d", b.ID, i)
		}
		r.stays(blocks, failed)
		r.end(id, 0, false)
	}
	t.Logf("%d blocks whole, %d found damaged", whole, damaged)
	require.Positive(t, whole)
}

// stays watches blocks that are said to be whole for a while in which the plugin flips bytes.
func (r *rig) stays(blocks []connector.Block, failed map[connector.BlockID]bool) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 3*time.Millisecond)
	defer cancel()
	for ctx.Err() == nil {
		for _, b := range blocks {
			require.True(r.t, failed[b.ID] || r.same([]connector.Block{b}))
		}
	}
}

func TestStagedRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		extra    map[string]any
		settings map[string]any
		want     string
	}{
		"too small": {nil, map[string]any{"trust": "staged", "landing_bytes": 1000}, "landing_bytes: 1000 bytes of landing memory hold no block, one needs 1264"},
		"holds":     {map[string]any{"fault": "hold"}, staged(8), "kvport.trust"},
	} {
		t.Run(name, func(t *testing.T) {
			leaks := leaktest.Watch(t)
			o := rigOptions{extra: c.extra, settings: c.settings}
			cfg, eng, opts := o.build(t)
			_, err := Open(t.Context(), cfg, eng, opts)
			require.ErrorIs(t, err, ErrConfig)
			require.ErrorContains(t, err, c.want)
			leaks()
		})
	}
}

// idleWorker is a worker side in this process that does nothing.
type idleWorker struct{}

func (idleWorker) Load(context.Context, *connector.Transfer, *connector.KV) error { return nil }
func (idleWorker) Save(context.Context, *connector.Transfer, *connector.KV) error { return nil }
func (idleWorker) Close() error                                                   { return nil }

// Worker sides in this process need no plugin: each maps the landing memory of its rank. What they did not load is
// found by its digest.
func TestWorkers(t *testing.T) {
	leaks := leaktest.Watch(t)
	o := rigOptions{ranks: 2, settings: staged(8)}
	cfg, eng, opts := o.build(t)
	failure := fmt.Errorf("does not open: %w", connector.ErrIncompatible)
	opts.PluginPath = nil
	opts.Workers = func([]*Region, connector.Layout) ([]connector.Worker, error) { return nil, failure }
	_, err := Open(t.Context(), cfg, eng, opts)
	require.ErrorIs(t, err, failure)
	leaks()

	opts.Workers = func(memory []*Region, layout connector.Layout) ([]connector.Worker, error) {
		require.Len(t, memory, 2)
		require.Equal(t, 8, layout.Blocks)
		return []connector.Worker{idleWorker{}, idleWorker{}}, nil
	}
	h, err := Open(t.Context(), cfg, eng, opts)
	require.NoError(t, err)
	require.Equal(t, "ready", h.Health().State)
	h.Step(&connector.Step{ID: 1, Computed: []connector.Transfer{transfer("a", keys(1, 16), 0)}})
	require.Empty(t, (<-h.Events()).Failed)
	h.Step(&connector.Step{ID: 2, Admitted: []connector.Transfer{transfer("b", keys(2, 2), 20)}})
	require.Len(t, (<-h.Events()).Failed, 2)
	require.NoError(t, h.Close(t.Context()))
	leaks()
}
