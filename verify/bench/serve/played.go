package serve

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/kvport/kvport/verify/bench"
)

// Played is what one setup did with the schedule of one seed: a line of what kvport bench serve keeps, from which all its numbers can be
// made again.
type Played struct {
	Rate     float64            `json:"rate"` // requests a second; 0: the workload's
	Setup    string             `json:"setup"`
	Seed     uint64             `json:"seed"`
	Sources  map[string]float64 `json:"sources,omitempty"`
	Outcomes []Outcome          `json:"outcomes"` // without the answers' tokens and the errors' texts
}

// Write appends the line to w.
func (p *Played) Write(w io.Writer) error {
	out := *p
	out.Outcomes = slices.Clone(p.Outcomes)
	for i := range out.Outcomes {
		out.Outcomes[i].Answer.Tokens = nil
	}
	return json.NewEncoder(w).Encode(out)
}

// ReadPlayed reads lines.
func ReadPlayed(r io.Reader) (list []Played, err error) {
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	for {
		var p Played
		switch err := d.Decode(&p); {
		case errors.Is(err, io.EOF) && len(list) == 0:
			return nil, errors.New("it has no line")
		case errors.Is(err, io.EOF):
			return list, nil
		case err != nil:
			return nil, fmt.Errorf("line %d: %w", len(list)+1, err)
		}
		list = append(list, p)
	}
}

// Rates are those of the lines, in their order.
func Rates(list []Played) (rates []float64) {
	for _, p := range list {
		if !slices.Contains(rates, p.Rate) {
			rates = append(rates, p.Rate)
		}
	}
	return rates
}

// Again makes the results of one rate again, and emits their rows. The first setup of the lines is what the others are compared with; setups, unless
// empty, are those that are shown, in their order.
func Again(list []Played, rate float64, setups []string, slos []SLO, emit bench.Emit) ([]*Result, error) {
	results := map[string]*Result{}
	var names []string
	for i := range list {
		p := &list[i]
		if p.Rate != rate {
			continue
		}
		r := results[p.Setup]
		if r == nil {
			r = &Result{Setup: p.Setup, SLOs: slos}
			results[p.Setup] = r
			names = append(names, p.Setup)
		}
		r.Add(p.Outcomes)
		r.count(p.Sources)
	}
	if len(setups) > 0 {
		names = setups
	}
	var out []*Result
	for _, name := range names {
		if results[name] == nil {
			return nil, fmt.Errorf("no line is of the setup %q", name)
		}
		if len(results[name].Runs) != len(results[names[0]].Runs) {
			return nil, fmt.Errorf("%q has %d seeds, %q has %d", name, len(results[name].Runs), names[0], len(results[names[0]].Runs))
		}
		out = append(out, results[name])
	}
	return out, Rows(out, emit)
}

// count adds prompt tokens by their source.
func (r *Result) count(sources map[string]float64) {
	if sources == nil {
		return
	}
	if r.Sources == nil {
		r.Sources = map[string]float64{}
	}
	for source, tokens := range sources {
		r.Sources[source] += tokens
	}
}
