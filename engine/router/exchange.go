package router

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"
)

// tied is the context of one upstream request: it ends with the client's, with the instance's life, or when
// the instance keeps silent for too long, and then has that as its cause.
type tied struct {
	ctx   context.Context //nolint:containedctx // of one request, and the reason for this type
	end   context.CancelCauseFunc
	leave func() bool // unties it from the client
	stop  func() bool // and from the instance's life
	timer *time.Timer
}

func tie(client, life context.Context) *tied {
	ctx, end := context.WithCancelCause(context.WithoutCancel(client))
	with := func(other context.Context) func() bool {
		return context.AfterFunc(other, func() { end(context.Cause(other)) })
	}
	return &tied{ctx: ctx, end: end, leave: with(client), stop: with(life)}
}

// await bounds the instance's silence from now on.
func (t *tied) await(limit time.Duration) {
	t.rest()
	t.timer = time.AfterFunc(limit, func() { t.end(fmt.Errorf("%w for %v", errSlow, limit)) })
}

// rest ends the bound: it is somebody else's turn.
func (t *tied) rest() {
	if t.timer != nil {
		t.timer.Stop()
	}
}

// why is the cause of an error if the error is only that the context ended for an instance's silence.
func (t *tied) why(err error) error {
	if cause := context.Cause(t.ctx); err != nil && errors.Is(cause, errSlow) {
		return cause
	}
	return err
}

func (t *tied) release() {
	t.rest()
	t.leave()
	t.stop()
	t.end(nil)
}

// exchange is the answer of a decode instance on its way to the client.
type exchange struct {
	*call
	tied   *tied
	d      target
	resp   *http.Response
	served outcome // if all goes well
	begun  bool    // the client has seen something of it
	held   []byte  // of a stream, before it has begun
	ending bool    // this is all of it: only the end of the body may follow
}

// maxEnding is how long an instance may take to end the body of a stream after lastEvent: until then it holds a slot.
const maxEnding = time.Second

// read takes the next piece. From the second one on the instance has IdleTimeout for each, and maxEnding for all that follow
// lastEvent.
func (x *exchange) read(buffer []byte) (int, error) {
	if (x.begun || len(x.held) > 0) && !x.ending {
		x.tied.await(x.router.config.IdleTimeout)
	}
	n, err := x.resp.Body.Read(buffer)
	if !x.ending && (n > 0 || err != nil) {
		x.tied.rest()
	}
	return n, err
}

// end begins the time that is left for the end of the body. Clients leave here; the instance counts the request until the
// body has ended.
func (x *exchange) end() {
	if !x.ending {
		x.ending = true
		x.tied.leave()
		x.tied.await(x.router.ending)
	}
}

// begin passes the head on. From here on the request cannot go elsewhere.
func (x *exchange) begin() {
	x.begun = true
	x.router.pool.released(x.d)
	copyHeader(x.w.Header(), x.resp.Header)
	x.withdrawRoute(x.resp.StatusCode)
	x.w.WriteHeader(x.resp.StatusCode)
	x.router.metrics.ttft.Observe(time.Since(x.started).Seconds())
}

// pass gives the client a piece and reports whether it took it.
func (x *exchange) pass(piece []byte) bool {
	x.cost.write(piece)
	x.awaitClient(x.router.config.WriteTimeout)
	_, err := x.w.Write(piece)
	if err == nil {
		err = http.NewResponseController(x.w).Flush()
	}
	return err == nil
}

// whole passes on an answer that is not a stream. At first it holds up to maxHeld bytes, so that most requests
// can still be retried when the connection breaks in the middle of the answer.
func (x *exchange) whole() attempt {
	held, err := io.ReadAll(io.LimitReader(x.resp.Body, maxHeld+1))
	x.tied.rest()
	switch {
	case err != nil:
		x.blame(x.tied.ctx, x.d, x.tied.why(err))
		return attempt{}
	case len(held) > maxHeld:
		return x.rest(held)
	}
	x.router.pool.worked(x.d)
	x.cost.write(held)
	if x.resp.StatusCode == http.StatusOK && x.router.pool.usesPrompts() {
		x.router.pool.answered(x.d, held, false)
	}
	if x.resp.StatusCode == http.StatusOK {
		held = x.keepTurn(x.d, held)
	}
	done := x.reply(&answer{status: x.resp.StatusCode, header: x.resp.Header, body: held})
	if done == plain {
		done = x.served
	}
	return attempt{done: done}
}

// rest passes on an answer that is too long to be held.
func (x *exchange) rest(held []byte) attempt {
	if n := x.resp.ContentLength; n >= 0 {
		x.w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
	}
	x.begin()
	if x.resp.StatusCode == http.StatusOK {
		x.router.pool.answered(x.d, nil, false)
	}
	buffer := make([]byte, 32<<10)
	for piece := held; ; {
		if !x.pass(piece) {
			return attempt{done: aborted}
		}
		n, err := x.read(buffer)
		piece = buffer[:n]
		switch {
		case err == nil:
		case errors.Is(err, io.EOF) && n > 0 && !x.pass(piece):
			return attempt{done: aborted}
		default:
			return x.over(err, x.sever)
		}
	}
}

// over ends an answer of which the client has seen something: breakOff is for one that is not whole.
func (x *exchange) over(err error, breakOff func()) attempt {
	switch {
	case errors.Is(err, io.EOF):
		x.router.pool.worked(x.d)
		return attempt{done: x.served}
	case left(x.tied.ctx) && !cutOff(x.tied.ctx):
		return attempt{done: aborted}
	}
	x.blame(x.tied.ctx, x.d, x.tied.why(err))
	breakOff()
	return attempt{done: broken}
}

// sever keeps the client from taking an answer for a whole one: it never sees the end of it.
func (x *exchange) sever() {
	_ = http.NewResponseController(x.w).SetWriteDeadline(time.Unix(1, 0)) // a recorder in a test has none
	x.severed = true
}

// lastEvent ends every complete stream.
const lastEvent = "data: [DONE]\n\n"

// errUnfinished says that a stream ended without lastEvent.
var errUnfinished = errors.New("the stream ended without [DONE]")

// maxTail is how many bytes of a stream's end are looked at: an error event that is longer is not known as one.
const maxTail = 4 << 10

// ending says how a stream ended, by the last bytes of it: whether with [DONE], and the data of the last event apart from that.
func ending(tail []byte) (finished bool, last []byte) {
	before, last := cutLast(tail)
	if finished = string(last) == "[DONE]"; finished {
		_, last = cutLast(before)
	}
	return finished, last
}

// cutLast cuts off the last line that has something in it, and gives the data in it.
func cutLast(text []byte) (before, data []byte) {
	text = bytes.TrimSpace(text)
	begins := bytes.LastIndexByte(text, '\n') + 1
	return text[:begins], dataOf(text[begins:])
}

// stream passes events on as they come. The first events decide: before the answer has begun the request can still
// go elsewhere, after that a broken stream can only be ended with an error event.
func (x *exchange) stream() attempt {
	buffer := make([]byte, 32<<10)
	var tail []byte // the end of what was passed on
	events := filter{change: func(event []byte) []byte { return x.keepTurn(x.d, event) }, off: len(x.marks) == 0}
	for {
		n, err := x.read(buffer)
		piece, failed := x.open(buffer[:n])
		if failed != nil {
			x.costly = true // it may have worked on the request
			x.blame(x.tied.ctx, x.d, failed)
			return attempt{}
		}
		tail = x.look(tail, piece) // before the client sees it, and leaves
		if len(piece) > 0 && !x.pass(events.write(piece)) {
			return attempt{done: aborted}
		}
		switch {
		case err == nil:
		case x.ending:
			return x.ended(io.EOF, tail)
		case !x.begun:
			x.blame(x.tied.ctx, x.d, fmt.Errorf("stream ended before its first byte: %w", x.tied.why(err)))
			return attempt{}
		default:
			if errors.Is(err, io.EOF) {
				x.pass(events.changed()) // a client that left needs no answer
			}
			return x.ended(err, tail)
		}
	}
}

// look adds a piece to the end of what was passed on. What follows lastEvent does not count.
func (x *exchange) look(tail, piece []byte) []byte {
	if x.ending {
		return tail
	}
	tail = append(tail, piece[max(0, len(piece)-maxTail):]...)
	tail = tail[max(0, len(tail)-maxTail):]
	from := max(0, len(tail)-len(piece)-len(lastEvent))
	if i := bytes.Index(tail[from:], []byte(lastEvent)); i >= 0 {
		x.end()
		return tail[:from+i+len(lastEvent)]
	}
	return tail
}

// ended is the end of a stream. One that breaks off or ends early is broken, and so is one whose instance says so itself by an
// error event, also if [DONE] follows: then the client gets no second one.
func (x *exchange) ended(err error, tail []byte) attempt {
	finished, last := ending(tail)
	breakOff := x.cut
	if errors.Is(err, io.EOF) && x.resp.StatusCode == http.StatusOK {
		switch failed := isError(last); {
		case failed && (!finished || !isRefusal(last)):
			err, breakOff = errFailed, func() {}
		case !finished:
			err = errUnfinished
		}
	}
	return x.over(err, breakOff)
}

// shutDown is what clients are told whose answers take longer than the router has.
const shutDown = "the router is shutting down, and the answer was not complete in time"

// cut ends a stream that cannot go on. No [DONE] follows: a client that overlooks the event still
// sees a stream cut short. The empty line ends an event that may have been cut in the middle.
func (x *exchange) cut() {
	x.awaitClient(x.router.config.WriteTimeout)
	code, message := "upstream_error", "the decode instance failed in the middle of the answer"
	switch cause := context.Cause(x.tied.ctx); {
	case cutOff(x.tied.ctx):
		code, message = "draining", shutDown
	case errors.Is(cause, errSlow):
		code, message = "upstream_timeout", "the decode instance kept silent in the middle of the answer"
	}
	_, _ = fmt.Fprintf(x.w, "\n\ndata: %s\n\n", encodeError("server_error", code, message)) // a client that left needs no answer
	_ = http.NewResponseController(x.w).Flush()                                             // the instance may not be gone yet
}
