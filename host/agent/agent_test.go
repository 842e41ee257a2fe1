package agent

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// A scheduler and two ranks come in every order; then blocks are saved and loaded, and each rank gets
// its own bytes.
func TestAttachInAnyOrder(t *testing.T) {
	for _, order := range []string{"s01", "s10", "0s1", "01s", "10s", "1s0"} {
		t.Run(order, func(t *testing.T) {
			o := open(t, config(t.TempDir(), nil), nil)
			var s *process
			ranks := make([]*process, 2)
			for _, who := range order {
				if who == 's' {
					s = scheduler(t, o.socket)
					continue
				}
				n := int(who - '0')
				ranks[n] = worker(t, o.socket, rankAt(n, 2))
				ranks[n].attached()
			}
			for _, p := range []*process{s, ranks[0], ranks[1]} {
				p.announced(1)
			}
			s.state("ready")
			hs := hashes("a", 3)
			tr := transfer("r", hs, 0)
			require.Zero(t, s.match(query("r", hs)))
			for i, p := range ranks {
				p.fill(tr.Blocks, i)
			}
			s.step(&connector.Step{ID: 1, Arrived: []connector.Query{query("r", hs)}})
			s.step(&connector.Step{ID: 2, Computed: []connector.Transfer{tr}})
			e := s.event(saved, "r")
			require.Equal(t, uint64(2), e.GetStep())
			require.Equal(t, []int32{0, 1, 2}, e.GetBlocks())
			require.Empty(t, e.GetFailed())

			require.Equal(t, 48, s.match(query("q", hs)))
			tr = transfer("q", hs, 10)
			s.step(&connector.Step{ID: 3, Admitted: []connector.Transfer{tr}})
			for i, p := range []*process{s, ranks[0], ranks[1]} {
				e := p.event(loaded, "q")
				require.Empty(t, e.GetFailed(), e.GetError())
				require.Equal(t, []int32{10, 11, 12}, e.GetBlocks())
				require.True(t, i == 0 || p.same(tr.Blocks, i-1))
			}
		})
	}
}

// A producer's ticket is there at once, and the consumer's match waits for what it promises.
func TestTicketBetweenAgents(t *testing.T) {
	dir := t.TempDir()
	patient := map[string]any{"deadlines": map[string]any{"later": "1m"}}
	po, do := spawn(t, config(dir, nil)), open(t, config(dir, patient), nil)
	pw, dw := worker(t, po.socket, rankAt(0, 1)), worker(t, do.socket, rankAt(0, 1))
	pw.attached()
	dw.attached()
	p, d := scheduler(t, po.socket), scheduler(t, do.socket)
	pidfd := p.announced(1)
	hs := hashes("a", 4)
	tr := transfer("r", hs, 0)
	pw.fill(tr.Blocks, 0)
	halt(t, pidfd)
	p.step(&connector.Step{ID: 1, Arrived: []connector.Query{query("r", hs)}, Computed: []connector.Transfer{tr}})
	ticket := p.finish("r", 70, tr.Blocks)
	require.NotEmpty(t, ticket)

	q := query("q", hs)
	q.Ticket = ticket
	m := d.call(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_Match{Match: wire.QueryToProto(&q)}})
	require.True(t, m.GetMatch().GetLater(), "not saved yet")
	require.NoError(t, unix.PidfdSendSignal(int(pidfd.Fd()), unix.SIGCONT, nil, 0))
	d.event(kvportv1.AgentEventKind_AGENT_EVENT_KIND_ANSWERED, "q")
	require.Equal(t, 64, d.match(q))
	p.event(saved, "r")
	e := p.event(finishedEvent, "r")
	require.False(t, e.GetHeld())
	require.Len(t, e.GetBlocks(), 4)
	d.step(&connector.Step{ID: 1, Admitted: []connector.Transfer{transfer("q", hs, 20)}})
	require.Empty(t, d.event(loaded, "q").GetFailed())
	require.True(t, dw.same(blocksOf(hs, 20), 0))
	require.Empty(t, p.finish("empty", 5, nil), "no full block, nothing to fetch")
}

// The ranks hear that the bytes of a load are there, on all of them, before they hear that they are right.
func TestLanded(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), nil)
	s := scheduler(t, o.socket)
	ranks := []*process{worker(t, o.socket, rankAt(0, 2)), worker(t, o.socket, rankAt(1, 2))}
	for _, w := range ranks {
		w.attached()
	}
	hs := hashes("a", 4)
	tr := transfer("r", hs, 0)
	for i, w := range ranks {
		w.fill(tr.Blocks, i)
	}
	s.step(&connector.Step{ID: 1, Computed: []connector.Transfer{tr}})
	require.Empty(t, s.event(saved, "r").GetFailed())
	s.step(&connector.Step{ID: 7, Admitted: []connector.Transfer{transfer("q", hs, 20)}})
	for i, w := range ranks {
		e := w.event(landed, "q")
		require.Equal(t, uint64(7), e.GetStep())
		require.True(t, w.same(blocksOf(hs, 20), i), "landed without its bytes")
		require.Empty(t, w.event(loaded, "q").GetFailed())
	}
	require.Empty(t, s.event(loaded, "q").GetFailed())
	missing := transfer("m", hashes("b", 4), 30)
	s.step(&connector.Step{ID: 8, Admitted: []connector.Transfer{missing}})
	require.Len(t, ranks[0].event(loaded, "m").GetFailed(), 4)
	require.False(t, ranks[0].has(landed, "m"), "a load that failed has not landed")
}

// A rank ends and comes back: the connector is closed, steps have their events all the same, and the
// agent stays. What was counted before stays counted.
func TestRankComesBack(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), nil)
	s := scheduler(t, o.socket)
	ranks := []*process{worker(t, o.socket, rankAt(0, 2)), worker(t, o.socket, rankAt(1, 2))}
	life := ranks[0].attached().GetLife()
	ranks[1].attached()
	s.state("ready")
	hs := hashes("a", 2)
	tr := transfer("r", hs, 0)
	ranks[0].fill(tr.Blocks, 0)
	ranks[1].fill(tr.Blocks, 1)
	s.step(&connector.Step{ID: 1, Computed: []connector.Transfer{tr}})
	require.Empty(t, s.event(saved, "r").GetFailed())
	bytes := s.counts("kvport_transfer_bytes_total", 1)

	first := s.announced(1)
	ranks[1].close()
	s.state("waiting")
	ended(t, first)
	require.Zero(t, s.match(query("x", hs)))
	s.step(&connector.Step{
		ID: 2, Admitted: []connector.Transfer{transfer("x", hs, 8)}, Computed: []connector.Transfer{transfer("y", hs, 16)},
		Ended: []connector.Ended{{Request: "z", Reason: connector.ReasonStop, Blocks: blocksOf(hs, 30)}},
	})
	require.Equal(t, []int32{8, 9}, s.event(loaded, "x").GetFailed())
	require.Equal(t, []int32{8, 9}, ranks[0].event(loaded, "x").GetFailed())
	require.Equal(t, []int32{16, 17}, s.event(saved, "y").GetFailed())
	require.Equal(t, []int32{30, 31}, s.event(finishedEvent, "z").GetBlocks())
	require.Empty(t, s.finish("z", 32, nil))

	for range 2 { // comes back; then attaches once more without having left
		back := worker(t, o.socket, rankAt(1, 2))
		require.Equal(t, life, back.attached().GetLife())
		if ranks[1].conn != nil {
			<-ranks[1].over
		}
		ranks[1] = back
		require.Equal(t, 32, s.match(query(fmt.Sprint("again", back.id, &back), hs)))
		s.step(&connector.Step{ID: 3, Admitted: []connector.Transfer{transfer("x", hs, 8)}})
		require.Empty(t, back.event(loaded, "x").GetFailed())
		require.True(t, back.same(blocksOf(hs, 8), 1))
	}
	s.announced(3)
	s.counts("kvport_transfer_bytes_total", bytes+1)
}

// A scheduler that comes back finds nothing of what its predecessor began.
func TestSchedulerComesBack(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), nil)
	w := worker(t, o.socket, rankAt(0, 1))
	w.attached()
	s := scheduler(t, o.socket)
	hs := hashes("a", 2)
	s.save(w, "r", hs, 0)
	first := w.announced(1)
	next := scheduler(t, o.socket)
	<-s.over
	ended(t, first)
	w.announced(2)
	require.Equal(t, 32, next.match(query("r", hs)))
	m := next.call(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_Detach{Detach: &kvportv1.AgentDetach{}}})
	require.NotNil(t, m.GetDetached())
	<-next.over
}

// A plugin dies in the middle of a load: the load is done again by the next one, which is announced
// before.
func TestPluginKilledMidLoad(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), nil)
	w := worker(t, o.socket, rankAt(0, 1))
	w.attached()
	s := scheduler(t, o.socket)
	hs := hashes("a", 3)
	s.save(w, "r", hs, 0)
	for i := range 3 {
		pidfd := w.announced(1 + i)
		halt(t, pidfd)
		s.step(&connector.Step{ID: uint64(2 + i), Admitted: []connector.Transfer{transfer("q", hs, 10)}})
		require.NoError(t, unix.PidfdSendSignal(int(pidfd.Fd()), unix.SIGKILL, nil, 0))
		e := w.event(loaded, "q")
		require.Empty(t, e.GetFailed(), e.GetError())
		require.True(t, w.same(blocksOf(hs, 10), 0))
		w.announced(2 + i)
		clear(w.mem)
	}
	require.InDelta(t, 3, s.counts("kvport_plugin_restarts_total", 3), 0)
}

// A rank that does not read is cut; nobody else waits for it.
func TestSlowReader(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), func(l *limits) { l.write = 2 * time.Second })
	s := scheduler(t, o.socket)
	slow, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: o.socket, Net: "unix"})
	require.NoError(t, err)
	defer slow.Close()
	p := &process{t: t, conn: slow}
	p.memory(rankAt(0, 2).Region, seals)
	defer p.file.Close()
	p.post(attachCall(rankAt(0, 2)), p.file)
	_, err = wire.ReadFrame(slow) // it has its seat, and reads no more from now on
	require.NoError(t, err)
	long := strings.Repeat("x", wire.MaxName-8)
	const n = 1000
	for i := range n {
		s.step(&connector.Step{ID: uint64(i), Admitted: []connector.Transfer{transfer(long+fmt.Sprint(i), hashes("a", 4), 0)}})
	}
	for i := range n {
		s.event(loaded, long+fmt.Sprint(i))
	}
	require.Eventually(t, func() bool {
		cut := false
		require.NoError(t, control(slow, func(fd int) error {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
			n, err := unix.Poll(fds, 0)
			for errors.Is(err, unix.EINTR) {
				n, err = unix.Poll(fds, 0)
			}
			cut = n == 1
			return err
		}))
		return cut
	}, time.Minute, 10*time.Millisecond)
	require.NoError(t, unix.Munmap(p.mem))
}

// SIGTERM, or a context that ends, lets what is under way end.
func TestDrain(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), nil)
	w := worker(t, o.socket, rankAt(0, 1))
	w.attached()
	s := scheduler(t, o.socket)
	var all []connector.Transfer
	for i := range 8 {
		all = append(all, transfer(fmt.Sprint("r", i), hashes(fmt.Sprint(i), 4), connector.BlockID(4*i)))
		w.fill(all[i].Blocks, 0)
	}
	s.step(&connector.Step{ID: 1, Computed: all})
	s.call(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_Match{Match: &kvportv1.Query{}}}) // the step has arrived
	o.stop()
	for i := range 8 {
		e := s.event(saved, fmt.Sprint("r", i))
		require.Empty(t, e.GetFailed(), e.GetError())
	}
	<-s.over
	<-w.over
}

// Without anybody an agent ends.
func TestNobodyComes(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), func(l *limits) { l.alone = 50 * time.Millisecond })
	o.end(t)
}

// A ticket of an engine with another kernel is refused, in words that say which.
func TestTicketOfAnotherKernel(t *testing.T) {
	dir := t.TempDir()
	pa, da := spawn(t, config(dir, nil)), spawn(t, config(dir, nil))
	there, here := rankAt(0, 1), rankAt(0, 1)
	there.Shape, there.ShapeText = connector.NewFingerprint("there"), "float32 block=16 isa=avx512"
	here.Shape, here.ShapeText = connector.NewFingerprint("here"), "float32 block=16 isa=avx2"
	pw, dw := worker(t, pa.socket, there), worker(t, da.socket, here)
	pw.attached()
	dw.attached()
	p, d := scheduler(t, pa.socket), scheduler(t, da.socket)
	hs := hashes("a", 4)
	p.save(pw, "r", hs, 0)
	q := query("q", hs)
	q.Ticket = p.finish("r", 64, blocksOf(hs, 0))
	require.NotEmpty(t, q.Ticket)
	require.Zero(t, d.match(q), "the blocks are there, but they are others")
	require.InDelta(t, 1, d.counts("kvport_tickets_refused_total", 1), 0)
	require.NoError(t, da.Process.Signal(unix.SIGTERM))
	require.NoError(t, da.ended(t))
	require.Contains(t, da.log.String(), `its blocks are made as \"float32 block=16 isa=avx512\", ours as \"float32 block=16 isa=avx2\"`)
}

// A connector that is made of others has a process for each: all are announced, also to a process that comes later.
func TestSeveralPlugins(t *testing.T) {
	one, two := config(t.TempDir(), nil), config(t.TempDir(), nil)
	strip := func(c string) string {
		return strings.Replace(c, `,"kvport":{"deadlines":{"handshake":"1m"},"heartbeat":{"limit":"1m"}}`, "", 1)
	}
	o := open(t, fmt.Sprintf(`{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":[%s,%s]},"kvport":{"deadlines":{"handshake":"1m"}}}`, strip(one), strip(two)), nil)
	w := worker(t, o.socket, rankAt(0, 1))
	w.attached()
	w.announced(2)
	s := scheduler(t, o.socket)
	s.announced(2)
	hs := hashes("a", 3)
	s.save(w, "r", hs, 0)
	require.Equal(t, 48, s.match(query("q", hs)))
	s.step(&connector.Step{ID: 2, Admitted: []connector.Transfer{transfer("q", hs, 10)}})
	require.Empty(t, s.event(loaded, "q").GetFailed())
	require.True(t, w.same(blocksOf(hs, 10), 0))
}
