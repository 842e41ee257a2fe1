package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/engine/server"
	"github.com/kvport/kvport/sdk/host"
)

// drainTime is how long a signalled process may take to finish what it has.
const drainTime = 10 * time.Second

// listenFlags are the flags of commands that listen.
type listenFlags struct {
	host       string
	port       int
	apiKeyFile string
	open       bool
}

func (f *listenFlags) add(cmd *cobra.Command, port int) {
	flags := cmd.Flags()
	flags.StringVar(&f.host, "host", "127.0.0.1", "address to listen on")
	flags.IntVar(&f.port, "port", port, "port to listen on; 0 picks a free one, see the ready line")
	flags.StringVar(&f.apiKeyFile, "api-key-file", "", "file with API keys, one a line; clients send one as bearer token")
	flags.BoolVar(&f.open, "allow-unauthenticated", false, "listen beyond loopback without API keys")
}

// front is an HTTP handler that can be told to refuse new requests.
type front interface {
	http.Handler
	Drain()
}

// listener checks the flags and opens the port.
func (f *listenFlags) listen() (*net.TCPListener, *keyring, error) {
	if f.port < 0 || f.port > 65535 {
		return nil, nil, fmt.Errorf("--port is %d, want 0 to 65535", f.port)
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
	if err != nil {
		return nil, nil, fail(err)
	}
	return l, keys, nil
}

// serveHTTP announces the listener and serves it until ctx ends, then lets running requests finish
// until the deadline that it returns, or ends them.
func serveHTTP(ctx context.Context, cmd *cobra.Command, l net.Listener, h front, keys *keyring) (deadline time.Time, err error) {
	var handler http.Handler = h
	if keys != nil {
		handler = keys.guard(h)
	}
	srv := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(slog.Default().Handler(), slog.LevelDebug),
	}
	ended := make(chan error, 1)
	go func() { ended <- srv.Serve(l) }()
	fmt.Fprintf(cmd.OutOrStdout(), "kvport: ready url=http://%s\n", l.Addr())
	select {
	case err := <-ended:
		return time.Now().Add(drainTime), err
	case <-ctx.Done():
	}
	h.Drain()
	deadline = time.Now().Add(drainTime)
	slog.Info("draining", "seconds", drainTime.Seconds())
	// A fifth of the time is for what comes after: the engine and its plugin.
	wait, cancel := context.WithDeadline(context.Background(), deadline.Add(-drainTime/5))
	defer cancel()
	if err := srv.Shutdown(wait); err != nil {
		slog.Warn("requests are cut off", "err", err)
		_ = srv.Close() // its error is the listener's, which Shutdown has closed
	}
	return deadline, nil
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

// guard lets only requests with a key through, and health checks.
func (k *keyring) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/health" && !k.allows(r.Header.Get("Authorization")) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			e := &server.Error{
				Status: http.StatusUnauthorized, Kind: "invalid_request_error",
				Code: "invalid_api_key", Message: "the Authorization header has no valid API key: want Bearer KEY",
			}
			e.Write(w)
			return
		}
		next.ServeHTTP(w, r)
	})
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
