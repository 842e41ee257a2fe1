package policy

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"
)

// Candidate is an instance that may be chosen for a request.
type Candidate struct {
	Instance
	Place    int
	Standing Standing
	Running  int     // requests that it has
	Waiting  float64 // tokens of prompts that it has been given to compute, for requests that are not answered yet
	Lately   float64 // tokens of prompts that it had to compute for its last requests, about 64
	Hit      Hit     // what it is believed to hold of the request's prompt
	Saved    float64 // tokens of the hit, less those that it could compute in the time in which it loads what lies in stores
}

// Load is the work that an instance has, in tokens of prompts. An answer that is being generated counts as 1,024.
func (c *Candidate) Load() float64 {
	if c.Role == Prefill {
		return c.Waiting
	}
	return c.Waiting + 1024*float64(c.Running)
}

// Scorer rates the candidates of one role.
type Scorer interface {
	// Score sets scores[i], from 0 to 1, for each candidate. It keeps neither slice.
	Score(r *Request, candidates []Candidate, scores []float64)
	// Why says in a few words what the score of a candidate is made of.
	Why(r *Request, c *Candidate) string
}

// limit is the load up to which an instance is preferred for what it holds, or for its session: a quarter over the mean,
// and 4,096 tokens. Beyond it, others are better.
func limit(candidates []Candidate) float64 {
	sum := 0.0
	for i := range candidates {
		sum += candidates[i].Load()
	}
	return 1.25*sum/float64(len(candidates)) + 4096
}

// scale is how many tokens a point of the scorers load and prefix is, so that with equal weights a token that waits
// counts as much as one that must be computed.
func scale(r *Request) float64 { return max(8192, float64(r.Tokens)) }

// loadScorer prefers instances with little to do. What they had to do lately counts a tenth, so that their caches
// are used alike.
type loadScorer struct{}

func (loadScorer) Score(r *Request, candidates []Candidate, scores []float64) {
	least := math.Inf(1)
	for i := range candidates {
		scores[i] = candidates[i].Load() + candidates[i].Lately/10
		least = min(least, scores[i])
	}
	for i := range scores {
		scores[i] = max(0, 1-(scores[i]-least)/scale(r))
	}
}

func (loadScorer) Why(_ *Request, c *Candidate) string {
	return fmt.Sprintf("%d running, %.0f tokens waiting, %.0f lately", c.Running, c.Waiting, c.Lately)
}

// prefixScorer prefers instances that hold much of the prompt, near at hand, unless they have too much to do.
type prefixScorer struct{}

func (prefixScorer) Score(r *Request, candidates []Candidate, scores []float64) {
	most := limit(candidates)
	for i := range candidates {
		scores[i] = 0
		if c := &candidates[i]; c.Load() <= most {
			scores[i] = c.Saved / scale(r)
		}
	}
}

func (prefixScorer) Why(r *Request, c *Candidate) string {
	return "holds " + c.Hit.of(r.Tokens)
}

// sessionScorer prefers one instance for each session: the first by a hash of both, among those that do not have too
// much to do. When instances come or go, only the sessions of these move.
type sessionScorer struct{}

func (sessionScorer) Score(r *Request, candidates []Candidate, scores []float64) {
	clear(scores)
	if r.Session == "" {
		return
	}
	key := xxh3.HashString(r.Session)
	most := limit(candidates)
	first := -1
	for i := range candidates {
		if first < 0 || before(key, most, &candidates[i], &candidates[first]) {
			first = i
		}
	}
	scores[first] = 1
}

// before reports whether a comes before b for a session. Groups are told apart first, so that the prefill and the
// decode instance of a session are in one group.
func before(key uint64, most float64, a, b *Candidate) bool {
	if fits, other := a.Load() <= most, b.Load() <= most; fits != other {
		return fits
	}
	if a.Group != b.Group {
		return xxh3.HashStringSeed(a.Group, ^key) > xxh3.HashStringSeed(b.Group, ^key)
	}
	return xxh3.HashStringSeed(a.Name, key) > xxh3.HashStringSeed(b.Name, key)
}

func (sessionScorer) Why(r *Request, _ *Candidate) string {
	if r.Session == "" {
		return "no session"
	}
	return "session"
}

// weighted is a scorer with its weight.
type weighted struct {
	name   string
	weight float64
	Scorer
}

// scoring is the rule of all policies that add up scores.
type scoring struct {
	scorers []weighted
	inTurn  bool // the decode instance is the next one, whatever the prefill instances are
	one     []float64
	totals  [roles][]float64
	order   []int
}

// pick implements rule: the pair with the most points. A decode instance with a prefill instance comes before one without.
func (s *scoring) pick(p *Policy, r *Request, f field) picked {
	ds := s.total(r, Decode, f.decodes)
	ps := s.total(r, Prefill, f.prefills)
	s.order = s.order[:0]
	for i := range f.prefills {
		s.order = append(s.order, i)
	}
	slices.SortStableFunc(s.order, func(a, b int) int {
		return cmp.Or(cmp.Compare(f.prefills[a].Standing, f.prefills[b].Standing), cmp.Compare(ps[b], ps[a]))
	})
	decodes := f.decodes
	if s.inTurn {
		decodes = decodes[:1]
	}
	var best picked
	standing, points := Out+1, 0.0
	for i := range decodes {
		with, total := (*Candidate)(nil), ds[i]
		its := Out // of no prefill instance
		for _, j := range s.order {
			if p.pairs(r, f.prefills[j].Place, decodes[i].Place) {
				with, total, its = &f.prefills[j], ds[i]+ps[j], f.prefills[j].Standing
				break
			}
		}
		if its < standing || its == standing && total > points {
			best.prefill, best.decode, standing, points = with, &decodes[i], its, total
		}
	}
	best.why = func() string { return s.why(r, &best) }
	return best
}

// total is the points of candidates.
func (s *scoring) total(r *Request, role Role, candidates []Candidate) []float64 {
	if grow := len(candidates); cap(s.one) < grow {
		s.one = make([]float64, grow)
	}
	s.totals[role] = append(s.totals[role][:0], make([]float64, len(candidates))...)
	if len(candidates) == 0 {
		return nil
	}
	one := s.one[:len(candidates)]
	for _, w := range s.scorers {
		w.Score(r, candidates, one)
		for i := range one {
			s.totals[role][i] += w.weight * one[i]
		}
	}
	return s.totals[role]
}

// why says what the points of a choice are made of.
func (s *scoring) why(r *Request, of *picked) string {
	var parts []string
	for _, c := range []*Candidate{of.prefill, of.decode} {
		if c == nil {
			continue
		}
		var words []string
		for _, w := range s.scorers {
			words = append(words, fmt.Sprintf("%s %g: %s", w.name, w.weight, w.Why(r, c)))
		}
		if s.inTurn {
			words = []string{"in turn"}
		}
		parts = append(parts, c.Role.String()+" "+strings.Join(words, ", "))
	}
	return strings.Join(parts, "; ")
}
