package router

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"mime"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/engine/router/admission"
	"github.com/kvport/kvport/engine/router/policy"
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
	size    int             // of its body, in bytes
	session string          // key of its session; empty: none
	client  string          // whose it is
	key     *apikeys.Key    // the client's; nil: the router has none
	explain bool            // the client asks why its instances are chosen, and may know
	request *policy.Request // what the choice depends on
	failed  map[int]bool    // instances of either role that this request does not try again
	picked  []int           // instances whose places the request keeps until it ends
	tokens  int             // of the prompt, if an instance has said so; 0: not known
	marks   []uint64        // of its conversation; nil where none is remembered
	from    int             // the place of the prefill instance that gave the ticket
	without string          // why no ticket was had though there are prefill instances; empty: none was needed
	severed bool            // the client gets nothing any more, not even the end of the answer
	fault   fault           // the worst of what happened on decode instances that gave no answer
	cost    consumption     // of the answer
	costly  bool            // an instance may have worked on the last attempt that failed
	waited  bool            // for decode instances that were full or busy
	busy    bool            // the last instance that was asked has said when to come back
	unheard *target         // a decode instance that has closed the connection without a word, not asked again yet
	again   bool            // it was
}

// answer is a whole answer of an instance.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// fault is why a decode instance gave no answer, the worse the greater.
type fault uint8

const (
	noFault fault = iota
	broke         // it failed or answered what makes no sense
	slow          // it kept silent for too long
)

// errSlow ends requests whose instance keeps silent.
var errSlow = errors.New("instance kept silent")

// run serves the request: a ticket from a prefill instance if there is one, then tokens from a
// decode instance. A ticket can be used once, so after an attempt that may have used it a new one is needed.
func (c *call) run(ctx context.Context) outcome {
	var params json.RawMessage
	var last *answer
	wanted := c.method == "" && !c.body.several()
	c.recall(wanted)
	c.request = c.prepare(ctx)
	first := true
	for attempts := 0; attempts < c.router.config.Attempts; first = false {
		if !first && !c.mayRetry(ctx, decode, attempts-1) {
			break
		}
		c.request.Alone = !wanted || c.keptNothing(params)
		at, ok := c.nextChoice(ctx, &params, first)
		if !ok {
			break
		}
		if !c.request.Alone && params == nil {
			params = c.prefill(ctx, &at)
		}
		result, used := c.decode(ctx, at.decode, params)
		switch {
		case result.done != "":
			return result.done
		case ctx.Err() != nil:
			return c.abandon(ctx)
		case result.refusal != nil:
			last = result.refusal
		}
		if !result.free {
			attempts++
		}
		if used {
			params, c.pair = nil, ""
		}
	}
	return c.giveUp(ctx, last)
}

// askAgain gives an instance that has closed the connection a second chance, if no other is left. One that has as many connections
// as it may closes one on which no request has come yet, and this request may just have been on its way there. The transport tries
// again only where a connection was used before.
func (c *call) askAgain() bool {
	if c.unheard == nil || c.again {
		return false
	}
	c.again = true
	delete(c.failed, c.unheard.index)
	return true
}

// closed reports whether an instance has closed the connection without a word.
func closed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// recall finds what is remembered of the conversation, for a request that needs a ticket.
func (c *call) recall(wanted bool) {
	if wanted && c.router.turns != nil {
		scope, prompt := c.body.prompt()
		c.marks = c.router.turns.marks(c.within(scope), prompt)
	}
}

// keptNothing reports whether the last attempt failed only since the decode instance was busy, and had no ticket because a prefill
// instance kept nothing of the prompt: it would keep nothing now either.
func (c *call) keptNothing(params json.RawMessage) bool {
	return params == nil && c.busy && c.without == noTicket
}

// giveUp answers when no instance did: with the last refusal if there was one.
func (c *call) giveUp(ctx context.Context, last *answer) outcome {
	c.cost.unserved = ctx.Err() == nil
	c.withdrawRoute(http.StatusBadGateway)
	switch {
	case ctx.Err() != nil:
		return c.abandon(ctx)
	case last != nil:
		return c.reply(last)
	}
	switch c.fault {
	case slow:
		refuse(c.w, http.StatusGatewayTimeout, "upstream_timeout", "no decode instance began to answer in time")
		return upstreamError
	case broke:
		refuse(c.w, http.StatusBadGateway, "upstream_error", "the decode instances that were tried failed before they answered")
		return upstreamError
	case noFault:
	}
	rest := c.router.pool.rest(decode, c.request.Client, nil)
	switch {
	case c.router.pool.full(decode, c.failed):
		return c.router.tellRefusal(c, &admission.RefusedError{Reason: admission.QueueTimeout, After: time.Second}, nil)
	case c.waited && rest > 0:
		return c.router.tellRefusal(c, &admission.RefusedError{Reason: admission.QueueTimeout, After: rest}, nil)
	}
	if rest > 0 {
		c.w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(rest.Seconds()))))
	}
	refuse(c.w, http.StatusServiceUnavailable, "no_decode_instance", "no decode instance is available, try again later")
	return unavailable
}

// abandon ends a request of which the client has seen nothing: if the client did not leave, the router
// is shutting down.
func (c *call) abandon(ctx context.Context) outcome {
	if !cutOff(ctx) {
		return aborted
	}
	c.awaitClient(c.router.config.WriteTimeout)
	refuse(c.w, http.StatusServiceUnavailable, "draining", shutDown)
	_ = http.NewResponseController(c.w).Flush() // a client that left needs no answer
	return unavailable
}

// reply passes an instance's whole answer on.
func (c *call) reply(a *answer) outcome {
	c.awaitClient(c.router.config.WriteTimeout)
	copyHeader(c.w.Header(), a.header)
	c.withdrawRoute(a.status)
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

// prefill asks the prefill instance of a choice, and others if it fails. No params: decode must serve alone.
func (c *call) prefill(ctx context.Context, at *route) (params json.RawMessage) {
	c.without = "" // whatever an attempt before this one went without
	defer func() {
		if params != nil {
			return
		}
		c.router.pool.unaided(at.decode)
		if at.prefill.leg != nil && c.without != noTicket { // all that were asked have failed
			at.prefill, at.without = target{}, c.without
			c.tell(ctx, at)
		}
	}()
	if at.prefill.leg == nil {
		c.goWithout(at.without)
		return nil
	}
	request := c.forPrefill(at.prefill)
	body := request.encode()
	p := at.prefill
	for retry := 0; ; retry++ {
		params, another := c.promptAt(ctx, p, at.decode, body)
		if !another || ctx.Err() != nil {
			return params
		}
		next, why, ok := c.router.pool.chooseFor(at.decode, c.request, c.failed)
		if !ok {
			c.goWithout(why)
			return nil
		}
		c.picked = append(c.picked, next.index)
		if !c.mayRetry(ctx, prefill, retry) {
			c.router.pool.released(next)
			c.router.pool.done(next)
			delete(c.failed, next.index)
			c.goWithout(noPrefill)
			return nil
		}
		p = next
		c.router.metrics.retries.WithLabelValues(prefill.String()).Inc()
		at.prefill, at.why = next, why
		c.tell(ctx, at)
		body = c.forPrefill(next).encode()
	}
}

// goWithout notes why the decode instance gets no ticket, unless prefill instances that were asked gave none.
func (c *call) goWithout(why string) {
	if c.without != noTicket {
		c.without = why
	}
}

// promptAt lets one prefill instance compute the prompt. It reports whether another one may do what this one did not.
func (c *call) promptAt(ctx context.Context, p, d target, body []byte) (params json.RawMessage, another bool) {
	defer c.router.pool.done(p)
	c.meet(p, d)
	c.begin(p)
	got, err := c.ask(ctx, p, body)
	switch {
	case errors.Is(err, errTooLong): // the request asks for it: another instance would say no less
		c.router.pool.worked(p)
		c.router.config.Log.Warn("prefill answer is not used", "id", c.id, "instance", p.url.String(), "err", err)
		c.without = noTicket
		return nil, false
	case err != nil:
		c.blame(ctx, p, err)
		return nil, true
	case got.status == http.StatusOK:
		c.router.pool.answered(p, got.body, true)
		return c.ticket(ctx, p, got), false
	case retryable(got.status):
		c.refused(p, got.status, got.header)
		return nil, true
	}
	c.without = noTicket
	return nil, c.turnedAway(p, got)
}

// ticket takes what a prefill instance kept out of its answer; nil if that is nothing.
func (c *call) ticket(ctx context.Context, p target, got *answer) json.RawMessage {
	c.from = p.index
	delete(c.failed, p.index) // good for another ticket, should this one be lost
	params, err := transferParams(got.body)
	if err != nil {
		c.blame(ctx, p, err)
	} else {
		c.router.pool.accepted(p)
	}
	if params == nil {
		c.without = noTicket
	}
	return params
}

// ask sends one prefill request and reads the whole answer.
func (c *call) ask(ctx context.Context, p target, body []byte) (*answer, error) {
	t := tie(ctx, p.life)
	defer t.release()
	t.await(c.router.config.PrefillTimeout)
	resp, err := c.send(t.ctx, p, body)
	if err != nil {
		return nil, t.why(err)
	}
	defer resp.Body.Close()
	if !retryable(resp.StatusCode) {
		c.router.pool.admitted(p)
	}
	got, err := whole(resp, maxPrefillAnswer)
	return got, t.why(err)
}

// attempt is the result of one try at a decode instance: done, or a reason to try the next.
type attempt struct {
	done    outcome // not empty: the client has its answer
	refusal *answer // what the instance said, if it said anything
	free    bool    // this attempt does not count: it refused the connection, which costs no time, and is not asked again; or it is busy
}

// decode tries one decode instance. used reports whether it may have used up the ticket.
func (c *call) decode(ctx context.Context, d target, params json.RawMessage) (result attempt, used bool) {
	var body []byte
	if c.method == "" {
		body = c.body.forDecode(c.wishes(d, params)).encode()
	}
	defer c.router.pool.released(d)
	defer c.router.pool.done(d)
	c.begin(d)
	t := tie(ctx, d.life)
	defer t.release()
	t.await(c.firstByte())
	ctx = t.ctx
	resp, err := c.send(ctx, d, body)
	if err != nil {
		c.blame(ctx, d, t.why(err))
		if closed(err) {
			c.unheard = &d
		}
		return attempt{free: unsent(err) && errors.Is(err, syscall.ECONNREFUSED)}, !unsent(err)
	}
	defer resp.Body.Close()
	if retryable(resp.StatusCode) {
		refusal, err := whole(resp, maxHeld)
		c.refused(d, resp.StatusCode, resp.Header)
		if err != nil || redirects(resp.StatusCode) { // where to is nobody's business
			refusal = nil
		}
		// 429 and 503 are said before a request reaches the engine.
		early := resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode == http.StatusServiceUnavailable
		return attempt{refusal: refusal, free: c.busy}, !early
	}
	c.router.pool.admitted(d)
	x := exchange{call: c, tied: t, d: d, resp: resp, served: c.served(d, resp, params != nil)}
	if kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); kind == "text/event-stream" {
		return x.stream(), true
	}
	return x.whole(), true
}

// firstByte is how long a decode instance may take for the first byte of its answer.
func (c *call) firstByte() time.Duration {
	if c.streams() {
		return c.router.config.FirstByteTimeout
	}
	return c.router.config.AnswerTimeout
}

// streams reports whether the client asks for a stream.
func (c *call) streams() bool { return string(c.body["stream"]) == "true" }

// served says how a request is counted if all goes well, and counts what became of its ticket.
func (c *call) served(d target, resp *http.Response, ticket bool) outcome {
	switch {
	case resp.StatusCode != http.StatusOK:
		return plain
	case ticket:
		return c.handedOver(d, resp.Header)
	}
	return c.notHandedOver()
}

// awaitClient bounds how long the client may take for the next piece of its answer; 0 is for ever.
func (c *call) awaitClient(limit time.Duration) {
	if c.severed {
		return
	}
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
	// An instance may close a connection that is idle just when a request is sent there. Without this, which is never sent,
	// the transport would not try a POST once more on another connection.
	req.Header["X-Idempotency-Key"] = nil
	if c.pair != "" {
		req.Header.Set("X-Request-Id", c.pair)
	}
	return c.router.client.Do(req)
}

// blame takes note of a failure, unless the client caused it by leaving.
func (c *call) blame(ctx context.Context, t target, err error) {
	if left(ctx) {
		c.router.pool.released(t)
		return
	}
	c.fail(t, err, false)
}

// refused takes note that an instance answered with a status that is no answer. One that says when to come back is busy: it
// has done nothing, and has not failed.
func (c *call) refused(t target, status int, h http.Header) {
	if limit := retryAfter(status, h, time.Now()); limit > 0 {
		c.router.pool.rests(t, limit, status == http.StatusTooManyRequests)
		c.router.pool.released(t)
		if t.role == decode && c.left() > 0 { // it may be asked again then; attempts at prefill instances have no other limit
			delete(c.failed, t.index)
		}
		c.router.config.Log.Debug("instance is busy", "id", c.id, "instance", t.url.String(), "role", t.role.String(), "status", status, "pause", limit.String())
		c.busy = true
		return
	}
	c.costly = true
	err := fmt.Errorf("status %d", status)
	if redirects(status) {
		err = fmt.Errorf("status %d: redirects are not followed", status)
	}
	c.fail(t, err, status == http.StatusTooManyRequests)
}

func (c *call) fail(t target, err error, overload bool) {
	silent := errors.Is(err, errSlow)
	c.costly = c.costly || silent
	switch {
	case t.role == prefill: // decode serves alone
	case silent:
		c.fault = slow
	case !unsent(err):
		c.fault = max(c.fault, broke)
	}
	c.router.pool.failed(t, overload)
	c.router.config.Log.Warn("instance failed a request", "id", c.id, "instance", t.url.String(), "role", t.role.String(), "err", err)
}

// left reports whether the client went away, as opposed to the instance.
func left(ctx context.Context) bool {
	cause := context.Cause(ctx)
	return cause != nil && !errors.Is(cause, errLost) && !errors.Is(cause, errSlow)
}

// cutOff reports whether the router gave a request up at shutdown, as opposed to its client.
func cutOff(ctx context.Context) bool { return errors.Is(context.Cause(ctx), http.ErrServerClosed) }

// retryable reports whether another instance may do better.
func retryable(status int) bool {
	return status >= http.StatusInternalServerError || status == http.StatusTooManyRequests || redirects(status)
}

// redirects reports whether a status sends the request elsewhere, which no instance has a say in.
func redirects(status int) bool { return status >= 300 && status < 400 }

// unsent reports whether a request certainly did not reach the instance.
func unsent(err error) bool {
	op, is := errors.AsType[*net.OpError](err)
	return is && op.Op == "dial"
}

// errTooLong says that an answer is longer than it may be.
var errTooLong = errors.New("answer is too long")

// whole reads an answer to its end, or fails with errTooLong if it has more than limit bytes.
func whole(resp *http.Response, limit int64) (*answer, error) {
	body, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(body)) > limit {
		return nil, fmt.Errorf("%w: over %d bytes", errTooLong, limit)
	}
	return &answer{status: resp.StatusCode, header: resp.Header, body: body}, nil
}

// copyHeader adds an instance's headers to the answer; the request id is the router's, and so is what became
// of the ticket.
func copyHeader(to, from http.Header) {
	for name, values := range forwarded(from) {
		if name != "X-Request-Id" && name != handoffHeader && name != routeHeader {
			to[name] = values
		}
	}
}

// fields is a request body of which only some fields are known; the others pass through unread.
type fields map[string]json.RawMessage

// remoteDecode asks a prefill instance to keep the KV for a consumer, in the words of vLLM's proxies.
const remoteDecode = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,` +
	`"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// parse reads a request body: one JSON object and nothing else.
func parse(body []byte) (fields, error) {
	var f fields
	if err := json.Unmarshal(body, &f); err != nil {
		return nil, fmt.Errorf("request body is not a JSON object: %w", err)
	}
	if f == nil {
		return nil, errors.New("request body is null, want a JSON object")
	}
	return f, nil
}

// forPrefill is the request as a prefill instance gets it: one token, not streamed, KV kept.
func (f fields) forPrefill() fields {
	p := maps.Clone(f)
	for _, name := range []string{"stream_options", "min_tokens", "return_token_ids", "max_completion_tokens"} {
		delete(p, name)
	}
	if _, ok := f["max_completion_tokens"]; ok {
		p["max_completion_tokens"] = json.RawMessage("1")
	}
	p["max_tokens"] = json.RawMessage("1")
	p["stream"] = json.RawMessage("false")
	p["kv_transfer_params"] = json.RawMessage(remoteDecode)
	return p
}

// forDecode is the request as a decode instance gets it, with what the prefill instance answered.
// Without params it is a plain request: what a client put there itself is dropped, since only a
// prefill instance can say where KV is.
func (f fields) forDecode(params json.RawMessage) fields {
	d := maps.Clone(f)
	delete(d, "kv_transfer_params")
	if params != nil {
		d["kv_transfer_params"] = params
	}
	return d
}

// several reports whether the request has more than one prompt. kv_transfer_params describe one.
func (f fields) several() bool {
	list := elements(f["prompt"], 2)
	return len(list) == 2 && isPrompt(list[0])
}

// encode is the request's body. Values are as they were read: encoding/json would read every byte of a prompt again.
func (f fields) encode() []byte {
	data := []byte{'{'}
	for i, name := range slices.Sorted(maps.Keys(f)) {
		if i > 0 {
			data = append(data, ',')
		}
		key, _ := json.Marshal(name) // a string cannot fail to encode
		data = append(append(append(data, key...), ':'), f[name]...)
	}
	return append(data, '}')
}

// transferParams takes kv_transfer_params out of a prefill instance's answer; nil if it kept nothing.
func transferParams(answer []byte) (json.RawMessage, error) {
	var a struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(answer, &a); err != nil {
		return nil, fmt.Errorf("prefill answer: %w", err)
	}
	if len(a.Params) == 0 || a.Params[0] != '{' {
		return nil, nil
	}
	return a.Params, nil
}

// forwarded are the headers of from that concern the other end: neither those of one hop, nor
// those that the transport sets itself.
func forwarded(from http.Header) http.Header {
	to := from.Clone()
	for _, list := range from.Values("Connection") {
		for name := range strings.SplitSeq(list, ",") {
			to.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range []string{
		"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Content-Length", "Accept-Encoding", "Expect",
		"Origin", "Sec-Fetch-Site", // the front has looked at them: to an instance the router is no web page
	} {
		to.Del(name)
	}
	return to
}

// apiError is an error as OpenAI's clients expect it.
type apiError struct {
	Error struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    string  `json:"code"`
	} `json:"error"`
}

func encodeError(kind, code, message string) []byte {
	var e apiError
	e.Error.Message, e.Error.Type, e.Error.Code = message, kind, code
	data, _ := json.Marshal(e) // strings cannot fail
	return data
}

// refuse answers with an error of the router's own.
func refuse(w http.ResponseWriter, status int, code, message string) {
	kind := "server_error"
	if status < http.StatusInternalServerError {
		kind = "invalid_request_error"
	}
	busy := status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests
	if busy && w.Header().Get("Retry-After") == "" {
		w.Header().Set("Retry-After", "1")
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(encodeError(kind, code, message), '\n')) // a client that left needs no answer
}
