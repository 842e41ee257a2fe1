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

// A connection begins with the dialer's hello (link, direction, frames delivered) and the listener's
// answer (verdict, frames delivered). With a key the proof begins behind the hello, the listener answers
// verdictProve before, both prove that they have it (see [pipe.Prove]), and until that was right the listener
// keeps nothing of the hello. From then on frames flow in one direction, and acknowledgements in the other.
//
// Without a key, or with TLS, all is as in the first version, which knew no keys. It reads a hello of version
// 2, which has the same length, answers verdictVersion, and hangs up.
const (
	helloMagic   = 0x6b767048 // "kvpH"
	plainVersion = 1
	keyedVersion = 2
	helloSize    = 4 + 1 + 1 + 1 + 16 + 8
	answerSize   = 4 + 1 + 8
)

// The listener's verdicts.
const (
	verdictNew     = 1 // a link that begins
	verdictAgain   = 2 // a link that goes on
	verdictUnknown = 3 // a link that is over: this end has forgotten it
	verdictVersion = 4 // with the listener's version in the place of the frames; the first one says 0
	verdictProve   = 5 // prove that you have the key
)

type linkID [16]byte

// hello is what a dialer says first.
type hello struct {
	link      linkID
	outward   bool   // the dialer sends on this connection
	keyed     bool   // both ends are to prove that they have the key
	again     bool   // the link existed before
	delivered uint64 // frames that the dialer has received on it, where it receives
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
		return hello{}, fmt.Errorf("what connected is no kvport: %w", connector.ErrIncompatible)
	}
	if b[4] != plainVersion && b[4] != keyedVersion {
		return hello{}, otherVersion(uint64(b[4]))
	}
	return hello{
		link: linkID(b[7:]), outward: b[5] == 1, keyed: b[4] == keyedVersion, again: b[6] == 1,
		delivered: binary.LittleEndian.Uint64(b[23:]),
	}, nil
}

// otherVersion says why a peer that speaks a version of the protocol cannot be talked to.
func otherVersion(theirs uint64) error {
	why := "we do not know it"
	switch theirs {
	case plainVersion:
		why = "which proves no link key, and we require one: it is an older release of the plugin, or has a key_file that we lack"
	case keyedVersion:
		why = "which requires a link key, and we have none: we have a key_file that it lacks, or no key at all"
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
		return 0, 0, fmt.Errorf("what listens is no kvport: %w", connector.ErrIncompatible)
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
