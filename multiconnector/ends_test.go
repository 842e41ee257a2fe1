package multiconnector_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/multiconnector"
)

// mortal is a keeper that knows how its holds end. What it reports before it announces a hold is in early.
type mortal struct {
	*keeper
	ends  chan multiconnector.HoldsOver
	early *multiconnector.HoldsOver
}

func (m *mortal) Finish(ctx context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	if m.early != nil {
		m.ends <- *m.early
		<-time.After(time.Second)
	}
	return m.keeper.Finish(ctx, ended)
}

// HoldsOver implements multiconnector.HoldWatcher.
func (m *mortal) HoldsOver(ctx context.Context) (multiconnector.HoldsOver, error) {
	select {
	case o := <-m.ends:
		return o, nil
	case <-ctx.Done():
		return multiconnector.HoldsOver{}, ctx.Err()
	}
}

// A hold of which two children keep a part is over when both parts are, and counts as fetched only if consumers have come
// for both. Once the blocks of one part are lost it is over at once, and only once.
func TestHowHoldsEnd(t *testing.T) {
	type over = multiconnector.HoldsOver
	all := over{Fetched: []connector.HoldID{1}, Died: []connector.HoldID{2}, Lost: []connector.HoldID{3}}
	require.Equal(t, []connector.HoldID{1, 2}, all.Consumed())
	hold := func(base connector.HoldID) []connector.HoldID { return []connector.HoldID{base + 1} }
	first, second, joint := hold(100), hold(500), []connector.HoldID{1}
	for name, c := range map[string]struct {
		early         *over // of the first child
		first, second over
		after         []over // what the host hears after each of the two; empty: nothing
	}{
		"fetched":           {nil, over{Fetched: first}, over{Fetched: second}, []over{{}, {Fetched: joint}}},
		"one dies":          {nil, over{Died: first}, over{Fetched: second}, []over{{}, {Died: joint}}},
		"the last one dies": {nil, over{Fetched: first}, over{Died: second}, []over{{}, {Died: joint}}},
		"both die":          {nil, over{Died: first}, over{Died: second}, []over{{}, {Died: joint}}},
		"one is lost":       {nil, over{Lost: first}, over{Fetched: second}, []over{{Lost: joint}, {}}},
		"both are lost":     {nil, over{Lost: first}, over{Lost: second}, []over{{Lost: joint}, {}}},
		"fetched, lost":     {nil, over{Fetched: first}, over{Lost: second}, []over{{}, {Lost: joint}}},
		"dead, then lost":   {nil, over{Died: first}, over{Lost: second}, []over{{}, {Lost: joint}}},
		"twice":             {nil, over{Died: first, Fetched: first}, over{Died: second, Lost: second}, []over{{}, {Died: joint}}},
		"fetched early":     {&over{Fetched: first}, over{}, over{Fetched: second}, []over{{}, {Fetched: joint}}},
		"dead early":        {&over{Died: first}, over{}, over{Fetched: second}, []over{{}, {Died: joint}}},
		"lost early":        {&over{Lost: first}, over{}, over{Fetched: second}, []over{{Lost: joint}, {}}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := &mortal{newKeeper(100, time.Hour), make(chan over), c.early}
				b := &mortal{newKeeper(500, time.Hour), make(chan over), nil}
				r := newComposite(t, a, b)
				defer func() { require.NoError(t, r.Close()) }()
				holder, _ := connector.As[connector.Holder](r)
				holds, err := holder.Finish(t.Context(), []connector.Ended{{Request: "r", Tokens: 4, Remote: true}})
				require.NoError(t, err)
				require.Equal(t, joint[0], holds[0].ID)
				for i, ends := range []func(){func() { a.ends <- c.first }, func() { b.ends <- c.second }} {
					ends()
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					got, err := multiconnector.WaitHoldsOver(ctx, holder)
					cancel()
					require.Equal(t, c.after[i], got)
					if got.Fetched == nil && got.Died == nil && got.Lost == nil {
						require.ErrorIs(t, err, context.DeadlineExceeded)
					}
				}
			})
		})
	}
}

// When one part of a hold is lost, the child that keeps another learns that the host has released it.
func TestLostHoldEndsForTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &mortal{newKeeper(100, time.Hour), make(chan multiconnector.HoldsOver), nil}
		b := newKeeper(500, time.Hour)
		r := newComposite(t, a, b)
		defer func() { require.NoError(t, r.Close()) }()
		holder, _ := connector.As[connector.Holder](r)
		leaser, _ := connector.As[connector.Leaser](r)
		holds, err := holder.Finish(t.Context(), []connector.Ended{{Request: "r", Tokens: 4, Remote: true}})
		require.NoError(t, err)
		a.ends <- multiconnector.HoldsOver{Lost: []connector.HoldID{101}}
		got, err := multiconnector.WaitHoldsOver(t.Context(), holder)
		require.NoError(t, err)
		require.Equal(t, []connector.HoldID{holds[0].ID}, got.Lost)
		for range 3 { // the host says it once
			_, err = leaser.Renewals(t.Context(), got.Lost)
			require.NoError(t, err)
			got.Lost = nil
		}
		b.is(func() { require.Equal(t, []connector.HoldID{501}, b.over) })
	})
}
