package router

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/kvport/kvport/engine/router/policy"
	"github.com/kvport/kvport/internal/register"
	"github.com/kvport/kvport/verify/testkit"
)

func newTestPool(t require.TestingT) *pool {
	m, err := newMetrics(prometheus.NewRegistry())
	require.NoError(t, err)
	chooser, err := policy.New(policy.Config{Policy: policy.PrefixAware})
	require.NoError(t, err)
	return newPool(nil, chooser, slog.New(slog.DiscardHandler), m)
}

// pickDecode takes a decode instance for a request that needs no other.
func (p *pool) pickDecode(tried map[int]bool) (target, bool) {
	at, ok := p.choose(&policy.Request{Alone: true}, tried, policy.None)
	return at.decode, ok
}

func at(t require.TestingT, text string) *url.URL {
	u, err := url.Parse(text)
	require.NoError(t, err)
	return u
}

// Instances that come and go for ever take no more places than there are at once, and leave no series behind.
func TestPlacesAreUsedAgain(t *testing.T) {
	p := newTestPool(t)
	turns := newTurns(10)
	for i := range 5000 {
		list := []spec{{role: prefill, url: at(t, fmt.Sprintf("http://p%d", i))}, {role: decode, url: at(t, fmt.Sprintf("http://d%d", i))}}
		require.NoError(t, p.set(byDNS, list))
		d, ok := p.pickDecode(map[int]bool{})
		require.True(t, ok)
		require.Equal(t, list[1].url, d.url)
		turns.keep([]uint64{7}, 0, placeOf(d.url), []byte("{}"))
		from, _, ok := p.chooseFor(d, &policy.Request{}, map[int]bool{})
		require.True(t, ok)
		p.handedOver(pair{from.index, d.index}, true, "x")
		p.saw(d.index, &fit{Role: "kv_producer"})
		p.leave([]int{d.index, from.index})
		if i%3 == 0 {
			p.recycle(turns.forget)
			require.LessOrEqual(t, turns.marked.Len(), 1)
		}
	}
	require.NoError(t, p.set(byDNS, nil))
	p.recycle(turns.forget)
	require.LessOrEqual(t, len(p.urls), 10)
	require.Zero(t, p.taken())
	require.Empty(t, p.misfits)
	require.Empty(t, p.wasted)
	require.Zero(t, turns.marked.Len())
	require.Zero(t, testutil.CollectAndCount(p.metrics.up))
	h := p.health()
	require.Empty(t, h.instances)
	require.True(t, h.everPrefill)
}

// The place of an instance that has left is nobody else's as long as a request has to do with it.
func TestPlaceIsKeptForItsRequests(t *testing.T) {
	p := newTestPool(t)
	require.NoError(t, p.set(byFile, []spec{{role: decode, url: at(t, "http://a")}}))
	d, ok := p.pickDecode(map[int]bool{})
	require.True(t, ok)
	require.NoError(t, p.set(byFile, nil))
	p.recycle(func(gone) {})
	require.NoError(t, p.set(byFile, []spec{{role: decode, url: at(t, "http://b")}}))
	other, ok := p.pickDecode(map[int]bool{})
	require.True(t, ok)
	require.NotEqual(t, d.index, other.index)
	p.failed(d, false)
	require.Equal(t, "up", p.health().instances[0].State, "what a is blamed for is not b's")
	require.NoError(t, d.life.Err(), "the request goes on")
	require.NoError(t, p.set(byFile, []spec{{role: decode, url: at(t, "http://A/")}, {role: decode, url: at(t, "http://b")}}))
	require.Equal(t, d.index, p.index(decode, "a"), "it comes back to its own place")
	p.leave([]int{d.index, other.index})
	require.Len(t, p.health().instances, 2)
}

// An instance that several sources name stays until the last one drops it; each may say that it is drained.
func TestSourcesOfAnInstance(t *testing.T) {
	p := newTestPool(t)
	one := func(drain bool) []spec { return []spec{{role: decode, url: at(t, "http://a:1"), drain: drain}} }
	isUp := func() float64 { return testutil.ToFloat64(p.metrics.up.WithLabelValues("http://a:1", "decode")) }
	picks := func() bool {
		d, ok := p.pickDecode(map[int]bool{})
		if ok {
			p.leave([]int{d.index})
		}
		return ok
	}
	require.NoError(t, p.set(byFile, one(false)))
	require.NoError(t, p.set(byDNS, one(false)))
	require.NoError(t, p.set(byFile, nil))
	require.True(t, picks())
	require.NoError(t, p.set(byFile, one(true)))
	require.False(t, picks())
	require.Equal(t, "draining", p.health().instances[0].State)
	require.Zero(t, p.health().available[decode])
	require.Zero(t, isUp())
	p.probed(0, starting)
	p.probed(0, healthy)
	require.False(t, picks(), "however well it is")
	require.Zero(t, isUp())
	require.NoError(t, p.set(byFile, one(false)))
	require.True(t, picks())
	require.Equal(t, 1.0, isUp())
	require.NoError(t, p.set(byFile, one(true)))
	require.NoError(t, p.set(byFile, nil))
	require.True(t, picks(), "what does not name it says nothing about it")
	require.NoError(t, p.set(byDNS, nil))
	require.False(t, picks())
	require.Empty(t, p.health().instances)
}

// However a URL is spelled, it is the same instance: the file takes one of a flag out of service, and a list that has both is refused.
func TestSpellingsOfAnInstance(t *testing.T) {
	for _, same := range [][]string{
		{"http://a", "http://A:80/", "http://a:80"}, {"https://a/base", "https://a:443/base/"}, {"http://[fe80::80]", "http://[FE80::80]:80"}, {"http://a:8000", "http://a:8000/"},
	} {
		r, err := New(Config{Decode: []string{same[0]}})
		require.NoError(t, err)
		for _, other := range same[1:] {
			require.NoError(t, r.SetInstances([]Instance{{URL: other, Role: "decode", Drain: true}}))
			list := r.pool.health().instances
			require.Len(t, list, 1, other)
			require.Equal(t, "draining", list[0].State, other)
			_, err := parseInstances([]Instance{{URL: same[0], Role: "decode"}, {URL: other, Role: "decode"}})
			require.ErrorContains(t, err, "appears twice")
		}
		r.Close()
	}
	places := map[string]bool{}
	for _, other := range []string{"http://a", "https://a", "http://a:443", "https://a:80", "http://a:8080", "http://a/80"} {
		places[placeOf(at(t, other))] = true
	}
	require.Len(t, places, 6)
}

// A source says to which group an instance belongs, and may change that; one that registers says nothing about it.
func TestGroupOfAnInstance(t *testing.T) {
	p := newTestPool(t)
	in := func(group string) []spec {
		return []spec{{role: prefill, group: "a", url: at(t, "http://p:1")}, {role: decode, group: group, url: at(t, "http://d:1")}}
	}
	paired := func() bool {
		to, ok := p.choose(&policy.Request{}, map[int]bool{}, policy.None)
		require.True(t, ok)
		p.leave([]int{to.decode.index})
		if to.prefill.leg == nil {
			require.Equal(t, policy.Misfit, to.without)
			return false
		}
		p.leave([]int{to.prefill.index})
		return true
	}
	require.NoError(t, p.set(byFile, in("a")))
	p.saw(0, engineFit("kv_producer"))
	p.saw(1, engineFit("kv_producer"))
	require.Len(t, p.health().incompatible, 1)
	require.NoError(t, p.set(byFile, in("b")))
	require.Empty(t, p.health().incompatible, "nobody makes them a pair")
	require.False(t, p.health().paired)
	require.False(t, paired())
	p.saw(1, engineFit("kv_consumer"))
	require.False(t, paired())
	_, _, err := p.register(decode, &register.Message{HTTP: "d:1", At: time.Now().UnixNano()}, "k")
	require.NoError(t, err)
	require.Equal(t, "b", p.health().instances[1].Group)
	require.NoError(t, p.set(byFile, in("a")))
	require.True(t, paired())
	require.True(t, p.health().paired)
	require.Len(t, p.urls, 2)
}

// Of several groups that sources say the first one of the first source counts for as long as the source says one, however
// often others are said, so that nothing is forgotten of the instance. The log has that once.
func TestSeveralGroupsOfAnInstance(t *testing.T) {
	p := newTestPool(t)
	var log testkit.Log
	p.log = logTo(&log)
	in := func(groups ...string) (list []spec) {
		for _, group := range groups {
			list = append(list, spec{role: decode, group: group, url: at(t, "http://d:1")})
		}
		return list
	}
	group := func() string { return p.health().instances[0].Group }
	require.NoError(t, p.set(byDNS, in("", "a", "b")))
	d, ok := p.pickDecode(map[int]bool{})
	require.True(t, ok)
	for range 3 {
		require.NoError(t, p.set(byDNS, in("a", "", "b")))
		require.NoError(t, p.set(byFile, in("c")))
		require.Equal(t, "a", group())
		running, _ := p.policy.Busy(d.index)
		require.Equal(t, 1, running, "what is known of the instance stays")
	}
	require.Equal(t, 2, strings.Count(log.String(), "instance is named with several groups, the first counts"), log.String())
	require.Contains(t, log.String(), `group=a ignored="b c"`)
	require.NoError(t, p.set(byDNS, in("b")))
	require.Equal(t, "b", group(), "nobody says a any more")
	require.NoError(t, p.set(byDNS, nil))
	require.Equal(t, "c", group())
	require.NoError(t, p.set(byFile, in("d")))
	require.Equal(t, "d", group(), "a source may change its mind")
	require.NoError(t, p.set(byFile, nil))
	require.NoError(t, p.set(byDNS, in("e")))
	require.Equal(t, "e", group(), "it comes back before its last request has ended")
	p.done(d)
	p.leave([]int{d.index})
}

// A list that is too long changes nothing.
func TestTooManyInstances(t *testing.T) {
	p := newTestPool(t)
	var list []spec
	for i := range maxInstances {
		list = append(list, spec{role: decode, url: at(t, fmt.Sprintf("http://x:%d", i+1))})
	}
	require.NoError(t, p.set(byFile, list))
	err := p.set(byDNS, []spec{{role: decode, url: at(t, "http://y")}})
	require.ErrorIs(t, err, ErrTooMany)
	require.Equal(t, maxInstances, p.taken())
	require.NoError(t, p.set(byFile, list[1:]))
	require.NoError(t, p.set(byDNS, []spec{{role: decode, url: at(t, "http://y")}}))
	flags := Config{Prefill: []string{"http://p"}}
	for _, s := range list {
		flags.Decode = append(flags.Decode, s.url.String())
	}
	_, err = New(flags)
	require.ErrorIs(t, err, ErrTooMany)
}

// A list may have all other instances, however many there are, and whatever those still serve that leave.
func TestAllInstancesAreReplaced(t *testing.T) {
	p := newTestPool(t)
	list := func(host string) (list []spec) {
		for i := range maxInstances {
			list = append(list, spec{role: decode, url: at(t, fmt.Sprintf("http://%s:%d", host, i+1))})
		}
		return list
	}
	require.NoError(t, p.set(byDNS, list("a")))
	tried := map[int]bool{}
	for range 10 {
		_, ok := p.pickDecode(tried)
		require.True(t, ok)
	}
	require.NoError(t, p.set(byDNS, list("b")))
	require.Equal(t, maxInstances, p.taken())
	require.ErrorIs(t, p.set(byFile, list("a")), ErrTooMany, "they would be others'")
	require.NoError(t, p.set(byFile, list("b")))
	require.Len(t, p.health().instances, maxInstances)
	require.Len(t, p.places, maxInstances+10)
}

// An instance that comes back while requests of before still run starts from nothing: it may be another process.
func TestInstanceComesBack(t *testing.T) {
	p := newTestPool(t)
	one := []spec{{role: decode, url: at(t, "http://a")}}
	require.NoError(t, p.set(byFile, one))
	d, ok := p.pickDecode(map[int]bool{})
	require.True(t, ok)
	for range breakAfter {
		p.failed(d, false)
	}
	p.rests(d, time.Minute, false)
	for range silences {
		p.probed(d.index, silent)
	}
	require.Error(t, d.life.Err())
	require.Equal(t, 1.0, testutil.ToFloat64(p.metrics.broken.WithLabelValues("http://a", "decode")))
	require.NoError(t, p.set(byFile, nil))
	require.NoError(t, p.set(byFile, one))
	again, ok := p.pickDecode(map[int]bool{})
	require.True(t, ok)
	require.Equal(t, d.index, again.index)
	require.NoError(t, again.life.Err())
	require.Zero(t, testutil.ToFloat64(p.metrics.broken.WithLabelValues("http://a", "decode")))
	require.Zero(t, p.known[d.index].busy)
}

// Whatever sources say and requests do: exactly what some source names and does not drain can be picked, and what
// requests have picked stays theirs.
func TestPlacesProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := newTestPool(t)
		named := map[source]map[string]bool{byFile: {}, byDNS: {}}
		var running []target
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0:
				by := rapid.SampledFrom([]source{byFile, byDNS}).Draw(t, "source")
				named[by] = map[string]bool{}
				var list []spec
				for _, name := range rapid.SliceOfDistinct(rapid.SampledFrom([]string{"a", "b", "c", "d"}), func(s string) string { return s }).Draw(t, "names") {
					named[by]["http://"+name] = rapid.Bool().Draw(t, "drain")
					list = append(list, spec{role: decode, url: at(t, "http://"+name), drain: named[by]["http://"+name]})
				}
				require.NoError(t, p.set(by, list))
				p.unlimited()
			case 1:
				if len(running) > 0 {
					p.done(running[0])
					p.leave([]int{running[0].index})
					running = running[1:]
				}
			case 2:
				p.recycle(func(gone) {})
			}
			for _, d := range running {
				require.Equal(t, d.url, p.urls[d.index])
			}
			want := map[string]bool{}
			for _, names := range named {
				for name := range names {
					want[name] = true
				}
			}
			for _, names := range named {
				for name, drains := range names {
					if drains {
						delete(want, name)
					}
				}
			}
			got, tried := map[string]bool{}, map[int]bool{}
			for d, ok := p.pickDecode(tried); ok; d, ok = p.pickDecode(tried) {
				got[d.url.String()] = true
				running = append(running, d)
			}
			require.Equal(t, want, got)
		}
	})
}

// A router drops the places of requests that have ended, also of those that failed and of models.
func TestRequestsLeaveTheirPlaces(t *testing.T) {
	p, d := serveInstance(t, ticket("T")), serveInstance(t, tokens, code(500), reset(""))
	f := serveRouter(t, Config{Prefill: urls(p), Decode: urls(d)})
	for range 4 {
		post(t, f.URL+"/v1/completions", doc)
	}
	resp, err := http.Get(f.URL + "/v1/models")
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Eventually(t, func() bool {
		f.router.pool.mu.Lock()
		defer f.router.pool.mu.Unlock()
		return f.router.pool.known[0].users == 0 && f.router.pool.known[1].users == 0
	}, waitLimit, waitTick)
}

// An instance of --replica stays in its replica, whatever the config file says about it.
func TestFileLeavesReplicas(t *testing.T) {
	m, err := newMetrics(prometheus.NewRegistry())
	require.NoError(t, err)
	chooser, err := policy.New(policy.Config{})
	require.NoError(t, err)
	p := newPool([]spec{{role: decode, group: "rack1", url: at(t, "http://d:1")}}, chooser, slog.New(slog.DiscardHandler), m)
	group := func() string { return p.health().instances[0].Group }
	for _, said := range []string{"", "b"} {
		require.NoError(t, p.set(byFile, []spec{{role: decode, group: said, url: at(t, "http://d:1"), drain: true}}))
		require.Equal(t, "rack1", group())
		require.NoError(t, p.set(byFile, nil))
		require.Equal(t, "rack1", group())
	}
}
