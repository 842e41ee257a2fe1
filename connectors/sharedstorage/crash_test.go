package sharedstorage_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
)

const (
	crashBlocks = 64 // saved at a time; the upper half of the cache is for loading them
	crashBytes  = 256 << 10
)

// engine is one life of an engine with its plugin.
type engine struct {
	t         *testing.T
	region    *host.Region
	kv        *connector.KV
	process   *host.Process
	scheduler connector.Scheduler
	worker    connector.Worker
}

func start(t *testing.T, path string, config json.RawMessage) *engine {
	t.Helper()
	e := &engine{t: t}
	layout := connector.Layout{
		Name: "plain", Blocks: 2 * crashBlocks,
		Groups:   []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}},
		Segments: []connector.Segment{{BlockStride: crashBytes, Bytes: crashBytes}},
	}
	var err error
	e.region, err = host.NewRegion(2 * crashBlocks * crashBytes)
	require.NoError(t, err)
	e.kv, err = connector.NewKV(layout, [][]byte{e.region.Bytes()})
	require.NoError(t, err)
	e.process, err = host.Launch(t.Context(), path, host.LaunchOptions{Regions: []*host.Region{e.region}})
	require.NoError(t, err)
	env := connector.Env{Engine: "crash", Epoch: 1, Role: connector.RoleBoth, World: 1, Layout: layout, Log: slog.New(slog.DiscardHandler)}
	e.scheduler, err = e.process.OpenScheduler(t.Context(), env, config)
	require.NoError(t, err)
	e.worker, err = e.process.OpenWorker(t.Context(), env, config)
	require.NoError(t, err)
	return e
}

// end kills the plugin, if it lives, and frees the cache.
func (e *engine) end() {
	e.process.Kill()
	<-e.process.Done()
	require.NoError(e.t, e.region.Close())
}

// prompt gives the keys of round n.
func prompt(n int) []connector.BlockKey {
	space := connector.KeySpace{Salt: "crash"}
	tokens := make([]int32, 16*crashBlocks)
	tokens[0] = int32(n)
	return space.Keys(tokens, 16)
}

func transfer(keys []connector.BlockKey, first int) *connector.Transfer {
	t := &connector.Transfer{Request: "r", Tokens: 16 * len(keys)}
	for i, k := range keys {
		t.Blocks = append(t.Blocks, connector.Block{Key: k, ID: connector.BlockID(first + i)})
	}
	return t
}

// fill writes a block whose every word tells its key and place.
func fill(view []byte, k connector.BlockKey) {
	seed := binary.LittleEndian.Uint64(k[:])
	for i := 0; i < len(view); i += 8 {
		binary.LittleEndian.PutUint64(view[i:], seed+uint64(i))
	}
}

// A plugin that is killed in the middle of saving leaves whole blocks or none (rule WORK-08), and
// its temporary files are no block.
func TestKilledWhileSaving(t *testing.T) {
	const kills = 8
	path := filepath.Join(t.TempDir(), "kvport-sharedstorage")
	output, err := exec.Command("go", "build", "-buildvcs=false", "-o", path, "../../plugins/sharedstorage").CombinedOutput()
	require.NoError(t, err, "%s", output)
	folder := t.TempDir()
	config, err := json.Marshal(map[string]string{"shared_storage_path": folder})
	require.NoError(t, err)

	interrupted, torn := 0, 0
	for n := range kills {
		e := start(t, path, config)
		save := transfer(prompt(n), 0)
		for _, b := range save.Blocks {
			fill(e.kv.View(0, b.ID), b.Key)
		}
		kill := time.AfterFunc(time.Duration(1+n)*1500*time.Microsecond, e.process.Kill)
		if e.worker.Save(t.Context(), save, e.kv) != nil {
			interrupted++
		}
		kill.Stop()
		e.end()
	}
	leftovers, err := os.ReadDir(filepath.Join(folder, "tmp"))
	require.NoError(t, err)

	e := start(t, path, config)
	defer e.end()
	found, want := 0, make([]byte, crashBytes)
	for n := range kills {
		keys := prompt(n)
		for i, k := range keys { // each by itself: blocks are saved in any order
			ms, err := e.scheduler.Match(context.Background(), []connector.Query{{Request: "r", Tokens: 17, Keys: keys[i : i+1]}})
			require.NoError(t, err)
			if ms[0].Tokens == 0 {
				continue
			}
			found++
			load := transfer(keys[i:i+1], crashBlocks)
			require.NoError(t, e.worker.Load(t.Context(), load, e.kv))
			fill(want, k)
			if string(want) != string(e.kv.View(0, crashBlocks)) {
				torn++
			}
		}
	}
	require.Zero(t, torn)
	require.Positive(t, interrupted)
	t.Logf("%d of %d saves interrupted by SIGKILL, %d temporary files left, %d of %d blocks stored, %d torn",
		interrupted, kills, len(leftovers), found, kills*crashBlocks, torn)
}
