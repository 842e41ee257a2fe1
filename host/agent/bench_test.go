package agent

import (
	"testing"

	"github.com/stretchr/testify/require"

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
