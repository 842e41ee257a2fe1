package simulated

import (
	"encoding/csv"
	"math"
	"os"
	"slices"
	"strconv"
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

// runs are what the authors of Splitwise measured, for some GPUs: times by size.
func runs(t *testing.T, gpus string) (prompt, decode map[int][]float64) {
	t.Helper()
	f, err := os.Open("testdata/splitwise.csv")
	require.NoError(t, err)
	defer f.Close()
	lines, err := csv.NewReader(f).ReadAll()
	require.NoError(t, err)
	prompt, decode = map[int][]float64{}, map[int][]float64{}
	number := func(text string) float64 {
		v, err := strconv.ParseFloat(text, 64)
		require.NoError(t, err)
		return v
	}
	for _, l := range lines[1:] {
		size, batch := int(number(l[1])), int(number(l[2]))
		if l[0] == gpus && batch == 1 {
			prompt[size] = append(prompt[size], number(l[3]))
		}
		if l[0] == gpus && size == 512 {
			decode[batch] = append(decode[batch], number(l[4]))
		}
	}
	return prompt, decode
}

// TestMeasured: the curves are the medians of what was measured. Where those of a larger size are smaller, they are lowered to them.
func TestMeasured(t *testing.T) {
	median := func(list []float64) float64 {
		slices.Sort(list)
		return math.Round(10*(list[(len(list)-1)/2]+list[len(list)/2])/2) / 10
	}
	for gpus, r := range map[string]*rates{"4": fourGPUs(), "8": eightGPUs()} {
		prompt, decode := runs(t, gpus)
		for _, list := range []struct {
			c        curve
			measured map[int][]float64
		}{{r.prompt, prompt}, {r.decode, decode}} {
			require.Len(t, list.measured, len(list.c))
			for i, p := range list.c {
				least := math.Inf(1)
				for _, later := range list.c[i:] {
					least = min(least, median(list.measured[later.size]))
				}
				require.InDelta(t, least, p.ms, 1e-9, "%s GPUs, %d", gpus, p.size)
			}
		}
	}
}

// TestStep: steps with 512 tokens of prompts and more, and those with none, take what was measured. No step takes less time than one that does less, with
// short steps as measured, too.
func TestStep(t *testing.T) {
	for _, r := range []*rates{fourGPUs(), eightGPUs()} {
		for _, p := range r.prompt {
			if p.size >= short {
				require.Equal(t, ms(p.ms), r.step(p.size, 0))
			}
		}
		for _, p := range r.decode {
			require.Equal(t, ms(p.ms), r.step(0, p.size))
		}
		require.InDelta(t, float64(r.step(0, 8)), float64(r.step(1, 8)), float64(ms(0.1)), "one token more")
		for _, r.flat = range []bool{false, true} {
			for tokens := range 1200 {
				for _, answers := range []int{0, 1, 2, 8, 63, 64, 65, 300} {
					if tokens+answers == 0 {
						continue
					}
					require.GreaterOrEqual(t, r.step(tokens+1, answers), r.step(tokens, answers), "%d tokens, %d answers", tokens, answers)
					require.GreaterOrEqual(t, r.step(tokens, answers+1), r.step(tokens, answers), "%d tokens, %d answers", tokens, answers)
				}
			}
		}
		require.Equal(t, ms(r.prompt[0].ms), r.step(32, 0), "flat: as measured")
		require.Equal(t, time.Duration(mixed*float64(ms(r.prompt[0].ms))), r.step(32, 8))
	}
	require.Less(t, eightGPUs().step(4096, 0), fourGPUs().step(4096, 0))
}

// TestAlone: a request that has everything to itself takes the times of the table.
func TestAlone(t *testing.T) {
	list := []serve.Request{request(time.Second, 0, -1, 1024, 3)}
	o := setup(t, "two-2048").play(list)[0]
	require.Equal(t, ms(105.6), o.First-o.At)
	require.Equal(t, []time.Duration{ms(29.7), ms(29.7)}, o.Gaps)
	require.Equal(t, o.First+2*ms(29.7), o.End)

	o = setup(t, "pd").play(list)[0]
	require.Equal(t, ms(105.6)+transfer(1024)+ms(29.7), o.First-o.At)
	require.Equal(t, []time.Duration{ms(29.7), ms(29.7)}, o.Gaps)

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
	require.Equal(t, rates.step(1024, 0)+transfer(512)+ms(29.7), ttft("pd"))
	require.Equal(t, transfer(512)+rates.step(512, 0)+transfer(512)+ms(29.7), ttft("pd-turns"))
}

// TestRoom: answers run side by side as long as the cache has room for them, more than were measured, too; those for which there is none wait their turn, and all
// of them end.
func TestRoom(t *testing.T) {
	const needs = 10 + 100
	var list []serve.Request
	for i := range 300 {
		list = append(list, request(0, i, -1, 10, 100))
	}
	s := setup(t, "two-2048")
	s.engines = 1
	slowest := func(out []serve.Outcome) (most time.Duration) {
		for _, o := range out {
			require.Equal(t, 100, o.Pieces)
			most = max(most, slices.Max(o.Gaps[10:])) // all prompts are computed by then
		}
		return most
	}
	require.Equal(t, s.rates.decode.at(300), slowest(s.play(list)), "the line from 32 to 64 answers goes on")
	require.Greater(t, s.rates.decode.at(300), ms(150))

	s.rates.room = 20*needs + 50
	out := s.play(list)
	for _, o := range out {
		require.LessOrEqual(t, slices.Max(o.Gaps), s.rates.step(200, 20), "20 at once")
	}
	require.Greater(t, out[20].First, out[0].End, "the 21st waits for one that is over")
	require.Greater(t, out[299].First, 14*out[0].End)

	s.rates.room = 10
	out = s.play(list[:2])
	require.Greater(t, out[1].First, out[0].End, "what is too large runs alone")

	pd := setup(t, "pd")
	pd.rates.room = 20 * needs
	for _, o := range pd.play(list) {
		require.Equal(t, 100, o.Pieces)
		require.LessOrEqual(t, slices.Max(o.Gaps), pd.rates.decode.at(20), "the decode engine has no room for more")
	}
}

// TestChoose: a conversation begins where there are the fewest requests, waiting ones too, and stays there, though the other engine has fewer.
func TestChoose(t *testing.T) {
	s := setup(t, "two-2048")
	long := func(at time.Duration, talk, after int) serve.Request { return request(at, talk, after, 4096, 200) }
	list := []serve.Request{
		long(0, 0, -1),                 // the first engine
		long(ms(1), 1, -1),             // the second one
		request(ms(2), 2, -1, 4096, 1), // the first one, and over soon
		long(2*time.Second, 3, -1),     // both have one: the first one
		long(3*time.Second, 1, 1),      // stays on the second one
		long(4*time.Second, 0, 0),      // stays on the first one, which has as many
		long(5*time.Second, 4, -1),     // the second one
	}
	w := newWorld(s, list)
	for w.Next() {
	}
	place := map[int]int{}
	for talk, e := range w.home {
		place[talk] = slices.Index(w.engines, e)
	}
	require.Equal(t, map[int]int{0: 0, 1: 1, 2: 0, 3: 0, 4: 1}, place)
	for talk, n := range place {
		require.Positive(t, w.engines[n].held[talk])
		require.Zero(t, w.engines[1-n].held[talk], "nothing of a conversation is on the other engine")
	}
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
	w.Requests, w.Rate, w.WarmUp, w.CoolDown = 40, 20, 1, 1
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
					if !request.Aside {
						tokens += request.MaxTokens
					}
				}
			}
			require.Equal(t, tokens, c.Tokens, r.Setup)
			for _, run := range r.Runs {
				for _, o := range run {
					require.Greater(t, o.First, o.At)
					require.Len(t, o.Gaps, o.Pieces-1)
					for _, gap := range o.Gaps {
						require.GreaterOrEqual(t, gap, ms(29.7), "no step is shorter")
					}
				}
			}
		}
		return rows
	}
	first, again := run(3), run(3)
	require.Equal(t, first, again)
	require.NotEqual(t, first, run(4))
}
