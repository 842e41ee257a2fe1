package fleet

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/policy"
)

// small is a fleet that is played in a moment.
func small() Options {
	return Options{Seed: 7, Instances: 20, Blocks: 20 * 800, Requests: 2400, Rate: 1, Policy: policy.PrefixAware}
}

// soak reports whether the tests have their full counts.
func soak() bool { return os.Getenv("KVPORT_SOAK") != "" }

// sized is the fleet of a test: a small one, or that of the command.
func sized() Options {
	if soak() {
		return Options{Seed: 7, Instances: 100, Blocks: 400_000, Requests: 100_000, Rate: 2, Policy: policy.PrefixAware}
	}
	return small()
}

func run(t testing.TB, o Options) *Result {
	t.Helper()
	r, err := Run(t.Context(), o)
	require.NoError(t, err)
	return r
}

func table(t *testing.T, rows []Row) {
	t.Helper()
	var text strings.Builder
	require.NoError(t, Table(&text, rows))
	t.Logf("\n%s", text.String())
}

// TestPolicies: with each policy every invariant holds. By events prefix_aware finds nearly what the oracle does, and by its
// history too; without either there are fewer hits.
func TestPolicies(t *testing.T) {
	var rows []Row
	by := map[string]*Result{}
	require.NoError(t, Policies(t.Context(), sized(), func(r Row) {
		require.Empty(t, r.Violations, r.Name)
		require.Equal(t, r.Requests, r.Answered, r.Name)
		require.Zero(t, r.Retries, r.Name)
		rows, by[r.Name] = append(rows, r), r.Result
	}))
	table(t, rows)
	require.Len(t, rows, len(policy.Names())+2)
	oracle := by["prefix_aware, by an oracle"].HitRate()
	require.GreaterOrEqual(t, by["prefix_aware"].HitRate(), 0.95*oracle)
	require.GreaterOrEqual(t, by["prefix_aware, by history"].HitRate(), 0.9*oracle)
	require.GreaterOrEqual(t, oracle, 0.8*by["prefix_aware"].BestRate())
	require.Greater(t, by["prefix_aware"].HitRate(), 1.2*by["round_robin"].HitRate())
	require.Greater(t, by["session"].HitRate(), 1.1*by["round_robin"].HitRate())
	require.Less(t, by["least_loaded"].Prefill, 1.5)
	for name, r := range by {
		require.LessOrEqual(t, r.HitRate(), r.BestRate()+0.05, name)
		require.Less(t, r.Decode, 2.0, name)
	}
}

// TestFaults: each has its price, and breaks no invariant.
func TestFaults(t *testing.T) {
	var rows []Row
	by := map[Fault]*Result{}
	require.NoError(t, Incidents(t.Context(), sized(), func(r Row) {
		require.Empty(t, r.Violations, r.Name)
		by[Fault(len(rows))] = r.Result
		rows = append(rows, r)
	}))
	table(t, rows)
	sound := by[NoFault]
	for f, r := range by {
		switch f {
		case RacksFail:
			require.Positive(t, r.Retries)
			require.Positive(t, r.Traffic.Expired)
			require.Less(t, r.HitRate(), sound.HitRate())
			require.Less(t, ratio(r.Failed, r.Requests), 0.1, "what was running there")
		case MissedEvents:
			require.Positive(t, r.Traffic.Gaps)
			require.Positive(t, r.Traffic.Replayed)
			require.Zero(t, r.Traffic.Lost, "replays have what was missed")
			require.InDelta(t, sound.HitRate(), r.HitRate(), 0.03)
		case LostEvents, RepeatedEvents:
			require.Positive(t, r.Traffic.Lost, f)
			require.GreaterOrEqual(t, r.HitRate(), 0.8*sound.HitRate(), "the history decides")
		case LateEvents:
			require.GreaterOrEqual(t, r.HitRate(), 0.9*sound.HitRate())
		case TwoRouters:
			require.Less(t, r.HitRate(), sound.HitRate()+0.01)
			require.GreaterOrEqual(t, r.HitRate(), 0.9*sound.HitRate(), "both read the same events")
		case TwoRoutersApart:
			require.GreaterOrEqual(t, r.HitRate(), 0.9*sound.HitRate())
		default:
		}
		if f != RacksFail {
			require.Equal(t, r.Requests, r.Answered, f)
		}
	}
}

// TestScale: in front of 100 instances with a million blocks, and with its full counts of 1,000 with ten million, the default policy answers
// every request, finds what it does in a small fleet, and loads no instance much more than the others. The other policies and the faults
// are played there with a tenth of the requests.
func TestScale(t *testing.T) {
	if testing.Short() {
		t.Skip("100,000 requests, which the race stage need not see; make test plays them")
	}
	o := Options{Seed: 11, Instances: 100, Blocks: 1_000_000, Requests: 100_000, Rate: 2, Policy: policy.PrefixAware}
	if soak() {
		o.Instances, o.Blocks, o.Requests = 10*o.Instances, 10*o.Blocks, 10*o.Requests
	}
	began := time.Now()
	o.Clock = func() time.Duration { return time.Since(began) }
	r := run(t, o)
	require.Empty(t, r.Violations)
	require.Equal(t, r.Requests, r.Answered)
	require.GreaterOrEqual(t, r.HitRate(), 0.8*r.BestRate())
	require.Less(t, r.Prefill, 1.5)
	require.Less(t, r.Decode, 2.0)
	rows := []Row{{Name: fmt.Sprintf("%d instances, %d requests", o.Instances, o.Requests), Result: r}}
	if soak() {
		few := o
		few.Requests /= 10
		take := func(r Row) {
			require.Empty(t, r.Violations, r.Name)
			rows = append(rows, r)
		}
		require.NoError(t, Policies(t.Context(), few, take))
		require.NoError(t, Incidents(t.Context(), few, take))
	}
	table(t, rows)
	var measured strings.Builder
	require.NoError(t, MeasuredTable(&measured, rows))
	t.Logf("\n%s", measured.String())
}

// TestWaiting: requests wait while decode instances are full, and fail at once while there is none to be had.
func TestWaiting(t *testing.T) {
	o := small()
	o.Instances, o.Blocks, o.Requests, o.Rate = 2, 2*minBlocks, 400, 1000
	r := run(t, o)
	require.Empty(t, r.Violations)
	require.Greater(t, r.Answered, maxInFlight, "they came in a fifth of a second")

	o.Rate, o.Fault = 0.5, RacksFail
	o.Requests = 200
	r = run(t, o)
	require.Empty(t, r.Violations)
	require.Equal(t, r.Requests, r.Answered+r.Failed)
	require.GreaterOrEqual(t, r.Failed, 4, "of about eight that come while both instances are down")
}

// TestGrowth: what comes to a router grows no faster than the number of instances.
func TestGrowth(t *testing.T) {
	sizes := grow(t, Sound)
	var text strings.Builder
	require.NoError(t, GrowthTable(&text, sizes))
	t.Logf("\n%s", text.String())
	require.Empty(t, superlinear(sizes))
}

// grow plays fleets of three sizes.
func grow(t *testing.T, m Mutant) (sizes []Size) {
	t.Helper()
	o, list := small(), []int{10, 32, 100}
	o.Requests, o.Mutant = 30*o.Instances, m
	if soak() && m == Sound {
		list = []int{10, 100, 1000}
		o.Blocks, o.Requests = minBlocks*o.Instances, 60*o.Instances
	}
	require.NoError(t, Sizes(t.Context(), o, list, func(s Size) {
		require.Empty(t, s.Violations)
		sizes = append(sizes, s)
	}))
	return sizes
}

// superlinear lists what grows faster than the number of instances.
func superlinear(sizes []Size) (list []string) {
	for i, kind := range sizes[0].Rates() {
		if exponent, ok := Growth(sizes, func(r *Result) float64 { return r.Rates()[i].Second }); ok && exponent > 1.1 {
			list = append(list, kind.Name)
		}
	}
	return list
}

// TestEqualSeeds: equal options give equal results, and another seed gives another.
func TestEqualSeeds(t *testing.T) {
	o := small()
	o.Requests = 600
	for _, f := range []Fault{NoFault, RacksFail, MissedEvents, TwoRouters} {
		o.Fault = f
		once, again := run(t, o), run(t, o)
		require.Equal(t, once, again, f)
	}
	other := o
	other.Seed++
	require.NotEqual(t, run(t, o), run(t, other))
}

// TestMemory: a block takes at most 64 bytes of the index.
func TestMemory(t *testing.T) {
	o := small()
	o.Instances, o.Blocks, o.Requests = 8, 8*12_000, 4000
	began := time.Now()
	o.Clock = func() time.Duration { return time.Since(began) }
	r := run(t, o)
	require.Empty(t, r.Violations)
	require.Greater(t, r.IndexBlocks, 40_000)
	t.Logf("%d blocks, %.1f bytes each; %.0f decisions a second", r.IndexBlocks, r.Measured.BytesPerBlock, r.Measured.DecisionsPerSecond)
	require.LessOrEqual(t, r.Measured.BytesPerBlock, 64.0)
	require.Positive(t, r.Measured.DecisionsPerSecond)
}

// TestMutants: each is noticed, and what it shows with is sound without it.
func TestMutants(t *testing.T) {
	kinds := map[Mutant]string{
		RemovalsForgotten: Unbounded, EpochIgnored: WrongIndex, GapsUnnoticed: WrongIndex, ReplayedTwice: WrongIndex, MemoryUnbounded: WrongIndex,
		SecondDeaf: WrongIndex, NeverSpreads: NotSpread, StickyToDead: ToTheDead, LoadCountedTwice: WrongLoad, LoadNeverEnds: WrongLoad,
		RequestLost:  LostRequests,
		LeaseForever: WrongLease, LeaseTooShort: WrongLease,
	}
	for _, m := range Mutants() {
		t.Run(m.String(), func(t *testing.T) {
			o := small()
			o.Mutant, o.Fault = m, m.Fault()
			switch m {
			case RegistrationsFlood:
				require.Equal(t, []string{"registrations"}, superlinear(grow(t, m)))
			case TimeInTrace:
				o.Requests = 100
				once, again := run(t, o), run(t, o)
				require.NotEqual(t, once, again)
			default:
				got := strings.Join(run(t, o).Violations, "\n")
				require.Contains(t, got, kinds[m]+":")
				t.Log(got)
			}
		})
	}
}

// TestOptions: what is wrong is named.
func TestOptions(t *testing.T) {
	for want, change := range map[string]func(*Options){
		"policy is":       func(o *Options) { o.Policy = "x" },
		"rate is":         func(o *Options) { o.Rate = -1 },
		"requests is 0":   func(o *Options) { o.Requests = 0 },
		"instances is 1,": func(o *Options) { o.Instances = 1 },
		"instances is 10": func(o *Options) { o.Instances = MaxInstances + 1 },
		"blocks is 100":   func(o *Options) { o.Blocks = 100 },
	} {
		o := small()
		change(&o)
		_, err := Run(t.Context(), o)
		require.ErrorContains(t, err, want)
	}
	over, end := context.WithCancel(t.Context())
	end()
	_, err := Run(over, small())
	require.ErrorIs(t, err, context.Canceled)
}
