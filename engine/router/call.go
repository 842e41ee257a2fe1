package router

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"time"
)

// call is one request on its way through the instances.
type call struct {
	router  *Router
	w       http.ResponseWriter
	method  string // empty: POST with body
	path    string
	id      string
	header  http.Header // for upstream requests
	pair    string      // their id, where it names both engines
	body    fields
	started time.Time
	failed  map[int]bool // instances of either role that this request does not try again
	marks   []uint64     // of its conversation; nil where none is remembered
}

// answer is a whole answer of an instance.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// run serves the request: a ticket from a prefill instance if there is one, then tokens from a
// decode instance. A ticket can be used once, so an attempt that may have used it wants a new one.
func (c *call) run(ctx context.Context) outcome {
	var params json.RawMessage
	var last *answer
	wanted := c.method == "" && !c.body.several()
	if wanted && c.router.turns != nil {
		c.marks = c.router.turns.marks(c.body.prompt())
	}
	for attempt := range c.router.config.Attempts {
		d, ok := c.router.pool.pick(decode, c.failed)
		if !ok {
			break
		}
		if attempt > 0 {
			c.router.metrics.retries.WithLabelValues(decode.String()).Inc()
		}
		if wanted && params == nil {
			var refusal *answer
			if params, refusal = c.prefill(ctx, d); refusal != nil {
				return c.reply(refusal)
			}
		}
		result, used := c.decode(ctx, d, params)
		switch {
		case result.done != "":
			return result.done
		case ctx.Err() != nil:
			return aborted
		case result.refusal != nil:
			last = result.refusal
		}
		if used {
			params, c.pair = nil, ""
		}
	}
	return c.giveUp(ctx, last)
}

// giveUp answers when no instance did: with the last refusal if there was one.
func (c *call) giveUp(ctx context.Context, last *answer) outcome {
	switch {
	case ctx.Err() != nil:
		return aborted
	case last != nil:
		return c.reply(last)
	}
	refuse(c.w, http.StatusServiceUnavailable, "no_decode_instance", "no decode instance is available, try again later")
	return unavailable
}

// reply passes an instance's whole answer on.
func (c *call) reply(a *answer) outcome {
	c.awaitClient(c.router.config.WriteTimeout)
	copyHeader(c.w.Header(), a.header)
	c.w.WriteHeader(a.status)
	_, _ = c.w.Write(a.body) // a client that left needs no answer
	c.router.metrics.ttft.Observe(time.Since(c.started).Seconds())
	switch {
	case a.status >= http.StatusInternalServerError:
		return upstreamError
	case a.status >= http.StatusBadRequest:
		return clientError
	}
	return plain
}

// prefill asks prefill instances in turn. No params and no refusal: decode must serve alone.
func (c *call) prefill(ctx context.Context, d target) (params json.RawMessage, refusal *answer) {
	request := c.body.forPrefill()
	if last := c.lastTurn(); last != nil {
		request["kv_transfer_params"] = last
	}
	body := request.encode()
	for first := true; ctx.Err() == nil; first = false {
		p, ok := c.router.pool.pick(prefill, c.failed)
		if !ok {
			return nil, nil
		}
		if !first {
			c.router.metrics.retries.WithLabelValues(prefill.String()).Inc()
		}
		c.meet(p, d)
		got, err := c.ask(ctx, p, body)
		switch {
		case err != nil:
			c.blame(ctx, p, err)
		case got.status == http.StatusOK:
			delete(c.failed, p.index) // good for another ticket, should this one be lost
			params, err = transferParams(got.body)
			if err != nil {
				c.blame(ctx, p, err)
			}
			return params, nil
		case retryable(got.status):
			c.blame(ctx, p, fmt.Errorf("status %d", got.status))
		default:
			return nil, got // decode would refuse it for the same reason
		}
	}
	return nil, nil
}

// ask sends one prefill request and reads the whole answer.
func (c *call) ask(ctx context.Context, p target, body []byte) (*answer, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.router.config.PrefillTimeout, errors.New("prefill timeout"))
	defer cancel()
	ctx, release := tie(ctx, p.life)
	defer release()
	resp, err := c.send(ctx, p, body)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return whole(resp)
}

// attempt is the result of one try at a decode instance: done, or a reason to try the next.
type attempt struct {
	done    outcome // not empty: the client has its answer
	refusal *answer // what the instance said, if it said anything
}

// decode tries one decode instance. used reports whether it may have used up the ticket.
func (c *call) decode(ctx context.Context, d target, params json.RawMessage) (result attempt, used bool) {
	var body []byte
	if c.method == "" {
		body = c.body.forDecode(c.wishes(params)).encode()
	}
	ctx, release := tie(ctx, d.life)
	defer release()
	resp, err := c.send(ctx, d, body)
	if err != nil {
		c.blame(ctx, d, err)
		return attempt{}, !unsent(err)
	}
	defer resp.Body.Close()
	if retryable(resp.StatusCode) {
		refusal, err := whole(resp)
		c.blame(ctx, d, fmt.Errorf("status %d", resp.StatusCode))
		if err != nil {
			refusal = nil
		}
		// 429 and 503 are said before a request reaches the engine.
		early := resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode == http.StatusServiceUnavailable
		return attempt{refusal: refusal}, !early
	}
	served := plain
	if params != nil {
		served = disaggregated
	}
	if kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); kind == "text/event-stream" {
		return c.stream(ctx, d, resp, served)
	}
	got, err := whole(resp)
	if err != nil {
		c.blame(ctx, d, err)
		return attempt{}, true
	}
	done := c.reply(got)
	if done == plain {
		done = served
		c.keepTurn(d, got.body)
	}
	return attempt{done: done}, true
}

// lastEvent ends every complete stream.
const lastEvent = "data: [DONE]\n\n"

// stream passes events on as they come. The first bytes decide: before them the request can still
// go elsewhere, after them a broken stream can only be ended with an error event.
func (c *call) stream(ctx context.Context, d target, resp *http.Response, served outcome) (attempt, bool) {
	control := http.NewResponseController(c.w)
	buffer := make([]byte, 32<<10)
	var tail []byte // the end of what was passed on
	events := scanner{found: func(event []byte) { c.keepTurn(d, event) }, off: len(c.marks) == 0}
	for begun := false; ; {
		n, err := resp.Body.Read(buffer)
		if n > 0 && !begun {
			begun = true
			copyHeader(c.w.Header(), resp.Header)
			c.w.WriteHeader(resp.StatusCode)
			c.router.metrics.ttft.Observe(time.Since(c.started).Seconds())
		}
		if n > 0 {
			c.awaitClient(c.router.config.WriteTimeout)
			_, werr := c.w.Write(buffer[:n])
			if werr == nil {
				werr = control.Flush()
			}
			if werr != nil {
				return attempt{done: aborted}, true
			}
			tail = append(tail, buffer[max(0, n-len(lastEvent)):n]...)
			tail = tail[max(0, len(tail)-len(lastEvent)):]
			events.write(buffer[:n])
		}
		switch {
		case err == nil:
		case string(tail) == lastEvent:
			return attempt{done: served}, true // clients leave here, and may be faster than the instance's EOF
		case !begun:
			c.blame(ctx, d, fmt.Errorf("stream ended before its first byte: %w", err))
			return attempt{}, true
		case err == io.EOF:
			return attempt{done: served}, true
		case left(ctx):
			return attempt{done: aborted}, true
		default:
			c.blame(ctx, d, err)
			c.cut()
			return attempt{done: broken}, true
		}
	}
}

// cut ends a stream whose instance failed. No [DONE] follows: a client that overlooks the event still
// sees a stream cut short. The empty line ends an event that may have been cut in the middle.
func (c *call) cut() {
	c.awaitClient(c.router.config.WriteTimeout)
	event := encodeError("server_error", "upstream_error", "the decode instance failed in the middle of the answer")
	_, _ = fmt.Fprintf(c.w, "\n\ndata: %s\n\n", event) // a client that left needs no answer
}

// awaitClient bounds how long the client may take for the next piece of its answer; 0 is for ever.
func (c *call) awaitClient(limit time.Duration) {
	var deadline time.Time
	if limit > 0 {
		deadline = time.Now().Add(limit)
	}
	_ = http.NewResponseController(c.w).SetWriteDeadline(deadline) // a recorder in a test has none
}

// send makes one upstream request.
func (c *call) send(ctx context.Context, t target, body []byte) (*http.Response, error) {
	method := http.MethodPost
	if c.method != "" {
		method = c.method
	}
	req, err := http.NewRequestWithContext(ctx, method, t.url.JoinPath(c.path).String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header = c.header.Clone()
	if c.pair != "" {
		req.Header.Set("X-Request-Id", c.pair)
	}
	return c.router.client.Do(req)
}

// blame takes note of a failure, unless the client caused it by leaving.
func (c *call) blame(ctx context.Context, t target, err error) {
	if left(ctx) {
		return
	}
	c.router.pool.failed(t)
	c.router.config.Log.Warn("instance failed a request", "id", c.id, "instance", t.url.String(), "role", t.role.String(), "err", err)
}

// left reports whether the client went away, as opposed to the instance.
func left(ctx context.Context) bool {
	return ctx.Err() != nil && !errors.Is(context.Cause(ctx), errLost)
}

// retryable reports whether another instance may do better.
func retryable(status int) bool {
	return status >= http.StatusInternalServerError || status == http.StatusTooManyRequests
}

// unsent reports whether a request certainly did not reach the instance.
func unsent(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// whole reads an answer to its end.
func whole(resp *http.Response) (*answer, error) {
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return nil, err
	}
	if len(body) > maxAnswer {
		return nil, fmt.Errorf("answer is over %d bytes", maxAnswer)
	}
	return &answer{status: resp.StatusCode, header: resp.Header, body: body}, nil
}

// copyHeader adds an instance's headers to the answer; the request id is the router's.
func copyHeader(to, from http.Header) {
	for name, values := range forwarded(from) {
		if name != "X-Request-Id" {
			to[name] = values
		}
	}
}

// tie makes a context that ends with ctx or with life, and then has life's cause.
func tie(ctx, life context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(life, func() { cancel(context.Cause(life)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}
