package sched

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/kvcache"
)

// parked is a scheduler with one request, whose load of two blocks is under way, and the load.
func parked(t *testing.T, tokens int) (*Scheduler, connector.Transfer, uint64) {
	t.Helper()
	s := New(Config{BlockTokens: 4, MaxBatchedTokens: 64, MaxSeqs: 4, PrefixCaching: true, Role: connector.RoleBoth}, kvcache.New(32))
	space := &connector.KeySpace{}
	prompt := make([]int32, tokens)
	for i := range prompt {
		prompt[i] = int32(i)
	}
	require.NoError(t, s.Add(Request{ID: "a", Prompt: prompt, Space: space, Keys: space.Keys(prompt, 4), MaxTokens: 4}))
	q := s.Questions()
	require.Len(t, q, 1)
	s.Answer("a", 0, connector.Match{Tokens: 8})
	chunks, st := s.Schedule()
	require.Empty(t, chunks)
	require.Len(t, st.Admitted, 1)
	return s, st.Admitted[0], st.ID
}

// Rule OVERLAP-03: a chunk that was computed while the load lasted counts if the load has ended well by then, and in no
// other case.
func TestEarlyChunks(t *testing.T) {
	for name, test := range map[string]struct {
		end     func(s *Scheduler, step uint64, load connector.Transfer)
		counts  bool
		resumes int // where the next chunk starts
	}{
		"loaded": {func(s *Scheduler, step uint64, _ connector.Transfer) { s.Loaded(step, "a", nil, false, false) }, true, 10},
		"failed": {func(s *Scheduler, step uint64, l connector.Transfer) {
			s.Loaded(step, "a", []connector.BlockID{l.Blocks[1].ID}, false, false)
		}, false, 4},
		"all failed": {func(s *Scheduler, step uint64, l connector.Transfer) {
			s.Loaded(step, "a", []connector.BlockID{l.Blocks[0].ID, l.Blocks[1].ID}, false, false)
		}, false, 0},
		"lost": {func(s *Scheduler, step uint64, _ connector.Transfer) { s.Lost(step, "a", true) }, false, 0},
		"late": {func(*Scheduler, uint64, connector.Transfer) {}, false, 8},
	} {
		t.Run(name, func(t *testing.T) {
			s, load, step := parked(t, 10)
			chunks, _ := s.Schedule()
			require.Empty(t, chunks, "it is parked")
			s.Arriving(step, "a")
			chunks, _ = s.Schedule()
			require.Len(t, chunks, 1)
			require.True(t, chunks[0].Early)
			require.Equal(t, 8, chunks[0].Start)
			test.end(s, step, load)
			st := s.Commit([]int32{77})
			out := s.Outputs()
			if !test.counts {
				require.Empty(t, out)
				if st != nil {
					require.Empty(t, st.Computed)
				}
			} else {
				require.Equal(t, []int32{77}, out[0].Tokens)
				require.Equal(t, 8, out[0].External)
				require.Equal(t, 1, s.Stats().Overlapped)
			}
			if name == "late" {
				chunks, _ = s.Schedule()
				require.Empty(t, chunks, "it is tried once")
				s.Commit(nil)
				s.Loaded(step, "a", nil, false, false)
			}
			chunks, _ = s.Schedule()
			require.Len(t, chunks, 1)
			require.False(t, chunks[0].Early)
			require.Equal(t, test.resumes, chunks[0].Start)
		})
	}
}

// What is postponed is computed when the load is over.
func TestPostpone(t *testing.T) {
	s, _, step := parked(t, 10)
	s.Arriving(step, "a")
	chunks, _ := s.Schedule()
	require.Len(t, chunks, 1)
	require.Empty(t, s.Postpone())
	require.Nil(t, s.Commit(nil))
	s.Loaded(step, "a", nil, false, false)
	chunks, _ = s.Schedule()
	require.Len(t, chunks, 1)
	require.Equal(t, 8, chunks[0].Start)
	require.False(t, chunks[0].Early)
}
