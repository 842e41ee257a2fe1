package acceptance

import (
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
)

// choosing is requests through a router that says which instances it has chosen. Each answer is compared with that of an
// engine that is alone.
type choosing struct {
	*rig.Rig
	single *cluster.Process
	header http.Header // of the next requests
	route  string      // X-Kvport-Route of the last answer
}

// served is an answer and which instances it came from.
type served struct {
	*cluster.Completion
	prefill, decode string // base URLs; prefill is empty without one
	without         string // why
}

func newChoosing(t *testing.T, model string) *choosing {
	t.Helper()
	r := rig.New(t)
	return &choosing{Rig: r, single: r.ServeModel(model, "single", ""), header: http.Header{}}
}

// RoundTrip implements http.RoundTripper: it asks for the route, and notes it.
func (x *choosing) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set("X-Kvport-Route", "1")
	for name := range x.header {
		req.Header.Set(name, x.header.Get(name))
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err == nil {
		x.route = resp.Header.Get("X-Kvport-Route")
	}
	return resp, err
}

// ask sends one request.
func (x *choosing) ask(router *cluster.Process, tokens []int32, answer int) served {
	x.Helper()
	request := cluster.Request{Tokens: tokens, MaxTokens: answer, IgnoreEOS: true}
	client := cluster.Client{HTTP: http.Client{Transport: x}}
	got, err := client.Complete(x.Context(), router.URL, request)
	require.NoError(x, err)
	want, err := x.Client.Complete(x.Context(), x.single.URL, request)
	require.NoError(x, err)
	require.Equal(x, want.Tokens, got.Tokens, x.route)
	return served{got, part(x.route, "prefill"), part(x.route, "decode"), part(x.route, "without")}
}

// part is one of the parts of X-Kvport-Route.
func part(route, name string) string {
	_, after, _ := strings.Cut("; "+route, "; "+name+"=")
	value, _, _ := strings.Cut(after, ";")
	return value
}

// from is how many prompt tokens an engine got from a source.
func (x *choosing) from(e *cluster.Process, source string) int {
	x.Helper()
	return int(x.Metrics(e).Sum("kvport_prompt_tokens_total", fmt.Sprintf("source=%q", source)))
}

// engines starts n engines that are kv_both, with the first connector that brings blocks from engine to engine.
func (x *choosing) engines(model, name string, n int, args ...string) (list []*cluster.Process, urls []string) {
	x.Helper()
	config := turnsConfig(rig.Movers(x.T)[0])
	for i := range n {
		e := x.ServeModel(model, fmt.Sprint(name, " ", i+1), config, args...)
		list, urls = append(list, e), append(urls, e.URL)
	}
	return list, urls
}

// router starts one for prefill and decode instances.
func (x *choosing) router(policy string, prefills, decodes []string, args ...string) *cluster.Process {
	x.Helper()
	flags := []string{"route", "--port", "0", "--policy", policy, "--prefill", strings.Join(prefills, ","), "--decode", strings.Join(decodes, ",")}
	return x.Start("router", append(flags, args...)...)
}

// policies are those that kvport route lists when it is given none of them.
func (x *choosing) policies() []string {
	x.Helper()
	_, err := cluster.Start(x.Context(), nil, "router", rig.Binary(x.T), "route", "--policy", "none", "--decode", "http://127.0.0.1:1")
	require.Error(x, err)
	found := regexp.MustCompile(`--policy is "none", want ([a-z_, ]+)`).FindStringSubmatch(err.Error())
	require.NotNil(x, found, err)
	list := strings.Split(found[1], ", ")
	require.Contains(x, list, "pd_aware")
	return list
}

// words are token ids that no two prompts share.
func words(rng *rand.Rand, n int) []int32 {
	c := conversation{rng: rng}
	c.say(n)
	return c.tokens
}

// TestRouteReplicas: with --mode replica the prefill and the decode instance of a request are in one group, under every
// policy, and a group that comes by the config file takes requests too.
func TestRouteReplicas(t *testing.T) {
	x := newChoosing(t, "sim")
	rng := rand.New(rand.NewPCG(*rig.Seed, 1))
	ps, prefills := x.engines("sim", "prefill", 2)
	ds, decodes := x.engines("sim", "decode", 2)
	group, replicas := map[string]string{}, []string{}
	for i, name := range []string{"a", "b"} {
		group[prefills[i]], group[decodes[i]] = name, name
		replicas = append(replicas, fmt.Sprintf("%s=prefill:%s;decode:%s", name, prefills[i], decodes[i]))
	}
	route := func(policy string, args ...string) *cluster.Process {
		return x.Start("router", append([]string{"route", "--port", "0", "--mode", "replica", "--policy", policy, "--replica", replicas[0]}, args...)...)
	}
	for _, policy := range x.policies() {
		router := route(policy, "--replica", replicas[1])
		used := map[string]int{}
		for range 8 {
			got := x.ask(router, words(rng, 400), 4)
			require.NotEmpty(t, got.decode)
			if got.prefill == "" {
				require.Equal(t, "skipped", got.without, policy)
				used["decode alone"]++
				continue
			}
			require.Equal(t, group[got.prefill], group[got.decode], policy)
			used["group "+group[got.decode]]++
		}
		t.Logf("%s: requests %v", policy, used)
		if policy != "pd_aware" { // which takes whatever it has seen to be fast
			require.Len(t, used, 2, policy)
			require.Zero(t, used["decode alone"], policy)
		}
		x.Stop(router)
	}

	file := filepath.Join(t.TempDir(), "route.json")
	write := func(text string) {
		require.NoError(t, os.WriteFile(file+".new", []byte(text), 0o600))
		require.NoError(t, os.Rename(file+".new", file))
	}
	write(`{}`)
	router := route("least_loaded", "--config", file)
	require.Equal(t, "a", group[x.ask(router, words(rng, 400), 4).decode])
	write(fmt.Sprintf(`{"instances":[{"url":%q,"role":"prefill","group":"b"},{"url":%q,"role":"decode","group":"b"}]}`, prefills[1], decodes[1]))
	require.Eventually(t, func() bool {
		got := x.ask(router, words(rng, 400), 4)
		return got.prefill == prefills[1] && got.decode == decodes[1]
	}, time.Minute, 20*time.Millisecond, "group b gets no request")
	for _, e := range slices.Concat(ps, ds) {
		x.Idle(e)
	}
}

// TestRouteBalances: least_loaded gives short prompts to the prefill instance that has not had the long one, and as long
// as an answer is generated on one decode instance, to the other one.
func TestRouteBalances(t *testing.T) {
	const model = "sim:layers=16,bytes=1024" // which takes seconds for a long answer
	x := newChoosing(t, model)
	rng := rand.New(rand.NewPCG(*rig.Seed, 2))
	ps, prefills := x.engines(model, "prefill", 2, "--num-blocks", "512")
	ds, decodes := x.engines(model, "decode", 2, "--num-blocks", "512")
	router := x.router("least_loaded", prefills, decodes)

	long := x.ask(router, words(rng, 1600), 2)
	for range 4 {
		require.NotEqual(t, long.prefill, x.ask(router, words(rng, 100), 2).prefill)
	}

	for try := 0; !x.avoidsBusy(router, decodes, rng); try++ {
		require.Less(t, try, 4, "five long answers in a row were over too soon")
	}
	for _, e := range slices.Concat(ps, ds) {
		x.Idle(e)
	}
}

// alone waits until the router knows that at most one request runs: it learns of the end of an answer a moment after the client does.
func (x *choosing) alone(router *cluster.Process) {
	x.Helper()
	require.Eventually(x, func() bool { return x.Metrics(router).Sum("kvport_router_requests_in_flight") <= 1 }, time.Minute, time.Millisecond)
}

// avoidsBusy requires that prompts go to other decode instances than the one that generates a long answer. It reports
// whether that answer lasted long enough to tell.
func (x *choosing) avoidsBusy(router *cluster.Process, decodes []string, rng *rand.Rand) bool {
	x.Helper()
	body := `{"prompt":"an answer that takes long","max_tokens":6000,"ignore_eos":true,"stream":true}`
	req, err := http.NewRequestWithContext(x.Context(), http.MethodPost, router.URL+"/v1/completions", strings.NewReader(body))
	require.NoError(x, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := x.RoundTrip(req)
	require.NoError(x, err)
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = io.Copy(io.Discard, resp.Body) // until it is closed below
	}()
	busy := part(x.route, "decode")
	require.Contains(x, decodes, busy)
	var chosen []string
	for range 4 {
		x.alone(router)
		chosen = append(chosen, x.ask(router, words(rng, 100), 2).decode)
	}
	lasts := x.Metrics(router).Sum("kvport_router_requests_in_flight") > 0
	require.NoError(x, resp.Body.Close())
	<-read
	if lasts {
		require.NotContains(x, chosen, busy)
	}
	return lasts
}

// TestRoutePrefixes: four prompts with one long beginning. With prefix_aware one of two prefill instances computes it,
// once. In turn, both do.
func TestRoutePrefixes(t *testing.T) {
	const shared, own, prompts = 1600, 6, 4
	computed := map[string][]int{}
	for _, policy := range []string{"round_robin", "prefix_aware"} {
		x := newChoosing(t, "sim")
		ps, prefills := x.engines("sim", "prefill", 2)
		_, decodes := x.engines("sim", "decode", 1)
		router := x.router(policy, prefills, decodes, "--bidirectional", "0") // nothing comes back from the decode instance
		rng := rand.New(rand.NewPCG(*rig.Seed, 3))
		beginning := words(rng, shared)
		for range prompts {
			x.ask(router, slices.Concat(beginning, words(rng, own)), 4)
		}
		for _, p := range ps {
			computed[policy] = append(computed[policy], x.from(p, "local_compute"))
			x.Idle(p)
		}
		slices.Sort(computed[policy])
	}
	t.Logf("prompt tokens that each prefill instance computes, of %d prompts with %d tokens of which %d are shared: %v", prompts, shared+own, shared, computed)
	require.Zero(t, computed["prefix_aware"][0])
	require.InDelta(t, shared+prompts*own, computed["prefix_aware"][1], 16*prompts) // the last block may not be full
	require.Greater(t, computed["round_robin"][0], shared)
}

// TestRouteSticks: all turns of a conversation go to the pair that served the first, with policy session by X-Session-Id
// and with prefix_aware by what the prompts begin with. The prefill instance has all but the answers, which come from the
// decode instance.
func TestRouteSticks(t *testing.T) {
	const users, turns, says, answer = 6, 3, 400, 64
	for _, policy := range []string{"session", "prefix_aware"} {
		t.Run(policy, func(t *testing.T) {
			x := newChoosing(t, "sim")
			ps, prefills := x.engines("sim", "prefill", 2)
			ds, decodes := x.engines("sim", "decode", 2)
			router := x.router(policy, prefills, decodes, "--bidirectional", "100")
			pairs := map[string]int{}
			list := make([]*conversation, users)
			first := make([]served, users)
			for turn := range turns {
				for i := range list {
					if turn == 0 {
						list[i] = &conversation{rng: rand.New(rand.NewPCG(*rig.Seed, uint64(i)))}
					}
					c := list[i]
					if c.say(says); policy == "session" {
						x.header.Set("X-Session-Id", fmt.Sprint("user ", i))
					}
					got := x.ask(router, c.tokens, answer)
					if turn == 0 {
						first[i] = got
						pairs[got.prefill+" "+got.decode]++
					}
					require.NotEmpty(t, got.prefill)
					require.Equal(t, []string{first[i].prefill, first[i].decode}, []string{got.prefill, got.decode}, "turn %d of user %d", turn, i)
					c.tokens = append(c.tokens, got.Tokens...)
				}
			}
			fetched, computed := 0, 0
			for _, p := range ps {
				fetched += x.from(p, "external")
				computed += x.from(p, "local_compute")
				x.Idle(p)
			}
			for _, d := range ds {
				x.Idle(d)
			}
			most := users * (turns - 1) * (answer + 16)
			t.Logf("conversations by pair: %v; the prefill instances compute %d tokens and get %d of %d at most from the decode instances",
				slices.Sorted(maps.Values(pairs)), computed, fetched, most)
			require.Positive(t, fetched)
			require.LessOrEqual(t, fetched, most, "a prefill instance did not have what it had computed")
			require.LessOrEqual(t, computed, users*turns*(says+2*16))
		})
	}
}

// TestRoutePairs: a pair that does not fit is never formed, under any policy. With pd_aware a short prompt, and one that
// the decode instance has, needs no prefill instance, and a long one gets one.
func TestRoutePairs(t *testing.T) {
	const tokens = 1600
	x := newChoosing(t, "sim")
	rng := rand.New(rand.NewPCG(*rig.Seed, 5))
	ps, fits := x.engines("sim", "prefill", 1)
	_, other := x.engines("sim", "prefill with other blocks", 1, "--block-size", "24")
	ds, decodes := x.engines("sim", "decode", 1, "--kv-events-config", `{"enable_kv_cache_events": true}`)
	for _, policy := range x.policies() {
		router := x.router(policy, slices.Concat(other, fits), decodes)
		require.Eventually(t, func() bool {
			_, reasons := misfits(x.Rig, router)
			return len(reasons) == 1 && strings.Contains(reasons[0], "block_size")
		}, time.Minute, 20*time.Millisecond, "%s", router.Logs())
		paired := 0
		for range 6 {
			got := x.ask(router, words(rng, 400), 2)
			require.NotContains(t, other, got.prefill, policy)
			if got.prefill != "" {
				paired++
			}
		}
		t.Logf("%s: %d of 6 requests by the pair that fits, none by the other one", policy, paired)
		require.Positive(t, paired, policy)
		x.Stop(router)
	}

	there := words(rng, tokens)
	x.ask(ds[0], there, 2)
	for name, tt := range map[string]struct {
		prompt []int32
		alone  bool
	}{
		"a short prompt":                        {words(rng, 24), true},
		"one that the decode instance has":      {there, true},
		"a long one":                            {words(rng, tokens), false},
		"one whose beginning is there, not all": {slices.Concat(there[:tokens/2], words(rng, tokens/2)), false},
	} {
		router := x.router("pd_aware", fits, decodes) // which has measured nothing
		require.Eventually(t, func() bool {
			return x.Metrics(router).Sum("kvport_router_kv_index_blocks") >= tokens/16
		}, time.Minute, 20*time.Millisecond, "the events of the decode instance have not come")
		got := x.ask(router, tt.prompt, 2)
		t.Logf("%s: %s", name, x.route)
		require.Equal(t, tt.alone, got.prefill == "", name)
		require.Equal(t, tt.alone, got.without == "skipped", name)
		x.Stop(router)
	}
	x.Idle(ps[0])
	x.Idle(ds[0])
}
