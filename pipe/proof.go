package pipe

import (
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"time"

	"github.com/kvport/kvport/connector"
)

// The two ends of a plain connection on one machine prove to each other that they have the same key,
// because other users of the machine can reach loopback as well. The dialer sends a nonce and both
// addresses of its connection. The listener answers with a nonce of its own and an HMAC-SHA256 over all of
// that, and the dialer answers with another HMAC. The listener sees the same two addresses, unless somebody
// is in between: no other connection can have them while this one exists. Nobody else can read or write a
// connection over loopback, so nothing after the handshake needs a proof. Beyond loopback, TLS is required
// (see [KeyTLS]).
const (
	nonceSize  = 32
	macSize    = sha256.Size
	maxAddress = 255
	goesOn     = 1
	refused    = 0

	proofLabel   = "kvport/proof/1"
	dialerRole   = 'd'
	listenerRole = 'l'
)

// errOtherKey is the error at the end with a wrong key. It tells the operator to give both ends the same
// key.
func errOtherKey() error {
	return fmt.Errorf("the peer's key is not ours: both engines need the same kvport.ticket_key_file, or run as one user of one machine: %w",
		connector.ErrIncompatible)
}

// proof holds what the HMACs cover.
type proof struct {
	key      connector.Secret
	about    []byte
	listener [nonceSize]byte
	dialer   [nonceSize]byte
	address  string // of both ends of the connection, as the dialer sees them: see between
}

func (p *proof) mac(role byte) []byte {
	h := hmac.New(sha256.New, p.key)
	for _, part := range [][]byte{[]byte(proofLabel), {role}, p.about, p.listener[:], p.dialer[:], []byte(p.address)} {
		var size [4]byte
		binary.LittleEndian.PutUint32(size[:], uint32(len(part)))
		_, _ = h.Write(size[:]) // never fails
		_, _ = h.Write(part)
	}
	return h.Sum(nil)
}

// Prove is for the dialer of a plain connection. It sends hello, the dialer's first message, and the
// beginning of the proof. The function finish that it returns waits until the listener, which calls
// [Demand], has proved that it has key, and then proves the same to it. Between the two, the caller reads
// whatever the listener sends before its part of the proof. The caller must give conn a deadline. If the
// listener does not have the key, the error wraps connector.ErrIncompatible.
func Prove(conn net.Conn, key connector.Secret, hello []byte) (finish func() error, err error) {
	p := &proof{key: key, about: hello, address: between(conn.LocalAddr(), conn.RemoteAddr())}
	if len(p.address) > maxAddress {
		return nil, fmt.Errorf("prove the key to %s: its address is too long: %w", p.address, connector.ErrIncompatible)
	}
	_, _ = rand.Read(p.dialer[:]) // never fails
	out := append(append([]byte(nil), hello...), p.dialer[:]...)
	if _, err := conn.Write(append(append(out, byte(len(p.address))), p.address...)); err != nil {
		return nil, fmt.Errorf("prove the key: %w", err)
	}
	return func() error { return p.finish(conn) }, nil
}

func (p *proof) finish(conn net.Conn) error {
	var verdict [1]byte
	if _, err := io.ReadFull(conn, verdict[:]); err != nil {
		return fmt.Errorf("prove the key: %w", err)
	}
	if verdict[0] != goesOn {
		return errBetween(p.address)
	}
	var theirs [nonceSize + macSize]byte
	if _, err := io.ReadFull(conn, theirs[:]); err != nil {
		return fmt.Errorf("prove the key: %w", err)
	}
	p.listener = [nonceSize]byte(theirs[:nonceSize])
	if !hmac.Equal(theirs[nonceSize:], p.mac(listenerRole)) {
		return errOtherKey()
	}
	if _, err := conn.Write(p.mac(dialerRole)); err != nil {
		return fmt.Errorf("prove the key: %w", err)
	}
	return nil
}

// Demand is for the listener of a plain connection, after it has read the dialer's hello. It proves to the
// dialer, which calls [Prove], that it has key, and makes the dialer prove the same. Before that, the
// listener must neither take anything from the dialer nor give it anything. Demand waits for the dialer, so
// the caller must give conn a deadline. The error wraps connector.ErrIncompatible if the dialer does not
// have the key, or if a stranger forwards what the two say to each other because it has taken an address at
// which one of our engines listened before.
func Demand(conn net.Conn, key connector.Secret, hello []byte) error {
	p := &proof{key: key, about: hello}
	var head [nonceSize + 1]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return fmt.Errorf("demand a proof of the key: %w", err)
	}
	p.dialer = [nonceSize]byte(head[:nonceSize])
	address := make([]byte, head[nonceSize])
	if _, err := io.ReadFull(conn, address); err != nil {
		return fmt.Errorf("demand a proof of the key: %w", err)
	}
	p.address = string(address)
	if p.address != between(conn.RemoteAddr(), conn.LocalAddr()) && !passedOnByUs(conn) {
		_, _ = conn.Write([]byte{refused})
		return errBetween(p.address)
	}
	_, _ = rand.Read(p.listener[:]) // never fails
	if _, err := conn.Write(append(append([]byte{goesOn}, p.listener[:]...), p.mac(listenerRole)...)); err != nil {
		return fmt.Errorf("demand a proof of the key: %w", err)
	}
	var mac [macSize]byte
	if _, err := io.ReadFull(conn, mac[:]); err != nil {
		return fmt.Errorf("demand a proof of the key: %w", err)
	}
	if !hmac.Equal(mac[:], p.mac(dialerRole)) {
		return errOtherKey()
	}
	return nil
}

// between names a connection by its two ends.
func between(dialer, listener net.Addr) string { return dialer.String() + " to " + listener.String() }

// errBetween says that somebody stands between the two ends.
func errBetween(address string) error {
	return fmt.Errorf("the dialer's connection is %s, and another user passes on what is said there and could read along: give both ends a key_file, which makes TLS of it: %w",
		address, connector.ErrIncompatible)
}

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
