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
// answer (verdict, frames delivered). From then on frames flow in one direction, and acknowledgements
// in the other.
const (
	helloMagic   = 0x6b767048 // "kvpH"
	helloVersion = 1
	helloSize    = 4 + 1 + 1 + 1 + 16 + 8
	answerSize   = 4 + 1 + 8
)

// The listener's verdicts.
const (
	verdictNew     = 1 // a link that begins
	verdictAgain   = 2 // a link that goes on
	verdictUnknown = 3 // a link that is over: this end has forgotten it
	verdictVersion = 4
)

type linkID [16]byte

// hello is what a dialer says first.
type hello struct {
	link      linkID
	outward   bool   // the dialer sends on this connection
	again     bool   // the link existed before
	delivered uint64 // frames that the dialer has received on it, where it receives
}

func (h *hello) encode() []byte {
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, helloSize), helloMagic)
	b = append(b, helloVersion, flag(h.outward), flag(h.again))
	b = append(b, h.link[:]...)
	return binary.LittleEndian.AppendUint64(b, h.delivered)
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
	if b[4] != helloVersion {
		return hello{}, fmt.Errorf("peer speaks version %d, we %d: %w", b[4], helloVersion, connector.ErrIncompatible)
	}
	return hello{link: linkID(b[7:]), outward: b[5] == 1, again: b[6] == 1, delivered: binary.LittleEndian.Uint64(b[23:])}, nil
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
	case verdictNew, verdictAgain:
		return verdict, binary.LittleEndian.Uint64(b[5:]), nil
	case verdictUnknown:
		return verdict, 0, fmt.Errorf("the peer has forgotten the link: %w", connector.ErrGone)
	}
	return verdict, 0, fmt.Errorf("the peer refused us, verdict %d: %w", verdict, connector.ErrIncompatible)
}

// KeyTLS is [pipe.KeyTLS].
func KeyTLS(key []byte) (*tls.Config, error) { return pipe.KeyTLS(key) }
