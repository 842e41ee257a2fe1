package tracker

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// What a Holder keeps is offered as far as it goes; other offers stay cut.
func TestHeldOffersEndAnywhere(t *testing.T) {
	for _, c := range []struct {
		can          connector.Capability
		ticket       connector.Ticket
		tokens, want int
	}{
		{connector.CanHold, connector.Ticket{1}, 70, 70},
		{connector.CanHold, connector.Ticket{1}, 67, 67},
		{connector.CanHold, nil, 70, 64},
		{0, connector.Ticket{1}, 70, 64},
	} {
		b := newBench(t, func(cfg *Config) { cfg.Can = c.can })
		q := connector.Query{Request: "r", Tokens: 70, Keys: make([]connector.BlockKey, 4), Ticket: c.ticket}
		require.True(t, b.ask(q, 0))
		b.got(b.Matched(b.now, one[Ask](b).ID, connector.Match{Tokens: c.tokens}, nil))
		require.Equal(t, connector.Match{Tokens: c.want, Async: true}, b.Match(b.now, "r"), "%+v", c)
	}
}

// With groups a load leaves nothing when one of them has nothing to go on from.
func TestEmptyLoadOfGroups(t *testing.T) {
	for failed, denied := range map[connector.BlockID]bool{0: true, 1: false, 2: true, 3: true} {
		b := newBench(t, func(c *Config) {
			c.Groups = append(c.Groups, connector.Group{BlockTokens: 16, Policy: connector.PolicyTrailing, Trailing: 2})
		})
		moved := blocks(4)
		moved[2].Group, moved[3].Group = 1, 1
		b.got(b.Step(b.now, &connector.Step{ID: 9, Arrived: []connector.Query{{Request: "r"}}, Admitted: []connector.Transfer{
			{Request: "r", Tokens: 32, Blocks: moved},
		}}, nil))
		b.done(one[Move](b), Outcome{Corrupt: []connector.BlockID{failed}})
		require.Equal(t, []connector.BlockID{failed}, b.event().Failed)
		require.Equal(t, !denied, b.ask(prompt(4), 0), "block %d", failed)
	}
}
