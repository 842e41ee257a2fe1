// Package remote keeps KV blocks in a Redis or Valkey server, or a cluster of them.
//
// A block is one value under one key: it is there as a whole or not at all, and one command reads or
// writes it. Loads go from the socket into the paged cache and saves from there to the socket without a
// copy in between; in a cluster, saves gather the block once. Every call ends with its context, whatever
// the server does: a server that is stopped, slow, full, restarted or gone costs the blocks that it was
// asked for, which are computed instead.
package remote

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/kvport/kvport/connector"
)

// The limits and defaults of Options.
const (
	DefaultPrefix      = "kvport:"
	DefaultTimeout     = 3 * time.Second
	DefaultConnections = 4
	MaxConnections     = 64
	MaxValue           = 512 << 20 // what a server takes by default (proto-max-bulk-len)
	DefaultMaxValue    = MaxValue
)

// Options say which server, how to reach it and how values are kept.
type Options struct {
	Network   string   // tcp or unix
	Addresses []string // host:port, or one path; several are nodes of a cluster to begin with
	Cluster   bool     // blocks are spread over the slots of a cluster
	DB        int      // number of the database; 0 in a cluster

	Username string      // ACL user; empty: the default user
	Password string      // never logged and in no error
	TLS      *tls.Config // nil: plain text

	Prefix      string        // of every key
	TTL         time.Duration // of a block since it was last saved; 0: until the server evicts it
	Timeout     time.Duration // longest time of one call; a shorter context wins
	Connections int           // calls at the same time, each on a connection of its own
	MaxValue    int           // larger blocks are not stored, in bytes
	Log         *slog.Logger  // nil: nothing is logged

	// CredentialField names the config field or environment variable that the password came from, for
	// errors.
	CredentialField string

	openTimeout time.Duration // longest time of the first contact, for which a start waits; 0: the constant of that name
}

// withDefaults fills in what is zero.
func (o Options) withDefaults() Options {
	o.Network = cmp.Or(o.Network, "tcp")
	o.Timeout = cmp.Or(o.Timeout, DefaultTimeout)
	o.Connections = cmp.Or(o.Connections, DefaultConnections)
	o.MaxValue = cmp.Or(o.MaxValue, DefaultMaxValue)
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	o.CredentialField = cmp.Or(o.CredentialField, "password")
	o.openTimeout = cmp.Or(o.openTimeout, openTimeout)
	return o
}

// validate reports the first option that cannot work.
func (o *Options) validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), connector.ErrIncompatible)
	}
	switch {
	case len(o.Addresses) == 0:
		return bad("no address of a server")
	case len(o.Addresses) > 1 && !o.Cluster:
		return bad("%d addresses, want one unless it is a cluster", len(o.Addresses))
	case o.DB < 0 || o.DB > 0 && o.Cluster:
		return bad("database %d, want 0 in a cluster and 0 or more elsewhere", o.DB)
	case o.TTL < 0 || o.TTL > 0 && o.TTL < time.Millisecond:
		return bad("time to live is %v, want 0 or at least 1ms", o.TTL)
	case o.Timeout < 0:
		return bad("time-out is %v", o.Timeout)
	case o.Connections < 1 || o.Connections > MaxConnections:
		return bad("connections is %d, want 1..%d", o.Connections, MaxConnections)
	case o.MaxValue < headerSize || o.MaxValue > MaxValue:
		return bad("largest value is %d bytes, want %d..%d", o.MaxValue, headerSize, MaxValue)
	}
	return nil
}

// ErrPlain says that blocks would cross a network in plain text.
var ErrPlain = errors.New("plain text beyond this machine")

// Private reports whether what is sent to the servers cannot be read on a network: they are on this
// machine or TLS is on. Names other than localhost count as far away. The error wraps ErrPlain.
func (o *Options) Private() error {
	address := o.Beyond()
	if o.TLS != nil || address == "" {
		return nil
	}
	if _, _, err := net.SplitHostPort(address); err != nil {
		return fmt.Errorf("%w: %w", ErrPlain, err)
	}
	return fmt.Errorf("%s: %w", address, ErrPlain)
}

// Beyond is the first address that is not this machine's alone; empty if there is none. Names other than localhost count
// as far away, and so do addresses of this machine that others reach.
func (o *Options) Beyond() string {
	if o.Network == "unix" {
		return ""
	}
	for _, address := range o.Addresses {
		host, _, err := net.SplitHostPort(address)
		if ip, bad := netip.ParseAddr(host); err == nil && (host == "localhost" || bad == nil && ip.IsLoopback()) {
			continue
		}
		return address
	}
	return ""
}

const defaultPort = "6379"

// ParseURL reads where a server is:
//
//	redis://HOST[:PORT][/DB]             one server
//	rediss://HOST[:PORT][/DB]            one server, TLS
//	unix:///PATH                         one server, a socket on this machine
//	redis-cluster://HOST:PORT,HOST:PORT  a cluster, by some of its nodes
//	rediss-cluster://…                   a cluster, TLS
//
// valkey and valkeys stand for redis and rediss. A user or password in it is refused, since URLs end
// up in logs and process lists. No error repeats the text.
func ParseURL(text string) (Options, error) {
	scheme, rest, ok := strings.Cut(text, "://")
	if !ok {
		return Options{}, errors.New("is no URL, want such as redis://127.0.0.1:6379")
	}
	if strings.Contains(rest, "@") {
		return Options{}, errors.New("has a user or a password in it; they have fields of their own")
	}
	plain := strings.Replace(scheme, "valkey", "redis", 1)
	secure := strings.HasPrefix(plain, "rediss")
	var o Options
	switch plain {
	case "unix":
		return unixOptions(rest)
	case "redis", "rediss":
	case "redis-cluster", "rediss-cluster":
		o.Cluster = true
	default:
		return Options{}, fmt.Errorf("has the scheme %q, want redis, rediss, redis-cluster, rediss-cluster or unix", scheme)
	}
	o.Network = "tcp"
	if secure {
		o.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	hosts, path, _ := strings.Cut(rest, "/")
	for host := range strings.SplitSeq(hosts, ",") {
		address, err := hostPort(host)
		if err != nil {
			return Options{}, err
		}
		o.Addresses = append(o.Addresses, address)
	}
	if len(o.Addresses) > 1 && !o.Cluster {
		return Options{}, fmt.Errorf("names %d servers; for a cluster write %s-cluster://", len(o.Addresses), scheme)
	}
	return o, o.database(path)
}

// database reads the end of a URL.
func (o *Options) database(path string) error {
	if path == "" {
		return nil
	}
	db, err := strconv.Atoi(path)
	if err != nil || db < 0 || db > 0 && o.Cluster {
		return errors.New("does not end with the number of a database (a cluster has only 0)")
	}
	o.DB = db
	return nil
}

func unixOptions(path string) (Options, error) {
	if !strings.HasPrefix(path, "/") {
		return Options{}, errors.New("names no absolute path, want such as unix:///run/redis.sock")
	}
	return Options{Network: "unix", Addresses: []string{path}}, nil
}

// hostPort checks one host and adds the usual port if it names none.
func hostPort(text string) (string, error) {
	u, err := url.Parse("//" + text)
	if err != nil || u.Hostname() == "" || u.RawQuery != "" || u.Fragment != "" {
		return "", errors.New("has no host that could be read, want such as redis://127.0.0.1:6379")
	}
	port := u.Port()
	if port == "" {
		port = defaultPort
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", fmt.Errorf("has the port %q, want 1..65535", port)
	}
	address := net.JoinHostPort(u.Hostname(), port)
	if _, _, err := net.SplitHostPort(address); err != nil { // url.Parse lets a bracket pass that ends nothing
		return "", errors.New("has no host that could be read, want such as redis://127.0.0.1:6379")
	}
	return address, nil
}
