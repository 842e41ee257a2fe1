package policy

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kvport/kvport/internal/strictjson"
)

// The policies.
const (
	RoundRobin  = "round_robin"  // each instance in turn
	LeastLoaded = "least_loaded" // the one with the least to do
	PrefixAware = "prefix_aware" // the one that holds most of the prompt
	Session     = "session"      // the same one for each request of a session
	PDAware     = "pd_aware"     // the pair, or the decode instance alone, that is expected to answer first
)

// Names lists the policies.
func Names() []string { return []string{RoundRobin, LeastLoaded, PrefixAware, Session, PDAware} }

// weightsOf is what each policy that adds up scores gives to which scorer.
func weightsOf(policy string) map[string]float64 {
	return map[string]map[string]float64{
		LeastLoaded: {"load": 1},
		PrefixAware: {"prefix": 1, "load": 1},
		Session:     {"session": 10, "load": 1},
	}[policy]
}

// String names the role in reasons.
func (r Role) String() string {
	if r == Prefill {
		return "prefill"
	}
	return "decode"
}

// newRule makes the rule of a policy and reports whether it looks at prompts.
func newRule(c *Config) (r rule, prompts bool, err error) {
	name := c.Policy
	if !slices.Contains(Names(), name) {
		return nil, false, unknown("policy", name, Names())
	}
	if name == RoundRobin || name == PDAware {
		if len(c.Weights) > 0 {
			return nil, false, fmt.Errorf("policy %s has no weights; those that have are %s, %s and %s", name, LeastLoaded, PrefixAware, Session)
		}
		if name == PDAware {
			return &fastest{}, true, nil
		}
		return &scoring{inTurn: true}, false, nil
	}
	scorers := map[string]Scorer{"load": loadScorer{}, "prefix": prefixScorer{}, "session": sessionScorer{}}
	maps.Copy(scorers, c.Scorers)
	known := slices.Sorted(maps.Keys(scorers))
	weights := weightsOf(name)
	maps.Copy(weights, c.Weights)
	s := &scoring{}
	for _, name := range slices.Sorted(maps.Keys(weights)) {
		w := weights[name]
		switch {
		case scorers[name] == nil:
			return nil, false, unknown("scorer", name, known)
		case math.IsNaN(w) || math.IsInf(w, 0) || w < 0:
			return nil, false, fmt.Errorf("the weight of scorer %s is %g, want 0 or more", name, w)
		case w > 0:
			s.scorers = append(s.scorers, weighted{name, w, scorers[name]})
		}
	}
	if len(s.scorers) == 0 {
		return nil, false, fmt.Errorf("all weights are 0, want at least one of %s to be more", strings.Join(known, ", "))
	}
	return s, weights["prefix"] > 0 || len(c.Scorers) > 0, nil
}

// unknown says that a name is none of those that are known, and which one it may have meant.
func unknown(kind, name string, known []string) error {
	if near := strictjson.Nearest(name, known, 1+max(2, len(name)/3)); near != "" {
		return fmt.Errorf("unknown %s %s, did you mean %q?", kind, strictjson.Quote(name), near)
	}
	return fmt.Errorf("unknown %s %s, known are %s", kind, strictjson.Quote(name), strings.Join(known, ", "))
}

// ParseWeights reads weights as a flag has them, such as prefix=3,load=1. Which scorers there are, New knows.
func ParseWeights(text string) (map[string]float64, error) {
	weights := map[string]float64{}
	if text == "" {
		return weights, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		name, value, ok := strings.Cut(part, "=")
		name = strings.TrimSpace(name)
		if !ok || name == "" {
			return nil, fmt.Errorf("%s is not a weight, want NAME=NUMBER such as prefix=3", strictjson.Quote(part))
		}
		w, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil {
			return nil, fmt.Errorf("the weight of %s is %s, want a number", strictjson.Quote(name), strictjson.Quote(value))
		}
		if _, twice := weights[name]; twice {
			return nil, fmt.Errorf("the weight of %s appears twice", strictjson.Quote(name))
		}
		weights[name] = w
	}
	return weights, nil
}
