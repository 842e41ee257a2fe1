package p2pnccl

import (
	"net"
	"regexp"
	"strconv"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/ticket"
)

// A router that knows both ends of a request writes them into the X-Request-Id of both engines, as vLLM's
// did, and signs what it wrote:
//
//	___prefill_addr_HOST:PORT___decode_addr_HOST:PORT_UUID_SIGNATURE
//
// The engine's request id begins with it or, in vLLM, has it behind "cmpl-"; something of the engine's own
// follows.
const (
	hostPort  = `([0-9A-Za-z.\-]{1,253}|\[[0-9a-fA-F:.]{2,45}\]):([0-9]{1,5})`
	idPattern = `___prefill_addr_` + hostPort + `___decode_addr_` + hostPort + `_([0-9a-f]{32})`
)

// maxIDs bounds the ids that are remembered.
const maxIDs = 1 << 14

// addresses are the two ends of a request.
type addresses struct{ prefill, decode string }

// readers reads request ids. It is safe for concurrent use.
type reader struct {
	key     []byte
	pattern *regexp.Regexp

	mu       sync.Mutex
	owner    map[string]connector.RequestID // of signed ids: who came with it first
	order    []string
	signed   int64
	unsigned int64
	forged   int64
	replayed int64
	known    map[connector.RequestID]addresses // what was found, as it is asked for often
	asked    []connector.RequestID
}

func newReader(key []byte) *reader {
	return &reader{
		key: key, pattern: regexp.MustCompile(idPattern + `(?:_([0-9a-f]{32}))?`),
		owner: map[string]connector.RequestID{}, known: map[connector.RequestID]addresses{},
	}
}

// read gives the ends that a router has signed for a request; nothing for all others. An id counts for the
// first request that brings it, and for no other.
func (r *reader) read(id connector.RequestID) addresses {
	r.mu.Lock()
	defer r.mu.Unlock()
	if a, ok := r.known[id]; ok {
		return a
	}
	a := r.check(id)
	r.known[id], r.asked = a, append(r.asked, id)
	if len(r.asked) > maxIDs {
		delete(r.known, r.asked[0])
		r.asked = r.asked[1:]
	}
	return a
}

func (r *reader) check(id connector.RequestID) addresses {
	m := r.pattern.FindStringSubmatch(string(id))
	if m == nil {
		return addresses{}
	}
	uuid, signature := m[5], m[6]
	text := m[0]
	if signature != "" {
		text = text[:len(text)-1-len(signature)]
	}
	a := addresses{prefill: join(m[1], m[2]), decode: join(m[3], m[4])}
	switch owner, seen := r.owner[uuid]; {
	case signature == "":
		r.unsigned++
	case !ticket.VerifyText(r.key, ticket.RequestIDText, text, signature) || a.prefill == "" || a.decode == "":
		r.forged++
	case seen && owner != id:
		r.replayed++
	default:
		r.signed++
		r.owner[uuid], r.order = id, append(r.order, uuid)
		if len(r.order) > maxIDs {
			delete(r.owner, r.order[0])
			r.order = r.order[1:]
		}
		return a
	}
	return addresses{}
}

// join is an address; "" if the port is none.
func join(host, port string) string {
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return ""
	}
	if len(host) > 1 && host[0] == '[' {
		host = host[1 : len(host)-1]
	}
	return net.JoinHostPort(host, port)
}

// stats shows what ids were found.
func (r *reader) stats() []connector.Stat {
	r.mu.Lock()
	defer r.mu.Unlock()
	stat := func(kind string, n int64) connector.Stat {
		return connector.Stat{Name: "request_ids_total", Labels: []string{kind}, Value: float64(n)}
	}
	return []connector.Stat{stat("signed", r.signed), stat("unsigned", r.unsigned), stat("forged", r.forged), stat("replayed", r.replayed)}
}
