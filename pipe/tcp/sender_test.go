package tcp

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

// A Send that waits for room among frames whose Sends were cancelled while there was no connection gets it as soon
// as the next connection drops them.
func TestRoomAfterReconnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sender{end: newEnd(&Network{}, linkID{}, "", nil), next: 1}
		for range window {
			s.queue = append(s.queue, &outgoing{gone: true})
		}
		queued := false
		go func() { queued = s.enqueue(t.Context(), &outgoing{}) == nil }()
		synctest.Wait()
		require.False(t, queued, "the window is full")
		s.resume(0)
		synctest.Wait()
		require.True(t, queued, "nobody told the Send that there is room")
	})
}
