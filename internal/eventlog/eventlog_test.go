package eventlog

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

func event(keys int) connector.BlockEvent {
	return connector.BlockEvent{Kind: connector.BlocksStored, Keys: make([]connector.BlockKey, keys)}
}

func next(t *testing.T, l *Log) []connector.BlockEvent {
	t.Helper()
	events, err := l.Next(t.Context())
	require.NoError(t, err)
	return events
}

func TestEventsAreNumberedAndFetchedOnce(t *testing.T) {
	l := New()
	first := event(1)
	first.Medium, first.Scope, first.Seq = "disk", connector.ScopeNode, 77
	l.Add(first)
	l.Add(event(2))
	events := next(t, l)
	require.Len(t, events, 2)
	first.Seq = 1
	require.Equal(t, first, events[0])
	require.EqualValues(t, 2, events[1].Seq)
	l.Add(event(0))
	events = next(t, l)
	require.Len(t, events, 1)
	require.EqualValues(t, 3, events[0].Seq)
}

func TestNextWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New()
		got := make(chan []connector.BlockEvent)
		go func() {
			events, _ := l.Next(t.Context())
			got <- events
		}()
		synctest.Wait() // it waits
		l.Add(event(1))
		require.Len(t, <-got, 1)

		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { _, err := l.Next(ctx); ended <- err }()
		synctest.Wait()
		cancel()
		require.ErrorIs(t, <-ended, context.Canceled)
	})
}

// What is there is given even if nobody waits any more.
func TestEventsComeBeforeTheEndOfAContext(t *testing.T) {
	l := New()
	l.Add(event(1))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	events, err := l.Next(ctx)
	require.NoError(t, err)
	require.Len(t, events, 1)
	_, err = l.Next(ctx)
	require.ErrorIs(t, err, context.Canceled)
}

// The oldest events go when there are too many, or too many keys; one event stays, however big.
func TestALogIsBounded(t *testing.T) {
	for name, c := range map[string]struct{ events, keys, left, answer int }{
		"events":       {2*connector.MaxEvents + 3, 1, connector.MaxEvents, connector.MaxEvents},
		"keys":         {6, MaxWaiting / 4, 4, 2},
		"one too big":  {2, MaxWaiting + 1, 1, 1},
		"nothing lost": {8, MaxAnswer / 4, 8, 4},
	} {
		t.Run(name, func(t *testing.T) {
			l := New()
			for range c.events {
				l.Add(event(c.keys))
			}
			events := next(t, l)
			require.Len(t, events, c.answer)
			require.EqualValues(t, c.events-c.left+1, events[0].Seq, "what was lost shows")
			for n := len(events); n < c.left; n += len(events) {
				last := events[len(events)-1].Seq
				events = next(t, l)
				require.Equal(t, last+1, events[0].Seq)
			}
			require.EqualValues(t, c.events, events[len(events)-1].Seq)
			require.Zero(t, l.keys)
			require.Empty(t, l.queue)
		})
	}
}
