package policy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

func all(int) Standing { return Up }

// made is a policy with prefill instances at the first places and decode instances at the next.
func made(t testing.TB, c Config, prefills, decodes int) *Policy {
	p, err := New(c)
	require.NoError(t, err)
	for i := range prefills + decodes {
		in := Instance{Role: Prefill, Name: fmt.Sprint("instance ", i)}
		if i >= prefills {
			in.Role = Decode
		}
		p.Add(i, in)
	}
	return p
}

// owns says that an instance has tokens in its own cache.
func owns(place, tokens int) Held { return Held{Place: place, Hit: Hit{Engine: tokens}} }

// end ends the legs of a choice.
func end(p *Policy, c Choice) {
	p.Done(c.Prefill)
	p.Done(c.Decode)
}

// answered ends the legs of a choice after both instances have answered.
func answered(p *Policy, c Choice) {
	for _, l := range []*Leg{c.Prefill, c.Decode} {
		if l != nil {
			p.Answered(l, time.Time{}, Usage{})
		}
	}
	end(p, c)
}

func TestRoundRobinGoesRound(t *testing.T) {
	p := made(t, Config{}, 2, 3)
	var got [][2]int
	for range 4 {
		c, ok := p.Choose(&Request{Standing: all})
		require.True(t, ok)
		got = append(got, [2]int{c.Prefill.Place, c.Decode.Place})
	}
	require.Equal(t, [][2]int{{0, 2}, {1, 3}, {0, 4}, {1, 2}}, got)
}

// Why a choice has no prefill instance: those that would fit are full, or none fits, or none is available.
func TestFullPrefillInstances(t *testing.T) {
	for _, tt := range []struct {
		standings [2]Standing // of the prefill instances
		fits      [2]bool
		want      string
	}{
		{[2]Standing{Full, Out}, [2]bool{true, true}, AllFull},
		{[2]Standing{Full, Up}, [2]bool{true, false}, AllFull},
		{[2]Standing{Full, Up}, [2]bool{false, false}, Misfit},
		{[2]Standing{Full, Out}, [2]bool{false, true}, NoPrefill},
		{[2]Standing{Out, Out}, [2]bool{true, true}, NoPrefill},
	} {
		p := made(t, Config{}, 2, 1)
		r := &Request{
			Standing: func(place int) Standing { return append(tt.standings[:], Up)[place] },
			Fits:     func(prefill, _ int) bool { return tt.fits[prefill] },
		}
		c, ok := p.Choose(r)
		require.True(t, ok)
		require.Nil(t, c.Prefill)
		require.Equal(t, tt.want, c.Without, "%+v", tt)
		require.Equal(t, tt.want, p.ChoosePrefill(r, c.Decode).Without, "%+v", tt)
	}
	p := made(t, Config{}, 0, 1)
	c, ok := p.Choose(&Request{Standing: all})
	require.True(t, ok)
	require.Empty(t, c.Without)
	require.Equal(t, 1, p.instances[0].running)
	c, ok = p.Choose(&Request{Standing: all, NoWork: true})
	require.True(t, ok)
	require.Equal(t, 1, p.instances[0].running, "what computes nothing is no work")
	end(p, c)
	require.Equal(t, 1, p.instances[0].running)
}

// Whatever the policy and whatever happens: a choice keeps to the filter, to groups and to what fits; one is made if
// and only if there is a decode instance; and when all legs are done nothing is counted any more.
func TestChoiceProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, err := New(Config{Policy: rapid.SampledFrom(Names()).Draw(t, "policy"), History: 64})
		require.NoError(t, err)
		n := rapid.IntRange(1, 8).Draw(t, "instances")
		instances := make([]Instance, n)
		for i := range instances {
			instances[i] = Instance{Role(rapid.IntRange(0, 1).Draw(t, "role")), fmt.Sprint(i), fmt.Sprint(rapid.IntRange(0, 1).Draw(t, "group"))}
			p.Add(i, instances[i])
			p.Shares(i, rapid.Bool().Draw(t, "saves"), rapid.Bool().Draw(t, "loads"))
		}
		var running []*Leg
		now := time.Unix(0, 0)
		for range rapid.IntRange(1, 30).Draw(t, "requests") {
			standings := rapid.SliceOfN(rapid.SampledFrom([]Standing{Up, Suspect, Out, Full}), n, n).Draw(t, "standings")
			apart := rapid.SliceOfN(rapid.Bool(), n*n, n*n).Draw(t, "misfits")
			r := &Request{
				Prompt:   NewPrompt(1, nil, make([]byte, rapid.IntRange(0, 2000).Draw(t, "bytes"))),
				Session:  rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "session"),
				Alone:    rapid.Bool().Draw(t, "alone"),
				Held:     []Held{{rapid.IntRange(-1, 9).Draw(t, "place"), someHit(t, -5, 5000), rapid.Bool().Draw(t, "sure")}},
				Explain:  true,
				Standing: func(place int) Standing { return standings[place] },
				Fits:     func(prefill, decode int) bool { return !apart[prefill*n+decode] },
			}
			c, ok := p.Choose(r)
			best := bestDecode(instances, standings)
			require.Equal(t, best < Out, ok)
			if !ok {
				continue
			}
			require.Equal(t, []any{Decode, best}, []any{instances[c.Decode.Place].Role, standings[c.Decode.Place]})
			require.NotEmpty(t, c.Why)
			if c.Prefill != nil {
				require.False(t, r.Alone)
				require.Equal(t, Prefill, instances[c.Prefill.Place].Role)
				require.Less(t, standings[c.Prefill.Place], Out)
				require.True(t, r.Fits(c.Prefill.Place, c.Decode.Place))
				require.Equal(t, instances[c.Prefill.Place].Group, instances[c.Decode.Place].Group)
				require.Empty(t, c.Without)
				p.Sent(c.Prefill, now)
			}
			running = append(running, c.Prefill, c.Decode)
			now = now.Add(time.Duration(rapid.IntRange(0, 1e9).Draw(t, "passes")))
			for _, l := range running {
				if l == nil || rapid.Bool().Draw(t, "goes on") {
					continue
				}
				p.Sent(l, now)
				p.Answered(l, now.Add(time.Millisecond), Usage{rapid.IntRange(0, 99).Draw(t, "prompt"), rapid.IntRange(0, 99).Draw(t, "cached")})
			}
			if rapid.IntRange(0, 9).Draw(t, "goes") == 0 {
				place := rapid.IntRange(0, n-1).Draw(t, "which")
				p.Add(place, instances[place]) // another one, of which those that run are not
			}
		}
		for _, l := range running {
			p.Done(l)
			p.Done(l)
		}
		for i := range p.instances {
			require.Zero(t, p.instances[i].running)
			require.InDelta(t, 0, p.instances[i].queued, 1e-6)
		}
	})
}

// bestDecode is the best standing of a decode instance.
func bestDecode(instances []Instance, standings []Standing) Standing {
	best := Out
	for i, in := range instances {
		if in.Role == Decode {
			best = min(best, standings[i])
		}
	}
	return best
}

// After a prefill instance failed another one that fits is chosen, and after a decode instance failed another one that
// fits the prefill instance that has the prompt.
func TestChooseAgain(t *testing.T) {
	for _, name := range Names() {
		t.Run(name, func(t *testing.T) {
			p := made(t, Config{Policy: name}, 3, 3)
			out := map[int]bool{}
			r := &Request{
				Prompt:   NewPrompt(1, nil, make([]byte, 4000)),
				Standing: func(place int) Standing { return map[bool]Standing{true: Out}[out[place]] },
				Fits:     func(prefill, decode int) bool { return prefill != 2 || decode != 3 },
			}
			c, ok := p.Choose(r)
			require.True(t, ok)
			out[c.Prefill.Place] = true
			again := p.ChoosePrefill(r, &Leg{Place: 3})
			require.NotNil(t, again.Prefill)
			require.NotContains(t, []int{2, c.Prefill.Place}, again.Prefill.Place)
			out[again.Prefill.Place] = true
			out[0], out[1] = true, true
			require.Equal(t, Misfit, p.ChoosePrefill(r, &Leg{Place: 3}).Without)
			out[2] = true
			require.Equal(t, NoPrefill, p.ChoosePrefill(r, &Leg{Place: 3}).Without)

			other, ok := p.ChooseDecode(r, 2)
			require.True(t, ok)
			require.NotEqual(t, 3, other.Decode.Place)
			require.Empty(t, other.Without)
			require.Equal(t, 1000, other.Decode.Load+other.Decode.Hit.Engine)
			out[4], out[5] = true, true
			_, ok = p.ChooseDecode(r, 2)
			require.False(t, ok, "the one that is left does not fit")
			_, ok = p.ChooseDecode(r, 99)
			require.False(t, ok)
			end(p, c)
		})
	}
}

// Only the decode instances that are alone have no reason for it.
func TestWithout(t *testing.T) {
	p := made(t, Config{}, 0, 1)
	c, _ := p.Choose(&Request{Standing: all})
	require.Empty(t, c.Without)
	p = made(t, Config{}, 1, 1)
	c, _ = p.Choose(&Request{Standing: all, Fits: func(int, int) bool { return false }})
	require.Equal(t, Misfit, c.Without)
	c, _ = p.Choose(&Request{Standing: func(place int) Standing { return Standing(2 - 2*place) }})
	require.Equal(t, NoPrefill, c.Without)
	c, _ = p.Choose(&Request{Standing: all, Alone: true})
	require.Empty(t, c.Without)
}

// TestSessionsMoveLittle: a session stays where it is; when one of n instances goes only its sessions move, and when
// one comes about one in n+1 does.
func TestSessionsMoveLittle(t *testing.T) {
	const n, sessions = 10, 2000
	p := made(t, Config{Policy: Session}, 0, n)
	where := func() (places [sessions]int) {
		for i := range places {
			c, ok := p.Choose(&Request{Session: fmt.Sprint("session ", i), Standing: all})
			require.True(t, ok)
			places[i] = c.Decode.Place
			end(p, c)
		}
		return places
	}
	before := where()
	require.Equal(t, before, where())
	had := map[int]int{}
	for _, place := range before {
		had[place]++
	}
	p.Remove(3)
	moved := 0
	for i, place := range where() {
		if before[i] == 3 {
			require.NotEqual(t, 3, place)
			moved++
		} else {
			require.Equal(t, before[i], place)
		}
	}
	t.Logf("one of %d goes: %d of %d sessions move; each had %v", n, moved, sessions, had)
	require.Equal(t, had[3], moved)
	require.InDelta(t, sessions/n, moved, 0.35*sessions/n)
	p.Add(3, Instance{Role: Decode, Name: "instance 3"})
	require.Equal(t, before, where(), "an instance that comes back has its sessions again")
	p.Add(n, Instance{Role: Decode, Name: "one more"})
	moved = 0
	for i, place := range where() {
		if place != before[i] {
			require.Equal(t, n, place)
			moved++
		}
	}
	t.Logf("one more than %d comes: %d of %d sessions move", n, moved, sessions)
	require.InDelta(t, sessions/(n+1), moved, 0.35*sessions/n)
}

// TestSessionsAreBounded: a session whose instance has far more to do than the others goes to its next one, in one
// group for both roles.
func TestSessionsAreBounded(t *testing.T) {
	p, err := New(Config{Policy: Session})
	require.NoError(t, err)
	for i := range 12 {
		p.Add(i, Instance{Role: Role(i % 2), Name: fmt.Sprint(i), Group: fmt.Sprint("group ", i/4)})
	}
	r := &Request{Session: "busy", Standing: all}
	counts := map[int]int{}
	for range 30 {
		c, ok := p.Choose(r)
		require.True(t, ok)
		require.Equal(t, c.Prefill.Place/4, c.Decode.Place/4)
		counts[c.Decode.Place]++
	}
	t.Log(counts)
	require.Greater(t, len(counts), 2)
	for _, n := range counts {
		require.LessOrEqual(t, n, 12)
	}
}

// TestLeastLoaded: the instance with less to do is next, whether that is answers or prompts.
func TestLeastLoaded(t *testing.T) {
	p := made(t, Config{Policy: LeastLoaded}, 2, 2)
	long := Request{Tokens: 5000, Standing: all}
	first, _ := p.Choose(&long)
	for range 3 { // short ones go by until the prompts are level
		c, _ := p.Choose(&Request{Tokens: 100, Standing: all})
		require.NotEqual(t, first.Prefill.Place, c.Prefill.Place)
		p.Done(c.Prefill)
	}
	p.Done(first.Decode)
	c, _ := p.Choose(&Request{Tokens: 100, Standing: all})
	require.Equal(t, first.Decode.Place, c.Decode.Place)
}

// TestPrefixAware: a prompt goes where its beginning is, by the history or by the instances' own word.
func TestPrefixAware(t *testing.T) {
	p := made(t, Config{Policy: PrefixAware}, 3, 3)
	rng := rand.New(rand.NewPCG(1, 1))
	texts := make([][]byte, 9)
	for i := range texts {
		texts[i] = make([]byte, 8000)
		for j := range texts[i] {
			texts[i][j] = byte(rng.Uint32())
		}
	}
	choose := func(r Request) Choice {
		r.Standing, r.Explain = all, true
		c, ok := p.Choose(&r)
		require.True(t, ok)
		answered(p, c)
		return c
	}
	var first []Choice
	for _, text := range texts {
		first = append(first, choose(Request{Prompt: NewPrompt(1, nil, text)}))
	}
	for i, text := range texts {
		c := choose(Request{Prompt: NewPrompt(1, nil, append(text[:8000:8000], "and more"...))})
		require.Equal(t, first[i].Prefill.Place, c.Prefill.Place)
		require.Equal(t, first[i].Decode.Place, c.Decode.Place)
		require.Contains(t, c.Why, "prefix 1: holds 1984 of 2002 tokens") // 62 pieces of 128 bytes
		other := choose(Request{Prompt: NewPrompt(1, []byte("another model"), text)})
		require.Contains(t, other.Why, "holds 0 of 2000 tokens")
	}
	told := (first[0].Prefill.Place + 1) % 3
	c := choose(Request{Prompt: NewPrompt(1, nil, texts[0]), Held: []Held{owns(first[0].Prefill.Place, 0), owns(told, 2000), owns(77, 2000), owns(-1, 9)}})
	require.Equal(t, told, c.Prefill.Place)
	p.Forget(told)
	require.NotContains(t, choose(Request{Prompt: NewPrompt(1, nil, texts[0]), Held: []Held{owns(first[0].Prefill.Place, 0)}}).Why, "prefill prefix 1: holds 1")
}

// TestHistoryCountsAnswers: others follow to an instance that computes their prompt, but what it did not answer it does not
// hold. What it held before stays, and so does what it has answered beside.
func TestHistoryCountsAnswers(t *testing.T) {
	for _, role := range []Role{Prefill, Decode} {
		p := made(t, Config{Policy: PrefixAware}, 1, 1)
		text := make([]byte, 10*PieceBytes)
		choose := func(pieces int) Choice {
			c, ok := p.Choose(&Request{Prompt: NewPrompt(1, nil, text[:pieces*PieceBytes]), Tokens: pieces, Standing: all})
			require.True(t, ok)
			return c
		}
		leg := func(c Choice) *Leg {
			if role == Prefill {
				return c.Prefill
			}
			return c.Decode
		}
		holds := func() int {
			c := choose(10)
			end(p, c)
			return leg(c).Hit.Engine
		}
		require.Zero(t, holds())
		require.Zero(t, holds(), "it was chosen and did not answer")
		answered(p, choose(4))
		require.Equal(t, 4, holds())
		require.Equal(t, 4, holds(), "it fails a longer one")

		first, second := choose(10), choose(10)
		require.Equal(t, 10, leg(second).Hit.Engine, "the first one computes it")
		end(p, first)
		require.Equal(t, 4, holds())
		answered(p, second)
		require.Equal(t, 10, holds(), "the second one has computed it")

		text[0]++
		for _, confirm := range []func(){
			func() { answered(p, choose(6)) },
			func() {
				prompt := NewPrompt(1, nil, text)
				p.Told(&prompt, leg(second).Place, Hit{Engine: 6}, 10)
			},
		} {
			text[1]++
			first, second = choose(10), choose(10)
			confirm()
			end(p, first)
			end(p, second)
			require.Equal(t, 6, holds(), "what was answered beside, nobody takes back")
		}

		gone := choose(10)
		p.Add(0, Instance{Role: Prefill})
		p.Add(1, Instance{Role: Decode})
		answered(p, choose(4))
		end(p, gone)
		require.Equal(t, 4, holds(), "what is there now has failed nothing")
	}
}

// TestUse: another policy goes on with the instances and the requests that there are, and back again.
func TestUse(t *testing.T) {
	p := made(t, Config{}, 2, 70)
	long := Request{Tokens: 5000, Prompt: NewPrompt(1, nil, make([]byte, 20_000)), Standing: all}
	running, _ := p.Choose(&long)
	p.Sent(running.Decode, time.Unix(0, 0))
	require.False(t, p.UsesPrompts())
	for _, name := range Names() {
		require.NoError(t, p.Use(Config{Policy: name}))
		require.Equal(t, name, p.Name())
		n, waiting := p.Busy(running.Prefill.Place)
		require.Equal(t, 1, n, name)
		require.Positive(t, waiting, name)
		for range 80 {
			c, ok := p.Choose(&long)
			require.True(t, ok)
			answered(p, c)
		}
	}
	require.ErrorContains(t, p.Use(Config{Policy: "x"}), "unknown policy")
	require.Equal(t, PDAware, p.Name())
	require.NoError(t, p.Use(Config{Policy: PrefixAware, Weights: map[string]float64{"load": 0}}))
	require.Positive(t, p.Known(&long), "the history of pd_aware goes on")
	require.NoError(t, p.Use(Config{}))
	require.Zero(t, p.Known(&long))
	end(p, running)
	for place := range p.instances {
		n, waiting := p.Busy(place)
		require.Zero(t, n)
		require.InDelta(t, 0, waiting, 1e-6)
	}
}

// TestTold: what an instance says about a prompt counts for the prompts that follow.
func TestTold(t *testing.T) {
	p := made(t, Config{Policy: PrefixAware}, 0, 2)
	prompt := NewPrompt(1, nil, make([]byte, 10*PieceBytes))
	r := &Request{Prompt: prompt, Tokens: 300, Standing: all}
	for _, wrong := range [][2]int{{0, 300}, {-1, 300}, {301, 300}, {1, 0}} {
		p.Told(&prompt, 1, Hit{Engine: wrong[0]}, wrong[1])
		require.Zero(t, p.Known(r))
	}
	p.Told(&prompt, 1, Hit{Engine: 165}, 300)
	require.InDelta(t, 0.5, p.Known(r), 0.01) // 5 whole pieces
	c, _ := p.Choose(r)
	require.Equal(t, 1, c.Decode.Place)
	require.Equal(t, Hit{Engine: 150}, c.Decode.Hit)
	p.Told(&prompt, 1, Hit{Engine: 300}, 300)
	require.Equal(t, 1.0, p.Known(r))
	r.Standing = func(place int) Standing { return Standing(2 * place) }
	require.Zero(t, p.Known(r), "of those that may be chosen")
}

// TestSkips: without anything learnt a short prompt and one that the decode instance holds need no prefill instance;
// with it, whatever is faster is chosen.
func TestSkips(t *testing.T) {
	p := made(t, Config{Policy: PDAware}, 1, 1)
	c, _ := p.Choose(&Request{Tokens: 30, Standing: all})
	require.Nil(t, c.Prefill)
	require.Equal(t, Skipped, c.Without)
	end(p, c)
	c, _ = p.Choose(&Request{Tokens: 3000, Standing: all})
	require.NotNil(t, c.Prefill)
	end(p, c)
	c, _ = p.Choose(&Request{Tokens: 3000, Held: []Held{owns(1, 2990)}, Standing: all})
	require.Nil(t, c.Prefill)
	end(p, c)
	// From here on decode computes a token in 1 ms, prefill in 0.1 ms, and a load takes 50 ms and 0.01 ms a token.
	now := time.Unix(0, 0)
	for i := range 40 {
		n := 100 + 100*(i%7)
		for _, l := range []*Leg{
			{Place: 0, role: Prefill, peer: None, Compute: n, born: 1},
			{Place: 1, role: Decode, peer: None, Compute: n, born: 2},
			{Place: 1, role: Decode, peer: 0, Load: n, born: 2},
		} {
			seconds := map[bool]float64{true: 0.001}[l.role == Decode] * float64(n)
			switch {
			case l.peer == 0:
				seconds = 0.05 + 1e-5*float64(n)
			case l.role == Prefill:
				seconds = 1e-4 * float64(n)
			}
			l.waiting, l.running = true, true
			p.instances[l.Place].running++
			p.Sent(l, now)
			p.Answered(l, now.Add(time.Duration(seconds*1e9)), Usage{})
			p.Done(l)
		}
	}
	for _, tt := range []struct {
		tokens, held int
		alone        bool
	}{{40, 0, true}, {100, 0, false}, {1000, 0, false}, {1000, 960, true}, {1000, 800, false}} {
		c, _ := p.Choose(&Request{Tokens: tt.tokens, Held: []Held{owns(1, tt.held)}, Standing: all})
		require.Equal(t, tt.alone, c.Prefill == nil, "%+v", tt)
		end(p, c)
	}
}

func TestLine(t *testing.T) {
	var l line
	for i := range 100 {
		x := float64(i % 13 * 100)
		l.add(i, x, 0.2+x/1000)
	}
	require.InDelta(t, 0.2, l.base, 1e-9)
	require.InDelta(t, 0.001, l.slope, 1e-9)
	for i := range 400 { // it follows
		x := float64(i % 13 * 100)
		l.add(i, x, 0.1+x/2000)
	}
	require.InDelta(t, 0.1, l.base, 1e-3)
	require.InDelta(t, 0.0005, l.slope, 1e-5)
	var same, none, down line
	for i := range 9 {
		same.add(i, 100, 0.5)
		none.add(i, 0, 0.5)
		down.add(i, float64(i*10), 1-float64(i)/100)
	}
	require.Equal(t, 0.005, same.slope)
	require.Equal(t, 0.5, none.base)
	require.Zero(t, down.slope)
	require.GreaterOrEqual(t, down.base, 0.0)
}

// The history says about each place what a plain model says, as long as it has not forgotten, and never more.
func TestHistoryProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		most := rapid.SampledFrom([]int{8, 1 << 20}).Draw(t, "pieces")
		h := newHistory(most)
		model := map[int]map[uint64]bool{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			place := rapid.SampledFrom([]int{0, 1, 63, 64, 200}).Draw(t, "place")
			h.fit(place)
			if rapid.IntRange(0, 9).Draw(t, "forget") == 0 {
				h.forget(place)
				delete(model, place)
				continue
			}
			var pieces []uint64
			at := uint64(0)
			for range rapid.IntRange(0, 6).Draw(t, "length") {
				at = at*3 + 1 + rapid.Uint64Range(0, 2).Draw(t, "branch")
				pieces = append(pieces, at)
			}
			got := map[int]int{}
			h.look(pieces, func(place, pieces int) { got[place] = pieces })
			for place, has := range model {
				n := 0
				for n < len(pieces) && has[pieces[n]] {
					n++
				}
				if most == 8 {
					require.LessOrEqual(t, got[place], n)
				} else {
					require.Equal(t, n, got[place])
				}
			}
			h.add(pieces, rapid.Uint64Range(0, 2).Draw(t, "client"), place)
			if model[place] == nil {
				model[place] = map[uint64]bool{}
			}
			for _, piece := range pieces {
				model[place][piece] = true
			}
			require.LessOrEqual(t, h.pieces.Len(), most)
			require.LessOrEqual(t, len(h.bits), most*h.words)
		}
	})
}

// One client that sends more than is remembered does not push out the prompts of the others, nor what they share with it.
func TestHistoryIsShared(t *testing.T) {
	p := made(t, Config{Policy: PrefixAware, History: 300}, 0, 1)
	text := func(first byte, pieces int) []byte {
		list := make([]byte, pieces*PieceBytes)
		list[0] = first
		return list
	}
	send := func(client uint64, text []byte) (held int) {
		prompt := NewPrompt(1, nil, text)
		prompt.Client = client
		c, ok := p.Choose(&Request{Prompt: prompt, Tokens: len(text) / PieceBytes, Standing: all})
		require.True(t, ok)
		answered(p, c)
		return c.Decode.Hit.Engine
	}
	require.Zero(t, send(1, text(1, 50)))
	require.Equal(t, 50, send(2, text(1, 50)), "both have a system prompt")
	for i := range 100 {
		require.Zero(t, send(2, text(byte(2+i), 100)))
	}
	require.Equal(t, 50, send(1, text(1, 50)))
	require.Equal(t, 100, send(2, text(101, 100)), "its last ones are known")
	require.Zero(t, send(2, text(50, 100)))
	for i := range 3 { // alone, it has nearly all of it
		send(2, text(byte(150+i), 80))
	}
	for i := range 3 {
		require.Equal(t, 80, send(2, text(byte(150+i), 80)))
	}
}

func TestPromptIsBounded(t *testing.T) {
	p := NewPrompt(1, nil, make([]byte, 9<<20))
	require.Len(t, p.pieces, maxPieces)
	require.Less(t, p.share(maxPieces), 0.12)
}

func TestConfig(t *testing.T) {
	for text, want := range map[string]string{
		"prefix":             `"prefix" is not a weight, want NAME=NUMBER such as prefix=3`,
		"=1":                 `"=1" is not a weight, want NAME=NUMBER such as prefix=3`,
		"load=x":             `the weight of "load" is "x", want a number`,
		"load=1,load=2":      `the weight of "load" appears twice`,
		"prefx=3":            `unknown scorer "prefx", did you mean "prefix"?`,
		"colour=3":           `unknown scorer "colour", known are load, prefix, session`,
		"load=-1":            "the weight of scorer load is -1, want 0 or more",
		"load=NaN":           "the weight of scorer load is NaN, want 0 or more",
		"load=0, prefix = 0": "all weights are 0, want at least one of load, prefix, session to be more",
	} {
		weights, err := ParseWeights(text)
		if err == nil {
			_, err = New(Config{Policy: PrefixAware, Weights: weights})
		}
		require.EqualError(t, err, want)
	}
	_, err := New(Config{Policy: "prefix_awre"})
	require.EqualError(t, err, `unknown policy "prefix_awre", did you mean "prefix_aware"?`)
	for _, name := range []string{RoundRobin, PDAware} {
		_, err = New(Config{Policy: name, Weights: map[string]float64{"load": 1}})
		require.EqualError(t, err, "policy "+name+" has no weights; those that have are least_loaded, prefix_aware and session")
	}
	weights, err := ParseWeights("")
	require.NoError(t, err)
	require.Empty(t, weights)
	p := made(t, Config{Policy: LeastLoaded, Weights: map[string]float64{"last": 5}, Scorers: map[string]Scorer{"last": lastScorer{}}}, 3, 3)
	c, ok := p.Choose(&Request{Standing: all, Explain: true})
	require.True(t, ok)
	require.Equal(t, []int{2, 5}, []int{c.Prefill.Place, c.Decode.Place})
	require.Contains(t, c.Why, "last 5: it is number 5")
}

// lastScorer prefers the instance with the highest place.
type lastScorer struct{}

func (lastScorer) Score(_ *Request, candidates []Candidate, scores []float64) {
	for i := range candidates {
		scores[i] = 1 - math.Exp2(-float64(candidates[i].Place))
	}
}

func (lastScorer) Why(_ *Request, c *Candidate) string { return fmt.Sprint("it is number ", c.Place) }

// While nothing is known about computing on decode instances, streams try it out, but never with a prompt of over 4,096
// tokens, and less and less often if that teaches nothing.
func TestTrialsThatTeachNothing(t *testing.T) {
	trials := func(tokens int, teaches bool) (n int) {
		p := made(t, Config{Policy: PDAware}, 1, 1)
		now := time.Unix(0, 0)
		for range 2000 {
			now = now.Add(time.Second)
			c, ok := p.Choose(&Request{Tokens: tokens, Standing: all})
			require.True(t, ok)
			if c.Prefill != nil {
				p.Sent(c.Prefill, now)
				p.Answered(c.Prefill, now.Add(100*time.Millisecond), Usage{Prompt: tokens})
			} else {
				n++
				p.Sent(c.Decode, now)
				if teaches { // that it takes twice as long
					p.Answered(c.Decode, now.Add(200*time.Millisecond), Usage{Prompt: tokens})
				}
			}
			end(p, c)
		}
		return n
	}
	require.Zero(t, trials(4097, true))
	require.Equal(t, 8, trials(4096, false), "after 4 answers, 8, 16 ...")
	require.InDelta(t, 2000/64, trials(4096, true), 3)
}

// What was forgotten of an instance does not come back, and to forget it again costs nothing.
func TestForgetOnce(t *testing.T) {
	h := newHistory(64)
	h.fit(70)
	held := func(place int) (n int) {
		h.look([]uint64{1, 2}, func(at, pieces int) {
			if at == place {
				n = pieces
			}
		})
		return n
	}
	held(70)
	h.add([]uint64{1, 2}, 0, 3, 70)
	require.Equal(t, []int{2, 2}, []int{held(3), held(70)})
	h.forget(70)
	require.Equal(t, []bool{true, false}, []bool{h.used[3], h.used[70]})
	h.forget(70)
	h.forget(99)
	require.Equal(t, []int{2, 0}, []int{held(3), held(70)})
	h.add([]uint64{1, 2}, 0, 70)
	require.Equal(t, 2, held(70))
}

// BenchmarkChoose is the decisions of one core at 64 instances, for prompts of 8k tokens (32 KiB of text): the text is
// cut into pieces, a pair is chosen, and both legs run and end. Of the prompts three in four begin as one before. At the end
// it prints the rows of the table in docs/router.md.
func BenchmarkChoose(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	texts := make([][]byte, 256)
	for i := range texts {
		texts[i] = make([]byte, 32<<10)
		for j := range texts[i] {
			texts[i][j] = byte(rng.Uint32())
		}
		if i%4 > 0 {
			copy(texts[i], texts[i-i%4][:24<<10])
		}
	}
	var rows strings.Builder
	for _, name := range Names() {
		b.Run(name, func(b *testing.B) {
			p := made(b, Config{Policy: name}, 32, 32)
			now := time.Unix(0, 0)
			b.ReportAllocs()
			i, before := uint64(0), cpuSeconds(b)
			for b.Loop() {
				i++
				r := &Request{Tokens: 8192, Session: sessions[i%4], Standing: all}
				if p.UsesPrompts() {
					r.Tokens, r.Prompt = 0, NewPrompt(i/1024, nil, texts[i%256])
				}
				c, _ := p.Choose(r)
				now = now.Add(time.Millisecond)
				if c.Prefill != nil {
					p.Sent(c.Prefill, now)
					p.Answered(c.Prefill, now.Add(30*time.Millisecond), Usage{Prompt: 8192, Cached: c.Prefill.Hit.Tokens()})
				}
				p.Sent(c.Decode, now)
				p.Answered(c.Decode, now.Add(40*time.Millisecond), Usage{})
				end(p, c)
			}
			rate := float64(i) / (cpuSeconds(b) - before)
			b.ReportMetric(rate, "decisions/cpu-s")
			fmt.Fprintf(&rows, "| `%s` | %.0f |\n", name, rate)
		})
	}
	fmt.Fprint(os.Stdout, rows.String())
}

// cpuSeconds is what the process has used of its cores: other processes of the machine do not count.
func cpuSeconds(b *testing.B) float64 {
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

var sessions = [4]string{"session 1", "session 2", "session 3", ""}
