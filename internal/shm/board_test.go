package shm

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// openBoard makes both ends of a board, in mappings of their own.
func openBoard(t *testing.T) (*Board, *BoardView) {
	t.Helper()
	b, err := NewBoard()
	require.NoError(t, err)
	r, err := Map(int(b.Region().File().Fd()), BoardBytes)
	require.NoError(t, err)
	v, err := ViewBoard(r.Bytes())
	require.NoError(t, err)
	t.Cleanup(func() {
		v.Close()
		require.NoError(t, r.Close())
		require.NoError(t, b.Close())
		require.NoError(t, b.Close(), "twice")
		goleak.VerifyNone(t)
	})
	return b, v
}

// Many counters are waited for at once, each by several, and every count arrives.
func TestBoard(t *testing.T) {
	b, v := openBoard(t)
	const counters, last = 64, 30
	var work sync.WaitGroup
	for range counters {
		c, ok := b.Take()
		require.True(t, ok)
		var seen sync.WaitGroup
		for range 3 {
			seen.Go(func() {
				for n := uint32(0); n < last; {
					got, err := v.Wait(t.Context(), c.Slot, c.Call, n)
					if err != nil || got <= n || got > last {
						t.Errorf("counter %d gave %d after %d: %v", c.Slot, got, n, err)
						return
					}
					n = got
				}
			})
		}
		work.Go(func() {
			for n := uint32(1); n <= last; n += 1 + rand.Uint32N(2) {
				c.Set(n)
			}
			c.Set(last)
			seen.Wait()
			c.Give()
		})
	}
	work.Wait()
}

// A counter that was given back is nobody's, also when the slot is in use again.
func TestBoardSlotsAreUsedAgain(t *testing.T) {
	b, v := openBoard(t)
	c, _ := b.Take()
	c.Set(7)
	waiting := make(chan error, 1)
	go func() {
		_, err := v.Wait(t.Context(), c.Slot, c.Call, 7)
		waiting <- err
	}()
	c.Give()
	require.ErrorIs(t, <-waiting, ErrNotMine)
	next, _ := b.Take()
	require.Equal(t, c.Slot, next.Slot)
	require.NotEqual(t, c.Call, next.Call)
	next.Set(9)
	_, err := v.Wait(t.Context(), c.Slot, c.Call, 0)
	require.ErrorIs(t, err, ErrNotMine)
	next.Set(GivenUp)
	n, err := v.Wait(t.Context(), next.Slot, next.Call, 9)
	require.NoError(t, err)
	require.EqualValues(t, GivenUp, n)

	for range BoardSlots - 1 {
		_, ok := b.Take()
		require.True(t, ok)
	}
	_, ok := b.Take()
	require.False(t, ok, "all are in use")
	next.Give()
	_, ok = b.Take()
	require.True(t, ok)
}

func TestBoardRefuses(t *testing.T) {
	_, v := openBoard(t)
	for _, args := range [][2]int{{-1, 1}, {BoardSlots, 1}, {0, 0}} {
		_, err := v.Wait(t.Context(), args[0], uint32(args[1]), 0)
		require.ErrorIs(t, err, ErrIncompatible)
	}
	_, err := ViewBoard(make([]byte, 8))
	require.ErrorIs(t, err, ErrIncompatible)
}

// A wait ends with its context, and a closed board accepts nothing.
func TestBoardWaitEnds(t *testing.T) {
	b, v := openBoard(t)
	c, _ := b.Take()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err := v.Wait(ctx, c.Slot, c.Call, 0)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, b.Close())
	c.Set(3)
	c.Give()
	_, ok := b.Take()
	require.False(t, ok)
}

// The other process counts with a counter that it was given, and with no other.
func TestBoardCountsBack(t *testing.T) {
	b, v := openBoard(t)
	c, _ := b.Take()
	go func() {
		v.Set(c.Slot, c.Call+1, 9)
		v.Set(-1, c.Call, 9)
		v.Set(BoardSlots, c.Call, 9)
		v.Set(c.Slot, 0, 9)
		v.Set(c.Slot, c.Call, 3)
	}()
	n, err := c.Wait(t.Context(), 0)
	require.NoError(t, err)
	require.EqualValues(t, 3, n)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err = c.Wait(ctx, 3)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	waiting := make(chan error, 1)
	go func() {
		_, err := c.Wait(t.Context(), 3)
		waiting <- err
	}()
	require.NoError(t, b.Close())
	require.Error(t, <-waiting)
	_, err = c.Wait(t.Context(), 3)
	require.ErrorIs(t, err, ErrNotMine)
}

// A peer that rings for nobody without end is heard after pauses, and what somebody waits for arrives all the same.
func TestBoardIsRungInVain(t *testing.T) {
	b, v := openBoard(t)
	rested := make(chan struct{}, 1)
	v.rest = func() {
		select {
		case rested <- struct{}{}:
		default:
		}
	}
	c, _ := b.Take()
	other, _ := b.Take()
	waiting := make(chan error, 1)
	go func() {
		n, err := v.Wait(t.Context(), c.Slot, c.Call, 0)
		if err == nil && n != 3 {
			err = ErrNotMine
		}
		waiting <- err
	}()
	require.Eventually(t, func() bool {
		other.Set(1)
		select {
		case <-rested:
			return true
		default:
			return false
		}
	}, time.Minute, 100*time.Microsecond, "every bell is heard at once")
	c.Set(3)
	require.NoError(t, <-waiting)
}

// Bells for somebody are heard at once, however many there are.
func TestBoardIsRungForSomebody(t *testing.T) {
	b, v := openBoard(t)
	v.rest = func() { t.Error("a pause after bells that were for somebody") }
	c, _ := b.Take()
	for n := range uint32(10 * spareBells) {
		c.Set(n + 1)
		got, err := v.Wait(t.Context(), c.Slot, c.Call, n)
		require.NoError(t, err)
		require.Equal(t, n+1, got)
	}
}
