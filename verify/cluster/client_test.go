package cluster

import (
	"context"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestCutEvent: a body that a deadline ends amid an event fails with the deadline, not with what half an event
// looks like as JSON.
func TestCutEvent(t *testing.T) {
	const whole = `data: {"choices":[{"text":"a","token_ids":[7]}]}` + "\n\n"
	for _, cut := range []string{`data: {"choi`, "data: ", "da", ""} {
		var c Completion
		body := io.MultiReader(strings.NewReader(whole+cut), iotest.ErrReader(context.DeadlineExceeded))
		require.ErrorIs(t, c.read(body, time.Now()), context.DeadlineExceeded, "cut after %q", cut)
		require.Equal(t, []int32{7}, c.Tokens)
	}
}

// TestCutBody: a body that ends without an error amid an event gives no finished completion.
func TestCutBody(t *testing.T) {
	var c Completion
	require.NoError(t, c.read(strings.NewReader(`data: {"choices":[{"text":"a","finish_reason":"stop"}]}`+"\n\ndata: [DO"), time.Now()))
	require.False(t, c.Finished)
}
