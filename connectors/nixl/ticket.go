package nixl

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"

	"github.com/kvport/kvport/connector"
)

const ticketVersion = 1

// ticket is where a consumer finds the blocks of one ended request. It comes signed, and is believed as
// far as a peer that has the ticket key.
type ticket struct {
	Version int              `json:"v"`
	Address string           `json:"addr"` // of the producer's side channel
	Hold    connector.HoldID `json:"hold"`
	Secret  []byte           `json:"secret"` // without it the producer gives nothing
	Tokens  int              `json:"tokens"`
	LeaseMS int64            `json:"lease_ms"` // without a sign of life
	World   int              `json:"world,omitempty"`
	Turn    bool             `json:"turn,omitempty"` // of an earlier turn: the prompt may go on otherwise
	Last    []byte           `json:"last,omitempty"` // key of the last full block: it stands for all before it
}

const (
	secretSize = 16
	maxLeaseMS = 600_000
)

// parseTicket reads a ticket. Errors wrap connector.ErrGone: to whom the ticket means nothing, the
// blocks are not there.
func parseTicket(data connector.Ticket) (ticket, error) {
	var t ticket
	err := json.Unmarshal(data, &t)
	if err == nil && (t.Version != ticketVersion || t.Hold == 0 || len(t.Secret) != secretSize || len(t.Last) > len(connector.BlockKey{}) || t.Tokens <= 0 || t.Tokens > maxTokens || t.LeaseMS <= 0 || t.LeaseMS > maxLeaseMS || t.World < 0 || t.World > maxWorld) {
		err = fmt.Errorf("version %d for hold %d of %d tokens", t.Version, t.Hold, t.Tokens)
	}
	if err == nil {
		_, _, err = net.SplitHostPort(t.Address)
	}
	if err != nil {
		return ticket{}, fmt.Errorf("not a ticket of this connector: %w: %w", err, connector.ErrGone)
	}
	return t, nil
}

// fits says whether the ticket is for a query's prompt, as far as full blocks of size tokens tell.
func (t *ticket) fits(q *connector.Query, size int) bool {
	n := t.Tokens / size
	return t.Turn || n == 0 || n <= len(q.Keys) && bytes.Equal(q.Keys[n-1][:], t.Last)
}

func (t *ticket) encode() ([]byte, error) { return json.Marshal(t) }
