package remote

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/connector"
)

// cluster starts three nodes that share the slots. None is taken for dead, however busy the machine is, and what the
// first says about slots goes before what the others say: its epoch is the highest.
func cluster(t *testing.T) (nodes [3]*redistest.Server) {
	t.Helper()
	for i := range nodes {
		nodes[i] = server(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "3600000")
		require.NoError(t, nodes[i].Do(t.Context(), "cluster", "addslotsrange", firstSlot(i), firstSlot(i+1)-1))
		require.NoError(t, nodes[i].Do(t.Context(), "cluster", "set-config-epoch", len(nodes)-i))
	}
	for _, node := range nodes[1:] {
		host, port, err := net.SplitHostPort(node.Address)
		require.NoError(t, err)
		require.NoError(t, nodes[0].Do(t.Context(), "cluster", "meet", host, port))
	}
	agree(t, nodes, "info", "cluster_state:ok", "cluster_slots_ok:16384", "cluster_known_nodes:3")
	return nodes
}

// agree waits until a CLUSTER command says all of what is wanted on each node.
func agree(t *testing.T, nodes [3]*redistest.Server, command string, wanted ...string) {
	t.Helper()
	says := func(node *redistest.Server, want string) bool {
		c := node.Client()
		text, err := c.Do(t.Context(), "cluster", command).Text()
		return errors.Join(err, c.Close()) == nil && strings.Contains(text, want)
	}
	for _, node := range nodes {
		for _, want := range wanted {
			require.Eventually(t, func() bool { return says(node, want) }, 5*time.Minute, 50*time.Millisecond, want)
		}
	}
}

// firstSlot is the first of the slots of node n of three.
func firstSlot(n int) int { return n * 16384 / 3 }

// Blocks are spread over the nodes of a cluster, and found again when slots have moved.
func TestCluster(t *testing.T) {
	nodes := cluster(t)
	a, b := nodes[0], nodes[1]
	s := open(t, Options{Addresses: []string{a.Address}, Cluster: true, Prefix: "c:"})
	full, empty := items(60, 3000, 3000, 16)
	require.NoError(t, s.Put(t.Context(), full))
	require.Equal(t, 60, found(t, s, full))
	require.NoError(t, s.Get(t.Context(), empty))
	requireEqual(t, full, empty)
	for _, node := range nodes {
		keys, err := node.Keys(t.Context())
		require.NoError(t, err)
		require.Greater(t, len(keys), 5, "each node has blocks")
		require.Less(t, len(keys), 40)
	}

	// All slots of b go to a, with what b forgets: those blocks are gone, the others are not. Only a gets the command: b
	// becomes its replica as soon as a's gossip reaches it, and would refuse a command that comes after that.
	kept, err := a.Keys(t.Context())
	require.NoError(t, err)
	require.NoError(t, b.Do(t.Context(), "flushall"))
	c := a.Client()
	defer func() { require.NoError(t, c.Close()) }()
	id, err := c.Do(t.Context(), "cluster", "myid").Text()
	require.NoError(t, err)
	pipe := c.Pipeline()
	for slot := firstSlot(1); slot < firstSlot(2); slot++ {
		pipe.Do(t.Context(), "cluster", "setslot", slot, "node", id)
	}
	_, err = pipe.Exec(t.Context())
	require.NoError(t, err)
	agree(t, nodes, "nodes", fmt.Sprintf(" 0-%d\n", firstSlot(2)-1))
	for end := time.Now().Add(time.Minute); ; {
		err := errors.Join(s.Put(t.Context(), full), s.Get(t.Context(), empty))
		if err == nil {
			break
		}
		require.True(t, time.Now().Before(end), "after the slots moved: %v", err)
	}
	requireEqual(t, full, empty)
	keys, err := a.Keys(t.Context())
	require.NoError(t, err)
	require.Subset(t, keys, kept)
	require.Greater(t, len(keys), len(kept))

	// A client that knows nothing of clusters is told so.
	_, err = Open(t.Context(), patient(Options{Addresses: []string{b.Address}, Prefix: "c:"}))
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "redis-cluster://")
}

// A node that dies takes its blocks with it and no others.
func TestClusterNodeDies(t *testing.T) {
	nodes := cluster(t)
	a, b := nodes[0], nodes[1]
	for _, node := range nodes {
		require.NoError(t, node.Do(t.Context(), "config", "set", "cluster-require-full-coverage", "no"))
	}
	s := open(t, Options{Addresses: []string{a.Address, b.Address}, Cluster: true, Timeout: time.Hour})
	full, empty := items(20, 100, 16)
	require.NoError(t, s.Put(t.Context(), full))
	b.Kill()
	start := time.Now()
	err := s.Get(t.Context(), empty)
	require.ErrorIs(t, err, connector.ErrGone)
	require.Less(t, time.Since(start), time.Minute, "nobody waits for it")
	var failed *connector.ItemError
	require.ErrorAs(t, err, &failed)
	bad := map[int]bool{}
	for _, i := range failed.Items {
		bad[i] = true
	}
	for i := range full {
		if !bad[i] {
			requireEqual(t, full[i:i+1], empty[i:i+1])
		}
	}
}

// tlsFront ends TLS in front of a server that has none.
func tlsFront(t *testing.T, target string) (address string, roots *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"cache.test"},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	parsed, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	roots = x509.NewCertPool()
	roots.AddCert(parsed)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS12})
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { join(c, target) })
		}
	})
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		wg.Wait()
	})
	return l.Addr().String(), roots
}

// join passes bytes on both ways until either end closes.
func join(c net.Conn, target string) {
	defer c.Close()
	s, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", target)
	if err != nil {
		return
	}
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = io.Copy(s, c); _ = s.Close() })
	_, _ = io.Copy(c, s)
	_ = c.Close()
	_ = s.Close()
	wg.Wait()
}

func TestTLS(t *testing.T) {
	srv := server(t)
	address, roots := tlsFront(t, srv.Address)
	s, err := Open(t.Context(), patient(Options{Addresses: []string{address}, Timeout: time.Hour, TLS: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}))
	require.NoError(t, err)
	full, empty := items(3, 1<<20, 16)
	require.NoError(t, s.Put(t.Context(), full))
	require.NoError(t, s.Get(t.Context(), empty))
	requireEqual(t, full, empty)

	require.NoError(t, srv.Pause())
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	start := time.Now()
	require.ErrorIs(t, s.Get(ctx, empty), context.Canceled)
	require.Less(t, time.Since(start), time.Minute, "cancelling reaches through TLS")
	require.NoError(t, srv.Resume())
	require.NoError(t, s.Close())

	// A certificate that nobody we trust has signed, or of another name: nothing is sent.
	for _, config := range []*tls.Config{{MinVersion: tls.VersionTLS12}, {RootCAs: roots, ServerName: "other.test", MinVersion: tls.VersionTLS12}} {
		var log strings.Builder
		s, err := Open(t.Context(), patient(Options{Addresses: []string{address}, TLS: config, Log: textLog(&log)}))
		require.NoError(t, err)
		require.Zero(t, found(t, s, full))
		require.Contains(t, log.String(), "certificate")
		require.NoError(t, s.Close())
	}
}
