package tcp

import (
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// A connection begins with the dialer's hello (link, direction, frames delivered) and the listener's answer
// (verdict, frames delivered). If there is a key, the proof begins after the hello: the listener first
// answers verdictProve, both ends prove that they have the key (see [pipe.Prove]), and until that has
// succeeded the listener keeps nothing of the hello. From then on, frames flow in one direction and
// acknowledgements in the other.
//
// Without a key, or with TLS, everything is as in version 1, which had no keys. A peer of version 1 reads a
// hello of version 2, which has the same length, answers verdictVersion, and hangs up.
const (
	helloMagic   = 0x6b767048 // "kvpH"
	plainVersion = 1
	keyedVersion = 2
	helloSize    = 4 + 1 + 1 + 1 + 16 + 8
	answerSize   = 4 + 1 + 8
)

// The listener's verdicts.
const (
	verdictNew     = 1 // the link begins
	verdictAgain   = 2 // the link continues
	verdictUnknown = 3 // the link is over: this end has forgotten it
	verdictVersion = 4 // the listener's version takes the place of the frames; version 1 says 0
	verdictProve   = 5 // the dialer must prove that it has the key
)

type linkID [16]byte

// hello is the dialer's first message.
type hello struct {
	link      linkID
	outward   bool   // the dialer sends on this connection
	keyed     bool   // both ends must prove that they have the key
	again     bool   // the link existed before
	delivered uint64 // frames that the dialer has received on the link, if it is the receiver
}

func (h *hello) encode() []byte {
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, helloSize), helloMagic)
	b = append(b, h.version(), flag(h.outward), flag(h.again))
	b = append(b, h.link[:]...)
	return binary.LittleEndian.AppendUint64(b, h.delivered)
}

func (h *hello) version() byte { return version(h.keyed) }

func version(keyed bool) byte {
	if keyed {
		return keyedVersion
	}
	return plainVersion
}

func flag(set bool) byte {
	if set {
		return 1
	}
	return 0
}

// parseHello reads a hello. Errors wrap connector.ErrIncompatible.
func parseHello(b []byte) (hello, error) {
	if len(b) != helloSize || binary.LittleEndian.Uint32(b) != helloMagic || b[5] > 1 || b[6] > 1 {
		return hello{}, fmt.Errorf("the peer that connected does not speak kvport's protocol: %w", connector.ErrIncompatible)
	}
	if b[4] != plainVersion && b[4] != keyedVersion {
		return hello{}, otherVersion(uint64(b[4]))
	}
	return hello{
		link: linkID(b[7:]), outward: b[5] == 1, keyed: b[4] == keyedVersion, again: b[6] == 1,
		delivered: binary.LittleEndian.Uint64(b[23:]),
	}, nil
}

// otherVersion is the error for a peer that speaks another version of the protocol.
func otherVersion(theirs uint64) error {
	why := "which is unknown here"
	switch theirs {
	case plainVersion:
		why = "which does not prove a link key, but this end requires one: the peer is an older release of the plugin, or has a key_file that this end lacks"
	case keyedVersion:
		why = "which requires a link key, but this end has none: this end has a key_file that the peer lacks, or no key at all"
	}
	return fmt.Errorf("peer speaks version %d, %s: %w", theirs, why, connector.ErrIncompatible)
}

func encodeAnswer(verdict byte, delivered uint64) []byte {
	b := append(binary.LittleEndian.AppendUint32(nil, helloMagic), verdict)
	return binary.LittleEndian.AppendUint64(b, delivered)
}

// readAnswer reads the listener's verdict.
func readAnswer(conn net.Conn) (verdict byte, delivered uint64, err error) {
	var b [answerSize]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return 0, 0, err
	}
	if binary.LittleEndian.Uint32(b[:]) != helloMagic {
		return 0, 0, fmt.Errorf("the listener does not speak kvport's protocol: %w", connector.ErrIncompatible)
	}
	switch verdict = b[4]; verdict {
	case verdictNew, verdictAgain, verdictProve:
		return verdict, binary.LittleEndian.Uint64(b[5:]), nil
	case verdictUnknown:
		return verdict, 0, fmt.Errorf("the peer has forgotten the link: %w", connector.ErrGone)
	case verdictVersion:
		return verdict, 0, otherVersion(max(1, binary.LittleEndian.Uint64(b[5:])))
	}
	return verdict, 0, fmt.Errorf("the peer refused us, verdict %d: %w", verdict, connector.ErrIncompatible)
}

// KeyTLS is [pipe.KeyTLS].
func KeyTLS(key []byte) (*tls.Config, error) { return pipe.KeyTLS(key) }
