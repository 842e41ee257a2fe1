package agent

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// A scheduler and two ranks come in every order; then blocks are saved and loaded, and each rank gets
// its own bytes.
func TestAttachInAnyOrder(t *testing.T) {
	for _, order := range []string{"s01", "s10", "0s1", "01s", "10s", "1s0"} {
		t.Run(order, func(t *testing.T) {
			o := open(t, config(t.TempDir(), nil), nil)
			var s *process
			ranks := make([]*process, 2)
			for _, who := range order {
				if who == 's' {
					s = scheduler(t, o.socket)
					continue
				}
				n := int(who - '0')
				ranks[n] = worker(t, o.socket, rankAt(n, 2))
				ranks[n].attached()
			}
			for _, p := range []*process{s, ranks[0], ranks[1]} {
				p.announced(1)
			}
			s.state("ready")
			hs := hashes("a", 3)
			tr := transfer("r", hs, 0)
			require.Zero(t, s.match(query("r", hs)))
			for i, p := range ranks {
				p.fill(tr.Blocks, i)
			}
			s.step(&connector.Step{ID: 1, Arrived: []connector.Query{query("r", hs)}})
			s.step(&connector.Step{ID: 2, Computed: []connector.Transfer{tr}})
			e := s.event(saved, "r")
			require.Equal(t, uint64(2), e.GetStep())
			require.Equal(t, []int32{0, 1, 2}, e.GetBlocks())
			require.Empty(t, e.GetFailed())

			require.Equal(t, 48, s.match(query("q", hs)))
			tr = transfer("q", hs, 10)
			s.step(&connector.Step{ID: 3, Admitted: []connector.Transfer{tr}})
			for i, p := range []*process{s, ranks[0], ranks[1]} {
				e := p.event(loaded, "q")
				require.Empty(t, e.GetFailed(), e.GetError())
				require.Equal(t, []int32{10, 11, 12}, e.GetBlocks())
				require.True(t, i == 0 || p.same(tr.Blocks, i-1))
			}
		})
	}
}
