package plugin

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/internal/shm"
)

// maxSocketDir leaves room for the names that go-plugin adds: a socket's path has 107 bytes.
const maxSocketDir = 68

// SocketDir makes a private folder (0700) for a plugin's socket. A temporary folder whose path is too
// long for a socket, or that cannot be written to, is passed over for the user's runtime folder, and
// that for /tmp. The caller removes it. Errors name TMPDIR.
func SocketDir() (string, error) { return socketDir(SocketRoots()) }

func socketDir(roots []string) (string, error) {
	var failed error
	for _, root := range roots {
		dir, err := os.MkdirTemp(root, socketPrefix)
		if err == nil && len(dir) <= maxSocketDir {
			return dir, nil
		}
		if err == nil {
			err = errors.Join(fmt.Errorf("%s is too long for a socket's path", root), os.Remove(dir))
		}
		failed = errors.Join(failed, err)
	}
	return "", fmt.Errorf("no folder for the plugin's socket, set TMPDIR to a short one: %w", failed)
}

// SocketRoots are the folders to try, best first.
func SocketRoots() []string {
	roots := []string{os.TempDir()}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		roots = append(roots, dir)
	}
	return append(roots, filepath.Join("/run/user", strconv.Itoa(os.Getuid())), "/tmp")
}

// socketPrefix begins the name of every folder of a plugin's socket.
const socketPrefix = "kvport-plugin-"

// lockName is a file in such a folder. The host of the plugin holds its lock (flock): the kernel lets
// go of it however the host ends.
const lockName = "lock"

// How old a folder must be to be taken for one that was left behind: a host makes the folder first and
// its lock then, and somebody else's may have no lock.
const (
	staleLocked = 10 * time.Second
	staleBare   = time.Hour
)

// lockDir marks a folder as in use until the file is closed.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, &fs.PathError{Op: "flock", Path: f.Name(), Err: err}
	}
	return f, nil
}

// SweepSockets removes the socket folders that hosts of this user left behind when they were killed,
// and counts them.
func SweepSockets(roots []string, now time.Time) (removed int) {
	for _, root := range roots {
		removed += shm.Sweep(filepath.Join(root, socketPrefix+"*"), now, abandoned)
	}
	return removed
}

// abandoned reports whether the host of a folder is gone.
func abandoned(dir string, age time.Duration) bool {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return age > staleBare && os.IsNotExist(err)
	}
	defer f.Close()
	return age > staleLocked && unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
}

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
