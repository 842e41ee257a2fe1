package p2pnccl

import (
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	maxPeers  = 4096 // entries of the list of engines
	leastBits = 8    // of a prefix: a shorter one lists everybody
	anyPort   = "*"  // stands for all ports in the list of engines
)

// peers are the engines that a request id may name which nobody has signed.
type peers []peer

// peer is one entry: engines at one name, or at one address or prefix of addresses.
type peer struct {
	prefix netip.Prefix // not valid: host counts
	host   string
	port   string // or anyPort
}

// listed reads the list of engines.
func (c *Config) listed() (list peers, err error) {
	if len(c.Peers) > maxPeers {
		return nil, bad("peers", "it has %d entries, at most %d: use prefixes", len(c.Peers), maxPeers)
	}
	for _, text := range c.Peers {
		p, ok := parsePeer(text)
		switch {
		case !ok:
			return nil, bad("peers", "%q is not HOST:PORT, where HOST may be a prefix such as 10.0.0.0/24 and PORT may be %s", text, anyPort)
		case p.prefix.IsValid() && p.prefix.Bits() < leastBits:
			return nil, bad("peers", "%q lists everybody: whoever writes a request id could then have this engine connect anywhere. Name the network of the engines, such as 10.0.0.0/24:%s", text, anyPort)
		}
		list = append(list, p)
	}
	return list, nil
}

// parsePeer reads one entry.
func parsePeer(text string) (p peer, ok bool) {
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return peer{}, false
	}
	p.port = port
	if n, err := strconv.ParseUint(port, 10, 16); port != anyPort && (err != nil || fmt.Sprint(n) != port || n == 0) {
		return peer{}, false
	}
	if p.prefix, err = netip.ParsePrefix(host); err == nil {
		return p, !p.prefix.Addr().Is4In6() // which would list nobody: such addresses count as those of IPv4
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		addr = addr.Unmap()
		p.prefix = netip.PrefixFrom(addr, addr.BitLen())
		return p, addr.Zone() == "" && !addr.IsUnspecified()
	}
	p.host = host
	return p, hostName().MatchString(host)
}

// hostName is what a name of a host looks like, here as in a request id.
func hostName() *regexp.Regexp { return regexp.MustCompile(`^[0-9A-Za-z.\-]{1,253}$`) }

// find gives the address of an engine as the list has it, so that there is one for each engine however an id writes it; empty: it is
// not listed. A name counts only where that name is listed, and is not looked up: what is listed as an address is not found by a name.
func (l peers) find(address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return ""
	}
	addr, err := netip.ParseAddr(host)
	addr, isAddress := addr.Unmap(), err == nil
	if isAddress && (addr.IsUnspecified() || addr.IsMulticast() || addr.Zone() != "") { // no engine is there
		return ""
	}
	i := slices.IndexFunc(l, func(p peer) bool {
		switch {
		case p.port != anyPort && p.port != port:
			return false
		case isAddress:
			return p.prefix.IsValid() && p.prefix.Contains(addr)
		}
		return p.host != "" && strings.EqualFold(p.host, host)
	})
	switch {
	case i < 0:
		return ""
	case isAddress:
		return net.JoinHostPort(addr.String(), port)
	}
	return net.JoinHostPort(l[i].host, port)
}

// anywhere gives the entries that list all ports of other machines: whoever writes an id can have this engine connect to what is no engine.
func (c *Config) anywhere() (entries []string) {
	for _, text := range c.Peers {
		if p, ok := parsePeer(text); ok && p.port == anyPort && !strings.EqualFold(p.host, "localhost") && (!p.prefix.IsValid() || !p.prefix.Addr().IsLoopback()) {
			entries = append(entries, text)
		}
	}
	return entries
}
