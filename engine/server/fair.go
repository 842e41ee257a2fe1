package server

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/router/admission"
)

// mostWaiting is how many prompts wait for their turn: beyond it one of the client goes that has most.
const mostWaiting = 1024

// fairness keeps clients with API keys to their limits and lets their prompts take turns, so that none of them fills the
// engine's queue, where the first one is served first. Requests of routers take no turns here: they have waited there.
type fairness struct {
	mu     sync.Mutex
	limits *admission.Queue // of requests, none of which waits
	turns  *admission.Queue // of prompts
}

// newFairness gives the engine a few more prompts than it computes at once, so that the next one is there when one ends.
func newFairness(seqs int) *fairness {
	return &fairness{
		limits: admission.NewQueue(admission.Config{Slots: math.MaxInt}),
		turns:  admission.NewQueue(admission.Config{Slots: seqs + (seqs+3)/4, Waiting: mostWaiting}),
	}
}

// request counts a request of a client that may cost tokens, until end, which is told what it cost; a negative number
// says that nobody knows. The error is an *admission.RefusedError.
func (f *fairness) request(k *apikeys.Key, tokens int) (end func(used int), err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r, err := f.limits.Arrive(time.Now(), k.Name, k.Limits, tokens)
	if err != nil {
		return nil, err
	}
	return func(used int) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.limits.End(time.Now(), r, used)
	}, nil
}

// turn waits until a prompt of a client may go to the engine, where it is until done.
func (f *fairness) turn(ctx context.Context, k *apikeys.Key, tokens int) (done func(), err error) {
	f.mu.Lock()
	r, err := f.turns.Arrive(time.Now(), k.Name, admission.Limits{}, tokens)
	f.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("%w: too many prompts wait", engine.ErrOverloaded)
	}
	done = func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.turns.End(time.Now(), r, 0)
	}
	select {
	case <-r.Decided():
	case <-ctx.Done():
		done()
		if cutOff(ctx) {
			return nil, errDraining()
		}
		return nil, errLeft
	}
	if r.Refused() != nil {
		return nil, fmt.Errorf("%w: too many prompts of this client wait", engine.ErrOverloaded)
	}
	return done, nil
}

// unsaidTokens is what an answer is estimated at whose request does not say, as in a router.
const unsaidTokens = 256

// cost estimates how many tokens a prompt and its answer have.
func (x *exchange) cost(j *job) int {
	answer := j.request.MaxTokens
	if x.params.maxTokens == 0 {
		answer = min(answer, unsaidTokens)
	}
	return len(j.prompt) + answer
}

// admit keeps the request's client to its limits. What it cost goes to end.
func (s *Server) admit(w http.ResponseWriter, x *exchange) (end func(used int), err error) {
	if x.key == nil {
		return func(int) {}, nil
	}
	tokens := 0
	for i := range x.jobs {
		tokens += x.cost(&x.jobs[i])
	}
	end, err = s.fair.request(x.key, tokens)
	refusal, refused := errors.AsType[*admission.RefusedError](err)
	if !refused {
		return end, err
	}
	w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(refusal.After.Seconds()))))
	limits := x.key.Limits
	var message string
	switch refusal.Reason {
	case admission.RequestRate:
		message = fmt.Sprintf("%s may send %d requests a minute (requests_per_minute)", x.key.Name, limits.RequestsPerMinute)
	case admission.TokenRate:
		message = fmt.Sprintf("%s may use %d tokens a minute (tokens_per_minute)", x.key.Name, limits.TokensPerMinute)
	default:
		message = fmt.Sprintf("%s may have %d requests running (max_in_flight)", x.key.Name, limits.InFlight)
	}
	return nil, &Error{http.StatusTooManyRequests, "rate_limit_error", "", "rate_limit_exceeded", message}
}

// used is how many tokens a request cost, or -1 if its end is not known.
func (a *writer) used() int {
	if a.open > 0 {
		return -1
	}
	return a.total.Prompt + a.total.Generated
}

// takesTurns reports whether prompts wait here for a place in the engine.
func (x *exchange) takesTurns() bool { return x.key != nil && !x.key.Router && !x.params.query }

// submitted is a job that the engine has.
type submitted struct {
	results <-chan engine.Output
	cancel  context.CancelCauseFunc
	done    func() // gives its turn to another one
}

// submit gives a job to the engine when it is its turn.
func (s *Server) submit(ctx context.Context, x *exchange, j *job) (*submitted, error) {
	done := func() {}
	if x.takesTurns() {
		var err error
		if done, err = s.fair.turn(ctx, x.key, x.cost(j)); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	results, err := s.config.Engine.Submit(ctx, j.request)
	if err != nil {
		cancel(err)
		done()
		return nil, err
	}
	return &submitted{results, cancel, done}, nil
}
