package p2pnccl

import (
	"log/slog"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
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
// follows. vLLM's proxy has no key and ends the id with the UUID: such an id counts only where the config trusts the
// proxy, and only if the config lists both engines.
const (
	idPrefix  = `___prefill_addr_`
	hostPort  = `([0-9A-Za-z.\-]{1,253}|\[[0-9a-fA-F:.]{2,45}\]):([0-9]{1,5})`
	idPattern = idPrefix + hostPort + `___decode_addr_` + hostPort + `_([0-9a-f]{32})`
)

// maxIDs bounds the ids that are remembered.
const maxIDs = 1 << 14

// What an id that names engines is. Those of the first two kinds are used.
const (
	idSigned    = "signed"
	idTrusted   = "trusted"   // not signed, by a proxy that the config trusts, of engines that it lists
	idUnsigned  = "unsigned"  // and the config trusts no proxy
	idUnlisted  = "unlisted"  // not signed, and it names an engine that the config does not list
	idForged    = "forged"    // of another key, or it names no address
	idReplayed  = "replayed"  // of another request
	idMalformed = "malformed" // it begins as one, and goes on otherwise
)

// reasons are why an id is ignored, for the log.
func reasons() map[string]string {
	return map[string]string{
		idUnsigned:  "no router has signed it, so any client may have written it: register with kvport route, or trust the proxy in front with unsigned_ids and peers",
		idUnlisted:  "it is not signed, and peers does not list both engines that it names",
		idForged:    "its signature is not of the deployment's key, or it names no address",
		idReplayed:  "another request had it before",
		idMalformed: "it does not go on with ___decode_addr_HOST:PORT_ and 32 hexadecimal digits",
	}
}

// addresses are the two ends of a request.
type addresses struct{ prefill, decode string }

// reader reads request ids. It is safe for concurrent use.
type reader struct {
	keys    []connector.Secret // of routers
	listed  peers              // whom unsigned ids may name; empty: such ids do not count
	log     *slog.Logger
	pattern *regexp.Regexp

	mu    sync.Mutex
	owner map[string]connector.RequestID // of ids that were used: who came with it first
	order []string
	found map[string]int64                  // by kind
	told  map[string]bool                   // kinds that the log has
	known map[connector.RequestID]addresses // what was found, as it is asked for often
	asked []connector.RequestID
}

func newReader(listed peers, log *slog.Logger, keys ...connector.Secret) *reader {
	found := map[string]int64{idSigned: 0, idTrusted: 0}
	for kind := range reasons() {
		found[kind] = 0
	}
	return &reader{
		keys: keys, listed: listed, log: log, pattern: regexp.MustCompile(idPattern + `(?:_([0-9a-f]{32}))?`),
		found: found, told: map[string]bool{}, owner: map[string]connector.RequestID{}, known: map[connector.RequestID]addresses{},
	}
}

// read gives the ends that a router has signed for a request, or that a trusted proxy has named; nothing for all others. An
// id counts for the first request that brings it, and for no other.
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

// verify reports whether a router of the deployment signed a text.
func (r *reader) verify(text, signature string) bool {
	return slices.ContainsFunc(r.keys, func(key connector.Secret) bool {
		return ticket.VerifyText(key, ticket.RequestIDText, text, signature)
	})
}

func (r *reader) check(id connector.RequestID) addresses {
	if !strings.Contains(string(id), idPrefix) {
		return addresses{}
	}
	kind, a := r.kind(id)
	r.found[kind]++
	if why, ignored := reasons()[kind]; ignored {
		if !r.told[kind] { // once: a client could write any number of them
			r.told[kind] = true
			r.log.Warn("a request id that names engines is ignored; more of this kind are only counted", "kind", kind, "reason", why)
		}
		return addresses{}
	}
	return a
}

// kind says what an id is. One that is used belongs to its request from then on.
func (r *reader) kind(id connector.RequestID) (kind string, a addresses) {
	m := r.pattern.FindStringSubmatch(string(id))
	if m == nil {
		return idMalformed, a
	}
	uuid, signature := m[5], m[6]
	text := m[0]
	if signature != "" {
		text = text[:len(text)-1-len(signature)]
	}
	a, kind = addresses{prefill: join(m[1], m[2]), decode: join(m[3], m[4])}, idSigned
	switch {
	case signature == "" && len(r.listed) == 0:
		return idUnsigned, a
	case signature == "" && (!r.listed.have(a.prefill) || !r.listed.have(a.decode)):
		return idUnlisted, a
	case signature == "":
		kind = idTrusted
	case !r.verify(text, signature) || a.prefill == "" || a.decode == "":
		return idForged, a
	}
	if owner, seen := r.owner[uuid]; seen && owner != id {
		return idReplayed, a
	}
	r.owner[uuid], r.order = id, append(r.order, uuid)
	if len(r.order) > maxIDs {
		delete(r.owner, r.order[0])
		r.order = r.order[1:]
	}
	return kind, a
}

// join is an address; "" if the port is none.
func join(host, port string) string {
	n, err := strconv.Atoi(port)
	if err != nil || n < 1 || n > 65535 {
		return ""
	}
	if len(host) > 1 && host[0] == '[' {
		host = host[1 : len(host)-1]
	}
	return net.JoinHostPort(host, strconv.Itoa(n))
}

// stats shows what ids were found.
func (r *reader) stats() (stats []connector.Stat) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for kind, n := range r.found {
		stats = append(stats, connector.Stat{Name: "request_ids_total", Labels: []string{kind}, Value: float64(n)})
	}
	return stats
}
