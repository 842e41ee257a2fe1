package engine

import (
	"fmt"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/sched"
	"github.com/kvport/kvport/host"
)

// Cached is the answer to a cache query: what a request with this prompt would get now instead of computing it. It is a
// hint, since blocks may be evicted before a request comes. The last token of a prompt is always computed, so a block
// that ends with the prompt is not counted.
type Cached struct {
	Scopes  []InScope // engine, node and shared, in this order
	NotHeld string    // why a query with Hold got no ticket; empty if it got one or did not ask
}

// InScope is what a request would get from one scope.
type InScope struct {
	Scope  connector.Scope
	Tokens int
	Blocks []connector.BlockKey // of these tokens, in order of the prompt
	// Unknown says that a connector of this scope gave no answer in time, or none that could be used: there may be
	// more than Tokens.
	Unknown bool
}

// query is what the loop must know of a cache query.
type query struct {
	keys    []connector.BlockKey // of the prompt
	origin  host.Origin
	hold    bool
	notHeld string // why no hold is possible, whatever is found
}

// checkQuery refuses what a cache query cannot be. It asks for what a request of one token would get.
func checkQuery(req *Request) error {
	if req.Query {
		req.MaxTokens = 1
	}
	switch {
	case req.Hold && !req.Query:
		return fmt.Errorf("%w: only a cache query can hold", ErrInvalid)
	case req.Query && (req.Ticket != nil || req.Remote || req.Turn):
		return fmt.Errorf("%w: a cache query brings no ticket and is for no consumer", ErrInvalid)
	}
	return nil
}

// query prepares a request that is a cache query for the scheduler.
func (e *Engine) query(req *Request, seq *sched.Request) *query {
	q := &query{keys: seq.Keys, hold: req.Hold, notHeld: e.cannotHold()}
	seq.Remote = q.hold && q.notHeld == ""
	seq.Turn = seq.Remote // what may never be fetched is not kept from being evicted
	return q
}

// cannotHold says why another engine could not fetch blocks of the prefix cache; "" if it could.
func (e *Engine) cannotHold() string {
	switch {
	case e.host == nil:
		return "this engine has no connector"
	case e.host.Info().Capabilities&connector.CanHold == 0:
		return fmt.Sprintf("%s does not hold blocks of the engine", e.info.Connector)
	case e.cfg.Connector.Role != connector.RoleBoth:
		return fmt.Sprintf("kv_role is %s, only kv_both can hold blocks that no request has announced", e.cfg.Connector.Role)
	}
	return ""
}

// noteOrigin remembers where that comes from what the connector offers to a cache query.
func (l *loop) noteOrigin(id connector.RequestID, m connector.Match) {
	if st := l.streams[id]; st != nil && st.query != nil && !m.Later {
		st.query.origin = l.e.host.Origin(id)
	}
}

// cached is the answer to a cache query; nil to what is none, or has no answer.
func (l *loop) cached(st *stream, o sched.Output) *Cached {
	q := st.query
	if q == nil || o.Reason != connector.ReasonStop {
		return nil
	}
	c := &Cached{Scopes: []InScope{{Scope: connector.ScopeEngine}, {Scope: connector.ScopeNode}, {Scope: connector.ScopeShared}}}
	of := func(s connector.Scope) *InScope {
		return &c.Scopes[min(max(s, connector.ScopeEngine), connector.ScopeShared)-1]
	}
	at, size := 0, l.e.cfg.BlockSize
	take := func(s connector.Scope, end int) {
		if in := of(s); end > at {
			in.Tokens += end - at
			in.Blocks = append(in.Blocks, q.keys[at/size:end/size]...)
			at = end
		}
	}
	take(connector.ScopeEngine, o.Local)
	for _, p := range q.origin.Parts {
		take(p.Scope, min(p.End, o.Local+o.External))
	}
	if at < o.Local+o.External { // a composite forgets where it found what, when it has too many requests
		take(l.e.host.Info().Scope, o.Local+o.External)
	}
	for _, s := range q.origin.Unknown {
		of(s).Unknown = true
	}
	switch {
	case !q.hold || o.Ticket != nil:
	case q.notHeld != "":
		c.NotHeld = q.notHeld
	case o.Local == 0:
		c.NotHeld = "the prefix cache has nothing of the prompt"
	default:
		c.NotHeld = "the connector gave no ticket"
	}
	return c
}
