package remote

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
)

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
