package machine

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
)

// Ports of 10,000 and above belong to no service that a machine usually has. Where the kernel does not say from
// where on it hands ports out, that is Linux's default.
const (
	lowestPort     = 10_000
	besides        = 10_000
	firstHandedOut = 32_768
)

// FreePort is a port of loopback at which nobody listens, for a process that must know its own beforehand. It is below
// those that the kernel gives to whoever connects or listens without naming one, as far as they leave room, so nobody
// gets it by chance meanwhile. So is the port that is 10,000 above, which a node of a Redis cluster takes as well.
func FreePort(ctx context.Context) (string, error) {
	end := handedOut("/proc/sys/net/ipv4/ip_local_port_range") - besides
	var err error
	for range 100 {
		port := strconv.Itoa(lowestPort + rand.IntN(end-lowestPort)) //nolint:gosec // no secret
		var l net.Listener
		if l, err = new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", port)); err == nil {
			return port, l.Close()
		}
	}
	return "", fmt.Errorf("no free port from %d to %d: %w", lowestPort, end-1, err)
}

// handedOut is the first port that the kernel hands out, as a file says.
func handedOut(file string) int {
	text, _ := os.ReadFile(file) //nolint:gosec // the caller's
	first, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\t")
	n, err := strconv.Atoi(first)
	if err != nil || n <= lowestPort+besides+1000 {
		return firstHandedOut
	}
	return n
}
