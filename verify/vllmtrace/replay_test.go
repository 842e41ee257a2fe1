package vllmtrace

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
)

// pluginFolder holds the shared storage plugin.
var pluginFolder string

func TestMain(m *testing.M) { os.Exit(withPlugin(m)) }

func withPlugin(m *testing.M) int {
	dir, err := os.MkdirTemp("", "vllmtrace")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	pluginFolder = dir
	build := exec.Command("go", "build", "-o", filepath.Join(dir, "kvport-sharedstorage"), "github.com/kvport/kvport/plugins/sharedstorage")
	if out, err := build.CombinedOutput(); err != nil {
		panic(fmt.Sprintf("build the plugin: %v\n%s", err, out))
	}
	return m.Run()
}

// rig is a host with a real plugin process and the traced cache, in which the content of a full
// block is a function of its key, the layer and the rank.
type rig struct {
	t     *testing.T
	host  *host.Host
	eng   host.Engine
	store string
	kvs   []*connector.KV
	seen  map[host.EventKind]int

	tolerant bool // the replay ends before its time
}

// newRig opens a host for the cache of a trace. The sizes of blocks are divided by scale; their
// number, their tokens and the order of the layers are the trace's.
func newRig(t *testing.T, log *Log, ranks int, scale int64) *rig {
	t.Helper()
	var init *InitCall
	var register *RegisterCall
	for _, c := range log.Calls {
		switch b := c.Body.(type) {
		case *InitCall:
			init = b
		case *RegisterCall:
			register = b
		}
	}
	layout, storage, err := LayoutOf(init, register)
	require.NoError(t, err)
	require.Equal(t, []int{66, 32, 30}, []int{layout.Blocks, layout.Groups[0].BlockTokens, len(layout.Segments)})
	require.Equal(t, storage, int64(layout.Blocks)*layout.BlockBytes(0))
	for i := range layout.Segments {
		s := &layout.Segments[i]
		s.Offset, s.BlockStride, s.Bytes = s.Offset/scale, s.BlockStride/scale, s.Bytes/scale
	}
	layout, size := host.WithDigests(layout)
	r := &rig{t: t, store: t.TempDir(), seen: map[host.EventKind]int{}}
	r.eng = host.Engine{Model: connector.NewFingerprint("model"), Shape: connector.NewFingerprint("shape", init.EngineID), Layout: layout}
	for range ranks {
		region, err := host.NewRegion(size)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, region.Close()) })
		kv, err := connector.NewKV(layout, [][]byte{region.Bytes()})
		require.NoError(t, err)
		r.eng.Ranks, r.kvs = append(r.eng.Ranks, region), append(r.kvs, kv)
	}
	r.open(init.EngineID)
	return r
}

func (r *rig) open(engine string) {
	extra, err := json.Marshal(r.store)
	require.NoError(r.t, err)
	cfg, err := host.ParseConfig(fmt.Sprintf(`{"kv_connector":"ExampleConnector","kv_role":"kv_both","engine_id":%q,
		"kv_connector_extra_config":{"shared_storage_path":%s},"kvport":{"heartbeat":{"limit":"1m"},"deadlines":{"later":"1m","transfer":"1m","save":"1m","finish":"1m"}}}`, engine, extra)) // a busy machine is no fault
	require.NoError(r.t, err)
	leaks := goleak.IgnoreCurrent()
	opts := host.Options{PluginPath: []string{pluginFolder}, Metrics: prometheus.NewRegistry()}
	if testing.Verbose() {
		opts.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	}
	r.host, err = host.Open(r.t.Context(), cfg, r.eng, opts)
	require.NoError(r.t, err)
	r.t.Cleanup(func() {
		late := 0
		done := make(chan struct{})
		go func() {
			defer close(done)
			for range r.host.Events() {
				late++
			}
		}()
		require.NoError(r.t, r.host.Close(context.WithoutCancel(r.t.Context())))
		<-done
		require.True(r.t, late == 0 || r.tolerant, "%d events that nobody waited for", late)
		require.NoError(r.t, goleak.Find(leaks))
	})
}

func (r *rig) Match(q connector.Query, ticket []byte) connector.Match { return r.host.Match(q, ticket) }
func (r *rig) Step(s *connector.Step)                                 { r.host.Step(s) }

func (r *rig) Next() (Event, error) {
	timeout := time.NewTimer(30 * time.Second)
	defer timeout.Stop()
	select {
	case e := <-r.host.Events():
		kinds := map[host.EventKind]EventKind{host.Loaded: Loaded, host.Saved: Saved, host.Finished: Finished, host.Answered: Answered}
		r.seen[e.Kind]++
		return Event{Kind: kinds[e.Kind], Request: e.Request, Blocks: e.Blocks, Failed: e.Failed}, nil
	case <-timeout.C:
		return Event{}, errors.New("no event for 30 seconds")
	}
}

// each visits every layer of some blocks with what belongs there.
func (r *rig) each(blocks []connector.Block, visit func(b connector.Block, view, want []byte)) {
	var want []byte
	for rank, kv := range r.kvs {
		for _, b := range blocks {
			segments := kv.Segments(b.Group)
			for layer, segment := range segments[:len(segments)-1] { // the last holds the digests
				view := kv.View(segment, b.ID)
				want = slices.Grow(want[:0], len(view))[:len(view)]
				word := binary.LittleEndian.Uint64(b.Key[:]) ^ uint64(layer+1)<<48 ^ uint64(rank+1)<<40
				for i := 0; i+8 <= len(want); i += 8 {
					word = word*6364136223846793005 + 1442695040888963407
					binary.LittleEndian.PutUint64(want[i:], word)
				}
				visit(b, view, want)
			}
		}
	}
}

// Write implements Engine. A partial block gets a few bytes that no full block begins with.
func (r *rig) Write(blocks []connector.Block) {
	r.each(blocks, func(b connector.Block, view, want []byte) {
		if b.Key == (connector.BlockKey{}) {
			want = want[:64]
		}
		copy(view, want)
	})
}

// Wrong implements Engine.
func (r *rig) Wrong(blocks []connector.Block) []connector.BlockID {
	wrong := map[connector.BlockID]bool{}
	r.each(blocks, func(b connector.Block, view, want []byte) {
		if !bytes.Equal(view, want) {
			wrong[b.ID] = true
		}
	})
	return slices.Sorted(maps.Keys(wrong))
}

// Fail implements Engine: it changes one byte of every block's file, of each rank in turn.
func (r *rig) Fail(blocks []connector.Block) (func(), error) {
	files := map[string]bool{}
	for i, b := range blocks {
		shard := connector.Shard{Rank: i % len(r.kvs), World: len(r.kvs)}
		files[connector.NewStoreKey(b.Key, r.eng.Shape, b.Group, shard).String()] = true
	}
	var paths []string
	err := filepath.WalkDir(r.store, func(path string, d fs.DirEntry, err error) error {
		if err == nil && files[d.Name()] {
			paths = append(paths, path)
		}
		return err
	})
	if err != nil || len(paths) != len(blocks) {
		return nil, fmt.Errorf("%d files of %d blocks: %w", len(paths), len(blocks), err)
	}
	flip := func() {
		for _, p := range paths {
			flipByte(r.t, p)
		}
	}
	flip()
	return flip, nil
}

func flipByte(t *testing.T, path string) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return // the connector has removed what it found damaged
	}
	require.NoError(t, err)
	defer f.Close()
	st, err := f.Stat()
	require.NoError(t, err)
	var b [1]byte
	_, err = f.ReadAt(b[:], st.Size()/2)
	require.NoError(t, err)
	b[0] ^= 0x10
	_, err = f.WriteAt(b[:], st.Size()/2)
	require.NoError(t, err)
}

// Every call of a real vLLM maps to the contract, and what the host does in answer keeps every
// invariant that can be checked from outside.
func TestReplay(t *testing.T) {
	for _, c := range []struct {
		trace  string
		eager  bool
		ranks  int
		scale  int64
		offers int // that differ, all after a load that left nothing valid
		loads  int
		failed int
	}{
		{trace: "async", ranks: 1, scale: 1, loads: 2},
		{trace: "async", eager: true, ranks: 2, scale: 16, loads: 2},
		{trace: "serve", ranks: 1, scale: 1, offers: 4, loads: 8, failed: 6},
		{trace: "serve", eager: true, ranks: 2, scale: 16, offers: 4, loads: 8, failed: 6},
	} {
		t.Run(fmt.Sprintf("%s eager=%t ranks=%d", c.trace, c.eager, c.ranks), func(t *testing.T) {
			if testing.Short() && c.ranks == 1 {
				t.Skip("with -short, which the race stage uses, only the case with more goroutines; make test runs all")
			}
			log := readTrace(t, c.trace)
			chains, err := ChainsOf(log)
			require.NoError(t, err)
			r := newRig(t, log, c.ranks, c.scale)
			out, err := Replay(log, chains, r, r, Options{Model: r.eng.Model, Eager: c.eager})
			require.NoError(t, err)
			require.Equal(t, log.Count(), out.Mapped, "calls that were not mapped")
			for _, k := range slices.Sorted(maps.Keys(out.Mapped)) {
				t.Logf("%4d %s", out.Mapped[k], k)
			}
			for _, v := range Check(out.Log) {
				t.Error(v)
			}
			require.Len(t, out.Offers, c.offers)
			for _, o := range out.Offers {
				require.True(t, o.Emptied && o.Answered == 0, "%+v", o)
			}
			require.Equal(t, []int{c.loads, c.failed}, []int{out.Loads, out.Failed})
			require.Equal(t, []int{out.Loads, out.Saves, log.Count()[RequestFinished]},
				[]int{r.seen[host.Loaded], r.seen[host.Saved], r.seen[host.Finished]}, "one event for each")
			require.Zero(t, r.host.Health().Pending)
			t.Logf("%d calls mapped, 0 unmapped; %d invariants kept; %d loads (%d fail as in the trace), %d saves of %d blocks, %d waits for a save, %d blocks compared, 0 wrong; %d offers denied by invariant 45",
				len(log.Calls)-1, len(Rules()), out.Loads, out.Failed, out.Saves, out.Blocks, out.Waits, out.Verified, len(out.Offers))
		})
	}
}
