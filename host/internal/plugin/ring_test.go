package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/leaktest"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// unused is how it is when no session has a ring.
func (r *Rings) unused(t *testing.T) {
	t.Helper()
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(r.file.Fd()), &st))
	require.Zero(t, st.Blocks, "memory is left")
	r.mu.Lock()
	defer r.mu.Unlock()
	require.Zero(t, r.open)
	require.NotContains(t, r.taken, true)
}

func TestSessionsHaveRings(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "kvport-test")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", bin, "../../testdata/plugin").CombinedOutput()
	require.NoError(t, err, string(out))
	prog, err := Executable(bin)
	require.NoError(t, err)
	leaks := leaktest.Watch(t)
	region, err := shm.Create("kvport-cache", 4096)
	require.NoError(t, err)
	p, err := Launch(t.Context(), prog, &Options{
		Regions: []Region{{File: region.File(), Size: region.Size()}}, Log: slog.New(slog.DiscardHandler),
		Handshake: time.Minute, Heartbeat: Heartbeat{time.Second, time.Minute}, Fence: time.Minute,
	})
	require.NoError(t, err)
	config, err := json.Marshal(map[string]string{"dir": t.TempDir()})
	require.NoError(t, err)
	for range 2 * maxRings { // more than there are areas, a few at once
		var sides sync.WaitGroup
		for range 3 {
			sides.Go(func() {
				w, err := p.OpenWorker(t.Context(), testEnv(), config)
				if err != nil {
					t.Error(err)
					return
				}
				s := w.(*workerProxy).session
				if !s.ringed.Load() {
					t.Error("the session has no ring")
				}
				big := &connector.Transfer{Request: "r", Tokens: 4, Extra: make([]byte, shm.RingFrame)} // goes over the stream
				for _, tr := range []*connector.Transfer{{Request: "r"}, big, {Request: "r"}} {
					if err := w.Load(t.Context(), tr, nil); err != nil {
						t.Error(err)
					}
				}
				// An area is free when the plugin has answered, for which Close alone waits two seconds.
				if err := errors.Join(s.close(t.Context()), w.Close()); err != nil {
					t.Error(err)
				}
			})
		}
		sides.Wait()
	}
	p.mem.rings.unused(t)
	var open []connector.Worker
	for range maxRings + 2 {
		w, err := p.OpenWorker(t.Context(), testEnv(), config)
		require.NoError(t, err)
		require.NoError(t, w.Load(t.Context(), &connector.Transfer{Request: "r"}, nil), "with or without one")
		open = append(open, w)
	}
	require.False(t, open[maxRings].(*workerProxy).ringed.Load(), "there are no more areas")
	require.Zero(t, p.Violations())
	p.Kill() // with all of them open
	for _, w := range open {
		require.NoError(t, w.Close())
	}
	require.NoError(t, region.Close())
	leaks()
}

// A plugin that knows no rings works over the stream, and its area is free again.
func TestPluginWithoutRing(t *testing.T) {
	rings, err := NewRings()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rings.Close()) })
	r := connectTo(t, func(s stream, m *kvportv1.SessionRequest) error { return s.Send(matchAnswer(m.GetId(), 7)) })
	r.UseRings(rings)
	for range maxRings + 1 {
		s, err := r.OpenScheduler(t.Context(), testEnv(), json.RawMessage("{}"))
		require.NoError(t, err)
		require.False(t, s.(*schedulerProxy).ringed.Load())
		m, err := s.Match(t.Context(), []connector.Query{{Request: "r", Tokens: 9}})
		require.NoError(t, err)
		require.Equal(t, 7, m[0].Tokens)
		require.NoError(t, s.Close())
	}
	rings.unused(t)
	require.Zero(t, r.Violations())
}

// hostileRing is a plugin that takes the ring and answers a call with frames of its own making.
func hostileRing(t *testing.T, frames ...[]byte) (*Remote, *Rings) {
	t.Helper()
	rings, err := NewRings()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rings.Close()) })
	var answer func(s stream, m *kvportv1.SessionRequest) error
	r := connectTo(t, func(s stream, m *kvportv1.SessionRequest) error { return answer(s, m) })
	r.UseRings(rings)
	answer = func(stream, *kvportv1.SessionRequest) error {
		bell, err := shm.NewBell(int(rings.bellEnd.Fd()))
		if err != nil {
			return err
		}
		defer bell.Close()
		end, err := shm.NewRingEnd(int(rings.file.Fd()), 0, false, bell)
		if err != nil {
			return err
		}
		for _, f := range frames {
			if _, err := end.Send(len(f), func(to []byte) ([]byte, error) { return append(to, f...), nil }); err != nil {
				return err
			}
		}
		return end.Close()
	}
	return r, rings
}

// What a plugin puts into the ring is judged like what comes over the stream; garbage ends the session.
func TestHostileFrames(t *testing.T) {
	encode := func(m *kvportv1.SessionResponse) []byte {
		size, fill := wire.Frame(m)
		out, err := fill(make([]byte, 0, size))
		require.NoError(t, err)
		return out
	}
	for name, c := range map[string]struct {
		frames     [][]byte
		violations int64
	}{
		"garbage":       {[][]byte{{0xff, 0xff}}, 1},
		"unknown calls": {[][]byte{encode(matchAnswer(99, 1)), encode(matchAnswer(0, 1)), {}, {0xff}}, 4},
		"wrong kind":    {[][]byte{encode(&kvportv1.SessionResponse{Id: 2, Result: &kvportv1.SessionResponse_Moved{}})}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			r, _ := hostileRing(t, c.frames...)
			s, err := r.openSession(t.Context(), &wire.Open{Side: kvportv1.Side_SIDE_SCHEDULER, Env: testEnv(), Config: json.RawMessage("{}")})
			require.NoError(t, err)
			s.openRing(true) // as if it had said so
			p := &schedulerProxy{s}
			done := make(chan error, 1)
			go func() {
				// A request that goes over the stream, so that the plugin sees it.
				_, err := p.Match(t.Context(), make([]connector.Query, 4096))
				done <- err
			}()
			require.Error(t, <-done)
			require.Equal(t, c.violations, r.Violations())
			require.NoError(t, s.close(t.Context()))
		})
	}
}

// A Cancel must not overtake its call, so it waits for room in the ring if the call went there.
func TestCancelGoesTheWayOfItsCall(t *testing.T) {
	rings, err := NewRings()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rings.Close()) })
	streamed := make(chan *kvportv1.SessionRequest, 3*shm.RingSlots)
	r := connectTo(t, func(_ stream, m *kvportv1.SessionRequest) error { streamed <- m; return nil })
	r.UseRings(rings)
	s, err := r.openSession(t.Context(), &wire.Open{Side: kvportv1.Side_SIDE_SCHEDULER, Env: testEnv(), Config: json.RawMessage("{}")})
	require.NoError(t, err)
	s.openRing(true) // as if it had said so; it reads nothing
	p := &schedulerProxy{s}
	var calls sync.WaitGroup
	ask := func(n, queries int) context.CancelFunc {
		ctx, cancel := context.WithCancel(t.Context())
		before := s.last.Load()
		for range n {
			calls.Go(func() {
				_, err := p.Match(ctx, make([]connector.Query, queries))
				assert.ErrorIs(t, err, ErrUnanswered)
			})
		}
		require.Eventually(t, func() bool { return s.last.Load() == before+uint64(n) }, time.Minute, time.Millisecond, "calls that are sent now, whatever becomes of ctx")
		return cancel
	}
	cancel := ask(1, 4096)
	require.Len(t, (<-streamed).GetMatch().GetQueries(), 4096)
	cancel()
	require.NotNil(t, (<-streamed).GetCancel(), "over the stream")
	calls.Wait()

	bell, err := shm.NewBell(int(rings.bellEnd.Fd()))
	require.NoError(t, err)
	end, err := shm.NewRingEnd(int(rings.file.Fd()), 0, false, bell)
	require.NoError(t, err)
	cancel = ask(shm.RingSlots, 1) // as many as there is room for
	cancel()
	calls.Wait() // their Cancels find no room; a call that came after the first of them found none either
	arrived := make(chan *kvportv1.SessionRequest, 3*shm.RingSlots)
	end.Start(func(frame []byte) {
		m := new(kvportv1.SessionRequest)
		if err := wire.FromFrame(frame, m); err != nil {
			t.Error(err)
		}
		arrived <- m
	}, func(err error) { t.Error(err) })
	overRing, overStream := map[uint64]bool{}, map[uint64]bool{}
	for cancelled := 0; cancelled < shm.RingSlots; {
		var m *kvportv1.SessionRequest
		asked := overRing
		select {
		case m = <-arrived:
		case m = <-streamed:
			asked = overStream
		}
		if m.GetMatch() != nil {
			asked[m.GetId()] = true
			continue
		}
		require.True(t, asked[m.GetCancel().GetCall()], "not before its call")
		cancelled++
	}
	require.NotEmpty(t, overRing)
	require.Empty(t, streamed)
	require.NoError(t, end.Close())
	require.NoError(t, bell.Close())
	require.NoError(t, s.close(t.Context()))
	require.Zero(t, r.Violations())
}
