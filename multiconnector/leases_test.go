package multiconnector_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/multiconnector"
)

// keeper is a child that keeps a part of every hold and renews what its consumers want.
type keeper struct {
	*shelf
	base connector.HoldID // its numbers are its own
	ttl  time.Duration

	mu       sync.Mutex
	last     connector.HoldID
	wanted   map[connector.HoldID]bool // renewed by every call
	over     []connector.HoldID        // that it has heard of
	asked    []connector.HoldID        // named by the last answer
	agreed   map[connector.HoldID]int  // calls after an answer that did not refuse it
	fail     bool
	hang     chan struct{} // Renewals waits for it to close
	consumed chan connector.HoldID
	calls    int
}

func newKeeper(base connector.HoldID, ttl time.Duration) *keeper {
	return &keeper{
		shelf: newShelf(), base: base, ttl: ttl, wanted: map[connector.HoldID]bool{}, agreed: map[connector.HoldID]int{},
		consumed: make(chan connector.HoldID, 64),
	}
}

func (k *keeper) Finish(_ context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make([]connector.Hold, len(ended))
	for i, e := range ended {
		k.last++
		out[i] = connector.Hold{ID: k.base + k.last, TTL: k.ttl, Consumers: 1, Ticket: []byte(e.Request), Weak: e.Weak}
	}
	return out, nil
}

func (k *keeper) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	select {
	case id := <-k.consumed:
		return []connector.HoldID{id}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

var errKeeper = errors.New("the keeper fails")

func (k *keeper) Renewals(ctx context.Context, ended []connector.HoldID) ([]connector.HoldID, error) {
	k.mu.Lock()
	k.calls++
	hang, fail := k.hang, k.fail
	k.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if fail {
		return nil, errKeeper
	}
	k.mu.Lock()
	for _, id := range k.asked {
		if !slices.Contains(ended, id) {
			k.agreed[id]++
		}
	}
	for _, id := range ended {
		delete(k.wanted, id)
	}
	k.over, k.asked = append(k.over, ended...), nil
	k.mu.Unlock()
	timer := time.NewTimer(100 * time.Millisecond)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for id := range k.wanted {
		k.asked = append(k.asked, id)
	}
	slices.Sort(k.asked)
	return slices.Clone(k.asked), nil
}

// is sets a keeper's state under its lock.
func (k *keeper) is(change func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	change()
}

// keepers is a composite of keepers, and its host.
type keepers struct {
	*testing.T
	kids  []*keeper
	sched connector.Scheduler
}

func newKeepers(t *testing.T, kids ...*keeper) *keepers {
	t.Helper()
	sides := make([]connector.Scheduler, len(kids))
	for i, k := range kids {
		sides[i] = k
	}
	return &keepers{t, kids, newComposite(t, sides...)}
}

// newComposite is the scheduler side of a composite of holders that renew.
func newComposite(t *testing.T, sides ...connector.Scheduler) connector.Scheduler {
	t.Helper()
	var children []multiconnector.Child
	for i := range sides {
		children = append(children, multiconnector.Child{
			Name: fmt.Sprint("Keeper", i), Role: connector.RoleBoth, Patience: 50 * time.Millisecond,
			Info: connector.Info{Groups: true, Scope: connector.ScopeNode, Capabilities: connector.CanHold | connector.CanLease},
		})
	}
	m, err := multiconnector.New("Multi", children)
	require.NoError(t, err)
	require.NotZero(t, m.Info().Capabilities&connector.CanLease)
	return m.Scheduler(sides, groups(), nil)
}

func (r *keepers) finish(weak ...bool) connector.HoldID {
	r.Helper()
	h, _ := connector.As[connector.Holder](r.sched)
	holds, err := h.Finish(r.Context(), []connector.Ended{{Request: "r", Tokens: 4, Remote: true, Weak: len(weak) > 0 && weak[0]}})
	require.NoError(r, err)
	return holds[0].ID
}

// renewals calls the composite as a host does, and checks how long it takes.
func (r *keepers) renewals(ended ...connector.HoldID) []connector.HoldID {
	r.Helper()
	l, ok := connector.As[connector.Leaser](r.sched)
	require.True(r, ok)
	began := time.Now()
	ids, err := l.Renewals(r.Context(), ended)
	require.NoError(r, err)
	require.LessOrEqual(r, time.Since(began), time.Second, "rule LEASE-01")
	return ids
}

// TestRenewals: a hold is renewed by whichever child renews its part, and a child takes its renewal for
// granted only after the host's next call.
func TestRenewals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newKeeper(100, time.Second), newKeeper(500, 3*time.Second)
		r := newKeepers(t, a, b)
		defer func() { require.NoError(t, r.sched.Close()) }()
		first, second := r.finish(), r.finish()
		require.Empty(t, r.renewals())
		b.is(func() { b.wanted[501] = true })
		require.Equal(t, []connector.HoldID{first}, r.renewals())
		<-time.After(time.Minute)
		b.is(func() { require.Empty(t, b.agreed, "the host has not called again") })
		a.is(func() { a.wanted[101], a.wanted[102] = true, true })
		b.is(func() { b.wanted[502] = true })
		seen := map[connector.HoldID]bool{}
		for range 4 {
			for _, id := range r.renewals() {
				seen[id] = true
			}
		}
		require.Equal(t, map[connector.HoldID]bool{first: true, second: true}, seen)
		a.is(func() { require.Positive(t, a.agreed[101]) })
		b.is(func() { require.Positive(t, b.agreed[501]) })

		r.renewals(first)
		<-time.After(time.Second)
		r.renewals()
		<-time.After(time.Second)
		r.renewals()
		a.is(func() { require.Equal(t, []connector.HoldID{101}, slices.Compact(a.over), "its part is over") })
		b.is(func() { require.Equal(t, []connector.HoldID{501}, slices.Compact(b.over)) })

		a.is(func() { a.wanted = map[connector.HoldID]bool{101: true, 4711: true} })
		b.is(func() { b.wanted = map[connector.HoldID]bool{501: true} })
		for range 3 {
			require.Empty(t, r.renewals(), "one is over, the other never was")
		}
		a.is(func() { require.Subset(t, a.over, []connector.HoldID{101, 4711}) })
	})
}

// TestRenewedHoldsAreConsumed: what was renewed for long is over when the last child's part was fetched.
func TestRenewedHoldsAreConsumed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newKeeper(100, time.Second), newKeeper(500, time.Second)
		r := newKeepers(t, a, b)
		defer func() { require.NoError(t, r.sched.Close()) }()
		id := r.finish()
		a.is(func() { a.wanted[101] = true })
		for range 50 {
			r.renewals()
		}
		r.finish() // which looks for holds that nobody renews
		a.consumed <- 101
		b.consumed <- 501
		h, _ := connector.As[connector.Holder](r.sched)
		ids, err := h.Consumed(t.Context())
		require.NoError(t, err)
		require.Equal(t, []connector.HoldID{id}, ids)
		for range 3 {
			require.Empty(t, r.renewals(), "rule LEASE-02")
		}
		a.is(func() { require.Contains(t, a.over, connector.HoldID(101)) })
		require.NotZero(t, r.finish(true))
		a.is(func() { a.wanted = map[connector.HoldID]bool{103: true} })
		for range 3 {
			require.Empty(t, r.renewals(), "nothing keeps the blocks of a weak hold")
		}
	})
}

// TestRenewalsOfFailingChildren: children fail and hang one by one, at random. What the others renew is
// renewed, nothing else is, and a child that is back learns about all holds that ended meanwhile.
func TestRenewalsOfFailingChildren(t *testing.T) {
	for seed := range uint64(200) {
		synctest.Test(t, func(t *testing.T) { failingChildren(t, rand.New(rand.NewPCG(seed, 1))) })
	}
}

func failingChildren(t *testing.T, rng *rand.Rand) {
	kids := make([]*keeper, 2+rng.IntN(3))
	for i := range kids {
		kids[i] = newKeeper(connector.HoldID(1000*(i+1)), time.Hour)
	}
	f := &failing{keepers: newKeepers(t, kids...), rng: rng}
	defer func() { require.NoError(t, f.sched.Close()) }()
	f.renewals()
	for range 30 {
		f.change()
		f.round(f.someOver())
	}
	for _, k := range f.kids {
		k.recover()
	}
	f.round(nil)
	f.round(nil)
	for _, k := range f.kids {
		k.is(func() {
			heard := slices.Compact(slices.Sorted(slices.Values(k.over)))
			require.Len(t, heard, len(f.ended), "every end is heard of, once it can be")
		})
	}
}

// failing is a composite whose children fail. Its holds are numbered from 1, a child's parts of them
// from its base on.
type failing struct {
	*keepers
	rng         *rand.Rand
	open, ended []connector.HoldID
}

// change has a request end, a child fail or recover, or a consumer begin to wait.
func (f *failing) change() {
	k := f.kids[f.rng.IntN(len(f.kids))]
	switch f.rng.IntN(4) {
	case 0:
		f.open = append(f.open, f.finish())
	case 1:
		if k.fail || k.hang != nil {
			k.recover()
		} else {
			k.is(func() {
				if k.fail = f.rng.IntN(2) == 0; !k.fail {
					k.hang = make(chan struct{})
				}
			})
		}
	case 2:
		if len(f.open) > 0 {
			id := f.open[f.rng.IntN(len(f.open))]
			k.is(func() { k.wanted[k.base+id] = true })
		}
	}
}

// recover ends a failure.
func (k *keeper) recover() {
	k.is(func() {
		if k.hang != nil {
			close(k.hang)
		}
		k.fail, k.hang = false, nil
	})
}

// someOver has the host end a hold, now and then.
func (f *failing) someOver() []connector.HoldID {
	if len(f.open) == 0 || f.rng.IntN(4) > 0 {
		return nil
	}
	at := f.rng.IntN(len(f.open))
	over := f.open[at]
	f.open = slices.Delete(f.open, at, at+1)
	f.ended = append(f.ended, over)
	return []connector.HoldID{over}
}

// round is long enough for two answers of every child that answers, and longer where a busy machine keeps one waiting.
func (f *failing) round(over []connector.HoldID) {
	f.Helper()
	var got []connector.HoldID
	for began := time.Now(); time.Since(began) < 500*time.Millisecond || time.Since(began) < time.Minute && len(f.missing(got)) > 0; over = nil {
		got = append(got, f.renewals(over...)...)
	}
	require.Subset(f, f.open, got)
	require.Empty(f, f.missing(got))
	for _, k := range f.kids {
		k.is(func() {
			for _, id := range k.over {
				require.Contains(f, f.ended, id-k.base)
			}
		})
	}
}

// missing are the renewals of children that answer which are not among those passed on.
func (f *failing) missing(got []connector.HoldID) (all []string) {
	for i, k := range f.kids {
		k.is(func() {
			for id := range k.wanted {
				if !k.fail && k.hang == nil && !slices.Contains(got, id-k.base) {
					all = append(all, fmt.Sprintf("hold %d of child %d of %d", id-k.base, i, len(f.kids)))
				}
			}
		})
	}
	return all
}

// TestMasked: a composite passes on every power, except place, and layers beside a child that plans, and says so.
func TestMasked(t *testing.T) {
	all := connector.Info{}
	for _, p := range connector.Powers() {
		require.Equal(t, p.Bit != connector.CanPlace, multiconnector.Powers&p.Bit != 0, p.Name)
		all.Capabilities |= p.Bit
	}
	layers := connector.Info{Capabilities: connector.CanLayers}
	for _, test := range []struct {
		other  connector.Capability
		role   connector.Role
		masked int
	}{
		{0, connector.RoleBoth, 0}, {connector.CanPlan, connector.RoleBoth, 1}, {connector.CanPlan, connector.RoleProducer, 1}, {connector.CanPlan, connector.RoleConsumer, 0},
	} {
		children := []multiconnector.Child{
			{Name: "A", Role: test.role, Info: layers},
			{Name: "B", Role: connector.RoleBoth, Info: connector.Info{Capabilities: test.other}},
		}
		m, err := multiconnector.New("Multi", children)
		require.NoError(t, err)
		masked := children[0].Masked(m.Info())
		require.Len(t, masked, test.masked)
		require.Equal(t, test.role.Saves() && test.masked == 0, m.Info().Capabilities&connector.CanLayers != 0)
		for _, text := range masked {
			require.Contains(t, text, "layers: ")
		}
	}
	require.Empty(t, (&multiconnector.Child{Role: connector.RoleBoth, Info: all}).Masked(all))
	consumer := multiconnector.Child{Name: "A", Role: connector.RoleConsumer, Info: all}
	m, err := multiconnector.New("Multi", []multiconnector.Child{consumer})
	require.NoError(t, err)
	masked := consumer.Masked(m.Info())
	require.Len(t, masked, 1)
	require.Contains(t, masked[0], "place: ")
}
