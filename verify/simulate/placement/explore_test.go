package placement

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// at once: every store of the protocol is seen by all before the next access.
func atOnce() *buffer { return nil }

// plain is a processor whose stores are plain, and whose additions are locked.
func plain() *buffer { return &buffer{} }

// plainToo is one whose additions are a load and a store.
func plainToo() *buffer { return &buffer{plainAdd: true} }

// TestPinAndRetire plays every order of a reader and a plugin that gives the slot up and fills it again.
func TestPinAndRetire(t *testing.T) {
	orders, err := explore(pinAndRetire(Sound, atOnce, atOnce))
	require.NoError(t, err)
	t.Logf("%d orders", orders)
	require.Greater(t, orders, 10)
	for _, m := range []Mutant{LookBeforePin, RetireAfterLook, RetireSkipped, PinsIgnored} {
		_, err := explore(pinAndRetire(m, atOnce, atOnce))
		require.Error(t, err, m.String())
		t.Log(m, err)
	}
}

// TestBetweenLives plays every order of a host that copies a block of a plugin that has died, and of the next life, which gives the
// slot another use (rule PLACE-28).
func TestBetweenLives(t *testing.T) {
	accepted, discarded := 0, 0
	orders, err := explore(betweenLives(Sound, func(a, d bool) {
		if a {
			accepted++
		}
		if d {
			discarded++
		}
	}))
	require.NoError(t, err)
	t.Logf("%d orders: %d copies count, %d do not", orders, accepted, discarded)
	require.Positive(t, accepted)
	require.Positive(t, discarded)
	for _, m := range []Mutant{NoSecondLook, NoGeneration, LifeStartsOver} {
		_, err := explore(betweenLives(m, func(bool, bool) {}))
		require.Error(t, err, m.String())
		t.Log(m, err)
	}
}

// TestLendAndSweep plays every order of a host that writes and of a next life that takes the arena over.
func TestLendAndSweep(t *testing.T) {
	for halves := range 3 {
		orders, err := explore(lendAndSweep(Sound, halves))
		require.NoError(t, err)
		require.Positive(t, orders)
		t.Logf("%d halves are written: %d orders", halves, orders)
	}
	for halves := 1; halves < 3; halves++ {
		_, err := explore(lendAndSweep(NoBarrier, halves))
		require.Error(t, err, "no barrier, %d halves", halves)
		t.Log(err)
	}
}

// TestLentAhead plays every order of a host that writes into a slot which was lent ahead, and of a plugin that takes note of it and evicts
// it, dies, takes the slot back, or is reset.
func TestLentAhead(t *testing.T) {
	played := func(name string, build func() (*scene, error)) {
		orders, err := explore(build)
		require.NoError(t, err, name)
		require.Positive(t, orders, name)
		t.Logf("%s: %d orders", name, orders)
	}
	played("evicted", evicted)
	played("reset", forgotten)
	for halves := range 3 {
		played("died", died(halves, true))
		played("given back", returned(halves, false))
	}
	for halves := 1; halves < 3; halves++ {
		for name, build := range map[string]func() (*scene, error){
			"the next life does not wait": died(halves, false), "the plugin takes the slot back while it is lent": returned(halves, true),
		} {
			_, err := explore(build)
			require.Error(t, err, name)
			t.Log(name, err)
		}
	}
}

// TestStoreBuffers: the orders of rule PLACE-04 need stores that others see before the load that follows. With the plain
// stores of either end, which amd64 keeps in a buffer for a while, a slot is written while it is read.
func TestStoreBuffers(t *testing.T) {
	for name, c := range map[string]struct{ reader, plugin func() *buffer }{
		"plain stores of the plugin": {atOnce, plain},
		"plain pins of the reader":   {plainToo, atOnce},
		"both":                       {plainToo, plain},
	} {
		_, err := explore(pinAndRetire(Sound, c.reader, c.plugin))
		require.Error(t, err, name)
		require.ErrorContains(t, err, "while it is read", name)
	}
	_, err := explore(pinAndRetire(Sound, plain, atOnce))
	require.NoError(t, err, "locked additions are enough for the reader")
}
