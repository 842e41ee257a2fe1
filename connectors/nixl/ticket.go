package nixl

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
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
	LeaseMS int64            `json:"lease_ms"`        // without a sign of life
	Turn    bool             `json:"turn,omitempty"`  // of an earlier turn: the prompt may go on otherwise
	Last    []byte           `json:"last,omitempty"`  // key of the last full block: it stands for all before it
	Lasts   [][]byte         `json:"lasts,omitempty"` // the same of the groups behind the first
	Life    string           `json:"life,omitempty"`  // of the producer
	IDs     []byte           `json:"ids,omitempty"`   // of the blocks, see packIDs; without them the producer is asked
	Slot    int              `json:"slot,omitempty"`  // of its board; 0: none
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
	if err == nil && (t.Version != ticketVersion || t.Hold == 0 || len(t.Secret) != secretSize || len(t.Last) > len(connector.BlockKey{}) || t.Tokens <= 0 || t.Tokens > maxTokens || t.LeaseMS <= 0 || t.LeaseMS > maxLeaseMS) {
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

// maxIDs bounds the blocks that a ticket names, in bytes: it travels through routers. The more blocks there are the less
// the question costs beside them.
const maxIDs = 2 << 10

// packIDs puts blocks into few bytes: of each group their number, and of each block the distance from the
// one before.
func packIDs(blocks []connector.Block, groups int) []byte {
	var out []byte
	for g := range groups {
		var n uint64
		for _, b := range blocks {
			if int(b.Group) == g {
				n++
			}
		}
		out = binary.AppendUvarint(out, n)
		last := connector.BlockID(0)
		for _, b := range blocks {
			if int(b.Group) == g {
				out = binary.AppendVarint(out, int64(b.ID)-int64(last))
				last = b.ID
			}
		}
	}
	return out
}

// unpackIDs is packIDs' other end. The blocks have no keys: see names.
func unpackIDs(data []byte, groups int) ([]heldBlock, error) {
	out := make([]heldBlock, 0, len(data))
	for g := range groups {
		n, rest, ok := uvarint(data)
		if data = rest; !ok || n > uint64(len(data)) {
			return nil, fmt.Errorf("ids of a ticket: %d blocks of group %d in %d bytes: %w", n, g, len(data), connector.ErrGone)
		}
		last := int64(0)
		for range n {
			d, size := binary.Varint(data)
			if last += d; size <= 0 || last < 0 || last > math.MaxInt32 {
				return nil, fmt.Errorf("ids of a ticket: block %d of group %d: %w", last, g, connector.ErrGone)
			}
			data = data[size:]
			out = append(out, heldBlock{Group: uint16(g), ID: connector.BlockID(last)})
		}
	}
	if len(data) > 0 {
		return nil, fmt.Errorf("ids of a ticket: %d bytes too many: %w", len(data), connector.ErrGone)
	}
	return out, nil
}

// names says whether the ticket says where a transfer's blocks are, and that they are those: of each group
// the last full block has the key that it says. A ticket that was changed can say anything; its sum, which the
// producer knows, does not.
func (t *ticket) names(x *connector.Transfer, l *connector.Layout) bool {
	if len(t.IDs) == 0 || t.Life == "" || t.Turn {
		return false
	}
	sure := false
	for g := range l.Groups {
		size := l.Groups[g].BlockTokens
		keyed, found := false, false
		ours, _ := ofGroup(uint16(g), x, &answer{})
		place := (x.From+x.Tokens+size-1)/size - len(ours) // of the first
		last := t.lastOf(g)
		for i, b := range ours {
			if b.Key == (connector.BlockKey{}) {
				continue
			}
			keyed = true
			found = found || place+i == t.Tokens/size-1 && bytes.Equal(b.Key[:], last)
		}
		if keyed && !found {
			return false
		}
		sure = sure || found
	}
	return sure
}

func (t *ticket) lastOf(group int) []byte {
	switch {
	case group == 0:
		return t.Last
	case group <= len(t.Lasts):
		return t.Lasts[group-1]
	}
	return nil
}
