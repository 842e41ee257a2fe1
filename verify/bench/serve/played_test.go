package serve

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What is kept of runs makes the rows again.
func TestPlayed(t *testing.T) {
	w := DefaultWorkload()
	w.Requests, w.Rate, w.WarmUp, w.CoolDown = 20, 2, 8, 2
	play := func(seed uint64, takes time.Duration) (run []Outcome) {
		for _, q := range w.Draw(seed) {
			o := Outcome{At: q.At, Sent: q.At, Aside: q.Aside, Later: q.After >= 0, Pieces: 2, First: q.At + takes/2, End: q.At + takes}
			o.Gaps, o.Answer = []time.Duration{takes / 2}, Answer{Tokens: []int32{1, 2}, Completed: 2}
			run = append(run, o)
		}
		run[len(run)-1].Kind, run[len(run)-1].Err = "cut", errInterrupted
		return run
	}
	slos := []SLO{{TTFT: time.Second}}
	var kept bytes.Buffer
	o := Options{Keep: func(p *Played) error { p.Rate = 2; return p.Write(&kept) }}
	results := []*Result{{Setup: "slow", SLOs: slos}, {Setup: "quick", SLOs: slos}}
	for seed := range uint64(3) {
		for i, r := range results {
			require.NoError(t, o.keep(r, seed, play(seed, time.Duration(2-i)*time.Second), map[string]float64{"external": 5}))
		}
	}
	emit, want := collect()
	require.NoError(t, Rows(results, emit))
	require.NotContains(t, kept.String(), "Tokens\":[")

	list, err := ReadPlayed(&kept)
	require.NoError(t, err)
	require.Equal(t, []float64{2}, Rates(list))
	emit, got := collect()
	again, err := Again(list, 2, nil, slos, emit)
	require.NoError(t, err)
	require.Len(t, again, 2)
	require.Equal(t, want, got)
	require.Equal(t, 15.0, *got["quick: prompt tokens, external"].Value)

	emit, got = collect()
	_, err = Again(list, 2, []string{"quick", "slow"}, slos, emit)
	require.NoError(t, err)
	require.Contains(t, got, "slow : quick, TTFT p50")
	_, err = Again(list, 2, []string{"none"}, slos, emit)
	require.ErrorContains(t, err, `no line is of the setup "none"`)
	_, err = Again(list[:5], 2, nil, slos, emit)
	require.ErrorContains(t, err, `"quick" has 2 seeds, "slow" has 3`)
	_, err = ReadPlayed(strings.NewReader(`{"rate":1}{"none":2}`))
	require.ErrorContains(t, err, "line 2: ")
	_, err = ReadPlayed(strings.NewReader(""))
	require.ErrorContains(t, err, "no line")
}
