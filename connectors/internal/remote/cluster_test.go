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

// cluster starts three nodes that share the slots.
func cluster(t *testing.T) (nodes [3]*redistest.Server) {
	t.Helper()
	for i := range nodes {
		nodes[i] = server(t, "--cluster-enabled", "yes")
		require.NoError(t, nodes[i].Do(t.Context(), "cluster", "addslotsrange", firstSlot(i), firstSlot(i+1)-1))
	}
	for _, node := range nodes[1:] {
		host, port, err := net.SplitHostPort(node.Address)
		require.NoError(t, err)
		require.NoError(t, nodes[0].Do(t.Context(), "cluster", "meet", host, port))
	}
	require.Eventually(t, func() bool {
		for _, node := range nodes {
			if !clusterOK(t, node) {
				return false
			}
		}
		return true
	}, time.Minute, 50*time.Millisecond)
	return nodes
}

// firstSlot is the first of the slots of node n of three.
func firstSlot(n int) int { return n * 16384 / 3 }

func clusterOK(t *testing.T, s *redistest.Server) bool {
	t.Helper()
	c := s.Client()
	info, err := c.ClusterInfo(t.Context()).Result()
	require.NoError(t, err)
	require.NoError(t, c.Close())
	return strings.Contains(info, "cluster_state:ok") && strings.Contains(info, "cluster_slots_ok:16384") && strings.Contains(info, "cluster_known_nodes:3")
}

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

	// All slots of b go to a, with what b forgets: those blocks are gone, the others are not.
	kept, err := a.Keys(t.Context())
	require.NoError(t, err)
	id := nodeID(t, a)
	require.NoError(t, b.Do(t.Context(), "flushall"))
	for _, node := range nodes {
		c := node.Client()
		pipe := c.Pipeline()
		for slot := firstSlot(1); slot < firstSlot(2); slot++ {
			pipe.Do(t.Context(), "cluster", "setslot", slot, "node", id)
		}
		_, err := pipe.Exec(t.Context())
		require.NoError(t, err)
		require.NoError(t, c.Close())
	}
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
	_, err = Open(t.Context(), Options{Addresses: []string{b.Address}, Prefix: "c:"})
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "redis-cluster://")
}

func nodeID(t *testing.T, s *redistest.Server) string {
	t.Helper()
	c := s.Client()
	id, err := c.Do(t.Context(), "cluster", "myid").Text()
	require.NoError(t, err)
	require.NoError(t, c.Close())
	return id
}

// A node that dies takes its blocks with it and no others.
func TestClusterNodeDies(t *testing.T) {
	nodes := cluster(t)
	a, b := nodes[0], nodes[1]
	for _, node := range nodes {
		require.NoError(t, node.Do(t.Context(), "config", "set", "cluster-require-full-coverage", "no"))
	}
	s := open(t, Options{Addresses: []string{a.Address, b.Address}, Cluster: true, Timeout: time.Second})
	full, empty := items(20, 100, 16)
	require.NoError(t, s.Put(t.Context(), full))
	b.Kill()
	start := time.Now()
	err := s.Get(t.Context(), empty)
	require.ErrorIs(t, err, connector.ErrGone)
	require.Less(t, time.Since(start), 5*time.Second)
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
	s, err := Open(t.Context(), Options{Addresses: []string{address}, TLS: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}})
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
	require.Less(t, time.Since(start), 2*time.Second, "cancelling reaches through TLS")
	require.NoError(t, srv.Resume())
	require.NoError(t, s.Close())

	// A certificate that nobody we trust has signed, or of another name: nothing is sent.
	for _, config := range []*tls.Config{{MinVersion: tls.VersionTLS12}, {RootCAs: roots, ServerName: "other.test", MinVersion: tls.VersionTLS12}} {
		var log strings.Builder
		s, err := Open(t.Context(), Options{Addresses: []string{address}, TLS: config, Log: textLog(&log)})
		require.NoError(t, err)
		require.Zero(t, found(t, s, full))
		require.Contains(t, log.String(), "certificate")
		require.NoError(t, s.Close())
	}
}
