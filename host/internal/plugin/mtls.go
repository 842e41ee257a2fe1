package plugin

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"time"
)

// clientCertKey is the environment variable in which a plugin finds the one certificate that it
// lets connect, as go-plugin's AutoMTLS has it.
const clientCertKey = "PLUGIN_CLIENT_CERT"

// certLife is how long the certificates of one plugin process are valid: longer than any runs.
const certLife = 30 * 365 * 24 * time.Hour

// newClientTLS makes the host's end of the mutual TLS with one plugin process, and the certificate
// in PEM to hand it. go-plugin adds the plugin's own certificate, the only one that is trusted, when
// the handshake line brings it.
//
// This is go-plugin's AutoMTLS, except for the curve. Its P-521 is refused by BoringSSL, the TLS of gRPC
// in C++, Python, Ruby and others, so that only plugins in Go could talk to us.
func newClientTLS() (*tls.Config, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("client key: %w", err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, nil, fmt.Errorf("client certificate: %w", err)
	}
	const name = "localhost" // what go-plugin's server calls itself
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: name, Organization: []string{"kvport"}}, DNSNames: []string{name},
		SerialNumber: serial, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(certLife),
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		IsCA:        true, BasicConstraintsValid: true, // it signs itself
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, nil, fmt.Errorf("client certificate: %w", err)
	}
	config := &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		RootCAs:      x509.NewCertPool(), // nobody is trusted until the handshake line has come
		MinVersion:   tls.VersionTLS12, ServerName: name,
	}
	return config, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}
