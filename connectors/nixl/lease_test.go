package nixl

import (
	"context"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// TestRenewalWantsTheHost: a consumer's sign of life lengthens a hold only once the host has agreed, and from the
// moment that it was asked.
func TestRenewalWantsTheHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHolds(1, 10*time.Second, newTally())
		there := func(id connector.HoldID, secret []byte) bool {
			_, err := h.find(id, secret)
			return err == nil
		}
		ask := func(ended ...connector.HoldID) []connector.HoldID {
			h.settle(ended)
			ids, err := h.renewals(t.Context(), time.Second)
			require.NoError(t, err)
			return ids
		}
		id, secret := h.add(connector.Ended{})
		began := time.Now()
		require.Empty(t, ask())
		require.Equal(t, time.Second, time.Since(began), "it waited, and no longer")
		require.ErrorIs(t, h.renew(id, []byte("another secret.")), connector.ErrGone)
		<-time.After(3 * time.Second)
		require.NoError(t, h.renew(id, secret))
		require.Equal(t, []connector.HoldID{id}, ask())
		<-time.After(4 * time.Second) // 8 s: the host agrees late, with what was asked at 4 s
		require.Empty(t, ask())
		<-time.After(5*time.Second - 1)
		require.True(t, there(id, secret), "14 s less 1 ns")
		<-time.After(1)
		require.False(t, there(id, secret), "14 s")

		id, secret = h.add(connector.Ended{})
		require.NoError(t, h.renew(id, secret))
		require.Equal(t, []connector.HoldID{id}, ask())
		<-time.After(10 * time.Second)
		require.False(t, there(id, secret), "the host has not agreed in time")
		require.ErrorIs(t, h.renew(id, secret), connector.ErrGone)

		id, secret = h.add(connector.Ended{})
		require.NoError(t, h.renew(id, secret))
		require.Equal(t, []connector.HoldID{id}, ask())
		require.Empty(t, ask(id))
		require.False(t, there(id, secret), "the host says that it is over")

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := h.renewals(ctx, time.Hour)
		require.ErrorIs(t, err, context.Canceled)
		require.InDelta(t, 2, h.tally.values[series{name: "holds_expired_total"}], 0)
	})
}

// TestExpiry: every hold ends when its time is over, whatever other holds do, and only then.
func TestExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHolds(1, 20*time.Second, newTally())
		rng := rand.New(rand.NewPCG(4, 5))
		ends, looked := map[connector.HoldID]time.Time{}, 0
		for range 3000 {
			<-time.After(time.Duration(rng.IntN(4000)) * time.Millisecond)
			now := time.Now()
			if now.Before(h.next) {
				looked++
			}
			switch rng.IntN(8) {
			case 0, 1, 2:
				e := connector.Ended{Weak: rng.IntN(3) == 0}
				id, secret := h.add(e)
				ends[id] = now.Add(h.leaseOf(&e))
				if !e.Weak && rng.IntN(2) == 0 {
					require.NoError(t, h.renew(id, secret))
				}
			case 3:
				ids, err := h.renewals(t.Context(), 0)
				require.NoError(t, err)
				h.settle(nil)
				for _, id := range ids {
					ends[id] = now.Add(h.lease)
				}
			default:
				h.sweep(now)
			}
			for id, end := range ends {
				if !now.Before(end) {
					delete(ends, id)
				}
			}
			_, err := h.find(0, nil)
			require.ErrorIs(t, err, connector.ErrGone)
			require.Len(t, h.open, len(ends))
			for id := range ends {
				require.Contains(t, h.open, id)
			}
		}
		require.Positive(t, looked, "mostly there is nothing to look at")
		require.Positive(t, h.tally.values[series{name: "holds_expired_total"}])
	})
}

// agreeable is a host that agrees to every renewal.
func agreeable(p *side) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			_, _ = p.s.(connector.Leaser).Renewals(ctx, nil)
		}
	}()
	p.Cleanup(func() {
		cancel()
		<-ended
	})
}

// TestSignsOfLife: a hold lives as long as a request of the consumer waits for it, and ends soon after.
func TestSignsOfLife(t *testing.T) {
	const lease = 2 * time.Second // longer than a busy machine keeps anybody from a sign of life
	rng := rand.New(rand.NewPCG(8, 9))
	p, d := open(t, connector.RoleProducer, Config{LeaseMS: int(lease / time.Millisecond)}, nil), open(t, connector.RoleConsumer, Config{}, nil)
	agreeable(p)
	_, hold := p.finish(rng, 1, 4)
	_, forgotten := p.finish(rng, 1, 4)
	query := []connector.Query{{Request: "r", Tokens: tokens(4), Keys: keys(1, 3), Ticket: hold.Ticket}}
	probe := []connector.Query{{Tokens: tokens(4), Keys: keys(1, 3), Ticket: forgotten.Ticket}}
	waited := time.NewTimer(lease * 3 / 2)
	tick := time.NewTicker(lease / 3)
	defer tick.Stop()
	for over := false; !over; {
		_, err := d.s.Match(t.Context(), query)
		require.NoError(t, err)
		_, err = d.s.Match(t.Context(), probe)
		require.NoError(t, err)
		select {
		case <-tick.C:
		case <-waited.C:
			over = true
		}
	}
	_, err := d.load(rng, 1, 4, forgotten.Ticket)
	require.ErrorIs(t, err, connector.ErrGone, "a probe holds nothing")
	_, err = d.load(rng, 1, 4, hold.Ticket)
	require.NoError(t, err)
	require.Equal(t, []connector.HoldID{hold.ID}, p.consumed())

	_, hold = p.finish(rng, 1, 4)
	query[0].Ticket = hold.Ticket
	_, err = d.s.Match(t.Context(), query)
	require.NoError(t, err)
	began := time.Now()
	require.Eventually(t, func() bool {
		p.node.holds.mu.Lock()
		defer p.node.holds.mu.Unlock()
		p.node.holds.sweep(time.Now())
		return len(p.node.holds.open) == 0
	}, time.Minute, 10*time.Millisecond)
	t.Logf("the hold of a request that asks no more ended after %v", time.Since(began).Round(time.Millisecond))
	stats, err := p.s.(connector.StatsSource).Stats(t.Context())
	require.NoError(t, err)
	checkStats(t, stats)
	stats, err = d.s.(connector.StatsSource).Stats(t.Context())
	require.NoError(t, err)
	require.Positive(t, checkStats(t, stats)["heartbeats_total ok"])
}

// checkStats makes sure that numbers are declared, and gives them by name and labels.
func checkStats(t *testing.T, stats []connector.Stat) map[string]float64 {
	t.Helper()
	require.NoError(t, connector.ValidateStats(StatInfos()))
	out := map[string]float64{}
	for _, s := range stats {
		known := false
		for _, i := range StatInfos() {
			if i.Name == s.Name {
				known = true
				require.NoError(t, i.Check(&s))
			}
		}
		require.True(t, known, s.Name)
		for _, l := range s.Labels {
			s.Name += " " + l
		}
		out[s.Name] = s.Value
	}
	return out
}

// TestReset: a reset ends every hold, weak ones too. The host is told, consumers find the holds gone, and holds
// that begin afterwards stay.
func TestReset(t *testing.T) {
	h := newHolds(1, time.Hour, newTally())
	a, secretA := h.add(connector.Ended{})
	b, secretB := h.add(connector.Ended{Weak: true})
	s := &scheduler{node: &Node{holds: h}}
	emptied, err := s.Reset(t.Context())
	require.NoError(t, err)
	require.True(t, emptied)
	over, err := s.Consumed(t.Context())
	require.NoError(t, err)
	require.Equal(t, []connector.HoldID{a, b}, over)
	_, err = h.find(a, secretA)
	require.ErrorIs(t, err, connector.ErrGone)
	require.ErrorIs(t, h.done(&question{Hold: b, Secret: secretB, Load: "read before"}, time.Now()), connector.ErrGone, "what was being read is not confirmed")
	c, secretC := h.add(connector.Ended{})
	_, err = h.find(c, secretC)
	require.NoError(t, err)
}
