package acceptance

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"

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

func newTurns(r *rig.Rig, model string, f *fixture.Fixture, conversations int, decode ...string) *turns {
	r.Helper()
	config := fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both","kv_connector_extra_config":%s,"kvport":{"recompute_threshold":32}}`, f.Connector, f.Setups[0].Config)
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
