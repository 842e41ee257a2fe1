package p2pnccl

import (
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
)

// maxPeers bounds the list of engines.
const maxPeers = 4096

// anyPort stands for all ports in the list of engines.
const anyPort = "*"

// peers are the engines that a request id may name which nobody has signed.
type peers []peer

// peer is one entry: engines at one name, or at one address or prefix of addresses.
type peer struct {
	prefix netip.Prefix // not valid: host counts
	host   string       // in lower case
	port   string       // or anyPort
}

// listed reads the list of engines.
func (c *Config) listed() (list peers, err error) {
	if len(c.Peers) > maxPeers {
		return nil, bad("peers", "it has %d entries, at most %d: use prefixes", len(c.Peers), maxPeers)
	}
	for _, text := range c.Peers {
		p, ok := parsePeer(text)
		if !ok {
			return nil, bad("peers", "%q is not HOST:PORT, where HOST may be a prefix such as 10.0.0.0/24 and PORT may be %s", text, anyPort)
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
	if p.port = port; port != anyPort {
		if _, p.port, err = net.SplitHostPort(join(host, port)); err != nil {
			return peer{}, false
		}
	}
	if p.prefix, err = netip.ParsePrefix(host); err == nil {
		return p, true
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		addr = addr.Unmap()
		p.prefix = netip.PrefixFrom(addr, addr.BitLen())
		return p, addr.Zone() == ""
	}
	p.host = strings.ToLower(host)
	return p, hostName().MatchString(host)
}

// hostName is what a name of a host looks like, here as in a request id.
func hostName() *regexp.Regexp { return regexp.MustCompile(`^[0-9A-Za-z.\-]{1,253}$`) }

// have reports whether the list has the engine at an address, which is HOST:PORT. A name counts as it is written and is not looked
// up: what is listed as an address is not found by a name.
func (l peers) have(address string) bool {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	addr, err := netip.ParseAddr(host)
	isAddress := err == nil
	return slices.ContainsFunc(l, func(p peer) bool {
		switch {
		case p.port != anyPort && p.port != port:
			return false
		case isAddress:
			return p.prefix.IsValid() && p.prefix.Contains(addr.Unmap())
		}
		return p.host != "" && p.host == strings.ToLower(host)
	})
}
