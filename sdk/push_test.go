package sdk

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// Blocks are pushed to the consumer that a request names, including those that another request computed;
// the consumer asks only for what did not come.
func TestPush(t *testing.T) {
	for _, await := range []bool{false, true} {
		w := &wires{}
		d := w.engine(t, "d", connector.RoleConsumer, pipe.Peers{Pushed: true, Wait: 3 * time.Second})
		to := "wire-0"
		p := w.engine(t, "p", connector.RoleProducer, pipe.Peers{Push: func(connector.RequestID) string { return to }, Await: await, Patience: time.Hour})
		ticket := p.save(1, 2, 3)
		require.Equal(t, 3, d.settled(ticket, 1, 2, 3))
		d.load(ticket, 1, 2, 3)
		require.Zero(t, d.count("received_blocks_total")-3)
		p.counts("pushed_blocks_total", 3)
		require.Zero(t, p.count("served_blocks_total"), "nothing was asked for")

		to = "nobody"
		began := time.Now()
		ticket = p.save(4, 5)
		require.Less(t, time.Since(began), time.Minute, "nobody waits for an hour where there is nobody")
		require.Equal(t, 2, d.settled(ticket, 4, 5), "what cannot be pushed is asked for")
		p.counts("served_blocks_total", 2)
		require.Eventually(t, func() bool { return p.count("push_failures_total") > 0 }, time.Minute, time.Millisecond)

		to = ""
		ticket = p.save(6)
		require.Equal(t, 1, d.settled(ticket, 6), "without a target everything is asked for")
		require.NotNil(t, PeerStats())
	}
}

// A consumer that does not expect blocks refuses them.
func TestPushRefused(t *testing.T) {
	w := &wires{}
	both := w.engine(t, "b", connector.RoleBoth, pipe.Peers{})
	p := w.engine(t, "p", connector.RoleProducer, pipe.Peers{Push: func(connector.RequestID) string { return "wire-0" }})
	ticket := p.save(1)
	require.Equal(t, 1, both.settled(ticket, 1))
	p.counts("served_blocks_total", 1)
}
