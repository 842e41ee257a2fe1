package multiconnector

import (
	"encoding/binary"
	"errors"

	"github.com/kvport/kvport/connector"
)

// A composite ticket is a version byte and sections: u16 length and name of a child, u32 length and
// that child's ticket. Lengths are big endian. Sections of children that the reader does not have
// are skipped, so that P and D need not have the same children.

const ticketVersion = 1

// maxTicketSections bounds a ticket of hostile bytes.
const maxTicketSections = 4 * MaxChildren

var errTicket = errors.New("composite ticket is malformed")

type section struct {
	child  string
	ticket []byte
}

func sealTicket(sections []section) []byte {
	if len(sections) == 0 {
		return nil
	}
	out := []byte{ticketVersion}
	for _, s := range sections {
		out = binary.BigEndian.AppendUint16(out, uint16(len(s.child)))
		out = append(out, s.child...)
		out = binary.BigEndian.AppendUint32(out, uint32(len(s.ticket)))
		out = append(out, s.ticket...)
	}
	return out
}

// openTicket reads a composite ticket. The sections share its bytes.
func openTicket(t []byte) ([]section, error) {
	if len(t) == 0 {
		return nil, nil
	}
	if t[0] != ticketVersion {
		return nil, errTicket
	}
	var out []section
	for rest := t[1:]; len(rest) > 0; {
		var name, ticket []byte
		var ok bool
		if name, rest, ok = cut(rest, 2); ok {
			ticket, rest, ok = cut(rest, 4)
		}
		if !ok || len(out) == maxTicketSections {
			return nil, errTicket
		}
		out = append(out, section{string(name), ticket})
	}
	return out, nil
}

// cut takes a field after a length of n bytes off b.
func cut(b []byte, n int) (field, rest []byte, ok bool) {
	if len(b) < n {
		return nil, nil, false
	}
	size := uint64(0)
	for _, c := range b[:n] {
		size = size<<8 | uint64(c)
	}
	b = b[n:]
	if uint64(len(b)) < size {
		return nil, nil, false
	}
	return b[:size], b[size:], true
}

// ticketOf is the part of a composite ticket that is for one child: nil when there is none.
func (m *Multi) ticketOf(child int, t connector.Ticket) connector.Ticket {
	sections, err := openTicket(t)
	if err != nil {
		return nil
	}
	for _, s := range sections {
		if s.child == m.children[child].Name {
			return append(connector.Ticket{}, s.ticket...)
		}
	}
	if t != nil && m.children[child].Info.Capabilities&connector.CanHold == 0 {
		return connector.Ticket{} // stores learn that there is one
	}
	return nil
}
