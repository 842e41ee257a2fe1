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

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/router/admission"
)

// fairness keeps clients with API keys to their limits and lets their prompts take turns, so that none of them fills the
// engine's queue, where the first one is served first. Requests of routers take no turns here: they have waited there.
type fairness struct {
	places  int // of requests whose body has come
	waiting prometheus.Gauge

	mu     sync.Mutex
	limits *admission.Queue // of requests, none of which waits
	turns  *admission.Queue // of prompts, of each request one at a time
	taken  int              // places
	each   map[string]int   // places by tenants, and by the names of clients without one
	behind int              // prompts that the engine does not have yet
}

// newFairness gives the engine as many prompts as its scheduler looks at: those that it computes at once, and as many again
// whose blocks are loaded meanwhile.
func newFairness(seqs, places int, waiting prometheus.Gauge) *fairness {
	return &fairness{
		places: places, waiting: waiting,
		limits: admission.NewQueue(admission.Config{Slots: math.MaxInt}),
		turns:  admission.NewQueue(admission.Config{Slots: 2 * seqs, Waiting: places}),
		each:   map[string]int{},
	}
}

// enter takes a place for a request of a client, until leave. The clients of a tenant may have their Share of the places that
// others leave, since their requests may wait here for long; of fewer than eight, all. Routers may have all, as may clients without a
// tenant: they may be routers of a deployment whose file has no names.
func (f *fairness) enter(k *apikeys.Key) (leave func(), err error) {
	who, shares := "", false
	if k != nil {
		who, shares = k.Name, k.Tenant != ""
	}
	if shares {
		who = "the tenant " + k.Tenant
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	left := f.places - (f.taken - f.each[who])
	if shares {
		left = admission.Share(left)
	}
	switch {
	case f.taken >= f.places:
		return nil, fmt.Errorf("%w: %d are running already", engine.ErrOverloaded, f.taken)
	case f.each[who] >= left:
		return nil, fmt.Errorf("%w: %s has %d running or waiting already, and may have seven eighths of those that others leave", engine.ErrOverloaded, who, f.each[who])
	}
	f.taken++
	f.each[who]++
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.taken--
		if f.each[who]--; f.each[who] == 0 {
			delete(f.each, who)
		}
	}, nil
}

// counts is how many requests have a place, and how many prompts wait for their turn.
func (f *fairness) counts() (requests, waiting int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.taken, f.behind
}

// wait counts prompts that wait for their turn; a negative number takes them out again.
func (f *fairness) wait(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.behind += n
	f.waiting.Set(float64(f.behind))
}

// request counts a request of a client, until end. What it may cost is said later. The error is an *admission.RefusedError.
func (f *fairness) request(k *apikeys.Key) (*admission.Request, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.limits.Arrive(time.Now(), k.Name, k.Limits, 1)
}

// estimate says how many tokens a request may cost. After an error, an *admission.RefusedError, it no longer counts.
func (f *fairness) estimate(r *admission.Request, tokens int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.limits.Estimate(time.Now(), r, tokens)
}

// end is told how many tokens a request cost. Nil is the request of a client that has no limits.
func (f *fairness) end(r *admission.Request, used int) {
	if r == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.limits.End(time.Now(), r, used)
}

// turn waits until a prompt of a client may go to the engine, where it is until done, which is told how many tokens it cost.
func (f *fairness) turn(ctx context.Context, k *apikeys.Key, tokens int) (done func(used int), err error) {
	f.mu.Lock()
	r, err := f.turns.Arrive(time.Now(), k.Name, admission.Limits{}, tokens)
	f.mu.Unlock()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", engine.ErrOverloaded, err)
	}
	done = func(used int) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.turns.End(time.Now(), r, used)
	}
	select {
	case <-r.Decided():
	case <-ctx.Done():
	}
	switch {
	case ctx.Err() == nil && r.Refused() != nil: // for the sake of another client
		return nil, fmt.Errorf("%w: %w", engine.ErrOverloaded, r.Refused())
	case ctx.Err() == nil:
		return done, nil
	case cutOff(ctx):
		err = errDraining()
	default:
		err = errLeft
	}
	done(0)
	return nil, err
}

// cost estimates how many tokens a prompt and its answer cost. A cache query computes none.
func (x *exchange) cost(j *job) int {
	if x.params.query {
		return 0
	}
	answer := j.request.MaxTokens
	if x.params.maxTokens == 0 {
		answer = min(answer, admission.AssumedTokens)
	}
	return len(j.prompt) + answer
}

// admit keeps a client to its limits, before its request costs anything. The request counts until s.fair.end; nil: there are no keys.
func (s *Server) admit(w http.ResponseWriter, k *apikeys.Key) (*admission.Request, error) {
	if k == nil {
		return nil, nil
	}
	r, err := s.fair.request(k)
	if err != nil {
		return nil, limited(w, k, err)
	}
	return r, nil
}

// estimate keeps the client of an admitted request to its tokens.
func (s *Server) estimate(w http.ResponseWriter, x *exchange, r *admission.Request) error {
	if r == nil {
		return nil
	}
	tokens := 0
	for i := range x.jobs {
		tokens += x.cost(&x.jobs[i])
	}
	return limited(w, x.key, s.fair.estimate(r, tokens))
}

// limited is the answer to a request that is beyond the limits of its client.
func limited(w http.ResponseWriter, k *apikeys.Key, err error) error {
	refusal, refused := errors.AsType[*admission.RefusedError](err)
	if !refused {
		return err
	}
	w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(refusal.After.Seconds()))))
	var message string
	switch refusal.Reason {
	case admission.RequestRate:
		message = fmt.Sprintf("%s may send %d requests a minute (requests_per_minute)", k.Name, k.Limits.RequestsPerMinute)
	case admission.TokenRate:
		message = fmt.Sprintf("%s may use %d tokens a minute (tokens_per_minute)", k.Name, k.Limits.TokensPerMinute)
	default:
		message = fmt.Sprintf("%s may have %d requests running (max_in_flight)", k.Name, k.Limits.InFlight)
	}
	return &Error{http.StatusTooManyRequests, "rate_limit_error", "", "rate_limit_exceeded", message}
}

// used is how many tokens a request cost that ended with err. What the server could not answer costs nothing. A client that left
// pays for what the engine has generated by then, taken or not, else it would leave just before the end.
func (a *writer) used(err error) int {
	switch {
	case a.x.params.query:
		return 0
	case a.open == 0:
		return a.total.Prompt + a.total.Generated
	case err != nil && !errors.Is(err, errLeft):
		return 0
	}
	tokens := int(a.x.generated.Load())
	for i := range a.jobs {
		tokens += len(a.jobs[i].prompt)
	}
	return tokens
}

// takesTurns reports whether prompts wait here for a place in the engine.
func (x *exchange) takesTurns() bool { return x.key != nil && !x.key.Router && !x.params.query }

// submitted is a job that the engine has.
type submitted struct {
	results <-chan engine.Output
	cancel  context.CancelCauseFunc
}

// submit gives a job to the engine when it is its turn, and the turn to another one when the engine has ended it.
func (s *Server) submit(ctx context.Context, x *exchange, j *job) (*submitted, error) {
	done := func(int) {}
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
		done(0)
		return nil, err
	}
	if x.key != nil {
		results = x.relay(results, len(j.prompt), done)
	}
	return &submitted{results, cancel}, nil
}

// relay passes on what the engine says about a prompt, and calls done when that was all, though the client may not have read it: one
// that reads slowly keeps no turn. What is not read yet is taken back and sent again with the news, as in the engine. used is how many
// tokens the prompt has; done is told what it cost with its answer.
func (x *exchange) relay(results <-chan engine.Output, used int, done func(used int)) <-chan engine.Output {
	out := make(chan engine.Output, 1)
	go func() {
		defer close(out)
		defer func() { done(used) }()
		for o := range results {
			used += len(o.Tokens)
			x.generated.Add(int64(len(o.Tokens)))
			select {
			case unread := <-out:
				o.Tokens = append(unread.Tokens, o.Tokens...)
			default:
			}
			out <- o
		}
	}()
	return out
}
