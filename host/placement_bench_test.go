package host

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// placedBench is an engine with the plugin of a tier, whose blocks are all resident.
type placedBench struct {
	testing.TB
	*Host
	keys   []connector.BlockKey
	plugin int32 // the clock of its processor time
	step   uint64
	last   connector.RequestID // of a load
	stuck  chan struct{}       // closed when nobody waits any longer for a load; nil: everybody does
}

const (
	benchBlocks = 128 // that are saved
	benchRoom   = 32  // behind them, for loads
)

func newPlacedBench(b testing.TB, layers int) *placedBench {
	b.Helper()
	f := testkit.Typical(b, fixture.Tier)
	dir := b.TempDir()
	root := testkit.Root(b)
	build := exec.Command("go", "build", "-buildvcs=false", "-o", filepath.Join(dir, "kvport-"+filepath.Base(f.Folder)), "./"+f.Folder)
	build.Dir = root
	out, err := build.CombinedOutput()
	require.NoError(b, err, "%s", out)
	const part = 24 << 10
	layout := connector.Layout{Name: "bench", Blocks: benchBlocks + benchRoom, Groups: []connector.Group{{BlockTokens: blockTokens, Policy: connector.PolicyAll}}}
	for layer := range layers {
		layout.Segments = append(layout.Segments, connector.Segment{Layer: layer, Offset: int64(layer) * part * (benchBlocks + benchRoom), BlockStride: part, Bytes: part})
	}
	layout, size := WithDigests(layout)
	region, err := NewRegion(size)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, region.Close()) })
	_, err = rand.NewChaCha8([32]byte{}).Read(region.Bytes())
	require.NoError(b, err)
	extra, err := json.Marshal(map[string]any{"cpu_bytes_to_use": 2 * size})
	require.NoError(b, err)
	cfg, err := ParseConfig(fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both","kv_connector_extra_config":%s}`, f.Connector, extra))
	require.NoError(b, err)
	cfg.SandboxedBy(Self)
	eng := Engine{Model: connector.NewFingerprint("bench"), Shape: connector.NewFingerprint("shape"), Layout: layout, Ranks: []*Region{region}}
	h, err := Open(b.Context(), cfg, eng, Options{PluginPath: []string{dir}, Log: slog.New(slog.DiscardHandler)})
	require.NoError(b, err)
	p := &placedBench{TB: b, Host: h, keys: keys(1, benchBlocks)}
	b.Cleanup(func() {
		go func() {
			for range h.Events() { // what nobody waits for
			}
		}()
		require.NoError(b, h.Close(context.Background()))
	})
	p.plugin = ^int32(h.gen.pid())<<3 | 2 // clock_getcpuclockid(3) of Linux
	tr := transfer("save", p.keys, 0)
	p.do(&connector.Step{Arrived: []connector.Query{query("save", p.keys)}, Computed: []connector.Transfer{tr}}, Saved)
	return p
}

// do takes a step, and waits for the event that ends it.
func (p *placedBench) do(s *connector.Step, kind EventKind) {
	p.step++
	s.ID = p.step
	p.Step(s)
	for {
		select {
		case e, open := <-p.Events():
			require.True(p, open)
			if e.Kind == kind {
				require.Empty(p, e.Failed)
				return
			}
		case <-p.stuck:
			p.FailNow()
		}
	}
}

// cpu is the processor time of both processes.
func (p *placedBench) cpu() (sum time.Duration) {
	for _, clock := range []int32{unix.CLOCK_PROCESS_CPUTIME_ID, p.plugin} {
		var t unix.Timespec
		require.NoError(p, unix.ClockGettime(clock, &t))
		sum += time.Duration(t.Nano())
	}
	return sum
}

// lookUp asks for 32 blocks.
func (p *placedBench) lookUp(int) {
	m := p.Probe(p.Context(), connector.Query{Tokens: 33 * blockTokens, Keys: p.keys[:32]})
	require.Equal(p, 32*blockTokens, m.Tokens)
}

// loadOne loads a block.
func (p *placedBench) loadOne(n int) { p.load(n%benchBlocks, 1) }

// load loads blocks that were saved to the places behind them, as the engine does for an admitted request.
func (p *placedBench) load(at, n int) (to []connector.Block) {
	s := &connector.Step{}
	if p.last != "" {
		s.Ended = []connector.Ended{{Request: p.last, Reason: connector.ReasonLength, Tokens: blockTokens}}
	}
	p.last = connector.RequestID(fmt.Sprint("load ", p.step))
	keys := p.keys[at : at+n]
	to = blocksOf(keys, benchBlocks)
	s.Arrived = []connector.Query{query(string(p.last), keys)}
	s.Admitted = []connector.Transfer{{Request: p.last, Tokens: n * blockTokens, Blocks: to}}
	p.do(s, Loaded)
	return to
}

// BenchmarkPlacement asks and loads by message and from the index, in turns in one run: the median time, and the processor time of both
// processes. The caller of what is timed did other work for 20 ms before, or nothing else.
func BenchmarkPlacement(b *testing.B) {
	for _, size := range []struct {
		name   string
		layers int
	}{{"48KB", 2}, {"737KB", 30}} {
		p := newPlacedBench(b, size.layers)
		for _, op := range []struct {
			name string
			run  func(int)
		}{{"lookup of 32", p.lookUp}, {"load of 1", p.loadOne}} {
			for name, other := range map[string]time.Duration{"hot": 0, "after 20 ms": 20 * time.Millisecond} {
				b.Run(size.name+"/"+op.name+"/"+name, func(b *testing.B) { p.compare(b, op.run, other) })
			}
		}
	}
}

func (p *placedBench) compare(b *testing.B, run func(int), other time.Duration) {
	const round = 10 // calls of one way before the other's turn
	var took [2][]time.Duration
	var cpu [2]time.Duration
	for n := 0; b.Loop(); n++ {
		for way := range 2 {
			p.place.resets.Load().Store(int32(1 - way))
			began, idle := p.cpu(), time.Duration(0)
			for i := range round {
				idle += p.work(other)
				at := time.Now()
				run(n*round + i)
				took[way] = append(took[way], time.Since(at))
			}
			cpu[way] += p.cpu() - began - idle
		}
	}
	p.place.resets.Load().Store(0)
	b.ReportMetric(0, "ns/op")
	for way, name := range []string{"message", "index"} {
		slices.Sort(took[way])
		b.ReportMetric(float64(took[way][len(took[way])/2].Nanoseconds())/1e3, name+"-us")
		b.ReportMetric(float64(cpu[way].Nanoseconds())/1e3/float64(len(took[way])), name+"-cpu-us")
	}
}

// work is other work of the caller, and says how much processor time it took.
func (p *placedBench) work(d time.Duration) time.Duration {
	began, end := p.cpu(), time.Now().Add(d)
	for data := make([]byte, 1<<20); time.Now().Before(end); {
		for i := range data {
			data[i]++
		}
	}
	return p.cpu() - began
}
