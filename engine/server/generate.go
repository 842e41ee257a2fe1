package server

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/sample"
)

// job is one choice of an answer: a prompt to be continued.
type job struct {
	request engine.Request
	stops   []string
	prompt  []int32 // the engine owns the request's
}

// piece is a part of one choice. The last one has finish or err set.
type piece struct {
	index  int
	text   string
	tokens []int32
	finish string // stop or length
	err    error
	usage  engine.Usage // last piece only
	ticket []byte       // last piece only

	cached *engine.Cached // last piece of a cache query only
}

// last reports whether nothing of the choice follows.
func (p *piece) last() bool { return p.finish != "" || p.err != nil }

// reason is the finish_reason of a last piece.
func (p *piece) reason() *string {
	reason := p.finish
	if p.err != nil {
		reason = "error"
	}
	return &reason
}

// start submits all jobs and merges what comes of them. The channel is closed when all are over, which
// they soon are once ctx ends; until then it must be read. On an error nothing runs.
//
// Where clients take turns, it returns when the first job has got its own. The others follow one after the other, and errors of
// their submission come as their last pieces.
func (s *Server) start(ctx context.Context, x *exchange) (<-chan piece, error) {
	ctx, stop := context.WithCancel(ctx)
	out := make(chan piece)
	var wg sync.WaitGroup
	begin := func(i int) (*follower, error) {
		f := &follower{server: s, job: &x.jobs[i], index: i, out: out}
		of, err := s.submit(ctx, x, f.job)
		if err == nil {
			wg.Go(func() { f.follow(ctx, of) })
		}
		return f, err
	}
	first := len(x.jobs) // of those that come later
	if x.takesTurns() {
		first = min(1, first)
		s.fair.wait(len(x.jobs))
	}
	for i := range first {
		_, err := begin(i)
		if x.takesTurns() {
			s.fair.wait(-1)
		}
		if err != nil {
			s.fair.wait(first - len(x.jobs))
			stop() // aborts the jobs before this one
			wg.Wait()
			return nil, err
		}
	}
	wg.Go(func() {
		for i := first; i < len(x.jobs); i++ {
			f, err := begin(i)
			s.fair.wait(-1)
			if err != nil {
				f.send(ctx, piece{index: i, err: err})
			}
		}
	})
	go func() {
		wg.Wait()
		stop()
		close(out)
	}()
	return out, nil
}

// follower turns the tokens of one job into text.
type follower struct {
	server *Server
	job    *job
	index  int
	stop   context.CancelCauseFunc // ends the job
	out    chan<- piece
	text   *sample.Stream
	tokens int // pushed
	ended  bool
}

// follow follows a job that the engine has.
func (f *follower) follow(ctx context.Context, of *submitted) {
	defer of.cancel(nil)
	f.stop = of.cancel
	f.run(ctx, of.results)
}

func (f *follower) run(ctx context.Context, results <-chan engine.Output) {
	f.text = sample.NewStream(f.server.config.Tokenizer.Bytes, f.job.stops)
	var final piece
	for r := range results {
		if f.ended { // the engine's own end, after that by a stop string
			final.usage, final.ticket = r.Usage, r.Ticket
			continue
		}
		p := f.push(&r)
		p.usage, p.ticket, p.cached = r.Usage, r.Ticket, r.Cached
		if p.last() {
			f.ended, final = true, p
			if r.Reason == 0 {
				f.stop(engine.ErrStop)
			}
			continue
		}
		if p.text != "" || len(p.tokens) > 0 {
			f.send(ctx, p)
		}
	}
	if !f.ended { // the engine closed the channel without a last word
		final = piece{index: f.index, err: engine.ErrClosed}
	}
	final.usage.Generated = f.tokens
	f.send(ctx, final)
}

// push makes the piece of one output.
func (f *follower) push(r *engine.Output) piece {
	p := piece{index: f.index}
	for i, token := range r.Tokens {
		f.tokens++
		p.tokens = r.Tokens[:i+1]
		if slices.Contains(f.server.stops, token) {
			continue // an end-of-sequence token is no text, also when it is ignored
		}
		text, stopped := f.text.Push(token)
		p.text += text
		if stopped {
			p.finish = "stop"
			return p
		}
	}
	switch r.Reason {
	case 0:
		return p
	case connector.ReasonStop:
		p.finish = "stop"
	case connector.ReasonLength:
		p.finish = "length"
	case connector.ReasonAbort:
		p.err = engine.ErrClosed // if the client left, nobody reads it
	default:
		p.err = cmp.Or(r.Err, engine.ErrClosed)
	}
	p.text += f.text.Flush()
	return p
}

func (f *follower) send(ctx context.Context, p piece) {
	select {
	case f.out <- p:
	case <-ctx.Done():
	}
}
