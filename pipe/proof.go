package pipe

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"net"

	"github.com/kvport/kvport/connector"
)

// Two ends of a plain connection on one machine prove to each other that they have the same key: other users
// of the machine reach loopback as well as we do. The dialer sends a nonce and both addresses of its connection.
// The listener answers with a nonce of its own and an HMAC-SHA256 over all of that, and the dialer with
// another one. The two addresses are those of the listener's end too, or somebody stands in between: no other
// connection can have them while this one has. Nobody else can read or write a connection over loopback, so
// nothing after that needs a proof; beyond loopback it takes TLS (see [KeyTLS]).
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

// errOtherKey is what the end with a wrong key hears: for its operator, who has to give both ends the same.
func errOtherKey() error {
	return fmt.Errorf("the peer's key is not ours: both engines need the same kvport.ticket_key_file, or run as one user of one machine: %w",
		connector.ErrIncompatible)
}

// proof is what an HMAC is made over.
type proof struct {
	key      connector.Secret
	about    []byte
	listener [nonceSize]byte
	dialer   [nonceSize]byte
	address  string // of the connection, as the dialer sees it: see between
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

// Prove is for the dialer of a plain connection. It sends hello, its first words, and what begins the proof, and
// gives then what begins the rest of it: finish waits for the listener, which calls [Demand], to prove that
// it has key, and proves the same to it. What the listener says before its part of the proof is for the caller
// to read, in between. Give conn a deadline. A listener that does not have the key is connector.ErrIncompatible.
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

// Demand is for the listener of a plain connection, when it has read the dialer's hello: it proves to the dialer,
// which calls [Prove], that it has key, and has the dialer prove the same. Nothing may be taken from or given
// to the dialer before. It waits for the dialer: give conn a deadline. A dialer that does not have the key is
// connector.ErrIncompatible, and so is a stranger who passes on what the two say to each other: somebody who has
// taken an address at which one of our engines listened before.
func Demand(conn net.Conn, key connector.Secret, hello []byte) error {
	p := &proof{key: key, about: hello}
	var head [nonceSize + 1]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return fmt.Errorf("have the key proven: %w", err)
	}
	p.dialer = [nonceSize]byte(head[:nonceSize])
	address := make([]byte, head[nonceSize])
	if _, err := io.ReadFull(conn, address); err != nil {
		return fmt.Errorf("have the key proven: %w", err)
	}
	p.address = string(address)
	if p.address != between(conn.RemoteAddr(), conn.LocalAddr()) && !passedOnByUs(conn) {
		_, _ = conn.Write([]byte{refused})
		return errBetween(p.address)
	}
	_, _ = rand.Read(p.listener[:]) // never fails
	if _, err := conn.Write(append(append([]byte{goesOn}, p.listener[:]...), p.mac(listenerRole)...)); err != nil {
		return fmt.Errorf("have the key proven: %w", err)
	}
	var mac [macSize]byte
	if _, err := io.ReadFull(conn, mac[:]); err != nil {
		return fmt.Errorf("have the key proven: %w", err)
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
