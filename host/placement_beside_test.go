//go:build !race

package host

import (
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/internal/place"
)

// Both ends share bytes on purpose, which the race detector reports: what was copied beside a write is thrown away.

// Rule PLACE-23: a load beside a plugin that gives slots other uses all the time is right or goes to the plugin.
func TestPlacementBesideEviction(t *testing.T) {
	r := newPlacedRig(t, 1, all())
	bs := r.fill(keys(1, 8), 0)
	r.save(0, bs...)
	slots := make([][]byte, len(bs))
	for i, b := range bs {
		spans, err := r.ranks[0].kv.Spans(b)
		require.NoError(t, err)
		slots[i] = slices.Concat(spans...)
	}
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() {
		defer close(done)
		for n := range 4000 {
			i := n % len(bs)
			at := place.Slot(n % (len(bs) + 1))
			r.shelf.Retire(at)
			r.shelf.Begin(at)
			copy(r.shelf.Bytes(at, len(slots[i])), slots[i])
			r.shelf.Publish(at, &place.Header{Key: r.p.key(bs[i].Key, 0, 0), Length: uint32(len(slots[i]))})
			_ = r.p.learn([]uint32{uint32(at)}, 1)
		}
	})
	came, tried := 0, 0
	for over := false; !over; tried++ {
		select {
		case <-done:
			over = true
		default:
		}
		if r.loaded(0, bs[tried%len(bs)]) {
			came++
		}
	}
	wg.Wait()
	t.Logf("%d of %d loads came", came, tried)
	require.Zero(t, r.damaged.Load(), "a slot that was given up is no damage")
	require.True(t, r.loaded(0, bs[7]) || r.loaded(0, bs[6]), "what is still there comes")
}
