package bench

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/mac"
	"github.com/kvport/kvport/native/nixl"
	"github.com/kvport/kvport/native/ucx"
	"github.com/kvport/kvport/verify/fixture"
)

// pluginFolder holds the plugins of shared storage and offloading, remoteFolder that of remote stores, holderFolder one that holds blocks.
var pluginFolder, remoteFolder, holderFolder string

func TestMain(m *testing.M) {
	host.SandboxMain()
	ServePlugin()
	dir, err := os.MkdirTemp("", "benchtest")
	if err != nil {
		panic(err)
	}
	pluginFolder = dir
	remoteFolder, holderFolder = filepath.Join(dir, "remote"), filepath.Join(dir, "holder")
	for name, folder := range map[string]string{"sharedstorage": dir, "offload": dir, "p2p": dir, "remote": remoteFolder, "nixl": holderFolder} {
		build := exec.Command("go", "build", "-o", filepath.Join(folder, "kvport-"+name), "../../plugins/"+name)
		if out, err := build.CombinedOutput(); err != nil {
			panic(string(out))
		}
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if err := os.RemoveAll(dir); err != nil {
			panic(err)
		}
		os.Exit(code)
	}))
}

func self(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	require.NoError(t, err)
	return path
}

// collect gives an Emit and the rows that it got.
func collect() (Emit, *[]Row) {
	rows := new([]Row)
	return func(r Row) error { *rows = append(*rows, r); return nil }, rows
}

func requireRows(t *testing.T, rows []Row, names ...string) {
	t.Helper()
	byName := map[string]Row{}
	for _, r := range rows {
		require.NotContains(t, byName, r.Name)
		byName[r.Name] = r
	}
	for _, name := range names {
		require.Contains(t, byName, name)
		require.NotNil(t, byName[name].Value, name)
	}
}

func TestPlaced(t *testing.T) {
	emit, rows := collect()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "peers.json"), []byte(`{"lmcache":{"absent":"too large"}}`), 0o600))
	o := PlacedOptions{Model: tiny, Threads: 2, PluginPath: []string{pluginFolder}, Peers: true, PeersDir: dir, Quick: true, Emit: emit}
	require.NoError(t, Placed(t.Context(), o))
	for _, want := range []string{"1 x 48 KB : lmcache (too large)", "1 x 48 KB : mooncake (" + notInstalled + ")"} {
		require.True(t, slices.ContainsFunc(*rows, func(r Row) bool { return r.Name == want && r.Unit == "absent" }), want)
	}
	requireRows(t, *rows, "save of 1 x 48 KB, the first into its memory",
		"lookup of 32 keys of 48 KB, after 20ms of other work", "lookup of 128 keys of 48 KB, hot, processor time",
		"load of 128 x 48 KB, after 20ms of other work", "load of 128 x 48 KB, hot : copy, then digest, 95 % to",
		"ITL beside loads of 32 x 48 KB without end, 95 % to", "loads of 32 x 48 KB beside decoding : copies beside it",
		"load of all batches of 737 KB, hot, 95 % from", "save of 32 x 737 KB, hot, processor time : copy, then digest")
	require.False(t, slices.ContainsFunc(*rows, func(r Row) bool { return strings.Contains(r.Name, "8 MiB") }))
	o.Only = "9 MiB"
	require.ErrorContains(t, Placed(t.Context(), o), "no size of blocks has \"9 MiB\" in it")
}

// Another store moves the same blocks in turns with ours. One that ends, or is not there, says so in a row.
func TestPlacedBesidePeer(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3")
	}
	emit, _ := collect()
	p, err := openPlaced(t.Context(), PlacedOptions{PluginPath: []string{pluginFolder}, Quick: true, Emit: emit}, placedShape{shape{"48 KB", 2, 24 << 10, 0}, []int{1, 8}})
	require.NoError(t, err)
	defer func() { require.NoError(t, p.close()) }()
	require.NoError(t, p.fill(t.Context()))
	ours, theirs, err := p.duel(t.Context(), 2, p.load, func() (float64, error) { return 0.5, nil })
	require.NoError(t, err)
	require.Len(t, ours, 3)
	require.Equal(t, []float64{500_000, 500_000, 500_000}, theirs)
	why, err := p.against(t.Context(), &fixture.Rival{Name: "nobody"}, installed{Python: python}, 1)
	require.NoError(t, err)
	require.NotEmpty(t, why)
}

func TestTransfer(t *testing.T) {
	useNative(t)
	emit, rows := collect()
	dir := t.TempDir()
	require.NoError(t, Transfer(t.Context(), TransferOptions{
		Self: self(t), PluginPath: []string{pluginFolder}, Dir: dir, Quick: true, Emit: emit,
	}))
	requireRows(t, *rows, "save 48 KB", "load+digest 48 KB x 32", "save+digest 737 KB", "load 8 MB", "op round trip, ring", "op round trip, stream",
		"file load 737 KB", "file load 8 MB", "lookup of 32 keys, warm", "plugin restart after kill -9",
		"tcp pipe 8 MiB of 48 KB", "tcp pipe+digest 64 MiB of 1 MiB", "shm pipe 64 MiB of 1 MiB : memcpy", "raw tcp 8 MiB of 48 KB : memcpy")
	for _, r := range *rows {
		if r.Unit == "absent" {
			require.Regexp(t, "safetensors .*no --peer-python|shm pipe.*no digests|(raw|connector).*(make deps|no plugin is called)", r.Name)
			require.Nil(t, r.OK)
			continue
		}
		require.Positive(t, *r.Value, r.Name)
		require.Positive(t, *r.Limit, r.Name)
		require.Positive(t, *r.Ratio, r.Name)
	}
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left, "stored blocks are removed")
}

// useNative has the libraries of make deps found by a program that does not lie in bin.
func useNative(t *testing.T) {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join("..", "..", ".deps", "nixl"))
	require.NoError(t, err)
	for _, name := range []string{nixl.EnvDir, ucx.EnvDir} {
		t.Setenv(name, dir)
	}
	t.Setenv("UCX_MODULES", "^ib") // native/nixl says why
}

// TestTransports: what can be used here is measured and compared with what it is made of, what cannot is named.
func TestTransports(t *testing.T) {
	useNative(t)
	if _, err := nixl.Open(""); err != nil {
		t.Skip("NIXL AND UCX ARE NOT MEASURED: run make deps")
	}
	emit, rows := collect()
	options := TransferOptions{Self: self(t), PluginPath: []string{pluginFolder}, Only: "transports", Quick: true, Emit: emit}
	require.NoError(t, Transfer(t.Context(), options))
	for _, suffix := range []string{" 8 MiB of 48 KB", "+digest 8 MiB of 48 KB", " 64 MiB of 1 MiB", "+digest 64 MiB of 1 MiB"} {
		requireRows(t, *rows, "raw nixl"+suffix+" : memcpy", "raw nixl write"+suffix+" : memcpy", "raw ucx"+suffix+" : memcpy", "raw tcp"+suffix+" : memcpy", "tcp pipe"+suffix)
	}
	options.Only = "sockets"
	require.NoError(t, Transfer(t.Context(), options))
	requireRows(t, *rows, "raw nixl write over tcp 1 MiB")
	options.Only = "nothing"
	require.ErrorContains(t, Transfer(t.Context(), options), "want blocks")
}

// TestStore measures every plugin a little; whatever cannot be measured here is a row that says why.
func TestStore(t *testing.T) {
	emit, rows := collect()
	dir := t.TempDir()
	options := StoreOptions{Self: self(t), PluginPath: []string{pluginFolder}, Dir: dir, Server: filepath.Join("..", "..", ".deps", "valkey", "valkey-server"), Quick: true, Emit: emit}
	require.NoError(t, Store(t.Context(), options))
	requireRows(t, *rows, "offloading, memory store 1.41 MiB", "offloading, memory load+digest 8 MiB x 4", "offloading, disk load 8 MiB",
		"shared storage, tmpfs store+digest 1.41 MiB", "pipe, tcp 8 MiB", "pipe, tcp+digest 1.41 MiB x 16")
	for _, r := range *rows {
		require.NotContains(t, r.Name, "disk store", "it is acknowledged in memory")
		if r.Unit == "absent" {
			continue
		}
		require.Positive(t, *r.Value, r.Name)
		require.Positive(t, *r.Limit, r.Name)
		require.Positive(t, *r.Ratio, r.Name)
	}
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left, "stored blocks are removed")
}

// TestStoreWithoutServer: what needs a server is named, not left out in silence.
func TestStoreWithoutServer(t *testing.T) {
	emit, rows := collect()
	options := StoreOptions{Self: self(t), PluginPath: []string{remoteFolder}, Only: "redis", Dir: t.TempDir(), Server: filepath.Join(t.TempDir(), "none"), Quick: true, Emit: emit}
	require.NoError(t, Store(t.Context(), options))
	require.Len(t, *rows, 1)
	require.Equal(t, "absent", (*rows)[0].Unit)
	require.Contains(t, (*rows)[0].Name, "remote store, redis (")
	require.Contains(t, (*rows)[0].Name, "no such file")
}

// TestStorePeers: a peer that is not installed, does not work or does not answer is named with the reason.
func TestStorePeers(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3")
	}
	emit, rows := collect()
	dir := t.TempDir()
	options := StoreOptions{Self: self(t), PluginPath: []string{pluginFolder}, Dir: dir, Peers: true, PeersDir: dir, Quick: true, Emit: emit}
	for _, options.Only = range []string{"lmcache", "mooncake", "safetensors"} {
		require.NoError(t, Store(t.Context(), options))
	}
	require.Len(t, *rows, 3)
	for _, r := range *rows {
		require.Contains(t, r.Name, "not installed, run python3 verify/bench/peers/setup.py")
	}
	installed := fmt.Sprintf(`{"lmcache":{"absent":"too large"},"mooncake":{"python":%q,"path":""},"safetensors":{"python":%q,"path":""}}`, python, python)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "peers.json"), []byte(installed), 0o600))
	*rows = nil
	for _, options.Only = range []string{"lmcache", "mooncake"} {
		require.NoError(t, Store(t.Context(), options))
	}
	require.Len(t, *rows, 2)
	require.Equal(t, "lmcache (too large)", (*rows)[0].Name)
	require.Equal(t, "absent", (*rows)[1].Unit)
	require.Contains(t, (*rows)[1].Name, "mooncake (")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "peers.json"), []byte("{"), 0o600))
	require.ErrorContains(t, Store(t.Context(), options), "peers.json")
}

func TestEngine(t *testing.T) {
	emit, rows := collect()
	require.NoError(t, Engine(t.Context(), EngineOptions{
		Model: tiny, PluginPath: []string{pluginFolder}, Dir: t.TempDir(), Threads: 2, Quick: true, Emit: emit,
	}))
	requireRows(t, *rows, "decode batch 1, 2 threads", "decode batch 8, 2 threads", "first token of a hit, 64 tokens",
		"digests of a hit, share of first token", "digests of a hit, XXH3-128, share of first token", "added to a step without transfers",
		"first token of a hit, 64 tokens, keyed : XXH3-128", "first token of a hit, 64 tokens, keyed : XXH3-128, 95 % to", "step with saves, keyed : XXH3-128",
		"step with saves, keyed : XXH3-128, 95 % from")
	if !slices.ContainsFunc(*rows, func(r Row) bool { return strings.Contains(r.Name, "there is no sandbox") }) {
		requireRows(t, *rows, "first token of a hit, 64 tokens, sandbox : without", "first token of a hit, 64 tokens, sandbox : without, 95 % from",
			"8 requests, 4 at a time, sandbox : without", "8 requests, 4 at a time, sandbox : without, 95 % to")
	}
	text := new(bytes.Buffer)
	for _, r := range *rows {
		require.NoError(t, Text(text)(r))
	}
	require.Contains(t, text.String(), "llama.cpp (no --peer-python)")
	require.Contains(t, text.String(), "prefill 64, 1 thread (tiny-random has no file)")
}

func TestLayerWise(t *testing.T) {
	emit, rows := collect()
	require.NoError(t, LayerWise(t.Context(), EngineOptions{Model: tiny, PluginPath: []string{pluginFolder}, Threads: 2, Quick: true, Emit: emit}))
	requireRows(t, *rows, "layer 0 computed", "layer 0 confirmed", "last layer's compute ends",
		"layer-wise save, bytes confirmed before the last layer's compute ends", "prompt of 128 tokens, computed beside its save")
}

func TestOverlap(t *testing.T) {
	useNative(t)
	if _, err := nixl.Open(""); err != nil {
		t.Skip("LOADS BY LAYERS ARE NOT MEASURED: run make deps")
	}
	emit, rows := collect()
	require.NoError(t, Overlap(t.Context(), EngineOptions{Model: tiny, PluginPath: []string{holderFolder}, Threads: 2, Quick: true, Emit: emit}))
	requireRows(t, *rows, "the load is over", "the first token is there", "first token of 128 loaded tokens, layer by layer beside whole")
}

// TestOverlapPlaced: the same with a connector whose memory the host reads itself.
func TestOverlapPlaced(t *testing.T) {
	list, err := fixtures()
	require.NoError(t, err)
	tier, err := list.Typical(fixture.Tier)
	require.NoError(t, err)
	emit, rows := collect()
	require.NoError(t, Overlap(t.Context(), EngineOptions{Model: tiny, PluginPath: []string{pluginFolder}, Connector: tier.Connector, Threads: 2, Quick: true, Emit: emit}))
	requireRows(t, *rows, "the load is over", "the first token is there", "first token of 128 loaded tokens, layer by layer beside whole")
}

// TestDigest: every digest and copy is measured, and lies between what its median is said to be.
func TestDigest(t *testing.T) {
	emit, rows := collect()
	require.NoError(t, Digest(t.Context(), DigestOptions{Quick: true, Emit: emit}))
	aegis := "AEGIS-128X2 (" + mac.Implementation() + ")"
	requireRows(t, *rows, "digest 64 bytes, XXH3-128", "digest 24 KB, HMAC-SHA256", "digest 8 MB, copy", "digest 1 MB, "+aegis, "digest 1 MB, "+aegis+", 95 % from",
		"copy 24 KB, hot, alone", "copy 1 MB, hot, "+aegis+" in one pass, save", "copy 8 MB, cold, "+aegis+" in one pass, load",
		"copy 1 MB, cold, "+aegis+" in 4 KB", "copy 8 MB, cold, XXH3-128 after all", "copy 8 MB, hot, "+aegis+" in 16 KB, 95 % to")
	for i, r := range *rows {
		require.Positive(t, *r.Value, r.Name)
		if r.Unit == "ratio" {
			continue
		}
		require.Positive(t, *r.Limit, r.Name)
		if !strings.HasSuffix(r.Name, ", XXH3-128") && !strings.HasSuffix(r.Name, ", alone") {
			require.LessOrEqual(t, *(*rows)[i+1].Value, *r.Ratio, r.Name)
			require.GreaterOrEqual(t, *(*rows)[i+2].Value, *r.Ratio, r.Name)
		}
	}
}

// However many ratios there are, the interval holds the median of all that could have been in 95 % of the cases: by the binomial
// distribution of how many of them lie below it.
func TestMedianInterval(t *testing.T) {
	for n := 10; n < 300; n++ {
		ratios := make([]float64, n)
		for i := range ratios {
			ratios[i] = float64(n - i)
		}
		low, median, high := medianInterval(ratios)
		require.Equal(t, float64(n+1)/2, median)
		require.Equal(t, float64(n+1), low+high)
		all, _ := math.Lgamma(float64(n + 1))
		within := 0.0
		for below := low; below < high; below++ {
			a, _ := math.Lgamma(below + 1)
			b, _ := math.Lgamma(float64(n) - below + 1)
			within += math.Exp(all - a - b - float64(n)*math.Ln2)
		}
		require.Greater(t, within, 0.95, n)
		require.Less(t, within, 0.999, n)
	}
	low, median, high := medianInterval([]float64{3, 1})
	require.Equal(t, []float64{1, 2, 3}, []float64{low, median, high})
}

// TestRoute: behind each router all requests are answered, and the rows say how the ways to route compare.
func TestRoute(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "kvport")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "../../cmd/kvport").CombinedOutput()
	require.NoError(t, err, string(out))
	emit, rows := collect()
	options := RouteOptions{EngineOptions: EngineOptions{Model: tiny, PluginPath: []string{pluginFolder}, Quick: true, Emit: emit}, Self: binary}
	require.NoError(t, Route(t.Context(), options))
	var names []string
	for _, way := range []string{"always prefill", "never prefill"} {
		name := "first token, pd_aware : " + way
		names = append(names, name, name+", 96 % from", name+", 96 % to")
	}
	requireRows(t, *rows, append(names, "requests that pd_aware keeps from prefill")...)
	for i := 0; i < 6; i += 3 {
		ratio, low, high := *(*rows)[i].Ratio, *(*rows)[i+1].Value, *(*rows)[i+2].Value
		require.True(t, 0 < low && low <= ratio && ratio <= high, "%v to %v, %v", low, high, ratio)
	}
	options.Self = filepath.Join(t.TempDir(), "none")
	require.ErrorContains(t, Route(t.Context(), options), "no such file")
}

// The ways of a round get prompts of the same lengths, of which no two begin alike but those that go on from one before.
func TestRoutePrompts(t *testing.T) {
	begin := map[string]bool{}
	repeats := 0
	for round := range uint64(3) {
		first := routePrompts(round, 0, false)
		for way := range uint64(3) {
			for i, p := range routePrompts(round, way, false) {
				require.Len(t, p, len(first[i]))
				if text := fmt.Sprint(p[:16]); begin[text] {
					repeats++
				} else {
					begin[text] = true
				}
			}
		}
	}
	require.Equal(t, 3*3*3, repeats)
}

// The interval of the median of 12 ratios leaves out two at each end: by the binomial distribution it holds what the
// median of all rounds would be in 96 % of the cases.
func TestRouteInterval(t *testing.T) {
	var ratios []float64
	for i := range routeRounds {
		ratios = append(ratios, float64(routeRounds-i))
	}
	low, median, high := routeInterval(ratios)
	require.Equal(t, []float64{3, 6.5, 10}, []float64{low, median, high})
	outside, ways := 0.0, 1.0 // of a coin that is thrown 12 times: how often it shows heads at most twice
	for heads := range routeLeft + 1 {
		outside += ways / math.Exp2(routeRounds)
		ways = ways * float64(routeRounds-heads) / float64(heads+1)
	}
	require.InDelta(t, 0.96, 1-2*outside, 0.002)
}

func TestTransferWithoutPlugin(t *testing.T) {
	emit, _ := collect()
	err := Transfer(t.Context(), TransferOptions{Self: filepath.Join(t.TempDir(), "none"), Quick: true, Emit: emit})
	require.ErrorContains(t, err, "no such file")
}

// TestPeer uses an interpreter without the packages, which is the usual one.
func TestPeer(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3")
	}
	p, err := StartPeer(t.Context(), python, "none.gguf", 1)
	require.NoError(t, err)
	for range 2 {
		_, err = p.ask("nonsense")
		require.ErrorIs(t, err, errAbsent)
		require.ErrorContains(t, err, "KeyError")
	}
	require.NoError(t, p.Close())
	_, err = p.ask("prefill", 1)
	require.Error(t, err)
	require.NotErrorIs(t, err, errAbsent)

	_, err = StartPeer(t.Context(), filepath.Join(t.TempDir(), "python"), "", 1)
	require.ErrorContains(t, err, "start the peer")
	_, err = (*Peer)(nil).ask("prefill")
	require.ErrorIs(t, err, errAbsent)
	require.NoError(t, (*Peer)(nil).Close())
}

func TestRows(t *testing.T) {
	out := new(bytes.Buffer)
	emit := JSON(out)
	rows := []Row{
		faster("a", 10, 0.123456, 0.1, "GB/s")(atLeast(0.9)),
		faster("b", 0, 8, 10, "GB/s")(atLeast(0.9)),
		shorter("c", 0, 30, 10, "us")(atMost(20)),
		shorter("d", 0, 10, math.NaN(), "us")(budget{}),
		absent("e", "why"),
	}
	for _, r := range rows {
		require.NoError(t, emit(r))
	}
	require.Equal(t, `{"name":"a","bytes":10,"value":0.1235,"unit":"GB/s","limit":0.1,"ratio":1.235,"budget":"ratio >= 0.9","ok":true}
{"name":"b","bytes":0,"value":8,"unit":"GB/s","limit":10,"ratio":0.8,"budget":"ratio >= 0.9","ok":false}
{"name":"c","bytes":0,"value":30,"unit":"us","limit":10,"ratio":0.3333,"budget":"value <= 20","ok":false}
{"name":"d","bytes":0,"value":10,"unit":"us","limit":null,"ratio":null,"budget":"","ok":null}
{"name":"e (why)","bytes":0,"value":null,"unit":"absent","limit":null,"ratio":null,"budget":"","ok":null}
`, out.String())
	got, err := Read(out)
	require.NoError(t, err)
	require.Equal(t, rows, got)
	_, err = Read(bytes.NewBufferString(`{"name":"a"}{"nome":"b"}`))
	require.ErrorContains(t, err, "row 2")
	require.Equal(t, []string{"yes", "NO", "-"}, []string{rows[0].Verdict(), rows[1].Verdict(), rows[4].Verdict()})
}
