package host

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

// TestScratch: copies of source blocks never have more memory than the limit, in whatever sizes they come; who gets none
// waits for the others.
func TestScratch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScratch(100)
		a, b := s.take(40), s.take(60)
		got := make(chan []byte, 1)
		go func() { got <- s.take(50) }()
		synctest.Wait()
		require.Empty(t, got)
		s.give(a)
		synctest.Wait()
		require.Empty(t, got, "that one is too short")
		require.EqualValues(t, 60, s.allocated, "and makes room")
		s.give(b)
		c := <-got
		require.Same(t, &b[0], &c[0])
		s.give(c)
		require.Len(t, s.take(100), 100)
		require.EqualValues(t, 100, s.allocated)
		require.Empty(t, s.free)
	})
}
