package pipe

import (
	"net"
	"os"
	"slices"
	"strconv"
)

// party is who is at the other end of a connection, as far as this machine can tell: a user of it, or another machine.
type party struct {
	name  string
	other bool // it is another user of this machine than ours
}

// parties knows the other ends of connections. It reads the kernel's tables once for all of them, since that
// takes time where there are many sockets.
type parties struct {
	read   func(path string) ([]byte, error)
	tables map[string]string
}

func newParties() *parties { return &parties{os.ReadFile, map[string]string{}} }

// of is the party at the other end of a connection.
func (p *parties) of(conn net.Conn) party {
	peer, isTCP := conn.RemoteAddr().(*net.TCPAddr)
	own, alike := conn.LocalAddr().(*net.TCPAddr)
	switch {
	case !isTCP || !alike: // a Unix socket is in a folder that others cannot enter
		return party{}
	case peer.IP.IsLoopback():
		return p.onLoopback(peer, own)
	}
	return party{name: peer.IP.String()}
}

// onLoopback looks for the user whose socket is the other end. Where there is no table all are one party.
func (p *parties) onLoopback(peer, own *net.TCPAddr) party {
	path := tableOf(peer)
	table, known := p.tables[path]
	if !known {
		data, err := p.read(path)
		if err != nil {
			return party{}
		}
		table = string(data)
		p.tables[path] = table
	}
	uid, known := ownerOf(table, peer, own)
	if !known { // the socket is closed, or is closing
		return party{name: "nobody", other: true}
	}
	return party{name: "user " + strconv.Itoa(uid), other: uid != os.Getuid()}
}

// excess is which of some handshakes, the oldest first, has to go so that the last of them may stay; -1: none. Another
// user of this machine has at most maxOthers of them. When there are more than maxPending, the party that has most
// loses its oldest: whoever connects without end takes nobody else's place. who looks for those that are not known yet;
// if it is nil they count as one party.
func excess(all []*handshake, who *parties) int {
	count, loser := map[string]int{}, ""
	for _, h := range all {
		if who != nil && h.party == nil {
			found := who.of(h.conn)
			h.party = &found
		}
		count[h.name()]++
	}
	newest := all[len(all)-1]
	switch {
	case newest.party != nil && newest.party.other && count[newest.name()] > maxOthers:
		loser = newest.name()
	case len(all) <= maxPending:
		return -1
	default:
		loser = all[0].name()
		for _, h := range all {
			if count[h.name()] > count[loser] {
				loser = h.name()
			}
		}
	}
	return slices.IndexFunc(all, func(h *handshake) bool { return h.name() == loser })
}

// name is that of the party; empty as long as it is not known.
func (h *handshake) name() string {
	if h.party == nil {
		return ""
	}
	return h.party.name
}
