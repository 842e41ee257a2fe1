package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/keyring"
)

// maxPEM bounds a file of certificates or a key, in bytes.
const maxPEM = 1 << 20

// tlsFiles are the files of one end of TLS connections. Those of a server have a certificate; those of a client may.
type tlsFiles struct {
	cert, key string
	ca        string // of the other end
}

// addTLS adds the flags of a server's.
func (f *tlsFiles) addTLS(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.cert, "tls-cert-file", "", "file with the server's certificate and those that lead to its CA, in PEM: the port speaks HTTPS alone; SIGHUP makes kvport read it again")
	flags.StringVar(&f.key, "tls-key-file", "", "file with the key of --tls-cert-file, in PEM, readable by its owner only")
	flags.StringVar(&f.ca, "tls-client-ca-file", "", "file with the CAs of clients' certificates, in PEM; every connection must have one then, those of probes too")
}

// check refuses flags that do not go together. names are the flags of the certificate, the key and the CA.
func (f *tlsFiles) check(names [3]string) error {
	switch {
	case (f.cert == "") != (f.key == ""):
		return fmt.Errorf("--%s and --%s go together", names[0], names[1])
	case f.ca != "" && f.cert == "" && names == serverTLS():
		return fmt.Errorf("--%s is for --%s", names[2], names[0])
	}
	return nil
}

func serverTLS() [3]string {
	return [3]string{"tls-cert-file", "tls-key-file", "tls-client-ca-file"}
}

func upstreamTLS() [3]string {
	return [3]string{"upstream-cert-file", "upstream-key-file", "upstream-ca-file"}
}

// certificates reads the pair; nil if there is none.
func (f *tlsFiles) certificates() ([]tls.Certificate, error) {
	if f.cert == "" {
		return nil, nil
	}
	cert, err := host.ReadFile(f.cert, maxPEM)
	if err != nil {
		return nil, err
	}
	key, err := keyring.ReadOwn(f.key, maxPEM)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.key, err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%s and %s: %w", f.cert, f.key, err)
	}
	return []tls.Certificate{pair}, nil
}

// pool reads the CAs; nil if there are none.
func (f *tlsFiles) pool() (*x509.CertPool, error) {
	if f.ca == "" {
		return nil, nil
	}
	data, err := host.ReadFile(f.ca, maxPEM)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(data) {
		return nil, errors.New(f.ca + " has no certificate in PEM")
	}
	return pool, nil
}

// server is what a server does with the files. HTTP/2 is not offered: its streams share a connection, of which
// the gate counts the requests.
func (f *tlsFiles) server() (*tls.Config, error) {
	pairs, err := f.certificates()
	if err != nil {
		return nil, err
	}
	pool, err := f.pool()
	if err != nil {
		return nil, err
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: pairs, ClientCAs: pool, NextProtos: []string{"http/1.1"}}
	if pool != nil {
		c.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return c, nil
}

// client is what a client does with the files; nil if there are none.
func (f *tlsFiles) client() (*tls.Config, error) {
	if *f == (tlsFiles{}) {
		return nil, nil
	}
	pairs, err := f.certificates()
	if err != nil {
		return nil, err
	}
	pool, err := f.pool()
	if err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: pairs, RootCAs: pool}, nil
}

// serverCertificate is a server's part of TLS, which may change while it serves. The zero value is none.
type serverCertificate struct {
	files  tlsFiles
	config atomic.Pointer[tls.Config]
}

// load reads the files; what cannot be read leaves what was there.
func (s *serverCertificate) load() error {
	if s.files.cert == "" {
		return nil
	}
	c, err := s.files.server()
	if err != nil {
		return err
	}
	s.config.Store(c)
	return nil
}

// open checks the files and reads them for the first time.
func (s *serverCertificate) open() error {
	if err := s.files.check(serverTLS()); err != nil {
		return err
	}
	if err := s.load(); err != nil {
		return fmt.Errorf("--tls-cert-file: %w", err)
	}
	return nil
}

// reload reads the files again, for connections that come later.
func (s *serverCertificate) reload() {
	err := s.load()
	if err != nil {
		slog.Error("SIGHUP: the certificate stays as it is", "err", err)
	}
	apikeys.Act{Action: "reload", Result: apikeys.ResultOf(err)}.Log(slog.Default(), "file", s.files.cert)
}

// around makes a listener speak TLS, if there is a certificate.
func (s *serverCertificate) around(l net.Listener) net.Listener {
	if s.config.Load() == nil {
		return l
	}
	return tls.NewListener(l, &tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return s.config.Load(), nil },
	})
}

// scheme is how URLs of the server begin.
func (s *serverCertificate) scheme() string {
	if s.config.Load() == nil {
		return "http"
	}
	return "https"
}
