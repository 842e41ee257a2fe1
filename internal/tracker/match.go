package tracker

import (
	"errors"
	"math"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
)

// match is what is known of the connector's offer to one request. The engine may ask as often as it
// likes; the plugin is asked once, and again when its answer got old or was Later.
type match struct {
	query   connector.Query // the last one
	asked   connector.Query // the one that ask carries
	ask     CallID          // on its way; 0: none
	open    bool            // an answer is wanted and not known yet
	known   bool
	from    int    // the tokens that the engine had: of those before, the answer says nothing
	end     int    // tokens from 0 that can be had, if known; the best so far, if open
	groups  uint32 // as the connector said
	bare    bool   // end and groups are the answer to a question without the ticket, see askBare
	at      time.Time
	renewed time.Time // when ask was sent, if an answer is known
	told    bool      // the engine was told Later
	engine  bool      // the engine has asked; else all questions since the last answer came ahead
	until   time.Time // when Later ends; zero: not begun
	spent   bool      // Later has ended once, it will not begin again
	unsure  bool      // known, but not from the connector: its answer was late or an error
	wait    time.Duration
	retryAt time.Time // zero: none
}

// Query brings the engine's question; its Ticket and Reshaped are for the Tracker to set. wait says whether an
// answer may come at any moment, so that Match is better called a little later. The caller keeps q.Keys.
func (b *Tracker) Query(now time.Time, q connector.Query) (wait bool, actions []Action) {
	m := b.begin(now, q.Request)
	foretold := !m.engine // if it came already, it came ahead, and nobody has waited for its answer
	m.engine = true
	wait, actions = b.question(now, q)
	return wait || foretold && m.open && m.ask != 0, actions
}

// Ahead brings a question that the engine will probably ask. It is Query, except that it spends none of the time that an
// answer may take: should that end before the engine asks, the question counts as never asked.
func (b *Tracker) Ahead(now time.Time, q connector.Query) (wait bool, actions []Action) {
	m := &b.request(q.Request).match
	m.engine = m.engine && m.open // else the engine has its answer, and does not wait for another
	b.begin(now, q.Request)
	return b.question(now, q)
}

// begin begins the time that an answer may take, if the engine does not wait for it already.
func (b *Tracker) begin(now time.Time, id connector.RequestID) *match {
	m := &b.request(id).match
	if m.engine {
		return m
	}
	if m.until = (time.Time{}); m.open {
		b.beginLater(now, m)
	}
	return m
}

func (b *Tracker) question(now time.Time, q connector.Query) (wait bool, actions []Action) {
	r := b.request(q.Request)
	r.queried = true
	if len(r.keys) != len(q.Keys) {
		r.keys = slices.Clone(q.Keys)
	}
	q.Keys, q.Ticket, q.Reshaped = r.keys, r.plugin, 0
	if r.source != nil {
		q.Reshaped = min(r.source.Tokens, q.Tokens)
	}
	m := &r.match
	m.query = q
	switch {
	case b.hopeless(r), m.open, m.known && m.spent:
		return false, b.take()
	case q.Computed < m.from: // the engine has less by now
	case m.known && now.Sub(m.at) < b.cfg.Fresh:
		return false, b.take()
	case m.known && b.renew(now, r):
		return false, b.take()
	}
	*m = match{query: q, asked: m.asked, ask: m.ask, open: true, spent: m.spent, engine: m.engine}
	b.askAgain(now, r)
	return m.ask != 0, b.take()
}

// renew asks again for an answer that is too old, and says whether the old answer may be given meanwhile: not for longer
// than a fresh one may be. A request that was told Later would be passed over by its engine, although
// nothing has changed most of the time.
func (b *Tracker) renew(now time.Time, r *request) bool {
	m := &r.match
	if m.ask != 0 {
		return now.Sub(m.renewed) < b.cfg.Fresh
	}
	if b.state != up {
		return false
	}
	m.renewed = now
	b.ask(r, m.query)
	return true
}

// Sure reports whether the answer of Match is the connector's. It is not if the connector was late or failed, or if
// nobody is there to ask.
func (b *Tracker) Sure(id connector.RequestID) bool {
	r := b.requests[id]
	switch {
	case r == nil || b.closed || b.state == broken && !b.alone(r.match.query.Ticket):
		return false
	case b.hopeless(r):
		return true
	}
	return r.match.known && !r.match.unsure
}

// hopeless says that the answer is a miss without asking.
func (b *Tracker) hopeless(r *request) bool {
	q := &r.match.query
	room := b.limit(q) > q.Computed
	nobody := b.state == broken && !b.alone(q.Ticket)
	return r.denied || b.closed || nobody || !b.cfg.Role.Loads() || !room || len(q.Keys) == 0 && q.Ticket == nil
}

// unit is the number of tokens in which external and local parts may meet.
func (b *Tracker) unit() int {
	n := 1
	for _, g := range b.cfg.Groups {
		n = n / gcd(n, g.BlockTokens) * g.BlockTokens
	}
	return n
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// limit is how many leading tokens may come from elsewhere: at least one is left to compute, and a
// load ends with a full block. What a Holder keeps may end anywhere; there the engine leaves one.
func (b *Tracker) limit(q *connector.Query) int {
	if b.held(q) {
		return q.Tokens
	}
	n := max(q.Tokens-1, 0)
	return n - n%b.unit()
}

// undamaged is how many leading tokens are not known to be damaged where they are stored. Whoever asks
// computes the rest, and the save of that mends it; an engine whose failure policy is fail would
// otherwise fail at every request that begins so. An engine that only loads cannot know when another
// has mended them, so it tries again (Config.Quarantine).
func (b *Tracker) undamaged(keys []connector.BlockKey) int {
	if i := b.corrupt.first(keys); i >= 0 {
		return i * b.cfg.Groups[0].BlockTokens
	}
	return math.MaxInt
}

// held says that a query is about what a Holder keeps.
func (b *Tracker) held(q *connector.Query) bool {
	return q.Ticket != nil && b.isHolder()
}

// Match answers the last Query of a request. It waits for nothing.
func (b *Tracker) Match(now time.Time, id connector.RequestID) connector.Match {
	r := b.requests[id]
	if r == nil || b.hopeless(r) {
		return connector.Match{}
	}
	m := &r.match
	if m.open {
		m.told = true
		b.beginLater(now, m)
		return connector.Match{Later: true}
	}
	q := m.query
	if m.bare {
		q = bare(q)
	}
	end := min(m.end, b.limit(&q))
	if !b.held(&q) {
		if b.cfg.Quarantine {
			end = min(end, b.undamaged(q.Keys))
		}
		end -= end % b.unit()
	}
	tokens := end - q.Computed
	if !m.known || q.Computed < m.from || tokens <= 0 || r.turn && tokens < b.cfg.Threshold {
		return connector.Match{}
	}
	r.bare = m.bare
	return connector.Match{Tokens: tokens, Groups: m.groups, Async: true}
}

func (b *Tracker) beginLater(now time.Time, m *match) {
	if m.until.IsZero() {
		m.until = now.Add(b.cfg.Later)
		b.wakes.at(m.until)
	}
}

// askAgain asks the plugin if an answer is wanted, none is on its way and one is up. If none is up, the host is asked.
func (b *Tracker) askAgain(now time.Time, r *request) {
	m := &r.match
	if !m.open || m.ask != 0 {
		return
	}
	b.beginLater(now, m)
	if b.state != up && !b.alone(m.query.Ticket) {
		return
	}
	b.ask(r, m.query)
}

// askBare asks without a ticket of another shape, by which there is nothing at the moment: what comes with it comes from
// its producer alone, and a store may have the blocks under the keys of ours. The next question is by the ticket
// again, since a composite also says that there is nothing while the child that could use the ticket is silent.
func (b *Tracker) askBare(now time.Time, r *request) {
	m := &r.match
	if m.open || !m.bare { // else the old answer, which is without the ticket too, may be given meanwhile
		if !m.open {
			m.until = time.Time{}
		}
		m.open, m.known, m.end, m.groups = true, false, 0, 0
		b.beginLater(now, m)
	}
	b.ask(r, bare(m.query))
}

// bare is a question without its ticket.
func bare(q connector.Query) connector.Query {
	q.Ticket, q.Reshaped = nil, 0
	return q
}

// ask sends a question of a request.
func (b *Tracker) ask(r *request, q connector.Query) {
	m := &r.match
	m.ask, m.asked, m.retryAt = CallID(b.id()), q, time.Time{}
	b.asks[m.ask] = r
	b.emit(Ask{ID: m.ask, Gen: b.taking(), Query: m.asked, Ahead: !m.engine})
}

// Matched brings the answer to an Ask. An error is a miss, ErrBusy is Later. A host whose plugin went
// away before it answered says Down instead.
func (b *Tracker) Matched(now time.Time, id CallID, answer connector.Match, err error) []Action {
	r := b.asks[id]
	if r == nil {
		b.counters.Unknown++
		return nil
	}
	delete(b.asks, id)
	m := &r.match
	m.ask = 0
	if err == nil && m.outdated() {
		b.askAgain(now, r)
		return b.take()
	}
	over := m.open && !now.Before(m.until)
	if err == nil && !b.sound(&m.asked, answer) {
		b.counters.Violations++
		err = errViolation
	}
	if err == nil && m.nothing(answer) {
		b.askBare(now, r)
		return b.take()
	}
	if !m.open { // the old answer ends here
		m.open, m.known, m.end, m.groups = true, false, 0, 0
	}
	if err != nil { // when Later has ended it does not matter which: the match is undecided, as Tick would say
		answer = connector.Match{Later: over || errors.Is(err, connector.ErrBusy)}
	}
	if m.unsure = err != nil; !m.unsure {
		m.hear(answer)
	}
	if answer.Later || m.end < min(r.need, b.limit(&m.query)) {
		m.wait = min(max(2*m.wait, b.cfg.BackoffMin), b.cfg.BackoffMax)
		m.retryAt = now.Add(m.wait)
		b.wakes.at(m.retryAt)
		b.tickMatch(now, r)
		return b.take()
	}
	b.settleMatch(now, r)
	return b.take()
}

// outdated says that the engine has less by now than when it asked: an answer says nothing of the blocks between. If there is
// an older one, that is as good as before.
func (m *match) outdated() bool { return m.query.Computed < m.asked.Computed }

// nothing says that there is nothing by the ticket of another shape with which the connector was asked.
func (m *match) nothing(answer connector.Match) bool {
	return !answer.Later && answer.Tokens == 0 && m.asked.Reshaped > 0 && len(m.asked.Keys) > 0
}

// hear notes an answer.
func (m *match) hear(answer connector.Match) {
	end := m.asked.Computed + answer.Tokens
	if answer.Later && end <= m.end {
		return
	}
	if end > m.end {
		m.wait = 0 // what is awaited is on its way: look again soon
	}
	m.from, m.end, m.groups, m.bare = m.asked.Computed, end, answer.Groups, m.asked.Ticket == nil
}

// sound checks an answer against its query.
func (b *Tracker) sound(q *connector.Query, m connector.Match) bool {
	all := uint64(1)<<len(b.cfg.Groups) - 1
	most := q.Tokens
	if q.Reshaped > 0 {
		most = max(q.Reshaped, q.Computed)
	}
	return m.Tokens >= 0 && m.Tokens <= most-q.Computed && uint64(m.Groups)&^all == 0
}

func (b *Tracker) settleMatch(now time.Time, r *request) {
	m := &r.match
	told := m.told
	m.open, m.known, m.told, m.at, m.retryAt = false, true, false, now, time.Time{}
	if told {
		b.emit(Tell{Event{Kind: Answered, Request: r.id}})
	}
}

func (b *Tracker) tickMatch(now time.Time, r *request) {
	m := &r.match
	switch {
	case !m.open:
	case !m.until.IsZero() && !now.Before(m.until) && !m.engine:
		b.forgetMatch(r)
	case !m.until.IsZero() && !now.Before(m.until):
		m.spent, m.unsure = true, true
		if b.state == up {
			b.counters.Undecided++
		}
		b.cancelAsk(m)
		b.settleMatch(now, r)
	case !m.retryAt.IsZero() && !now.Before(m.retryAt):
		b.askAgain(now, r)
	}
}

// giveUpMatch makes an open question a miss.
func (b *Tracker) giveUpMatch(r *request) {
	m := &r.match
	b.cancelAsk(m)
	if !m.open {
		return
	}
	m.end, m.unsure = 0, true
	b.settleMatch(m.at, r)
}

func (b *Tracker) cancelAsk(m *match) {
	if m.ask != 0 {
		delete(b.asks, m.ask)
		b.emit(CancelCall{ID: m.ask})
		m.ask = 0
	}
}

// forgetMatch drops what is known of a request's offer: its blocks or the store have changed. An
// engine that waits for an answer is told to ask again.
func (b *Tracker) forgetMatch(r *request) {
	b.cancelAsk(&r.match)
	if r.match.told {
		b.emit(Tell{Event{Kind: Answered, Request: r.id}})
	}
	r.match = match{}
}
