package sdk

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// More silent links than a producer serves at a time keep no consumer out: the oldest of them end.
func TestSilentLinksKeepNobodyOut(t *testing.T) {
	w := &wires{}
	p := w.engine(t, "p", connector.RoleProducer, pipe.Peers{})
	ticket := p.save(1, 2)
	var silent []pipe.Link
	for range 300 {
		l, err := w.Dial(t.Context(), "wire-0")
		require.NoError(t, err)
		silent = append(silent, l)
	}
	d := w.engine(t, "d", connector.RoleConsumer, pipe.Peers{})
	require.Equal(t, 2, d.settled(ticket, 1, 2))
	d.load(ticket, 1, 2)

	require.Eventually(t, func() bool { // they are closed beside the link that takes their place
		ended := 0
		for _, l := range silent {
			select {
			case <-l.In.(*strand).closed:
				ended++
			default:
			}
		}
		return ended >= len(silent)-256
	}, time.Minute, time.Millisecond)
	require.Equal(t, 2, d.settled(ticket, 1, 2), "who says something stays")
}
