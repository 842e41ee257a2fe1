package serve

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A schedule is that of a Poisson process: intervals have the mean that the rate says, and a deviation as large as the mean. Intervals that are all
// alike, or arrivals in bursts, have another one.
func TestPoisson(t *testing.T) {
	w := DefaultWorkload()
	w.Requests, w.Rate = 20000, 50
	list := w.Draw(7)
	var sum, squares, before float64
	for _, r := range list {
		s := r.At.Seconds()
		sum += s - before
		squares += (s - before) * (s - before)
		before = s
	}
	mean := sum / float64(len(list))
	deviation := math.Sqrt(squares/float64(len(list)) - mean*mean)
	require.InEpsilon(t, 1/w.Rate, mean, 0.03)
	require.InEpsilon(t, mean, deviation, 0.05)
	require.Equal(t, list, w.Draw(7), "a seed gives one schedule")
	require.NotEqual(t, list[0].Message, w.Draw(8)[0].Message)
}

func TestConversations(t *testing.T) {
	w := DefaultWorkload()
	w.Requests, w.Rate, w.SystemPrompts = 2000, 4, 3
	list := w.Draw(3)
	turns, systems, long := map[int]int{}, map[string]bool{}, 0
	for i, r := range list {
		turns[r.Conversation]++
		if r.After < 0 {
			systems[words(r.System)] = true
			require.Equal(t, 1, turns[r.Conversation])
		} else {
			require.Less(t, r.After, i)
			require.Equal(t, list[r.After].Conversation, r.Conversation)
			require.GreaterOrEqual(t, r.At-list[r.After].At, 10*time.Second, "the user thinks")
			require.Nil(t, r.System)
		}
		require.LessOrEqual(t, turns[r.Conversation], w.Turns.Max)
		require.True(t, w.Answer.Min <= r.MaxTokens && r.MaxTokens <= w.Answer.Max)
		if len(r.Message) >= w.Long.Min {
			long++
		} else {
			require.True(t, w.Short.Min <= len(r.Message) && len(r.Message) <= w.Short.Max)
		}
	}
	require.Len(t, systems, w.SystemPrompts)
	require.InEpsilon(t, w.LongShare, float64(long)/float64(len(list)), 0.15)
	require.InEpsilon(t, w.Turns.mean(), float64(len(list))/float64(len(turns)), 0.15)
}

// The prompt of a turn is that of the one before, its answer, and what is new.
func TestJoin(t *testing.T) {
	w := DefaultWorkload()
	w.Rate = 10
	w.Think = 0
	list := w.Draw(1)
	Join(list, Drawn(list, 1))
	followed := 0
	for _, r := range list {
		want := slices.Concat(r.System, r.Message)
		if r.After >= 0 {
			followed++
			want = slices.Concat(list[r.After].Prompt(), Drawn(list, 1)(r.After), r.Message)
		}
		require.Equal(t, want, r.Prompt())
	}
	require.Positive(t, followed)
}

func TestCheck(t *testing.T) {
	good := DefaultWorkload()
	require.NoError(t, good.Check())
	for want, change := range map[string]func(w *Workload){
		"requests is 0":           func(w *Workload) { w.Requests = 0 },
		"rate is NaN":             func(w *Workload) { w.Rate = math.NaN() },
		"system_prompts is 0":     func(w *Workload) { w.SystemPrompts = 0 },
		"think_seconds is -1":     func(w *Workload) { w.Think = -1 },
		"long_share is 2":         func(w *Workload) { w.LongShare = 2 },
		"turns is 0 to 4":         func(w *Workload) { w.Turns.Min = 0 },
		"answer_tokens is 9 to 1": func(w *Workload) { w.Answer = Range{9, 1} },
	} {
		w := DefaultWorkload()
		change(&w)
		require.ErrorContains(t, w.Check(), want)
	}
}

const mooncake = `{"timestamp": 500, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48], "more": 1}

{"timestamp": 3000, "input_length": 1500, "output_length": 26, "hash_ids": [46, 47, 2353]}
{"timestamp": 2000, "prompt": "once upon", "output_length": 7}
`

func TestTrace(t *testing.T) {
	list, err := ReadTrace(strings.NewReader(mooncake), TraceOptions{})
	require.NoError(t, err)
	require.Len(t, list, 3)
	require.Equal(t, []time.Duration{0, 1500 * time.Millisecond, 2500 * time.Millisecond}, []time.Duration{list[0].At, list[1].At, list[2].At})
	require.Equal(t, "once upon", list[1].Text)
	require.Len(t, list[0].Message, 1100)
	require.Len(t, list[2].Message, 1500)
	require.Equal(t, list[0].Message[:1024], list[2].Message[:1024], "equal ids are equal tokens")
	require.NotEqual(t, list[0].Message[1024:1100], list[2].Message[1024:1100])
	require.Equal(t, 52, list[0].MaxTokens)

	quick, err := ReadTrace(strings.NewReader(mooncake), TraceOptions{Speed: 2, BlockTokens: 64, Requests: 2})
	require.NoError(t, err)
	require.Len(t, quick, 2)
	require.Equal(t, 1250*time.Millisecond, quick[1].At)
	require.Len(t, quick[1].Message, 187)
	require.Equal(t, 3, quick[1].MaxTokens)

	for text, want := range map[string]string{
		"":                    "the trace has no request",
		"{\"prompt\": \"x\"}": "line 1: output_length is 0",
		"{\"prompt\": \"x\", \"output_length\": 1}\n{":               "line 2: ",
		`{"input_length": 513, "output_length": 1, "hash_ids": [1]}`: "line 1: 1 hash_ids for an input_length of 513",
	} {
		_, err := ReadTrace(strings.NewReader(text), TraceOptions{})
		require.ErrorContains(t, err, want)
	}
}

func FuzzReadTrace(f *testing.F) {
	f.Add(mooncake)
	f.Add(`{"timestamp":1e300,"output_length":1,"prompt":"x"}`)
	f.Fuzz(func(t *testing.T, text string) {
		list, err := ReadTrace(strings.NewReader(text), TraceOptions{BlockTokens: 4})
		if err != nil {
			return
		}
		for i := range list {
			require.GreaterOrEqual(t, list[i].At, time.Duration(0))
			require.Positive(t, list[i].MaxTokens)
			require.True(t, i == 0 || list[i-1].At <= list[i].At)
		}
	})
}
