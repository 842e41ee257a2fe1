package remote

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// Once there is a connection, saves gather nothing: values go out from where the blocks lie, with their time to
// live and whole.
func TestSavesAreNotGathered(t *testing.T) {
	srv := server(t)
	s := open(t, Options{Addresses: []string{srv.Address}, Connections: 1, TTL: time.Minute})
	first, _ := items(1, 10)
	require.NoError(t, s.Put(t.Context(), first))
	was := cap(s.all[1].scratch)
	full, empty := items(9, 300<<10, 1, 0, 200<<10)
	require.NoError(t, s.Put(t.Context(), full[1:]))
	require.Equal(t, was, cap(s.all[1].scratch))
	require.NoError(t, s.Get(t.Context(), empty[1:]))
	requireEqual(t, full[1:], empty[1:])
	c := srv.Client()
	defer func() { require.NoError(t, c.Close()) }()
	for _, it := range full {
		left, err := c.PTTL(t.Context(), s.key(it.Key)).Result()
		require.NoError(t, err)
		require.Greater(t, left, 30*time.Second)
		require.LessOrEqual(t, left, time.Minute)
	}
}

// Connections are cut after any number of bytes while blocks are saved: what a Put calls saved is there and whole,
// and what it does not is not there or whole.
func TestCutSaves(t *testing.T) {
	srv := server(t)
	r := newRelay(t, srv.Address)
	s := open(t, Options{Addresses: []string{r.Address()}, Connections: 2})
	marker := item(1000, 10)
	require.NoError(t, s.Put(t.Context(), []connector.Item{marker}))
	random := rand.New(rand.NewPCG(3, 4))
	saved, lost := 0, 0
	for round := range 40 {
		full, empty := items(8, 20000, 20000, 16)
		for i := range full {
			full[i].Key[5], empty[i].Key[5] = byte(round), byte(round)
		}
		r.CutSentAfter(1 + random.Int64N(500000))
		failed := map[int]bool{}
		if err := s.Put(t.Context(), full); err != nil {
			require.ErrorIs(t, err, connector.ErrGone)
			part := &connector.ItemError{}
			if !errors.As(err, &part) { // the question before it failed
				part.Items = []int{0, 1, 2, 3, 4, 5, 6, 7}
			}
			for _, i := range part.Items {
				failed[i] = true
			}
		}
		r.CutSentAfter(0)
		r.Cut()
		require.Eventually(t, func() bool { return found(t, s, []connector.Item{marker}) == 1 }, 5*time.Second, 5*time.Millisecond)
		for i := range full {
			err := s.Get(t.Context(), empty[i:i+1])
			require.True(t, err == nil || failed[i], "block %d of round %d was acknowledged: %v", i, round, err)
			if err == nil {
				requireEqual(t, full[i:i+1], empty[i:i+1])
			}
		}
		lost += len(failed)
		saved += len(full) - len(failed)
	}
	t.Logf("%d connections cut, %d blocks saved and whole, %d not", r.Cuts(), saved, lost)
	require.Greater(t, r.Cuts(), 10)
	require.Positive(t, saved)
	require.Positive(t, lost)
}
