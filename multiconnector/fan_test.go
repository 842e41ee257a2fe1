package multiconnector_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/multiconnector"
)

// voice is a child that counts and tells.
type voice struct {
	*shelf
	stats  []connector.Stat
	hang   chan struct{} // Stats waits for it to close
	events chan []connector.BlockEvent
}

func (v *voice) Stats(ctx context.Context) ([]connector.Stat, error) {
	if v.hang != nil {
		<-v.hang // it does not look at ctx
	}
	return v.stats, ctx.Err()
}

func (v *voice) Events(ctx context.Context) ([]connector.BlockEvent, error) {
	select {
	case e := <-v.events:
		return e, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

var (
	hits = connector.StatInfo{Name: "hits_total", Help: "Hits.", Kind: connector.Counter, Labels: []string{"tier"}}
	size = connector.StatInfo{Name: "size", Help: "Size.", Kind: connector.Gauge}
)

// choir is a composite of voices.
func choir(t *testing.T, change func([]multiconnector.Child), voices ...*voice) (connector.Info, connector.Scheduler) {
	t.Helper()
	children := make([]multiconnector.Child, len(voices))
	sides := make([]connector.Scheduler, len(voices))
	for i, v := range voices {
		v.shelf = newShelf()
		if v.events == nil {
			v.events = make(chan []connector.BlockEvent)
		}
		sides[i] = v
		children[i] = multiconnector.Child{
			Name: string(rune('A' + i)), Role: connector.RoleBoth, Patience: 10 * time.Second,
			Info: connector.Info{Groups: true, Capabilities: connector.CanStat | connector.CanEvents, Stats: []connector.StatInfo{hits, size}},
		}
	}
	if change != nil {
		change(children)
	}
	m, err := multiconnector.New("Multi", children)
	require.NoError(t, err)
	require.NoError(t, connector.ValidateStats(m.Info().Stats))
	s := m.Scheduler(sides, []connector.Group{{BlockTokens: blockTokens}}, nil)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return m.Info(), s
}

func statsOf(t *testing.T, s connector.Scheduler) []connector.Stat {
	t.Helper()
	source, ok := connector.As[connector.StatsSource](s)
	require.True(t, ok)
	stats, err := source.Stats(t.Context())
	require.NoError(t, err)
	return stats
}

func TestStatsOfChildren(t *testing.T) {
	five := func(v float64) connector.Stat {
		return connector.Stat{Name: "hits_total", Labels: []string{"memory"}, Value: v}
	}
	info, s := choir(t, func(cs []multiconnector.Child) {
		cs[1].Label = "Store"
		cs[1].Info.Stats = []connector.StatInfo{{Name: "hits_total", Help: "Hits.", Kind: connector.Counter, Labels: []string{"shard"}}}
		cs[2].Info.Stats = []connector.StatInfo{{Name: "hits_total", Help: "Hits.", Kind: connector.Counter, Labels: []string{"child", "tier"}}}
		cs[3].Info.Stats = []connector.StatInfo{{Name: "wide", Help: "Wide.", Kind: connector.Gauge, Labels: []string{"a", "b", "c", "d"}}}
	},
		&voice{stats: []connector.Stat{five(5), {Name: "size", Value: 7}, {Name: "unknown", Value: 1}, {Name: "size", Labels: []string{"x"}, Value: 1}}},
		&voice{stats: []connector.Stat{{Name: "hits_total", Labels: []string{"s1"}, Value: 2}}},
		&voice{stats: []connector.Stat{{Name: "hits_total", Labels: []string{"0/Deep", "disk"}, Value: 3}}},
		&voice{stats: []connector.Stat{{Name: "wide", Labels: []string{"1", "2", "3", "4"}, Value: 3}}},
	)
	require.Equal(t, []string{"child", "tier", "shard"}, info.Stats[0].Labels)
	require.Equal(t, []string{"child"}, info.Stats[1].Labels)
	require.Equal(t, []connector.Stat{
		{Name: "hits_total", Labels: []string{"0/A", "memory", ""}, Value: 5},
		{Name: "size", Labels: []string{"0/A"}, Value: 7},
		{Name: "hits_total", Labels: []string{"1/Store", "", "s1"}, Value: 2},
		{Name: "hits_total", Labels: []string{"2/0/Deep", "disk", ""}, Value: 3},
	}, statsOf(t, s), "what does not fit or was not declared is left out")
}

func TestStatsLimits(t *testing.T) {
	many := make([]connector.StatInfo, connector.MaxStats)
	for i := range many {
		many[i] = connector.StatInfo{Name: "n" + string(rune('a'+i/26)) + string(rune('a'+i%26)), Help: "N.", Kind: connector.Gauge}
	}
	samples := make([]connector.Stat, connector.MaxSamples)
	for i := range samples {
		samples[i] = connector.Stat{Name: many[0].Name}
	}
	info, s := choir(t, func(cs []multiconnector.Child) { cs[0].Info.Stats = many }, &voice{stats: samples}, &voice{stats: samples})
	require.Len(t, info.Stats, connector.MaxStats)
	require.Len(t, statsOf(t, s), connector.MaxSamples)

	info, s = choir(t, func(cs []multiconnector.Child) { cs[0].Info.Stats = nil }, &voice{})
	require.Zero(t, info.Capabilities&connector.CanStat)
	_, ok := connector.As[connector.StatsSource](s)
	require.False(t, ok, "nobody counts")
}

// A child that does not answer costs the others its patience, once.
func TestStatsOfSlowChild(t *testing.T) {
	slow := &voice{stats: []connector.Stat{{Name: "size", Value: 1}}, hang: make(chan struct{})}
	_, s := choir(t, func(cs []multiconnector.Child) { cs[0].Patience = 50 * time.Millisecond }, slow,
		&voice{stats: []connector.Stat{{Name: "size", Value: 2}}})
	answer := sync.OnceFunc(func() { close(slow.hang) })
	t.Cleanup(answer) // or the composite cannot close
	want := []connector.Stat{{Name: "size", Labels: []string{"1/B"}, Value: 2}}
	for range 100 {
		require.Equal(t, want, statsOf(t, s))
	}
	answer()
	require.Eventually(t, func() bool { return len(statsOf(t, s)) == 2 }, time.Minute, time.Millisecond)
}

// reader follows the events of a composite as an index would.
type reader struct {
	t      *testing.T
	source connector.EventSource
	last   uint64
	has    map[connector.BlockKey]bool
}

func newReader(t *testing.T, s connector.Scheduler) *reader {
	source, ok := connector.As[connector.EventSource](s)
	require.True(t, ok)
	return &reader{t: t, source: source, has: map[connector.BlockKey]bool{}}
}

// next takes one answer.
func (r *reader) next() []connector.BlockEvent {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	events, err := r.source.Events(ctx)
	require.NoError(r.t, err)
	require.NotEmpty(r.t, events)
	for _, e := range events {
		require.Equal(r.t, r.last+1, e.Seq)
		r.last = e.Seq
		for _, k := range e.Keys {
			require.Equal(r.t, e.Kind == connector.BlocksRemoved, r.has[k], "%v of %v is no news", e.Kind, k)
			r.has[k] = e.Kind == connector.BlocksStored
		}
		if e.Kind == connector.BlocksCleared {
			clear(r.has)
		}
	}
	return events
}

func stored(seq uint64, keys ...connector.BlockKey) []connector.BlockEvent {
	return []connector.BlockEvent{{Seq: seq, Kind: connector.BlocksStored, Keys: keys, Medium: "memory", Scope: connector.ScopeNode}}
}

func removed(seq uint64, keys ...connector.BlockKey) []connector.BlockEvent {
	return []connector.BlockEvent{{Seq: seq, Kind: connector.BlocksRemoved, Keys: keys, Medium: "memory", Scope: connector.ScopeNode}}
}

func TestEventsOfChildren(t *testing.T) {
	a, b := &voice{}, &voice{}
	_, s := choir(t, nil, a, b)
	r := newReader(t, s)
	ks := keys(6)
	tell := func(v *voice, events []connector.BlockEvent) {
		v.events <- events
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := r.source.Events(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)

	tell(a, stored(7, ks[0], ks[1]))
	require.Equal(t, stored(1, ks[0], ks[1]), r.next())
	tell(b, stored(1, ks[1], ks[2]))
	require.Equal(t, stored(2, ks[2]), r.next())
	tell(a, removed(8, ks[1])) // the other has it
	tell(a, removed(8, ks[0])) // said before: it is not news
	tell(a, removed(9, ks[0], ks[5]))
	require.Equal(t, removed(3, ks[0]), r.next())
	tell(b, removed(2, ks[1], ks[2]))
	require.ElementsMatch(t, []connector.BlockKey{ks[1], ks[2]}, r.next()[0].Keys)

	tell(a, stored(10, ks[3]))
	r.next()
	tell(b, stored(3, ks[3], ks[4]))
	r.next()
	tell(b, stored(6, ks[5])) // a gap: of what b has only this is known
	require.Equal(t, removed(7, ks[4]), r.next()[:1])
	for !r.has[ks[5]] {
		r.next()
	}
	tell(a, []connector.BlockEvent{{Seq: 11, Kind: connector.BlocksCleared}})
	require.Equal(t, connector.BlocksRemoved, r.next()[0].Kind)
	tell(b, []connector.BlockEvent{{Seq: 7, Kind: connector.BlocksCleared}})
	require.Equal(t, connector.BlocksCleared, r.next()[0].Kind)
	require.Empty(t, r.has)
}

// Against a model: whatever the children say, the reader knows exactly the blocks that at least one
// child has.
func TestEventsAgainstModel(t *testing.T) {
	for seed := range uint64(100) {
		eventsRun(t, seed)
	}
}

func eventsRun(t *testing.T, seed uint64) {
	t.Helper()
	rnd := rand.New(rand.NewPCG(seed, 3))
	voices := make([]*voice, 1+rnd.IntN(4))
	has := make([]map[connector.BlockKey]bool, len(voices))
	seqs := make([]uint64, len(voices))
	for i := range voices {
		voices[i], has[i] = &voice{events: make(chan []connector.BlockEvent, 100)}, map[connector.BlockKey]bool{}
	}
	_, s := choir(t, nil, voices...)
	ks := keys(12)
	for range 60 {
		i := rnd.IntN(len(voices))
		var event connector.BlockEvent
		switch rnd.IntN(8) {
		case 0:
			event.Kind = connector.BlocksCleared
			clear(has[i])
		case 1: // a gap
			seqs[i] += 3
			clear(has[i])
			fallthrough
		default:
			event.Kind = connector.BlocksStored
			if rnd.IntN(3) == 0 {
				event.Kind = connector.BlocksRemoved
			}
			for range 1 + rnd.IntN(4) {
				k := ks[rnd.IntN(len(ks))]
				event.Keys = append(event.Keys, k)
				has[i][k] = event.Kind == connector.BlocksStored
			}
		}
		seqs[i]++
		event.Seq = seqs[i]
		voices[i].events <- []connector.BlockEvent{event}
	}
	r := readToEnd(t, s, voices, seqs)
	for _, k := range ks {
		want := false
		for i := range has {
			want = want || has[i][k]
		}
		require.Equal(t, want, r.has[k], "seed %d", seed)
	}
}

// readToEnd reads until it has seen a last block of each child.
func readToEnd(t *testing.T, s connector.Scheduler, voices []*voice, seqs []uint64) *reader {
	t.Helper()
	last := connector.BlockKey{0xEE}
	for i, v := range voices {
		last[1] = byte(i)
		v.events <- stored(seqs[i]+1, last)
	}
	r := newReader(t, s)
	for n := 0; n < len(voices); {
		for _, e := range r.next() {
			n += len(slices.DeleteFunc(slices.Clone(e.Keys), func(k connector.BlockKey) bool { return k[0] != 0xEE }))
		}
	}
	return r
}

// Nobody reads for long: the oldest events go, which shows as a gap.
func TestEventsAreBounded(t *testing.T) {
	a := &voice{events: make(chan []connector.BlockEvent, 1)}
	_, s := choir(t, nil, a)
	r := newReader(t, s)
	a.events <- stored(1, keys(1)[0])
	r.next()
	n := uint64(2)
	key := func(i uint64) connector.BlockKey { return connector.BlockKey{1, byte(i), byte(i >> 8), byte(i >> 16)} }
	for range 2 * connector.MaxEvents {
		a.events <- stored(n, key(n))
		n++
	}
	a.events <- removed(n, key(n-1)) // when it is taken the last of the others was
	events, err := r.source.Events(t.Context())
	require.NoError(t, err)
	require.LessOrEqual(t, len(events), connector.MaxEvents)
	require.Greater(t, events[0].Seq, uint64(2))
}
