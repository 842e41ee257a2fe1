package simulate

import "math/rand/v2"

// Prompt is what one client of a fixed workload asks.
type Prompt struct {
	Tokens []int32
	Salt   string
	Max    int // tokens of the answer
}

// Workload draws prompts that fit every world of at least 40 slots a group.
func Workload(seed uint64, n int) []Prompt {
	r := rand.New(rand.NewPCG(seed, 13))
	list := make([]Prompt, n)
	for i := range list {
		p := &list[i]
		for at := range 1 + r.IntN(24) {
			p.Tokens = append(p.Tokens, int32(at%7))
		}
		if r.IntN(2) == 0 {
			p.Tokens[r.IntN(len(p.Tokens))] = int32(8 + r.IntN(3))
		}
		p.Max = 1 + r.IntN(8)
	}
	return list
}

// Variants are worlds that must give equal answers: the draws of seeds, each changed so that prompts of a
// Workload fit, and the plainest world of all first.
func Variants(seed uint64, n int) []Options {
	plain := Options{
		Seed: seed, Decodes: 1, BlockTokens: 16, Blocks: 64, Groups: 1, Ranks: 1, MaxBatchedTokens: 1 << 20, MaxSeqs: 64,
	}
	list := []Options{plain}
	for i := range n - 1 {
		o := draw(seed<<8 + uint64(i))
		need := o.Groups * ((40 + o.smallest() - 1) / o.smallest())
		if o.Orphans {
			need *= 2 // half may be lost
		}
		o.Blocks = max(o.Blocks, need)
		o.FailLoads = false
		list = append(list, o)
	}
	return list
}

// Answers plays a workload in a world. The result has the tokens of every client that was neither
// broken off nor left; nil for the others.
func Answers(o Options, prompts []Prompt, steps int) ([][]int32, *Violation) {
	w := newWorld(o)
	w.router.workload = prompts
	w.run(script(&o, steps))
	for w.violation == nil && len(w.router.workload) > 0 { // those that the script did not bring
		w.quiet = false
		for range min(8, len(w.router.workload)) {
			var d rng
			w.router.submit(&d)
		}
		w.run(nil)
	}
	w.vanish()
	answers := make([][]int32, len(prompts))
	for _, c := range w.router.past {
		if c.n <= len(answers) && !c.left && !c.broken {
			answers[c.n-1] = c.got
		}
	}
	return answers, w.violation
}
