package tracker

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// TestWeakEnded: what the next turn may want keeps no block, whatever the Holder answers; who does not save has
// nothing to offer.
func TestWeakEnded(t *testing.T) {
	for role, held := range map[connector.Role]connector.HoldID{connector.RoleBoth: 7, connector.RoleConsumer: 0, connector.RoleProducer: 0} {
		b := newBench(t, func(c *Config) { c.Can, c.Role = connector.CanHold, role })
		b.got(b.Step(b.now, &connector.Step{ID: 10, Ended: []connector.Ended{{Request: "r", Tokens: 40, Remote: true, Weak: true, Blocks: blocks(2)}}}, nil))
		b.got(b.FinishAnswered(b.now, one[Finish](b).ID, []connector.Hold{{ID: 7}}, nil))
		e := b.event()
		require.False(t, e.Held)
		require.Equal(t, held, e.Hold.ID)
		require.Equal(t, held != 0, e.Ticket != nil)
		if e.Ticket != nil {
			require.Zero(t, e.Ticket.Lease)
		}
		require.Empty(t, b.Pins())
		require.True(t, b.Idle())
	}
}
