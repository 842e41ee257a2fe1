package main

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/host"
)

// drainTime is how long a signalled process may take to finish what it has, by default; closeTime is
// what the engine and its plugin have of it at least.
const (
	drainTime = 10 * time.Second
	closeTime = 2 * time.Second
)

// listenFlags are the flags of commands that listen.
type listenFlags struct {
	host       string
	port       int
	apiKeyFile string
	open       bool

	allowedHosts   []string
	maxConnections int
	drainTimeout   time.Duration
}

func (f *listenFlags) add(cmd *cobra.Command, port int) {
	flags := cmd.Flags()
	flags.StringVar(&f.host, "host", "127.0.0.1", "address to listen on")
	flags.IntVar(&f.port, "port", port, "port to listen on; 0 picks a free one, see the ready line")
	flags.StringVar(&f.apiKeyFile, "api-key-file", "", "file with API keys, one a line; clients send one as bearer token; SIGHUP makes kvport read it again")
	flags.BoolVar(&f.open, "allow-unauthenticated", false, "listen beyond loopback without API keys")
	flags.StringSliceVar(&f.allowedHosts, "allowed-host", nil, "names that the Host header may have in addition to localhost and --host; beyond loopback any name is accepted unless one is given")
	flags.IntVar(&f.maxConnections, "max-connections", 0, "connections at once at most, of which the longest idle one makes room for a new one (default from the limit of open files)")
	flags.DurationVar(&f.drainTimeout, "drain-timeout", drainTime, "how long the process may take to end after SIGTERM or SIGINT; requests that run have four fifths of it")
}

// listener checks the flags and opens the port.
func (f *listenFlags) listen() (*net.TCPListener, *keyring, error) {
	if f.port < 0 || f.port > 65535 {
		return nil, nil, fmt.Errorf("--port is %d, want 0 to 65535", f.port)
	}
	if err := f.checkLimits(); err != nil {
		return nil, nil, err
	}
	var keys *keyring
	if f.apiKeyFile != "" {
		var err error
		if keys, err = readKeys(f.apiKeyFile); err != nil {
			return nil, nil, fmt.Errorf("--api-key-file: %w", err)
		}
	}
	addr, err := net.ResolveTCPAddr("tcp", net.JoinHostPort(f.host, strconv.Itoa(f.port)))
	if err != nil {
		return nil, nil, fmt.Errorf("--host: %w", err)
	}
	if !addr.IP.IsLoopback() && keys == nil && !f.open {
		return nil, nil, fmt.Errorf("--host %q is not loopback: give --api-key-file, or --allow-unauthenticated to let anybody in", f.host)
	}
	l, err := net.ListenTCP("tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, nil, fmt.Errorf("--port: %d is taken, another process listens there; give another one, or 0 for a free one: %w", f.port, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, nil, fmt.Errorf("--host: this machine has no address %s: %w", addr.IP, err)
	case err != nil:
		return nil, nil, fail(err)
	}
	return l, keys, nil
}

// checkLimits refuses limits that cannot work.
func (f *listenFlags) checkLimits() error {
	most := descriptors() / 2
	switch {
	case f.drainTimeout < 0:
		return fmt.Errorf("--drain-timeout is %s, want 0s or more", f.drainTimeout)
	case f.maxConnections != 0 && (f.maxConnections < fewestConnections || f.maxConnections > most):
		return fmt.Errorf("--max-connections is %d, want %d to %d, half of the files that this process may open", f.maxConnections, fewestConnections, most)
	}
	return nil
}

// connections is how many there may be.
func (f *listenFlags) connections() int {
	if f.maxConnections > 0 {
		return f.maxConnections
	}
	return defaultConnections()
}

// inFlight is how many requests may run at once: fewer than there are connections, so that a health check
// always gets through.
func (f *listenFlags) inFlight(most int) int {
	return min(most, f.connections()*3/4)
}

// keyring knows the hashes of the API keys.
type keyring struct{ hashes [][sha256.Size]byte }

func readKeys(path string) (*keyring, error) {
	data, err := host.ReadFile(path, maxConfig)
	if err != nil {
		return nil, err
	}
	if st, err := os.Stat(path); err == nil && st.Mode().Perm()&0o077 != 0 {
		slog.Warn("API key file can be read by others", "file", path, "mode", st.Mode().Perm().String())
	}
	k := &keyring{}
	for line := range bytes.Lines(data) {
		if key := bytes.TrimSpace(line); len(key) > 0 {
			k.hashes = append(k.hashes, sha256.Sum256(key))
		}
	}
	if len(k.hashes) == 0 {
		return nil, errors.New(path + " has no keys")
	}
	return k, nil
}

// allows compares with every key in constant time.
func (k *keyring) allows(authorization string) bool {
	scheme, key, _ := strings.Cut(authorization, " ")
	hash := sha256.Sum256([]byte(strings.TrimSpace(key)))
	found := 0
	for _, known := range k.hashes {
		found |= subtle.ConstantTimeCompare(hash[:], known[:])
	}
	return found == 1 && strings.EqualFold(scheme, "Bearer")
}
