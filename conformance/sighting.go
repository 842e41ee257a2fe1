package conformance

import (
	"context"
	"fmt"
	"net"
)

// sighting remembers for a run, whose cases come one after another, which case found the servers behind the relays (@PROXY:HOST:PORT@) last.
type sighting struct {
	last string // the case
	lost bool   // they were not found after it
}

// look says what keeps a case from saying anything of the connector: that a server is not there. It is empty if all are. first reports whether
// no case has said so before.
func (s *sighting) look(ctx context.Context, h Harness, id string) (why string, first bool) {
	owner, ok := h.(interface{ behindRelays() []string })
	if s == nil || !ok {
		return "", false
	}
	for _, address := range owner.behindRelays() {
		conn, err := (&net.Dialer{Timeout: soon}).DialContext(ctx, "tcp", address)
		if err == nil {
			_ = conn.Close() // nothing was sent
			continue
		}
		first, s.lost = !s.lost, true
		if s.last == "" {
			return fmt.Sprintf("no server is at %s", address), first
		}
		return fmt.Sprintf("no server is at %s since case %s", address, s.last), first
	}
	s.last, s.lost = id, false
	return "", false
}
