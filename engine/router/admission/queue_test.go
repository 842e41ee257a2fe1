package admission

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// world drives a queue and checks after every call what must always hold.
type world struct {
	t       require.TestingT
	q       *Queue
	now     time.Time
	limits  map[string]Limits
	live    []*Request // those that neither ended nor were refused
	started map[*Request]bool
}

func newWorld(t require.TestingT, c Config) *world {
	return &world{t: t, q: NewQueue(c), now: time.Unix(1000, 0), limits: map[string]Limits{}, started: map[*Request]bool{}}
}

func decided(r *Request) bool {
	select {
	case <-r.Decided():
		return true
	default:
		return false
	}
}

func (w *world) arrive(name string, tokens int) (*Request, *RefusedError) {
	r, err := w.q.Arrive(w.now, name, w.limits[name], tokens)
	if err == nil {
		w.live = append(w.live, r)
	}
	w.check()
	var refusal *RefusedError
	if err != nil {
		require.ErrorAs(w.t, err, &refusal)
		require.GreaterOrEqual(w.t, refusal.After, shortestAfter)
		require.LessOrEqual(w.t, refusal.After, longestAfter)
	}
	return r, refusal
}

// check is what holds between two calls.
func (w *world) check() {
	running, waiting := 0, 0
	each := map[*client]int{}
	still := w.live[:0]
	for _, r := range w.live {
		switch {
		case decided(r) && r.Refused() != nil:
			continue
		case decided(r):
			running++
			each[r.client]++
			w.started[r] = true
		default:
			waiting++
		}
		still = append(still, r)
	}
	w.live = still
	require.Equal(w.t, running, w.q.Running())
	require.Equal(w.t, waiting, w.q.Waiting())
	require.LessOrEqual(w.t, running, w.q.config.Slots)
	require.LessOrEqual(w.t, waiting, w.q.config.Waiting)
	require.LessOrEqual(w.t, len(w.q.clients), maxClients+1)
	for c, n := range each {
		require.Equal(w.t, n, c.running)
	}
	for _, r := range w.live {
		if !decided(r) && running < w.q.config.Slots {
			require.True(w.t, r.client.capped(), "a request waits though there is room")
		}
	}
}

// step does one of everything that may happen.
func (w *world) step(what, a, b int) {
	w.now = w.now.Add(time.Duration(b) * 100 * time.Millisecond)
	switch what % 4 {
	case 0, 1:
		w.arrive(fmt.Sprint(a%5), b*40)
	case 2:
		if len(w.live) > 0 {
			r := w.live[a%len(w.live)]
			w.end(r, b*50-100)
			w.end(r, 1) // without effect
		}
	case 3:
		if len(w.live) > 0 {
			r := w.live[a%len(w.live)]
			ran := decided(r)
			refusal := w.q.GiveUp(w.now, r)
			require.Equal(w.t, ran, refusal == nil)
			w.check()
		}
	}
}

func (w *world) end(r *Request, used int) {
	w.q.End(w.now, r, used)
	w.live = slices.DeleteFunc(w.live, func(other *Request) bool { return other == r })
	w.check()
}

// finish ends everything, after which nothing is left.
func (w *world) finish() {
	for len(w.live) > 0 {
		w.end(w.live[0], -1)
	}
	w.now = w.now.Add(24 * 365 * time.Hour)
	w.arrive("last", 1)
	for _, c := range w.q.clients {
		w.q.forget(w.now, c)
	}
	require.Len(w.t, w.q.clients, 1, "nothing is remembered of clients that say no more")
	require.LessOrEqual(w.t, len(w.q.ring), 1)
}

func TestQueueKeepsItsLimits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, Config{Slots: rapid.IntRange(1, 4).Draw(t, "slots"), Waiting: rapid.IntRange(0, 6).Draw(t, "waiting")})
		for i := range 5 {
			w.limits[fmt.Sprint(i)] = Limits{
				InFlight:          rapid.IntRange(0, 2).Draw(t, "in flight"),
				RequestsPerMinute: rapid.SampledFrom([]int{0, 1, 60}).Draw(t, "requests"),
				TokensPerMinute:   rapid.SampledFrom([]int{0, 100, 100_000}).Draw(t, "tokens"),
			}
		}
		for range rapid.IntRange(0, 80).Draw(t, "steps") {
			w.step(rapid.IntRange(0, 3).Draw(t, "what"), rapid.IntRange(0, 99).Draw(t, "a"), rapid.IntRange(0, 255).Draw(t, "b"))
		}
		w.finish()
	})
}

func FuzzQueue(f *testing.F) {
	f.Add(byte(1), byte(2), []byte{0, 1, 2, 0, 1, 200, 2, 0, 1, 3, 0, 9})
	f.Add(byte(0), byte(0), []byte{0, 0, 0})
	f.Fuzz(func(t *testing.T, slots, waiting byte, ops []byte) {
		w := newWorld(t, Config{Slots: int(slots % 8), Waiting: int(waiting % 8)})
		for i := range 5 {
			w.limits[fmt.Sprint(i)] = Limits{InFlight: i % 3, RequestsPerMinute: i * 7, TokensPerMinute: i * 900}
		}
		for ; len(ops) >= 3 && w.q.config.Slots > 0; ops = ops[3:] {
			w.step(int(ops[0]), int(ops[1]), int(ops[2]))
		}
		w.finishIfAny()
	})
}

func (w *world) finishIfAny() {
	if w.q.config.Slots > 0 {
		w.finish()
		return
	}
	_, refusal := w.arrive("a", 1)
	require.Equal(w.t, w.q.config.Waiting == 0, refusal != nil)
}

// Clients that always have something waiting get equal shares of tokens, however large their requests are and however
// many they send: the difference is bounded by one request, once the first have started.
func TestClientsGetEqualShares(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const most = 9000
		n := rapid.IntRange(2, 5).Draw(t, "clients")
		w := newWorld(t, Config{Slots: rapid.IntRange(1, 5).Draw(t, "slots"), Waiting: 100})
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		size := make([]int, n)
		for i := range size {
			size[i] = 1 + random.IntN(most)
		}
		served := map[string]int{}
		counted := map[*Request]bool{}
		for range 100 {
			for i := range n {
				for c := w.q.clients[fmt.Sprint(i)]; c == nil || len(c.queue) < 3; c = w.q.clients[fmt.Sprint(i)] {
					w.arrive(fmt.Sprint(i), 1+random.IntN(size[i]))
				}
			}
			for r := range w.started {
				if !counted[r] {
					counted[r] = true
					served[r.client.name] += r.tokens
				}
			}
			var running []*Request
			for _, r := range w.live {
				if decided(r) {
					running = append(running, r)
				}
			}
			w.now = w.now.Add(time.Millisecond)
			w.end(running[random.IntN(len(running))], -1)
		}
		for i := range n {
			for j := range n {
				// The first requests of the first clients start before the others have come.
				require.LessOrEqual(t, served[fmt.Sprint(i)]-served[fmt.Sprint(j)], (1+w.q.config.Slots)*most)
			}
		}
	})
}

// A client with many requests cannot keep another one out of a full queue, nor make it wait for all of its own.
func TestHogLeavesRoom(t *testing.T) {
	w := newWorld(t, Config{Slots: 1, Waiting: 4})
	var hog []*Request
	for range 5 {
		r, refusal := w.arrive("hog", 10)
		require.Nil(t, refusal)
		hog = append(hog, r)
	}
	_, refusal := w.arrive("hog", 10)
	require.Equal(t, QueueFull, refusal.Reason)
	one, refusal := w.arrive("other", 10)
	require.Nil(t, refusal)
	require.Equal(t, QueueFull, hog[4].Refused().Reason, "its newest request made room")
	w.end(hog[0], -1)
	w.end(hog[1], -1)
	require.True(t, decided(one), "its turn comes before the rest of the hog's")
	require.False(t, decided(hog[3]))
}

// What a client is told to wait is what the queue takes at the rate at which requests end.
func TestRetryAfterIsHonest(t *testing.T) {
	w := newWorld(t, Config{Slots: 2, Waiting: 10})
	for range 40 { // each runs for 4 s
		r, _ := w.arrive("a", 1)
		w.now = w.now.Add(4 * time.Second)
		w.end(r, -1)
	}
	for range 12 {
		w.arrive("a", 1)
	}
	_, refusal := w.arrive("a", 1)
	require.Equal(t, RefusedError{QueueFull, 22 * time.Second}, *refusal, "11 requests, half a request a second")
	_, refusal = w.arrive("b", 1)
	require.Nil(t, refusal)
	b := w.live[len(w.live)-1]
	refusal = w.q.GiveUp(w.now, b)
	require.Equal(t, RefusedError{QueueTimeout, 4 * time.Second}, *refusal, "one of a and its own")
	require.Nil(t, w.q.GiveUp(w.now, b), "once")
}

// Requests and tokens of a client are limited at the rate that is said, and what a request really cost counts.
func TestRates(t *testing.T) {
	w := newWorld(t, Config{Slots: 100, Waiting: 100})
	w.limits["a"] = Limits{RequestsPerMinute: 3}
	for range 3 {
		_, refusal := w.arrive("a", 1)
		require.Nil(t, refusal)
	}
	_, refusal := w.arrive("a", 1)
	require.Equal(t, RefusedError{RequestRate, 20 * time.Second}, *refusal)
	w.now = w.now.Add(20 * time.Second)
	_, refusal = w.arrive("a", 1)
	require.Nil(t, refusal)

	w.limits["b"] = Limits{TokensPerMinute: 600}
	r, refusal := w.arrive("b", 5000)
	require.Nil(t, refusal, "more than fits is served when the bucket is full")
	_, refusal = w.arrive("b", 10)
	require.Equal(t, RefusedError{TokenRate, (4400 + 10) * 100 * time.Millisecond}, *refusal)
	w.end(r, 500)
	_, refusal = w.arrive("b", 100)
	require.Nil(t, refusal, "it cost less than estimated")
	_, refusal = w.arrive("b", 1)
	require.Equal(t, TokenRate, refusal.Reason)

	w.limits["c"] = Limits{TokensPerMinute: 600}
	r, _ = w.arrive("c", 10)
	w.end(r, 1200)
	_, refusal = w.arrive("c", 1)
	require.Equal(t, RefusedError{TokenRate, 60100 * time.Millisecond}, *refusal, "it cost more")
}

// A bucket never lets more through than what it held and what has come since, whatever the requests are.
func TestBucketIsBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		perMinute := rapid.IntRange(1, 1000).Draw(t, "per minute")
		b, now := &bucket{}, time.Unix(50, 0)
		begin, taken, largest := now, 0, 0
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 5000).Draw(t, "ms")) * time.Millisecond)
			n := rapid.IntRange(1, 2000).Draw(t, "n")
			b.refill(now, perMinute)
			if !b.has(n) {
				later := *b
				later.refill(now.Add(time.Duration(b.until(n)*float64(time.Second))+time.Microsecond), perMinute)
				require.True(t, later.has(n), "what is said to be enough is enough")
				continue
			}
			b.take(n)
			taken += n
			largest = max(largest, n)
		}
		require.LessOrEqual(t, float64(taken), float64(perMinute)*(1+now.Sub(begin).Minutes())+float64(largest)+1)
	})
}

// Limits that change take effect at the next request, and a client that had none begins with a full bucket.
func TestLimitsChange(t *testing.T) {
	w := newWorld(t, Config{Slots: 9, Waiting: 9})
	_, refusal := w.arrive("a", 1)
	require.Nil(t, refusal)
	w.limits["a"] = Limits{RequestsPerMinute: 1}
	_, refusal = w.arrive("a", 1)
	require.Nil(t, refusal)
	_, refusal = w.arrive("a", 1)
	require.Equal(t, RequestRate, refusal.Reason)
	w.limits["a"] = Limits{}
	_, refusal = w.arrive("a", 1)
	require.Nil(t, refusal)
}

// When there are fewer slots than requests that run, these go on and no other starts; when there are more, others do at once.
func TestSlotsChange(t *testing.T) {
	q := NewQueue(Config{Slots: 1, Waiting: 9})
	now := time.Unix(1000, 0)
	var list []*Request
	for range 4 {
		r, err := q.Arrive(now, "a", Limits{}, 1)
		require.NoError(t, err)
		list = append(list, r)
	}
	for _, step := range []struct{ slots, running int }{{1, 1}, {3, 3}, {2, 3}} {
		q.SetSlots(now, step.slots)
		require.Equal(t, step.running, q.Running())
	}
	q.End(now, list[0], 0)
	require.Equal(t, []int{2, 1}, []int{q.Running(), q.Waiting()})
	q.End(now, list[1], 0)
	require.Equal(t, []int{2, 0}, []int{q.Running(), q.Waiting()})
}

// Requests of one client beyond its limit wait, and do not delay others.
func TestInFlightOfOneClient(t *testing.T) {
	w := newWorld(t, Config{Slots: 3, Waiting: 9})
	w.limits["a"] = Limits{InFlight: 1}
	first, _ := w.arrive("a", 1)
	second, _ := w.arrive("a", 1)
	other, _ := w.arrive("b", 1)
	require.True(t, decided(first))
	require.False(t, decided(second))
	require.True(t, decided(other))
	w.end(first, -1)
	require.True(t, decided(second))
}

// Names beyond those that are told apart share one place, and the memory of a stranger's names is bounded.
func TestManyClients(t *testing.T) {
	q := NewQueue(Config{Slots: 1 << 20, Waiting: 1 << 20})
	now := time.Unix(0, 0)
	for i := range maxClients + 100 {
		_, err := q.Arrive(now, fmt.Sprint("client ", i), Limits{RequestsPerMinute: 1000}, 1)
		require.NoError(t, err)
	}
	require.Len(t, q.clients, maxClients+1)
	require.Equal(t, 100, q.clients[""].running)
}

func TestRefusalIsAnError(t *testing.T) {
	var err error = &RefusedError{QueueFull, 3 * time.Second}
	var r *RefusedError
	require.ErrorAs(t, fmt.Errorf("outer: %w", err), &r)
	require.Equal(t, "queue_full: try again after 3s", err.Error())
}

// Retries are a share of the requests, and a few in any case.
func TestBudget(t *testing.T) {
	now := time.Unix(9, 0)
	b := &Budget{Share: 0.2}
	for range budgetSize {
		require.True(t, b.Retry(now))
	}
	require.False(t, b.Retry(now))
	granted := 0
	for range 1000 {
		b.Request(now)
		if b.Retry(now) {
			granted++
		}
	}
	require.InDelta(t, 200, granted, 1)
	now = now.Add(time.Second)
	for granted = 0; b.Retry(now); granted++ {
	}
	require.InDelta(t, budgetPerSecond, granted, 1)
}

func TestBackoff(t *testing.T) {
	for retry, want := range []int{10, 20, 40, 80, 100, 100} {
		for range 50 {
			got := Backoff(retry, 10*time.Millisecond, 100*time.Millisecond).Seconds() * 1000
			require.GreaterOrEqual(t, got, float64(want)/2)
			require.LessOrEqual(t, got, float64(want))
		}
	}
	require.Equal(t, time.Duration(0), Backoff(3, 0, time.Second))
	require.LessOrEqual(t, Backoff(1<<40, time.Millisecond, time.Second), time.Second)
}

func BenchmarkQueue(b *testing.B) {
	q, now := NewQueue(Config{Slots: 64, Waiting: 512}), time.Unix(0, 0)
	names := make([]string, 64)
	for i := range names {
		names[i] = fmt.Sprint(i)
	}
	var live []*Request
	for i := 0; b.Loop(); i++ {
		r, err := q.Arrive(now, names[i%64], Limits{}, 100+i%900)
		if err == nil {
			live = append(live, r)
		}
		if len(live) > 300 {
			q.End(now, live[0], -1)
			live = live[1:]
		}
	}
}

// What requests cost that was not estimated counts for the turns of what their clients have waiting then.
func TestCostsCorrectTurns(t *testing.T) {
	now := time.Unix(0, 0)
	q := NewQueue(Config{Slots: 4, Waiting: 1000})
	estimates, costs := map[string]int{"modest": 10, "exact": 100, "generous": 1000, "short": 50}, map[string]int{"modest": 100, "exact": 100, "generous": 100, "short": 50}
	type one struct {
		name string
		r    *Request
	}
	var waiting, running []one
	arrive := func(name string) {
		r, err := q.Arrive(now, name, Limits{}, estimates[name])
		require.NoError(t, err)
		waiting = append(waiting, one{name, r})
	}
	for _, name := range []string{"modest", "exact", "generous", "short"} {
		for range 20 {
			arrive(name)
		}
	}
	got := map[string]int{}
	for range 2000 {
		waiting = slices.DeleteFunc(waiting, func(o one) bool {
			select {
			case <-o.r.Decided():
				running = append(running, o)
				return true
			default:
				return false
			}
		})
		o := running[0]
		running = running[1:]
		got[o.name] += costs[o.name]
		arrive(o.name)
		q.End(now, o.r, costs[o.name])
	}
	for name, n := range got {
		require.InEpsilon(t, got["exact"], n, 0.1, "%s: %v", name, got)
	}
}

// A request may say what it costs when it runs already. One that costs too much has not come, and the next one runs.
func TestEstimate(t *testing.T) {
	now := time.Unix(0, 0)
	q := NewQueue(Config{Slots: 1, Waiting: 1})
	limits := Limits{RequestsPerMinute: 4, TokensPerMinute: 100}
	for _, tt := range []struct {
		tokens int
		want   error
	}{
		{40, nil},
		{40, nil},
		{40, &RefusedError{TokenRate, 12 * time.Second}}, // 20 are left
		{20, nil},
	} {
		r, err := q.Arrive(now, "a", limits, 1)
		require.NoError(t, err)
		next, err := q.Arrive(now, "b", Limits{}, 1)
		require.NoError(t, err)
		err = q.Estimate(now, r, tt.tokens)
		require.Equal(t, tt.want, err)
		if err == nil {
			q.End(now, r, tt.tokens)
		} else {
			q.End(now, r, 1000)
		}
		<-next.Decided()
		q.End(now, next, 0)
	}
	require.Zero(t, q.Running()+q.Waiting())
	_, err := q.Arrive(now, "a", limits, 1)
	require.Equal(t, &RefusedError{RequestRate, 15 * time.Second}, err, "the refused request counts, too")
}
