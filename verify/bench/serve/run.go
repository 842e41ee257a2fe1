package serve

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// Sender sends one request and reads its answer.
type Sender interface {
	// Send calls piece whenever some of the answer's tokens have arrived. The error is a *RequestError, or is counted as "other".
	Send(ctx context.Context, r *Request, piece func()) (Answer, error)
}

// Answer is what a server tells about one request.
type Answer struct {
	Tokens    []int32 // nil if it does not tell them
	Prompt    int     // tokens of the prompt, by its own count
	Completed int     // tokens of the answer, by its own count
}

// RequestError is why a request was not answered as it should have been.
type RequestError struct {
	Kind string // connect, status 429, error event, cut, timeout, usage, short, tokens, not sent, interrupted, other
	Err  error
}

// Error implements error.
func (e *RequestError) Error() string { return e.Kind + ": " + e.Err.Error() }

// Unwrap gives the cause.
func (e *RequestError) Unwrap() error { return e.Err }

// Outcome is how one request went, as the client saw it. Times are from the beginning of the run.
type Outcome struct {
	At     time.Duration   // when it was to leave
	Aside  bool            // it is load, and is not in the numbers
	Later  bool            // it is not the first turn of its conversation
	Sent   time.Duration   // when it left
	Pieces int             // how often tokens arrived
	First  time.Duration   // when the first of them did
	Gaps   []time.Duration // between the arrivals
	End    time.Duration   // when its answer had ended
	Answer Answer
	Kind   string // of its failure; empty: none
	Err    error  `json:"-"`
}

// lateAfter is how much later than planned a request may leave before it counts as late.
const lateAfter = 10 * time.Millisecond

// Late reports that the load generator itself was behind. What it measures is from the planned time on, late or not.
func (o *Outcome) Late() bool { return o.Sent-o.At > lateAfter }

// Progress is how far a run is.
type Progress struct{ Planned, Sent, Ended, Failed int }

// RunOptions say how a schedule is played.
type RunOptions struct {
	Timeout time.Duration // for one request; 0: 10 minutes
	Every   time.Duration // between two calls of Report; 0: 2 s
	Report  func(Progress)
}

var errInterrupted = errors.New("the run was interrupted")

// Run plays a schedule: each request leaves at its time, whether those before it have been answered or not. The outcomes are in
// the order of the schedule and there is one for every request, also for those that failed.
func Run(ctx context.Context, to Sender, list []Request, o RunOptions) []Outcome {
	if o.Timeout == 0 {
		o.Timeout = 10 * time.Minute
	}
	if o.Every == 0 {
		o.Every = 2 * time.Second
	}
	r := &run{to: to, timeout: o.Timeout, start: time.Now(), planned: len(list)}
	outcomes := make([]Outcome, len(list))
	over := make(chan struct{})
	var reporter, requests sync.WaitGroup
	if o.Report != nil {
		reporter.Go(func() { r.report(o, over) })
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i := range list {
		outcomes[i].At, outcomes[i].Aside, outcomes[i].Later = list[i].At, list[i].Aside, list[i].After >= 0
		timer.Reset(time.Until(r.start.Add(list[i].At)))
		select {
		case <-timer.C:
			requests.Go(func() { r.one(ctx, &list[i], &outcomes[i]) })
		case <-ctx.Done():
			outcomes[i].Kind, outcomes[i].Err = "not sent", errInterrupted
			r.failed.Add(1)
		}
	}
	requests.Wait()
	close(over)
	reporter.Wait()
	return outcomes
}

type run struct {
	to                  Sender
	timeout             time.Duration
	start               time.Time
	planned             int
	sent, ended, failed atomic.Int64
}

func (r *run) report(o RunOptions, over <-chan struct{}) {
	tick := time.NewTicker(o.Every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			o.Report(r.progress())
		case <-over:
			o.Report(r.progress())
			return
		}
	}
}

func (r *run) progress() Progress {
	return Progress{Planned: r.planned, Sent: int(r.sent.Load()), Ended: int(r.ended.Load()), Failed: int(r.failed.Load())}
}

func (r *run) one(ctx context.Context, request *Request, o *Outcome) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	o.Sent = time.Since(r.start)
	r.sent.Add(1)
	var last time.Duration
	var err error
	o.Answer, err = r.to.Send(ctx, request, func() {
		now := time.Since(r.start)
		if o.Pieces == 0 {
			o.First = now
		} else {
			o.Gaps = append(o.Gaps, now-last)
		}
		o.Pieces++
		last = now
	})
	o.End = time.Since(r.start)
	r.ended.Add(1)
	if err == nil {
		return
	}
	r.failed.Add(1)
	o.Kind, o.Err = "other", err
	if f, ok := errors.AsType[*RequestError](err); ok {
		o.Kind = f.Kind
	}
	switch ended := ctx.Err(); {
	case errors.Is(ended, context.DeadlineExceeded):
		o.Kind = "timeout"
	case ended != nil:
		o.Kind = "interrupted"
	}
}
