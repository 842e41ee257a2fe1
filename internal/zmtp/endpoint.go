package zmtp

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// Endpoint is a place where a socket listens.
type Endpoint struct {
	Network string // tcp or unix
	Address string // HOST:PORT, where no host means all of them; or a path
}

// ParseEndpoint reads ipc://PATH and tcp://HOST:PORT, where * stands for all addresses of the host. Names without a
// file, inproc and other transports are refused.
func ParseEndpoint(s string) (Endpoint, error) {
	scheme, rest, ok := strings.Cut(s, "://")
	switch {
	case ok && scheme == "ipc" && rest != "" && rest[0] != '@' && !strings.ContainsRune(rest, 0):
		return Endpoint{"unix", rest}, nil
	case ok && scheme == "tcp":
		host, port, err := net.SplitHostPort(rest)
		if _, bad := strconv.ParseUint(port, 10, 16); err != nil || bad != nil || strings.ContainsAny(host, "/ ") {
			break
		}
		if host == "*" {
			host = ""
		}
		return Endpoint{"tcp", net.JoinHostPort(host, port)}, nil
	}
	return Endpoint{}, fmt.Errorf("%q is no endpoint, want ipc://PATH or tcp://HOST:PORT", s)
}

// String is the endpoint as ZeroMQ writes it.
func (e Endpoint) String() string {
	if e.Network == "unix" {
		return "ipc://" + e.Address
	}
	if port, all := strings.CutPrefix(e.Address, ":"); all {
		return "tcp://*:" + port
	}
	return "tcp://" + e.Address
}
