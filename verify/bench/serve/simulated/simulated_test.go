package simulated

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/bench"
	"github.com/kvport/kvport/verify/bench/serve"
)

func ms(n float64) time.Duration { return time.Duration(n * float64(time.Millisecond)) }

// setup finds one by its name.
func setup(t *testing.T, name string) *Setup {
	t.Helper()
	for _, s := range Setups() {
		if s.Name == name {
			return &s
		}
	}
	require.Failf(t, "no such setup", "%s", name)
	return nil
}

// request is one of a schedule, with a prompt that it shares with no other.
func request(at time.Duration, talk, after, tokens, answer int) serve.Request {
	return serve.Request{At: at, Conversation: talk, After: after, Message: make([]int32, tokens), MaxTokens: answer}
}

func TestCurve(t *testing.T) {
	c := curve{{10, 5}, {20, 6}, {40, 10}}
	for size, want := range map[int]float64{1: 5, 10: 5, 15: 5.5, 20: 6, 30: 8, 40: 10, 60: 14} {
		require.Equal(t, ms(want), c.at(size), size)
	}
}

// TestStep: measured sizes take the measured times, a step that does both takes longer than either, and no curve falls by more than the noise of what
// was measured.
func TestStep(t *testing.T) {
	for _, r := range []*rates{fourGPUs(), eightGPUs()} {
		for _, p := range r.prompt {
			require.Equal(t, ms(p.ms), r.step(p.size, 0))
			require.Greater(t, r.step(p.size, 8), r.step(p.size, 0))
		}
		for _, p := range r.decode {
			require.Equal(t, ms(p.ms), r.step(0, p.size))
			require.GreaterOrEqual(t, r.step(1, p.size), r.step(0, p.size))
		}
		for i := range r.prompt[1:] {
			require.Greater(t, r.prompt[i+1].ms, 0.85*r.prompt[i].ms)
		}
	}
	require.Less(t, eightGPUs().step(4096, 0), fourGPUs().step(4096, 0))
}

// TestAlone: a request that has everything to itself takes the times of the table.
func TestAlone(t *testing.T) {
	list := []serve.Request{request(time.Second, 0, -1, 1024, 3)}
	o := setup(t, "two-2048").play(list)[0]
	require.Equal(t, ms(105.6), o.First-o.At)
	require.Equal(t, []time.Duration{ms(29.6), ms(29.6)}, o.Gaps)
	require.Equal(t, o.First+2*ms(29.6), o.End)

	o = setup(t, "pd").play(list)[0]
	require.Equal(t, ms(105.6)+transfer(1024)+ms(29.6), o.First-o.At)
	require.Equal(t, []time.Duration{ms(29.6), ms(29.6)}, o.Gaps)

	o = setup(t, "two-512").play(list)[0]
	require.Equal(t, 2*ms(59.6), o.First-o.At, "two chunks")
}

// TestPromptsDelayAnswers: a prompt makes a gap in an answer of the same engine, the longer the larger its chunks are, and none where prefill and
// decode are apart.
func TestPromptsDelayAnswers(t *testing.T) {
	list := []serve.Request{request(0, 0, -1, 128, 64), request(time.Second, 1, -1, 4096, 2)}
	longest := func(name string) (most time.Duration) {
		s := setup(t, name)
		if !s.apart {
			s.engines = 1
		}
		for _, gap := range s.play(list)[0].Gaps {
			most = max(most, gap)
		}
		return most
	}
	small, large := longest("two-512"), longest("two-2048")
	require.Equal(t, fourGPUs().step(511, 1), small)
	require.Equal(t, fourGPUs().step(2047, 1), large)
	require.Greater(t, large, 2*small)
	require.Equal(t, ms(29.9), longest("pd"), "two answers run for a moment")
}

// TestLaterTurns: a later turn computes the last answer unless an engine has it, or loads it.
func TestLaterTurns(t *testing.T) {
	list := []serve.Request{request(0, 0, -1, 2048, 512), request(time.Minute, 0, 0, 512, 2)}
	ttft := func(name string) time.Duration {
		o := setup(t, name).play(list)[1]
		require.True(t, o.Later)
		require.Equal(t, 2048+512+512, o.Answer.Prompt)
		return o.First - o.At
	}
	rates := fourGPUs()
	require.Equal(t, rates.step(512, 0), ttft("two-2048"))
	require.Equal(t, rates.step(1024, 0)+transfer(512)+ms(29.6), ttft("pd"))
	require.Equal(t, transfer(512)+rates.step(512, 0)+transfer(512)+ms(29.6), ttft("pd-turns"))
}

// TestSystemPrompts: a system prompt is computed once on an engine.
func TestSystemPrompts(t *testing.T) {
	system := make([]int32, 1536)
	list := []serve.Request{request(0, 0, -1, 512, 2), request(time.Minute, 1, -1, 512, 2)}
	list[0].System, list[1].System = system, system
	out := setup(t, "one-2048").play(list)
	require.Equal(t, eightGPUs().step(2048, 0), out[0].First-out[0].At)
	require.Equal(t, eightGPUs().step(512, 0), out[1].First-out[1].At)
}

// TestRun: every request has all its tokens in every setup, at a load that is far too high, too; the same seed gives the same rows.
func TestRun(t *testing.T) {
	w := DefaultWorkload()
	w.Requests, w.Rate = 40, 20
	run := func(seed uint64) (rows []bench.Row) {
		results, err := Run(t.Context(), Options{
			Workload: w, Seed: seed, Rounds: 2, SLOs: []serve.SLO{{TTFT: time.Second, ITL: 60 * time.Millisecond}},
			Emit: func(r bench.Row) error { rows = append(rows, r); return nil },
		})
		require.NoError(t, err)
		require.Len(t, results, len(Setups()))
		for _, r := range results {
			c := r.Counts()
			require.Equal(t, 80, c.Answered, r.Setup)
			tokens := 0
			for round := range uint64(2) {
				for _, request := range w.Draw(seed + round) {
					tokens += request.MaxTokens
				}
			}
			require.Equal(t, tokens, c.Tokens, r.Setup)
			for _, run := range r.Runs {
				for _, o := range run {
					require.Greater(t, o.First, o.At)
					require.Len(t, o.Gaps, o.Pieces-1)
					for _, gap := range o.Gaps {
						require.GreaterOrEqual(t, gap, ms(29.6), "no step is shorter")
					}
				}
			}
		}
		return rows
	}
	require.Equal(t, run(3), run(3))
	require.NotEqual(t, run(3), run(4))
}
