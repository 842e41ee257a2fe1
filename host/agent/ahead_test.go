package agent

import (
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// matchAll asks about all requests in one call, again while an answer is later; the answers, in tokens.
func (p *process) matchAll(qs []connector.Query) []int {
	p.t.Helper()
	for {
		m := p.call(aheadCall(qs))
		require.Nil(p.t, m.GetError())
		require.Len(p.t, m.GetAhead(), len(qs)-1)
		answers := append([]*kvportv1.Match{m.GetMatch()}, m.GetAhead()...)
		out, later := make([]int, len(qs)), false
		for i, a := range answers {
			if out[i] = int(a.GetTokens()); a.GetLater() {
				p.event(kvportv1.AgentEventKind_AGENT_EVENT_KIND_ANSWERED, string(qs[i].Request))
				later = true
			}
		}
		if !later {
			return out
		}
	}
}

func aheadCall(qs []connector.Query) *kvportv1.AgentCall {
	call := &kvportv1.AgentCall{Call: &kvportv1.AgentCall_Match{Match: wire.QueryToProto(&qs[0])}}
	for i := range qs[1:] {
		call.Ahead = append(call.Ahead, wire.QueryToProto(&qs[1+i]))
	}
	return call
}

// waiting are requests for the first blocks of a prompt of n, and one for another prompt.
func waiting(n int) (qs []connector.Query, want []int) {
	hs := hashes("a", n)
	for i := range n {
		qs, want = append(qs, query(fmt.Sprint("w", i), hs[:i+1])), append(want, (i+1)*blockTokens)
	}
	return append(qs, query("other", hashes("b", 2))), append(want, 0)
}

// What comes ahead with a match is answered as if it came alone (rule AGENT-16), also where some of a prompt is computed. A load may
// follow it without another question, and a request of which nothing follows ends as any other.
func TestAhead(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), nil)
	w := worker(t, o.socket, rankAt(0, 1))
	require.True(t, w.attached().GetAhead())
	s := scheduler(t, o.socket)
	hs := hashes("a", 6)
	s.save(w, "r", hs, 0)
	qs, want := waiting(len(hs))
	require.Equal(t, want, s.matchAll(qs))
	alone := make([]int, len(qs))
	for i := range qs {
		alone[i] = s.match(qs[i])
	}
	require.Equal(t, want, alone)
	for i := range qs[:len(hs)] {
		qs[i].Request, qs[i].Computed = connector.RequestID(fmt.Sprint("half", i)), blockTokens
		want[i] -= blockTokens
	}
	require.Equal(t, want, s.matchAll(qs))

	s.step(&connector.Step{ID: 2, Admitted: []connector.Transfer{transfer("w5", hs, 10)}})
	require.Empty(t, s.event(loaded, "w5").GetFailed())
	require.True(t, w.same(blocksOf(hs, 10), 0))
	var ended []connector.Ended
	for _, id := range []connector.RequestID{"w5", "w1", "other"} {
		ended = append(ended, connector.Ended{Request: id, Reason: connector.ReasonAbort})
	}
	s.step(&connector.Step{ID: 3, Ended: ended})
	for _, id := range []string{"w5", "w1", "other"} {
		require.False(t, s.event(finishedEvent, id).GetHeld())
	}
}

// A connector whose Match has what it asks for sent is asked nothing ahead.
func TestAheadOfFetches(t *testing.T) {
	dir, err := os.MkdirTemp("", "h") //nolint:usetesting // the name of a socket must be short
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	o := open(t, fmt.Sprintf(`{"kv_connector": "HoldConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"dir": %q, "fetches": true},
		"kvport": {"heartbeat": {"limit": "1m"}}}`, dir), nil)
	worker(t, o.socket, rankAt(0, 1)).attached()
	s := scheduler(t, o.socket)
	qs, _ := waiting(3)
	m := s.call(aheadCall(qs))
	require.NotNil(t, m.GetMatch())
	require.Empty(t, m.GetAhead())
}

// Without an open connector all are misses.
func TestAheadWithoutConnector(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), nil)
	s := scheduler(t, o.socket)
	qs, _ := waiting(3)
	require.Equal(t, make([]int, len(qs)), s.matchAll(qs))
}

// Only the match of a request brings others, and none of those is a probe.
func TestAheadRefused(t *testing.T) {
	o := open(t, config(t.TempDir(), nil), nil)
	r, probe := connector.Query{Request: "r"}, connector.Query{}
	finish := aheadCall([]connector.Query{r, r})
	finish.Call = &kvportv1.AgentCall_Finish{Finish: &kvportv1.Ended{Request: "r"}}
	long := connector.Query{Request: "r", Tokens: 1, Computed: 2}
	for _, call := range []*kvportv1.AgentCall{finish, aheadCall([]connector.Query{probe, r}), aheadCall([]connector.Query{r, probe}), aheadCall([]connector.Query{r, long})} {
		s := scheduler(t, o.socket)
		s.post(call, nil)
		m := s.find("error", func(m *kvportv1.AgentAnswer) bool { return m.GetError() != nil })
		require.Equal(t, kvportv1.ErrorCode_ERROR_CODE_INCOMPATIBLE, m.GetError().GetCode())
		<-s.over
	}
}
