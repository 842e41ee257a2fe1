package acceptance

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

var (
	flagTurns         = flag.Int("turns", 8, "turns of each conversation")
	flagConversations = flag.Int("conversations", 16, "conversations with several turns")
	flagAnswer        = flag.Int("answer", 96, "tokens of each answer of a conversation")
)

// conversation is token ids that grow from turn to turn.
type conversation struct {
	rng    *rand.Rand
	tokens []int32
}

// say adds what the user says.
func (c *conversation) say(n int) {
	for range n {
		c.tokens = append(c.tokens, 32+c.rng.Int32N(90))
	}
}

// turns are multi-turn conversations through prefill and decode engines that are both kv_both.
type turns struct {
	*rig.Rig
	single, p, d, router *cluster.Process
	list                 []*conversation
	answer               int // tokens of each answer
}

// turnsConfig is the config of both engines.
func turnsConfig(f *fixture.Fixture) string {
	return fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both","kv_connector_extra_config":%s,"kvport":{"recompute_threshold":32,"deadlines":{"handshake":"30s"}}}`, f.Connector, f.Setups[0].Config)
}

func newTurns(r *rig.Rig, model string, f *fixture.Fixture, conversations int, decode ...string) *turns {
	r.Helper()
	config := turnsConfig(f)
	x := &turns{Rig: r, answer: rig.Count(r.T, "answer", *flagAnswer, 48, 96)}
	x.single = r.ServeModel(model, "single", "")
	x.p, x.d = r.ServeModel(model, "prefill", config), r.ServeModel(model, "decode", config, decode...)
	x.router = r.Route(x.p, x.d, "--bidirectional", "100")
	for i := range conversations {
		x.list = append(x.list, &conversation{rng: rand.New(rand.NewPCG(*rig.Seed, uint64(i)))})
	}
	return x
}

// turn has every user speak, and compares the answers with those of an engine that is alone.
func (x *turns) turn(n int) {
	x.Helper()
	want, got := make([]*cluster.Completion, len(x.list)), make([]*cluster.Completion, len(x.list))
	var g errgroup.Group
	g.SetLimit(2)
	for i, c := range x.list {
		c.say(100)
		g.Go(func() (err error) {
			request := cluster.Request{Tokens: c.tokens, MaxTokens: x.answer, IgnoreEOS: true}
			if got[i], err = x.Client.Complete(x.Context(), x.router.URL, request); err != nil {
				return err
			}
			want[i], err = x.Client.Complete(x.Context(), x.single.URL, request)
			return err
		})
	}
	require.NoError(x, g.Wait())
	rig.Same(x.T, fmt.Sprintf("turn %d", n), want, got)
	for i, c := range x.list {
		c.tokens = append(c.tokens, got[i].Tokens...)
	}
}

// fetched are the tokens that the prefill engine got from the decode engine, and the blocks it found lost.
func (x *turns) fetched() (tokens, lost int) {
	x.Helper()
	m := x.Metrics(x.p)
	return int(m.Sum("kvport_prompt_tokens_total", `source="external"`)), int(m.Sum("kvport_turn_blocks_total", `result="lost"`))
}

// TestTurns: the prefill engine of the next turn takes the last answer's blocks from the decode engine, and no
// more than it lacks.
func TestTurns(t *testing.T) {
	for _, f := range rig.Movers(t) {
		for name, model := range map[string]string{"sim": "sim", "model": rig.Model(t)} {
			t.Run(f.Connector+"/"+name, func(t *testing.T) {
				short := 2
				if name == "model" {
					short = 1
				}
				x := newTurns(rig.New(t), model, f, rig.Count(t, "conversations", *flagConversations, short, 16))
				n := rig.Count(t, "turns", *flagTurns, short+1, 8)
				for turn := range n {
					x.turn(turn)
				}
				fetched, lost := x.fetched()
				most := len(x.list) * (n - 1) * (x.answer + 16)
				t.Logf("tokens from the decode engine: %d of %d at most; blocks lost: %d", fetched, most, lost)
				require.Greater(t, fetched, most/2)
				require.LessOrEqual(t, fetched, most, "what the prefill engine has itself is not fetched")
				require.Positive(t, int(x.Metrics(x.d).Sum("kvport_prompt_tokens_total", `source="external"`)))
				require.Zero(t, int(x.Metrics(x.p).Sum("kvport_integrity_failures_total")))
				x.Idle(x.p)
				x.Idle(x.d)
			})
		}
	}
}

// TestTurnForks: each of several follow-ups to one answer loads prompt and answer from the decode engine, although there
// were others before it, the prefill engines have nothing left of the conversation, and the router was started again before
// the last. No flag asks for turns.
func TestTurnForks(t *testing.T) {
	const forks, prompt, answer, more = 6, 100, 64, 50
	for _, f := range rig.Movers(t) {
		t.Run(f.Connector, func(t *testing.T) {
			r, file := rig.New(t), filepath.Join(t.TempDir(), "turns")
			single := r.ServeModel("sim", "single", "")
			p1 := r.ServeModel("sim", "prefill 1", turnsConfig(f), "--enable-prefix-caching=false")
			p2 := r.ServeModel("sim", "prefill 2", turnsConfig(f), "--enable-prefix-caching=false")
			d := r.ServeModel("sim", "decode", turnsConfig(f))
			route := func() *cluster.Process {
				return r.Start("router", "route", "--port", "0", "--prefill", p1.URL+","+p2.URL, "--decode", d.URL, "--bidirectional-file", file)
			}
			router := route()
			c := &conversation{rng: rand.New(rand.NewPCG(*rig.Seed, 1))}
			c.say(prompt)
			ask := func(url string, tokens []int32) []int32 {
				got, err := r.Client.Complete(t.Context(), url, cluster.Request{Tokens: tokens, MaxTokens: answer, IgnoreEOS: true})
				require.NoError(t, err)
				return got.Tokens
			}
			same := func(tokens []int32) []int32 {
				got := ask(router.URL, tokens)
				require.Equal(t, ask(single.URL, tokens), got)
				return got
			}
			// The router learns from the engines what they are. The first answer comes only then: another one with the same tokens
			// has blocks of its own on the decode engine, which keeps the first ones.
			require.Eventually(t, func() bool {
				other := &conversation{rng: c.rng}
				other.say(prompt)
				ask(router.URL, other.tokens)
				return r.Metrics(router).Sum("kvport_router_turns_total", `what="kept"`) > 0
			}, time.Minute, 20*time.Millisecond)
			first := slices.Concat(c.tokens, same(c.tokens))
			for i := range forks {
				if i == forks-1 { // the router's next life
					r.Stop(router)
					router = route()
				}
				c.tokens = slices.Clone(first)
				c.say(more)
				same(c.tokens)
			}
			fetched, failed := 0.0, 0.0
			for _, p := range []*cluster.Process{p1, p2} {
				fetched += r.Metrics(p).Sum("kvport_prompt_tokens_total", `source="external"`)
				failed += r.Metrics(p).Sum("kvport_integrity_failures_total")
				r.Idle(p)
			}
			r.Idle(d)
			least := forks * (len(first)/16*16 - 16) // the last token of an answer is never computed
			t.Logf("%d follow-ups to one answer: the prefill engines load %.0f of %d tokens", forks, fetched, forks*len(first))
			require.GreaterOrEqual(t, fetched, float64(least))
			require.Zero(t, failed)
		})
	}
}

// TestTurnsUnderPressure: the decode engine keeps nothing for the next turn. What it has given to others in the
// meantime is noticed and computed, and costs no token.
func TestTurnsUnderPressure(t *testing.T) {
	holder := rig.Connectors(t, func(f *fixture.Fixture) bool { return f.Holds })[0]
	x := newTurns(rig.New(t), "sim", holder, rig.Count(t, "conversations", *flagConversations, 4, 32), "--num-blocks", "160", "--max-model-len", "2048")
	other := &conversation{rng: rand.New(rand.NewPCG(*rig.Seed, 1000))}
	for turn := range rig.Count(t, "turns", *flagTurns, 4, 8) {
		x.turn(turn)
		other.tokens = nil
		other.say(16 * min(40+20*turn, 120)) // of 160 blocks
		_, err := x.Client.Complete(t.Context(), x.d.URL, cluster.Request{Tokens: other.tokens, MaxTokens: 4, IgnoreEOS: true})
		require.NoError(t, err)
	}
	fetched, lost := x.fetched()
	t.Logf("tokens from the decode engine: %d, blocks lost to others: %d", fetched, lost)
	require.Positive(t, lost, "nothing was lost: raise -turns")
	require.Zero(t, int(x.Metrics(x.p).Sum("kvport_integrity_failures_total")), "what was reused is not damaged")
	x.Idle(x.p)
	x.Idle(x.d)
}
