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
	"encoding/hex"
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
	hintAt     = 24 // in the dialer's nonce: what is before it is random
	macSize    = sha256.Size
	maxAddress = 255
	goesOn     = 1
	refused    = 0

	proofLabel   = "kvport/proof/1"
	hintLabel    = "kvport/proof/hint/1"
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
	keys     []connector.Secret // any of them counts; the first is used where there is a choice
	about    []byte
	listener [nonceSize]byte
	dialer   [nonceSize]byte
	address  string // of both ends of the connection, as the dialer sees them: see between
}

func (p *proof) mac(key connector.Secret, role byte) []byte {
	h := hmac.New(sha256.New, key)
	for _, part := range [][]byte{[]byte(proofLabel), {role}, p.about, p.listener[:], p.dialer[:], []byte(p.address)} {
		var size [4]byte
		binary.LittleEndian.PutUint32(size[:], uint32(len(part)))
		_, _ = h.Write(size[:]) // never fails
		_, _ = h.Write(part)
	}
	return h.Sum(nil)
}

// nonce draws the dialer's nonce. Its end tells those who have the dialer's first key that it is the one to use,
// and is random to everybody else, also to a listener of an earlier version.
func (p *proof) nonce() {
	_, _ = rand.Read(p.dialer[:hintAt]) // never fails
	copy(p.dialer[hintAt:], p.hint(p.keys[0]))
}

func (p *proof) hint(key connector.Secret) []byte {
	h := hmac.New(sha256.New, key)
	_, _ = h.Write([]byte(hintLabel)) // never fails
	_, _ = h.Write(p.dialer[:hintAt])
	return h.Sum(nil)[:nonceSize-hintAt]
}

// hinted is the key that the dialer's nonce names; without one that we have, our first.
func (p *proof) hinted() connector.Secret {
	found := p.keys[0]
	for _, key := range p.keys {
		if hmac.Equal(p.dialer[hintAt:], p.hint(key)) {
			found = key
		}
	}
	return found
}

// proven is the key with which the listener made its HMAC; nil if that is none of ours.
func (p *proof) proven(mac []byte) (found connector.Secret) {
	for _, key := range p.keys {
		if hmac.Equal(mac, p.mac(key, listenerRole)) {
			found = key
		}
	}
	return found
}

// Prove is for the dialer of a plain connection. It sends hello, the dialer's first message, and the
// beginning of the proof. The function finish that it returns waits until the listener, which calls
// [Demand], has proved that it has key, and then proves the same to it. Between the two, the caller reads
// whatever the listener sends before its part of the proof. The caller must give conn a deadline. If the
// listener does not have the key, the error wraps connector.ErrIncompatible.
//
// While an operator replaces the key, either end may have more of them. The two then find one that both have, if
// the first key of one end is among those of the other.
func Prove(conn net.Conn, key connector.Secret, hello []byte, more ...connector.Secret) (finish func() error, err error) {
	p := &proof{keys: append([]connector.Secret{key}, more...), about: hello, address: between(conn.LocalAddr(), conn.RemoteAddr())}
	if len(p.address) > maxAddress {
		return nil, fmt.Errorf("prove the key to %s: its address is too long: %w", p.address, connector.ErrIncompatible)
	}
	p.nonce()
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
	key := p.proven(theirs[nonceSize:])
	if key == nil {
		return errOtherKey()
	}
	if _, err := conn.Write(p.mac(key, dialerRole)); err != nil {
		return fmt.Errorf("prove the key: %w", err)
	}
	return nil
}

// Demand is for the listener of a plain connection, after it has read the dialer's hello. It proves to the
// dialer, which calls [Prove], that it has key, and makes the dialer prove the same. Before that, the
// listener must neither take anything from the dialer nor give it anything. Demand waits for the dialer, so
// the caller must give conn a deadline. The error wraps connector.ErrIncompatible if the dialer does not
// have the key, or if a stranger forwards what the two say to each other because it has taken an address at
// which one of our engines listened before. As with [Prove], there may be more keys.
func Demand(conn net.Conn, key connector.Secret, hello []byte, more ...connector.Secret) error {
	p := &proof{keys: append([]connector.Secret{key}, more...), about: hello}
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
	use := p.hinted()
	if _, err := conn.Write(append(append([]byte{goesOn}, p.listener[:]...), p.mac(use, listenerRole)...)); err != nil {
		return fmt.Errorf("demand a proof of the key: %w", err)
	}
	var mac [macSize]byte
	if _, err := io.ReadFull(conn, mac[:]); err != nil {
		return fmt.Errorf("demand a proof of the key: %w", err)
	}
	if !hmac.Equal(mac[:], p.mac(use, dialerRole)) {
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
//
// While an operator replaces the key, either end may have more of them. The dialer names its first key as the server's
// name, and the listener names all of its keys as authorities, so that each shows a certificate of a key that both have.
func KeyTLS(key []byte, more ...[]byte) (*tls.Config, error) {
	config := &tls.Config{
		MinVersion: tls.VersionTLS13, ClientAuth: tls.RequireAnyClientCert, ClientCAs: x509.NewCertPool(),
		// Names and authorities prove nothing here: both sides check the key, in VerifyConnection.
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection does it
	}
	var publics []ed25519.PublicKey
	for _, k := range append([][]byte{key}, more...) {
		private, err := keyPair(k)
		if err != nil {
			return nil, err
		}
		public, ok := private.Public().(ed25519.PublicKey)
		if !ok {
			return nil, errors.New("shared key: no public key")
		}
		publics = append(publics, public)
		// Peers of earlier versions have a certificate of the plain name.
		for _, name := range []string{keyName(public), peerName} {
			cert, err := certify(private, name)
			if err != nil {
				return nil, err
			}
			config.ClientCAs.AddCert(cert.Leaf)
			if name != peerName {
				config.Certificates = append(config.Certificates, cert)
			}
		}
	}
	config.ServerName = keyName(publics[0])
	config.GetClientCertificate = func(asked *tls.CertificateRequestInfo) (*tls.Certificate, error) {
		for i := range config.Certificates {
			if asked.SupportsCertificate(&config.Certificates[i]) == nil {
				return &config.Certificates[i], nil
			}
		}
		return &config.Certificates[0], nil // a listener of an earlier version names none
	}
	config.VerifyConnection = func(s tls.ConnectionState) error {
		for _, public := range publics {
			if len(s.PeerCertificates) > 0 && public.Equal(s.PeerCertificates[0].PublicKey) {
				return nil
			}
		}
		return fmt.Errorf("the peer does not have our shared key: %w", connector.ErrIncompatible)
	}
	return config, nil
}

// peerName is the subject of a certificate of earlier versions.
const peerName = "kvport peer"

// keyName names a key pair, and says nothing of the key that it comes from.
func keyName(public ed25519.PublicKey) string {
	sum := sha256.Sum256(public)
	return hex.EncodeToString(sum[:8]) + ".kvport"
}

// keyPair derives a key pair from a key.
func keyPair(key []byte) (ed25519.PrivateKey, error) {
	if len(key) < 32 {
		return nil, fmt.Errorf("shared key has %d bytes, must have at least 32: %w", len(key), connector.ErrIncompatible)
	}
	seed, err := hkdf.Key(sha256.New, key, nil, "kvport/pipe/tcp/1", ed25519.SeedSize)
	if err != nil {
		return nil, err
	}
	return ed25519.NewKeyFromSeed(seed), nil
}

// certify makes a certificate of a key pair.
func certify(private ed25519.PrivateKey, name string) (cert tls.Certificate, err error) {
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<33, 0), // the certificate is valid as long as the key
	}
	if name != peerName {
		template.DNSNames = []string{name} // by which the listener's end of TLS finds it
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		return cert, fmt.Errorf("shared key: %w", err)
	}
	cert = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private}
	if cert.Leaf, err = x509.ParseCertificate(der); err != nil {
		return cert, fmt.Errorf("shared key: %w", err)
	}
	return cert, nil
}
