package sched

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/kvcache"
)

// TestTickets: what has a ticket is asked about as soon as it is queued and again as long as it is, although
// there is no place for it; what has none, or is answered with Later, is not.
func TestTickets(t *testing.T) {
	s := New(Config{BlockTokens: 4, Groups: 1, MaxBatchedTokens: 16, MaxSeqs: 1, Role: connector.RoleConsumer}, kvcache.New(16))
	add := func(id connector.RequestID, ticket []byte) {
		space := &connector.KeySpace{}
		prompt := []int32{1, 2, 3, 4, 5, 6, 7, 8, 9}
		require.NoError(t, s.Add(Request{ID: id, Prompt: prompt, Space: space, Keys: space.Keys(prompt, 4), MaxTokens: 4, Ticket: ticket}))
	}
	asked := func(again bool) (ids []connector.RequestID) {
		for _, q := range s.Tickets(again) {
			require.Equal(t, []byte("ticket"), q.Ticket)
			ids = append(ids, q.Query.Request)
			s.Answer(q.Query.Request, q.Query.Computed, connector.Match{Tokens: 8, Later: q.Query.Request == "later"})
		}
		return ids
	}
	add("first", nil)
	for _, q := range s.Questions() {
		s.Answer(q.Query.Request, q.Query.Computed, connector.Match{})
	}
	s.Schedule()
	require.Equal(t, 1, s.Running())
	add("second", []byte("ticket"))
	add("third", nil)
	add("later", []byte("ticket"))
	require.Empty(t, s.Questions(), "there is no place")
	require.Equal(t, []connector.RequestID{"second", "later"}, asked(false))
	require.Empty(t, asked(false))
	require.Equal(t, []connector.RequestID{"second"}, asked(true))
	s.Answered("later")
	require.Equal(t, []connector.RequestID{"later"}, asked(false))
	s.Abort("first", connector.ReasonAbort, nil)
	s.Schedule()
	require.Equal(t, []connector.RequestID(nil), asked(true), "the second is being loaded")
}
