package plugin

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"encoding/pem"
	"testing"

	"github.com/stretchr/testify/require"
)

// What a plugin gets is a client's certificate that trusts itself, on a curve that gRPC in every
// language knows; the key stays here.
func TestClientCertificate(t *testing.T) {
	config, text, err := newClientTLS()
	require.NoError(t, err)
	require.NotContains(t, string(text), "PRIVATE")
	block, rest := pem.Decode(text)
	require.Empty(t, rest)
	cert, err := x509.ParseCertificate(block.Bytes)
	require.NoError(t, err)
	public, ok := cert.PublicKey.(*ecdsa.PublicKey)
	require.True(t, ok)
	require.Equal(t, elliptic.P256(), public.Curve)

	pool := x509.NewCertPool()
	pool.AddCert(cert)
	_, err = cert.Verify(x509.VerifyOptions{DNSName: "localhost", Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	require.NoError(t, err)
	_, err = cert.Verify(x509.VerifyOptions{Roots: config.RootCAs})
	require.Error(t, err, "nobody is trusted before the handshake line")

	_, other, err := newClientTLS()
	require.NoError(t, err)
	require.NotEqual(t, text, other, "one for each process")
}
