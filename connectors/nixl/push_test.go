package nixl

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/relay"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/nixl"
)

// value is the sum of a side's numbers of a name that have all labels.
func (x *side) value(name string, labels ...string) (sum float64) {
	stats, err := x.s.(connector.StatsSource).Stats(x.Context())
	require.NoError(x, err)
	for _, s := range stats {
		has := true
		for _, want := range labels {
			found := false
			for _, l := range s.Labels {
				found = found || l == want
			}
			has = has && found
		}
		if s.Name == name && has {
			sum += s.Value
		}
	}
	return sum
}

// TestAuto: bytes that go over TCP are written by the producer, others are read.
func TestAuto(t *testing.T) {
	for _, c := range []struct{ tls, tcp, mode, transport string }{
		{"", "", modePull, "ucx:cma"}, {"posix,self", "", modePull, "ucx:posix"}, {"tcp,self", trustNetwork, modePush, "ucx:tcp,self"},
	} {
		t.Run(c.transport, func(t *testing.T) {
			t.Setenv(envTransports, c.tls)
			rng := rand.New(rand.NewPCG(20, 21))
			p, d := open(t, connector.RoleProducer, Config{UCXTCP: c.tcp}, nil), open(t, connector.RoleConsumer, Config{UCXTCP: c.tcp}, nil)
			for i := range 5 {
				theirs, hold := p.finish(rng, byte(i), 9)
				ours, err := d.load(rng, byte(i), 9, hold.Ticket)
				require.NoError(t, err)
				require.Equal(t, p.bytes(theirs), d.bytes(ours))
			}
			require.InDelta(t, 5, d.value("reads_total", c.mode, c.transport, "ok"), 0)
			wrote := 0.0
			if c.mode == modePush {
				wrote = 5
			}
			require.InDelta(t, wrote, p.value("writes_total", c.transport, "ok"), 0)
		})
	}
}

// TestOverTCP: where writing is faster.
func TestOverTCP(t *testing.T) {
	rdma := t.TempDir()
	for transport, want := range map[string]bool{
		"ucx:network": true, "ucx:cma": false, "ucx:tcp": true, "ucx:tcp,self": true, "ucx:rc,self": false, "ucx:self": false, "posix": false,
		"ucx:posix": false, "ucx:posix,tcp": false,
	} {
		require.Equal(t, want, overTCP(transport, rdma), transport)
		require.Equal(t, want || transport == "ucx:posix" || transport == "ucx:posix,tcp", copied(transport, rdma), transport)
	}
	require.False(t, overTCP("ucx:network", ".."), "there are devices")
}

// TestLateWriter: a producer that writes when its consumer has given up writes to nothing, and the consumer
// goes on with others and with it.
func TestLateWriter(t *testing.T) {
	for _, c := range []struct{ tls, tcp string }{{"", ""}, {"posix,self", ""}, {"tcp,self", trustNetwork}} {
		t.Run("by "+c.tls, func(t *testing.T) {
			t.Setenv(envTransports, c.tls)
			testLateWriter(t, c.tcp)
		})
	}
}

// shared reports whether more than one load uses a mapping.
func (w *aliasMapping) shared() bool {
	w.rank.view.Lock()
	defer w.rank.view.Unlock()
	return w.users > 1
}

func testLateWriter(t *testing.T, tcp string) {
	rng := rand.New(rand.NewPCG(22, 23))
	p, d := open(t, connector.RoleProducer, Config{UCXTCP: tcp}, nil), open(t, connector.RoleConsumer, Config{Mode: modePush, UCXTCP: tcp}, nil)
	v, err := relay.New(p.node.address(), 22)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, v.Close()) })
	by := func(raw []byte) []byte {
		var x ticket
		require.NoError(t, json.Unmarshal(raw, &x))
		x.Address, x.IDs = v.Address(), nil // the producer is asked
		out, err := x.encode()
		require.NoError(t, err)
		return out
	}
	for i := range 3 {
		_, hold := p.finish(rng, byte(i), 9)
		// The question for the write must find a connection on which the key is proven: signs of life take one, too.
		spare := make([]net.Conn, maxIdle)
		for j := range spare {
			spare[j], _, err = d.node.pool.conn(t.Context(), v.Address())
			require.NoError(t, err)
		}
		for _, c := range spare {
			d.node.pool.keep(v.Address(), c)
		}
		ctx, cancel := context.WithCancel(t.Context())
		p.node.told = func() { v.Stall(true, false) } // where the blocks are it learns, and no more
		blocks := run(rng, byte(i), 9)
		require.NoError(t, d.w.(*worker).rank.register(d.kv))
		w, err := d.w.(*worker).rank.aliasMapping() // as another load has, that goes on
		require.NoError(t, err)
		loaded := make(chan error, 1)
		go func() {
			loaded <- d.w.Load(ctx, &connector.Transfer{Request: "r", Tokens: tokens(9), Blocks: blocks, Ticket: by(hold.Ticket)}, d.kv)
		}()
		require.Eventually(t, func() bool { return w.shared() }, time.Minute, time.Millisecond, "the load has a place for the bytes")
		<-time.After(time.Second) // by when it has asked for the write, to no avail
		cancel()
		err = <-loaded
		require.Error(t, err)
		require.NotErrorIs(t, err, connector.ErrIncompatible)
		p.node.told = nil
		require.InDelta(t, i+1, d.value("revoked_total"), 0)
		d.fill(rng, blocks) // another request's
		want := d.bytes(blocks)
		wrote := p.value("write_bytes_total")
		v.Stall(false, false)
		require.Eventually(t, func() bool { return p.value("write_bytes_total") > wrote }, time.Minute, time.Millisecond, "the late write")
		require.Equal(t, want, d.bytes(blocks), "a block that was given back was written")
		w.leave()

		theirs, hold := p.finish(rng, byte(i), 9)
		ours, err := d.load(rng, byte(i), 9, by(hold.Ticket))
		require.NoError(t, err, "in the next window")
		require.Equal(t, p.bytes(theirs), d.bytes(ours))
	}
}

// TestOneWrite: who asks for the same push again gets the answer of the first.
func TestOneWrite(t *testing.T) {
	p := pushes{all: map[readName]*pushed{}}
	began, end := make(chan struct{}), make(chan struct{})
	calls := 0
	ask := func(load string) (*answer, error) {
		return p.once(&question{Hold: 1, Secret: []byte("x"), Load: load}, func() (*answer, error) {
			calls++
			close(began)
			<-end
			return &answer{Written: 7}, nil
		})
	}
	var tasks sync.WaitGroup
	for i := range 4 {
		if i == 1 {
			<-began
		}
		tasks.Go(func() {
			a, err := ask("a")
			if err != nil || a.Written != 7 {
				t.Errorf("%v, %v", a, err)
			}
		})
	}
	close(end)
	tasks.Wait()
	require.Equal(t, 1, calls)
	_, err := ask("")
	require.ErrorIs(t, err, connector.ErrIncompatible)
	p.all[readName{1, 0, "a", "x"}].at = time.Now().Add(-2 * doneKept)
	p.sweep(time.Now())
	require.Empty(t, p.all)
}

// TestRuns: what is packed is unpacked, and what is not of the hold is refused.
func TestRuns(t *testing.T) {
	rng := rand.New(rand.NewPCG(24, 25))
	for range 200 {
		var from, to []nixl.Region
		for range 1 + rng.IntN(50) {
			n := 1 + rng.Uint64N(1<<20)
			from = append(from, nixl.Region{Addr: rng.Uint64(), Len: n})
			to = append(to, nixl.Region{Addr: rng.Uint64(), Len: n})
		}
		data := packRuns(from, to)
		gotFrom, gotTo, err := unpackRuns(data)
		require.NoError(t, err)
		require.Equal(t, from, gotFrom)
		require.Equal(t, to, gotTo)
		_, _, err = unpackRuns(data[:rng.IntN(len(data))])
		require.ErrorIs(t, err, connector.ErrIncompatible)
		_, _, err = unpackRuns(append(data, 0))
		require.ErrorIs(t, err, connector.ErrIncompatible)
	}
}

// TestRunsOfTheHold: a consumer gets what the hold has and not a byte beside it.
func TestRunsOfTheHold(t *testing.T) {
	c := &cache{segments: []segment{{Group: 0, Addr: 1000, Stride: 100, Bytes: 60}, {Group: 1, Addr: 1060, Stride: 100, Bytes: 40}, {Group: 0, Addr: 9000, Stride: 10, Bytes: 10}}}
	e := &connector.Ended{Blocks: []connector.Block{{ID: 2, Group: 0}, {ID: 2, Group: 1}, {ID: 3, Group: 0}}}
	for _, x := range []struct {
		addr, size uint64
		ok         bool
	}{
		{1200, 60, true},
		{1200, 160, true},
		{1230, 10, true},
		{1260, 40, true},
		{9020, 20, true},
		{1299, 2, true},
		{1200, 161, false},
		{1199, 1, false},
		{1199, 10, false},
		{1360, 1, false},
		{9020, 21, false},
		{9019, 2, false},
		{1, 1, false},
		{^uint64(0) - 5, 3, false},
		{9000, 1, false},
		{1200, 1 << 40, false},
	} {
		err := c.holds(e, []nixl.Region{{Addr: 1200, Len: 1}, {Addr: x.addr, Len: x.size}})
		require.Equal(t, x.ok, err == nil, "%+v: %v", x, err)
		if err != nil {
			require.ErrorIs(t, err, connector.ErrIncompatible)
		}
	}
}

func FuzzRuns(f *testing.F) {
	f.Add(packRuns([]nixl.Region{{Addr: 5, Len: 7}}, []nixl.Region{{Addr: 9, Len: 7}}))
	f.Add([]byte{255, 255, 255, 255, 15, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		from, to, err := unpackRuns(data)
		if err != nil {
			require.ErrorIs(t, err, connector.ErrIncompatible)
			return
		}
		again, there, err := unpackRuns(packRuns(from, to))
		require.NoError(t, err)
		require.Equal(t, from, again)
		require.Equal(t, to, there)
	})
}
