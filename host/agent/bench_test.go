package agent

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// BenchmarkMatch is one lookup of a waiting request with 42 hashes, over the socket.
func BenchmarkMatch(b *testing.B) {
	o := open(b, config(b.TempDir(), nil), nil)
	worker(b, o.socket, rankAt(0, 1)).attached()
	s := scheduler(b, o.socket)
	q := query("r", hashes("a", 42))
	s.match(q)
	call := &kvportv1.AgentCall{Call: &kvportv1.AgentCall_Match{Match: wire.QueryToProto(&q)}}
	for b.Loop() {
		require.NotNil(b, s.call(call).GetMatch())
	}
}

// BenchmarkMatchWaiting is lookups of 16 waiting requests with 42 hashes each, over the socket: in one call, and in one each.
func BenchmarkMatchWaiting(b *testing.B) {
	o := open(b, config(b.TempDir(), nil), nil)
	worker(b, o.socket, rankAt(0, 1)).attached()
	s := scheduler(b, o.socket)
	var qs []connector.Query
	for i := range 16 {
		qs = append(qs, query(fmt.Sprint("r", i), hashes(fmt.Sprint(i), 42)))
	}
	s.matchAll(qs)
	b.Run("together", func(b *testing.B) {
		call := aheadCall(qs)
		for b.Loop() {
			require.Len(b, s.call(call).GetAhead(), len(qs)-1)
		}
	})
	b.Run("alone", func(b *testing.B) {
		var calls []*kvportv1.AgentCall
		for i := range qs {
			calls = append(calls, aheadCall(qs[i:i+1]))
		}
		for b.Loop() {
			for _, call := range calls {
				require.NotNil(b, s.call(call).GetMatch())
			}
		}
	})
}

// BenchmarkMatchFirst is the lookup that the engine waits for, of a request about which the plugin must be asked: alone, and with as
// many others as may come ahead.
func BenchmarkMatchFirst(b *testing.B) {
	for _, others := range []int{0, wire.MaxAhead} {
		b.Run(fmt.Sprint("others=", others), func(b *testing.B) {
			o := open(b, config(b.TempDir(), nil), nil)
			worker(b, o.socket, rankAt(0, 1)).attached()
			s := scheduler(b, o.socket)
			var step uint64
			later := 0
			for b.Loop() {
				b.StopTimer()
				step++
				var qs []connector.Query
				var ended []connector.Ended
				for i := range 1 + others {
					qs = append(qs, query(fmt.Sprint(step, "/", i), hashes(fmt.Sprint(i), 16)))
					ended = append(ended, connector.Ended{Request: qs[i].Request, Reason: connector.ReasonAbort})
				}
				call := aheadCall(qs)
				b.StartTimer()
				m := s.call(call)
				b.StopTimer()
				if m.GetMatch().GetLater() {
					later++
				}
				for i, m := range append([]*kvportv1.Match{m.GetMatch()}, m.GetAhead()...) {
					if m.GetLater() { // the next round begins when the plugin has nothing to do
						s.event(kvportv1.AgentEventKind_AGENT_EVENT_KIND_ANSWERED, string(qs[i].Request))
					}
				}
				s.step(&connector.Step{ID: step, Ended: ended})
				s.event(finishedEvent, string(qs[others].Request))
				s.forget()
				b.StartTimer()
			}
			b.ReportMetric(float64(later)/float64(step), "later/op")
		})
	}
}
