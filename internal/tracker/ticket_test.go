package tracker

import (
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// bring gives a request of a world a ticket now and then: of a hold, of an earlier turn, or a refused one.
func (w *world) bring(q connector.Query) connector.Query {
	if !w.b.WantsTicket(q.Request) {
		return q
	}
	switch w.rng.IntN(5) {
	case 0:
		w.b.Accept(&q, &Ticket{Tokens: w.rng.IntN(100), Lease: time.Minute, Plugin: []byte{1}})
	case 1:
		w.b.Accept(&q, &Ticket{Tokens: w.rng.IntN(100)})
	case 2:
		w.b.Refuse(q.Request, "forged")
	}
	return q
}

// offered checks an answer: whole blocks that leave a token to compute, but of what a Holder keeps, which may
// end anywhere.
func (w *world) offered(q *connector.Query, m connector.Match) {
	if m.Later || m.Tokens == 0 {
		return
	}
	end := m.Tokens + q.Computed
	if r := w.b.requests[q.Request]; r.plugin != nil && w.b.isHolder() {
		require.LessOrEqual(w.t, end, q.Tokens)
	} else {
		require.True(w.t, end < q.Tokens && m.Tokens%16 == 0, "%+v for %+v", m, q)
	}
	require.Positive(w.t, m.Tokens)
}
