package agent

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// bin holds kvport, the plugin of shared storage and those of the tests of packages host and engine.
var bin string

func TestMain(m *testing.M) { os.Exit(withBinaries(m)) }

func withBinaries(m *testing.M) int {
	serveWrong()
	if os.Getenv(engineVariable) != "" {
		return playEngine()
	}
	dir, err := os.MkdirTemp("", "agenttest")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	bin = dir
	for name, pkg := range map[string]string{
		"kvport-sharedstorage": "plugins/sharedstorage", "kvport-test": "host/testdata/plugin", "kvport-hold": "engine/testdata/plugin", "kvport-tier": "plugins/offload", "kvport": "cmd/kvport",
	} {
		if out, err := exec.Command("go", "build", "-o", filepath.Join(dir, name), "github.com/kvport/kvport/"+pkg).CombinedOutput(); err != nil {
			panic(fmt.Sprintf("build %s: %v\n%s", pkg, err, out))
		}
	}
	return m.Run()
}

// The engine's prompts.
var blocksOf, transfer, query = testkit.Blocks, testkit.Transfer, testkit.Query

const (
	blockTokens = testkit.BlockTokens
	numBlocks   = 64
	blockBytes  = 512
	segments    = 2
)

// layout is the cache of the foreign engine: blocks interleave the layers.
func layout() connector.Layout {
	l := connector.Layout{Name: "test", Blocks: numBlocks, Groups: []connector.Group{{BlockTokens: blockTokens, Policy: connector.PolicyAll}}}
	for i := range segments {
		l.Segments = append(l.Segments, connector.Segment{Layer: i, Offset: int64(i) * blockBytes, BlockStride: segments * blockBytes, Bytes: blockBytes})
	}
	return l
}

// regionSize is as docs/agent.md tells shims to compute it.
func regionSize(l *connector.Layout) int64 {
	end := int64(0)
	for _, s := range l.Segments {
		end = max(end, s.Offset+int64(l.Blocks-1)*s.BlockStride+s.Bytes)
	}
	return end + int64(l.Blocks*(1+len(l.Segments)))*16 + 64
}

// config is a transfer config for shared storage in dir.
func config(dir string, settings map[string]any) string {
	deadlines := map[string]any{"handshake": "1m"}
	all := map[string]any{"heartbeat": map[string]any{"limit": "1m"}, "deadlines": deadlines} // a busy machine is no fault
	for name, value := range settings {
		if more, ok := value.(map[string]any); ok && name == "deadlines" {
			maps.Copy(deadlines, more)
			continue
		}
		all[name] = value
	}
	list, err := fixture.Tree(os.DirFS("../.."))
	if err != nil {
		panic(err)
	}
	store, err := list.Typical(fixture.Store)
	if err != nil {
		panic(err)
	}
	c, err := json.Marshal(map[string]any{
		"kv_connector": store.Connector, "kv_role": "kv_both", "kv_connector_extra_config": map[string]any{"shared_storage_path": dir}, "kvport": all,
	})
	if err != nil {
		panic(err)
	}
	return string(c)
}

// testAgent is an agent that runs in this process.
type testAgent struct {
	socket string
	stop   context.CancelFunc
	done   chan error
}

// open starts an agent in this process and makes sure that nothing of it is left at the end.
func open(t testing.TB, transfer string, change func(*limits)) *testAgent {
	t.Helper()
	return openFrom(t, bin, transfer, change)
}

// openFrom does so with the plugins of a folder.
func openFrom(t testing.TB, plugins, transfer string, change func(*limits)) *testAgent {
	t.Helper()
	cfg, err := host.ParseConfig(transfer)
	require.NoError(t, err)
	l := defaultLimits()
	l.stats = 50 * time.Millisecond
	if change != nil {
		change(&l)
	}
	dir, err := os.MkdirTemp("", "a") //nolint:usetesting // of mode 0700, and short
	require.NoError(t, err)
	leaks, fds := goleak.IgnoreCurrent(), descriptors(t)
	o := &testAgent{socket: filepath.Join(dir, "s"), done: make(chan error, 1)}
	var ctx context.Context
	ctx, o.stop = context.WithCancel(context.WithoutCancel(t.Context()))
	ready := make(chan struct{})
	c := Config{Transfer: cfg, PluginPath: []string{plugins}, Socket: o.socket, Ready: func() { close(ready) }}
	if testing.Verbose() {
		c.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	go func() { o.done <- run(ctx, c, l) }()
	select {
	case <-ready:
	case err := <-o.done:
		require.NoError(t, err)
	}
	t.Cleanup(func() {
		o.stop()
		require.NoError(t, <-o.done)
		left, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Empty(t, left, "socket or lock")
		require.NoError(t, os.Remove(dir))
		require.NoError(t, goleak.Find(leaks))
		require.Eventually(t, func() bool { return descriptors(t) <= fds }, time.Minute, 10*time.Millisecond)
	})
	return o
}

func descriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(entries)
}

// end waits until the agent has ended by itself.
func (o *testAgent) end(t testing.TB) {
	t.Helper()
	select {
	case err := <-o.done:
		require.NoError(t, err)
		o.done <- nil
	case <-time.After(time.Minute):
		require.FailNow(t, "the agent does not end")
	}
}

// process is one process of a foreign engine, as its shim would be: a connection, what it has been
// told, and the memory of its rank.
type process struct {
	t    testing.TB
	conn *net.UnixConn
	id   uint64
	mem  []byte
	file *os.File

	mu      sync.Mutex
	seen    []*kvportv1.AgentAnswer
	pidfds  []*os.File // of announced plugins
	changed chan struct{}
	over    chan struct{} // closed when the agent has ended the connection
}

func dial(t testing.TB, socket string) *process {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	require.NoError(t, err)
	p := &process{t: t, conn: c, changed: make(chan struct{}, 1), over: make(chan struct{})}
	go p.read()
	t.Cleanup(p.close)
	return p
}

func (p *process) close() {
	_ = p.conn.Close()
	<-p.over
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.pidfds {
		_ = f.Close()
	}
	p.pidfds = nil
	if p.mem != nil {
		_ = unix.Munmap(p.mem)
		_ = p.file.Close()
		p.mem = nil
	}
}

func (p *process) read() {
	defer close(p.over)
	in := &intake{conn: p.conn}
	for {
		frame, err := wire.ReadFrame(in)
		if err != nil {
			return
		}
		answer := &kvportv1.AgentAnswer{}
		if proto.Unmarshal(frame, answer) != nil {
			return
		}
		p.mu.Lock()
		p.pidfds, in.files = append(p.pidfds, in.files...), nil
		p.seen = append(p.seen, answer)
		p.mu.Unlock()
		select {
		case p.changed <- struct{}{}:
		default:
		}
	}
}

// find waits for a message that fits and takes it.
func (p *process) find(what string, fits func(*kvportv1.AgentAnswer) bool) *kvportv1.AgentAnswer {
	p.t.Helper()
	timeout := time.NewTimer(time.Minute)
	defer timeout.Stop()
	for over := false; ; {
		p.mu.Lock()
		for i, m := range p.seen {
			if fits(m) {
				p.seen = append(p.seen[:i], p.seen[i+1:]...)
				p.mu.Unlock()
				return m
			}
		}
		p.mu.Unlock()
		require.False(p.t, over, "the connection ended without %s", what)
		select {
		case <-p.changed:
		case <-p.over:
			over = true
		case <-timeout.C:
			require.FailNow(p.t, "no "+what)
		}
	}
}

// call sends a call and waits for its answer.
func (p *process) call(c *kvportv1.AgentCall) *kvportv1.AgentAnswer {
	p.t.Helper()
	p.post(c, nil)
	return p.answer(c.GetId())
}

func (p *process) answer(id uint64) *kvportv1.AgentAnswer {
	p.t.Helper()
	return p.find(fmt.Sprintf("answer to %d", id), func(m *kvportv1.AgentAnswer) bool { return m.GetId() == id })
}

// post sends a call with a descriptor beside it, and gives it an id unless it is a step.
func (p *process) post(c *kvportv1.AgentCall, file *os.File) {
	p.t.Helper()
	if _, step := c.GetCall().(*kvportv1.AgentCall_Step); !step {
		p.id++
		c.Id = p.id
	}
	frame, err := wire.AgentFrame(c)
	require.NoError(p.t, err)
	var oob []byte
	if file != nil {
		oob = unix.UnixRights(int(file.Fd()))
	}
	_, _, err = p.conn.WriteMsgUnix(frame, oob, nil)
	require.NoError(p.t, err)
}

func attachCall(a *wire.Attach) *kvportv1.AgentCall {
	m := &kvportv1.AgentAttach{Version: wire.AgentVersion, Side: a.Side, Engine: a.Engine}
	if a.Side == kvportv1.Side_SIDE_WORKER {
		m.Rank, m.World, m.Model, m.Shape, m.ShapeText = uint32(a.Rank), uint32(a.World), a.Model[:], a.Shape[:], a.ShapeText
		m.Layout, m.Region, m.Hashes, m.Events = wire.LayoutToProto(&a.Layout), uint64(a.Region), a.Hashes, a.Events
	}
	return &kvportv1.AgentCall{Call: &kvportv1.AgentCall_Attach{Attach: m}}
}

// scheduler attaches as the scheduler.
func scheduler(t testing.TB, socket string) *process {
	t.Helper()
	p := dial(t, socket)
	m := p.call(attachCall(&wire.Attach{Side: kvportv1.Side_SIDE_SCHEDULER, Engine: "e"}))
	require.Nil(t, m.GetError())
	require.NotZero(t, m.GetAttached().GetLife())
	require.True(t, m.GetAttached().GetLoads() && m.GetAttached().GetSaves())
	return p
}

// rankAt is how a rank describes itself.
func rankAt(rank, world int) *wire.Attach {
	l := layout()
	return &wire.Attach{
		Side: kvportv1.Side_SIDE_WORKER, Engine: "e", Rank: rank, World: world, Model: connector.NewFingerprint("model"),
		Shape: connector.NewFingerprint("shape"), ShapeText: "f32 isa=test", Layout: l, Region: regionSize(&l), Hashes: "vllm/sha256_cbor",
	}
}

// memory makes the region of a rank, as a shim does.
func (p *process) memory(size int64, seals int) {
	p.t.Helper()
	fd, err := unix.MemfdCreate("engine", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(p.t, err)
	require.NoError(p.t, unix.Ftruncate(fd, size))
	p.mem, err = unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(p.t, err)
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	require.NoError(p.t, err)
	p.file = os.NewFile(uintptr(fd), "memfd")
}

const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// post attaches a rank without waiting for the answer.
func worker(t testing.TB, socket string, a *wire.Attach) *process {
	t.Helper()
	p := dial(t, socket)
	p.memory(a.Region, seals)
	p.post(attachCall(a), p.file)
	return p
}

// attached waits for the answer to the first call.
func (p *process) attached() *kvportv1.AgentAttached {
	p.t.Helper()
	m := p.answer(1)
	require.Nil(p.t, m.GetError())
	require.NotNil(p.t, m.GetAttached())
	return m.GetAttached()
}

// hashes are an engine's own for a prompt of n full blocks.
func hashes(seed string, n int) []connector.BlockKey {
	out := make([]connector.BlockKey, n)
	for i := range out {
		out[i] = connector.BlockKey(connector.NewFingerprint("engine hash", seed, fmt.Sprint(i)))
	}
	return out
}

// each visits what belongs into blocks.
func (p *process) each(blocks []connector.Block, rank int, visit func(have, want []byte)) {
	for _, b := range blocks {
		for i := range segments {
			at := (int(b.ID)*segments + i) * blockBytes
			want := bytes.Repeat(b.Key[:], blockBytes/len(b.Key))
			binary.LittleEndian.PutUint32(want, uint32(rank<<8|i))
			visit(p.mem[at:at+blockBytes], want)
		}
	}
}

func (p *process) fill(blocks []connector.Block, rank int) {
	p.each(blocks, rank, func(have, want []byte) { copy(have, want) })
}

func (p *process) same(blocks []connector.Block, rank int) bool {
	same := true
	p.each(blocks, rank, func(have, want []byte) { same = same && bytes.Equal(have, want) })
	return same
}

func (p *process) step(s *connector.Step) {
	p.t.Helper()
	p.post(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_Step{Step: wire.StepToProto(s)}}, nil)
}

// match asks until the answer is not Later.
func (p *process) match(q connector.Query) int {
	p.t.Helper()
	for {
		m := p.call(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_Match{Match: wire.QueryToProto(&q)}})
		require.Nil(p.t, m.GetError())
		require.NotNil(p.t, m.GetMatch())
		if !m.GetMatch().GetLater() {
			return int(m.GetMatch().GetTokens())
		}
		p.event(kvportv1.AgentEventKind_AGENT_EVENT_KIND_ANSWERED, string(q.Request))
	}
}

// event waits for an event of a request.
func (p *process) event(kind kvportv1.AgentEventKind, request string) *kvportv1.AgentEvent {
	p.t.Helper()
	return p.find(fmt.Sprintf("%v of %s", kind, request), func(m *kvportv1.AgentAnswer) bool {
		return m.GetEvent().GetKind() == kind && m.GetEvent().GetRequest() == request
	}).GetEvent()
}

// forget drops what has come and was not asked for.
func (p *process) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen = nil
}

// has reports whether an event of a request has come and was not asked for.
func (p *process) has(kind kvportv1.AgentEventKind, request string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.seen, func(m *kvportv1.AgentAnswer) bool {
		return m.GetEvent().GetKind() == kind && m.GetEvent().GetRequest() == request
	})
}

func (p *process) state(state string) *kvportv1.AgentState {
	p.t.Helper()
	return p.find("state "+state, func(m *kvportv1.AgentAnswer) bool { return m.GetState().GetState() == state }).GetState()
}

// announced waits until as many plugins were announced and gives the pidfd of the last.
func (p *process) announced(n int) *os.File {
	p.t.Helper()
	require.Eventually(p.t, func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.pidfds) >= n
	}, time.Minute, 5*time.Millisecond, "%d plugins", n)
	p.mu.Lock()
	defer p.mu.Unlock()
	require.Len(p.t, p.pidfds, n)
	return p.pidfds[n-1]
}

// halt stops the process of a pidfd, and returns when all of its threads have stopped.
func halt(t *testing.T, pidfd *os.File) {
	t.Helper()
	require.NoError(t, unix.PidfdSendSignal(int(pidfd.Fd()), unix.SIGSTOP, nil, 0))
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", pidfd.Fd()))
	require.NoError(t, err)
	_, after, found := strings.Cut(string(info), "Pid:")
	require.True(t, found, "%s", info)
	folder := fmt.Sprintf("/proc/%s/task", strings.Fields(after)[0])
	require.Eventually(t, func() bool {
		threads, err := os.ReadDir(folder)
		return err == nil && !slices.ContainsFunc(threads, func(d os.DirEntry) bool {
			stat, err := os.ReadFile(folder + "/" + d.Name() + "/stat")
			_, state, _ := strings.Cut(string(stat), ") ")
			return err == nil && !strings.HasPrefix(state, "T")
		})
	}, time.Minute, time.Millisecond, "a thread runs on")
}

func (p *process) finish(id string, tokens int, blocks []connector.Block) []byte {
	p.t.Helper()
	m := p.call(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_Finish{Finish: wire.EndToProto(&connector.Ended{
		Request: connector.RequestID(id), Reason: connector.ReasonLength, Tokens: tokens, Remote: true, Blocks: blocks,
	})}})
	require.Nil(p.t, m.GetError())
	return m.GetFinish().GetTicket()
}

const (
	loaded        = kvportv1.AgentEventKind_AGENT_EVENT_KIND_LOADED
	landed        = kvportv1.AgentEventKind_AGENT_EVENT_KIND_LANDED
	saved         = kvportv1.AgentEventKind_AGENT_EVENT_KIND_SAVED
	finishedEvent = kvportv1.AgentEventKind_AGENT_EVENT_KIND_FINISHED
	lost          = kvportv1.AgentEventKind_AGENT_EVENT_KIND_LOST
	layersEvent   = kvportv1.AgentEventKind_AGENT_EVENT_KIND_LAYERS
)

// save stores blocks that rank 0 has computed.
func (p *process) save(w *process, id string, hs []connector.BlockKey, first connector.BlockID) {
	p.t.Helper()
	tr := transfer(id, hs, first)
	w.fill(tr.Blocks, 0)
	p.step(&connector.Step{ID: 1, Arrived: []connector.Query{query(id, hs)}, Computed: []connector.Transfer{tr}})
	e := p.event(saved, id)
	require.Empty(p.t, e.GetFailed(), e.GetError())
}

// counter is the sum of a counter, as the next state gives it.
func (p *process) counter(name string) float64 {
	p.t.Helper()
	p.mu.Lock()
	p.seen = slices.DeleteFunc(p.seen, func(m *kvportv1.AgentAnswer) bool { return m.GetState() != nil })
	p.mu.Unlock()
	sum := 0.0
	m := p.find("counters", func(m *kvportv1.AgentAnswer) bool { return len(m.GetState().GetCounters()) > 0 })
	for _, c := range m.GetState().GetCounters() {
		if c.GetName() == name {
			sum += c.GetValue()
		}
	}
	return sum
}

// counts waits until a counter has reached a value, and returns what it then is. Counters that arrive first may
// have been read before what the test has seen.
func (p *process) counts(name string, least float64) float64 {
	p.t.Helper()
	for end := time.Now().Add(time.Minute); ; {
		sum := p.counter(name)
		if sum >= least {
			return sum
		}
		require.True(p.t, time.Now().Before(end), "%s is %v, and does not reach %v", name, sum, least)
	}
}
