package pipe

import (
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"time"

	"github.com/kvport/kvport/connector"
)

// KeyTLS makes a mutual TLS config from a key of at least 32 bytes that all peers share. It derives a key
// pair from the key; each side shows a certificate for that pair and requires one from the other. A process
// that does not have the key can neither connect nor pose as a listener.
func KeyTLS(key []byte) (*tls.Config, error) {
	if len(key) < 32 {
		return nil, fmt.Errorf("shared key has %d bytes, must have at least 32: %w", len(key), connector.ErrIncompatible)
	}
	seed, err := hkdf.Key(sha256.New, key, nil, "kvport/pipe/tcp/1", ed25519.SeedSize)
	if err != nil {
		return nil, err
	}
	private := ed25519.NewKeyFromSeed(seed)
	public, ok := private.Public().(ed25519.PublicKey)
	if !ok {
		return nil, errors.New("shared key: no public key")
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kvport peer"},
		NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<33, 0), // the certificate is valid as long as the key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, private)
	if err != nil {
		return nil, fmt.Errorf("shared key: %w", err)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, ClientAuth: tls.RequireAnyClientCert,
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: private}},
		// Names and authorities have no meaning here: both sides check the key, below.
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection does it
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 0 || !public.Equal(s.PeerCertificates[0].PublicKey) {
				return fmt.Errorf("the peer does not have our shared key: %w", connector.ErrIncompatible)
			}
			return nil
		},
	}, nil
}
