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

const (
	lowestPort       = 10_000 // below are those of services that a machine usually has
	busOffset        = 10_000 // from the port of a Redis cluster's node to that of its bus
	defaultEphemeral = 32_768 // the first ephemeral port of Linux, unless it is configured
)

// FreePort is a port of loopback at which nobody listens, for a process that must know its own beforehand. It is below
// the ephemeral ports, which the kernel gives to whoever connects or listens without naming one, so nobody gets it by
// chance meanwhile. The same holds for the port that a node of a Redis cluster takes for its bus. Where ephemeral ports
// begin so low that there is no room below them, it is one of them.
func FreePort(ctx context.Context) (string, error) {
	end := firstEphemeral(portRange) - busOffset
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

// portRange says which ports are ephemeral: the first and the last.
const portRange = "/proc/sys/net/ipv4/ip_local_port_range"

// firstEphemeral is the first ephemeral port, as a file says, or the default if that leaves no room below it.
func firstEphemeral(file string) int {
	text, _ := os.ReadFile(file) //nolint:gosec // the caller's
	first, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\t")
	n, err := strconv.Atoi(first)
	if err != nil || n <= lowestPort+busOffset+1000 {
		return defaultEphemeral
	}
	return n
}
