package remote

import (
	"errors"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

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
		require.Eventually(t, func() bool { return found(t, s, []connector.Item{marker}) == 1 }, time.Minute, 5*time.Millisecond)
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

// A save asks the server for what it was not asked for before, and for that only, once.
func TestSavesAskOnce(t *testing.T) {
	srv := server(t)
	s, other := open(t, Options{Addresses: []string{srv.Address}}), open(t, Options{Addresses: []string{srv.Address}})
	c := srv.Client()
	defer func() { require.NoError(t, c.Close()) }()
	asked := func(do func()) int {
		require.NoError(t, srv.Do(t.Context(), "config", "resetstat"))
		do()
		info, err := c.Info(t.Context(), "commandstats").Result()
		require.NoError(t, err)
		calls, _, _ := strings.Cut(strings.TrimPrefix(infoField(info, "cmdstat_strlen"), "calls="), ",")
		n, _ := strconv.Atoi(calls) // none: no such field
		return n
	}
	full, empty := items(6, 1000)
	put := func(items []connector.Item) func() {
		return func() { require.NoError(t, s.Put(t.Context(), items)) }
	}
	require.Equal(t, 2, asked(put(full[4:])), "nobody asked before")
	require.Zero(t, found(t, s, full[:4]))
	require.Zero(t, asked(put(full[:4])), "they were not there")
	require.Equal(t, 6, asked(put(full)), "they are there now, as far as is known")
	require.Equal(t, uint64(6), s.Stats().Known)
	require.Equal(t, uint64(6), s.Stats().Saved)

	late, _ := items(8, 1000)
	late = late[6:]
	require.Zero(t, found(t, s, late))
	require.NoError(t, other.Put(t.Context(), late), "another engine was faster")
	put(late)()
	require.Equal(t, uint64(8), s.Stats().Saved, "written twice, which harms nobody")
	require.NoError(t, s.Get(t.Context(), empty))
	requireEqual(t, full, empty)
}

// What is remembered is bounded in number and time.
func TestAbsentIsBounded(t *testing.T) {
	var a absent
	now := time.Now()
	for n := range 3 * absentMost / 100 {
		keys := make([]connector.StoreKey, 100)
		for i := range keys {
			keys[i] = connector.StoreKey{byte(n), byte(n >> 8), byte(i), 1}
		}
		a.note(keys, map[connector.StoreKey]bool{keys[0]: true}, now)
		require.LessOrEqual(t, len(a.keys), absentMost)
		require.False(t, a.take(keys[0], now), "it was there")
		require.True(t, a.take(keys[1], now))
		require.False(t, a.take(keys[1], now), "once")
		require.False(t, a.take(keys[2], now.Add(absentTime)), "too long ago")
	}
}
