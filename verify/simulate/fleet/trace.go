package fleet

import (
	"container/heap"
	"math/bits"
	"math/rand/v2"
	"time"
)

// piece is a part of a prompt: a system prompt, a message or an answer. Its tokens follow from its id, so that nobody needs
// to keep them.
type piece struct {
	id     uint64
	tokens int
}

// token is one token of a piece.
func (p *piece) token(i int) int32 {
	high, low := bits.Mul64(p.id^0x9e3779b97f4a7c15, uint64(i)*2+0xbf58476d1ce4e5b9)
	return int32((high ^ low) & 0x7fffffff)
}

// appendTokens appends the tokens of pieces from one place up to another, which is within them.
func appendTokens(list []int32, pieces []piece, from, to int) []int32 {
	at := 0
	for i := range pieces {
		p := &pieces[i]
		for j := max(0, from-at); j < min(p.tokens, to-at); j++ {
			list = append(list, p.token(j))
		}
		at += p.tokens
	}
	return list
}

// chain is the key of a block: of all tokens up to its end.
func chain(before uint64, tokens []int32) uint64 {
	for _, t := range tokens {
		high, low := bits.Mul64(before^0x94d049bb133111eb, uint64(uint32(t))+0x2545f4914f6cdd1d)
		before = high ^ low
	}
	return before
}

// talk is a conversation.
type talk struct {
	number int
	left   int // turns that are to come
	free   time.Duration
	pieces []piece
	tokens int
	blocks []uint64 // the keys of all full blocks so far
}

// add appends a piece.
func (t *talk) add(p piece, scratch []int32) []int32 {
	t.pieces = append(t.pieces, p)
	t.tokens += p.tokens
	from := len(t.blocks) * blockTokens
	scratch = appendTokens(scratch[:0], t.pieces, from, t.tokens)
	last := uint64(1)
	if n := len(t.blocks); n > 0 {
		last = t.blocks[n-1]
	}
	for rest := scratch; len(rest) >= blockTokens; rest = rest[blockTokens:] {
		last = chain(last, rest[:blockTokens])
		t.blocks = append(t.blocks, last)
	}
	return scratch
}

// turn is a request of a trace.
type turn struct {
	at      time.Duration
	session int
	pieces  []piece  // of its prompt and of its answer
	prompt  int      // tokens
	answer  int      // tokens
	blocks  []uint64 // the keys of the full blocks of both
}

// prompted is the keys of the full blocks of the prompt alone.
func (t *turn) prompted() []uint64 { return t.blocks[:t.prompt/blockTokens] }

// The trace: turns of a conversation begin after the last answer and a pause. A tenth of the messages are long.
const (
	systems    = 32 // system prompts; the first are the most common
	systemMin  = 128
	systemMax  = 1024
	turnsMax   = 8
	shortMin   = 8
	shortMax   = 128
	longMin    = 512
	longMax    = 1536
	answerMin  = 32
	answerMax  = 256
	think      = 10 * time.Second
	longShare  = 0.1
	promptMost = minBlocks*blockTokens - answerMax - longMax // a conversation ends before it outgrows a cache
)

// trace draws requests one by one, so that none has to be kept. It does not depend on what becomes of them.
type trace struct {
	rng     *rand.Rand
	rate    float64
	now     time.Duration
	open    talks
	started int
	pieces  uint64
	system  []piece
	scratch []int32
}

func newTrace(o *Options) *trace {
	t := &trace{rng: rand.New(rand.NewPCG(o.Seed, 0x7472616365)), rate: o.Rate * float64(o.Instances), now: begin}
	for range systems {
		t.system = append(t.system, t.piece(systemMin, systemMax))
	}
	return t
}

func (t *trace) piece(least, most int) piece {
	t.pieces++
	return piece{t.pieces * 0xd1342543de82ef95, least + t.rng.IntN(most-least+1)}
}

// next is the next request. All of them are a Poisson process: at each of its times an open conversation goes on, the one that
// has waited longest, or a new one begins.
func (t *trace) next() *turn {
	t.now += time.Duration(t.rng.ExpFloat64() / t.rate * float64(time.Second))
	begins := t.rng.IntN(turnsMax+1) < 2 // conversations have half that many turns on average
	var c *talk
	if begins || len(t.open) == 0 || t.open[0].free > t.now {
		c = &talk{number: t.started, left: 1 + t.rng.IntN(turnsMax)}
		t.started++
		t.scratch = c.add(t.system[min(t.rng.IntN(systems), t.rng.IntN(systems))], t.scratch)
	} else {
		c, _ = heap.Pop(&t.open).(*talk)
	}
	message := t.piece(shortMin, shortMax)
	if t.rng.Float64() < longShare {
		message = t.piece(longMin, longMax)
	}
	t.scratch = c.add(message, t.scratch)
	prompt := c.tokens
	answer := t.piece(answerMin, answerMax)
	t.scratch = c.add(answer, t.scratch)
	one := &turn{at: t.now, session: c.number, pieces: c.pieces, prompt: prompt, answer: answer.tokens, blocks: c.blocks}
	c.left--
	c.free = t.now + time.Duration(answer.tokens)*decodeStep + time.Duration(t.rng.ExpFloat64()*float64(think))
	if c.left > 0 && c.tokens <= promptMost {
		heap.Push(&t.open, c)
	}
	return one
}

// talks are open conversations, the one that may go on first at the top.
type talks []*talk

func (t talks) Len() int { return len(t) }
func (t talks) Less(i, j int) bool {
	return t[i].free < t[j].free || t[i].free == t[j].free && t[i].number < t[j].number
}
func (t talks) Swap(i, j int) { t[i], t[j] = t[j], t[i] }
func (t *talks) Push(x any) {
	c, _ := x.(*talk)
	*t = append(*t, c)
}

func (t *talks) Pop() any {
	last := (*t)[len(*t)-1]
	*t = (*t)[:len(*t)-1]
	return last
}
