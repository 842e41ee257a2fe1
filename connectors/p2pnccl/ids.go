package p2pnccl

import (
	"log/slog"
	"slices"
	"strings"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/pairid"
	"github.com/kvport/kvport/internal/ticket"
)

// A router that knows both ends of a request names them in the X-Request-Id of both engines, as vLLM's did, and signs what it wrote. Package
// pairid says how such an id is written. vLLM's proxy has no key: its ids count only where the config trusts the proxy, and only
// if the config lists both engines.

// maxIDs bounds the ids of one class that are remembered.
const maxIDs = 1 << 14

// What an id that names engines is. Those of the first two kinds are used.
const (
	idSigned    = "signed"
	idTrusted   = "trusted"   // not signed, by a proxy that the config trusts, of engines that it lists
	idUnsigned  = "unsigned"  // and the config trusts no proxy
	idUnlisted  = "unlisted"  // not signed, and it names an engine that the config does not list
	idForged    = "forged"    // of another key
	idReplayed  = "replayed"  // of another request
	idMalformed = "malformed" // it has the words of one and is none
)

// reasons are why an id is ignored, for the log.
func reasons() map[string]string {
	return map[string]string{
		idUnsigned:  "no router has signed it, so any client may have written it: register with kvport route, or trust the proxy in front with unsigned_ids and peers",
		idUnlisted:  "it is not signed, and peers does not list both engines that it names",
		idForged:    "its signature is not of the deployment's key",
		idReplayed:  "another request had it before",
		idMalformed: "it has the words of one and names no engine",
	}
}

// addresses are the two ends of a request.
type addresses struct{ prefill, decode string }

// reader reads request ids. It is safe for concurrent use.
type reader struct {
	keys   []connector.Secret // of routers
	listed peers              // whom unsigned ids may name; empty: such ids do not count
	log    *slog.Logger

	mu              sync.Mutex
	signed, trusted seen // by what a router gives to one request only
	ignored         seen // by the whole id
	found           map[string]int64
	told            map[string]bool // kinds that the log has
}

// seen is what is remembered of one class of ids. Each class has room of its own: who can make up ids of one pushes out nothing of another.
type seen struct {
	of    map[string]claim
	order []string // the oldest first
}

// claim is the request that has brought an id first, and whom it names.
type claim struct {
	by connector.RequestID
	addresses
}

// add remembers one, and forgets the oldest if there are too many.
func (s *seen) add(key string, c claim) {
	if s.of == nil {
		s.of = map[string]claim{}
	}
	s.of[key], s.order = c, append(s.order, key)
	if len(s.order) > maxIDs {
		delete(s.of, s.order[0])
		s.order = s.order[1:]
	}
}

func newReader(listed peers, log *slog.Logger, keys ...connector.Secret) *reader {
	found := map[string]int64{idSigned: 0, idTrusted: 0}
	for kind := range reasons() {
		found[kind] = 0
	}
	return &reader{keys: keys, listed: listed, log: log, found: found, told: map[string]bool{}}
}

// read gives the ends that a router has signed for a request, or that a trusted proxy has named; nothing for all others. An
// id counts for the first request that brings it, and for no other.
func (r *reader) read(id connector.RequestID) addresses {
	if !strings.Contains(string(id), pairid.Prefix) {
		return addresses{}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, known := r.ignored.of[string(id)]; known {
		return addresses{}
	}
	pair, ok := pairid.Parse(string(id))
	class := &r.signed
	if pair.Signature == "" {
		class = &r.trusted
	}
	first, claimed := class.of[pair.Unique]
	if ok && claimed && first.by == id {
		return first.addresses
	}
	kind, ends := r.judge(&pair, ok)
	if claimed && (kind == idSigned || kind == idTrusted) {
		kind = idReplayed
	}
	r.found[kind]++
	if why, ignored := reasons()[kind]; ignored {
		r.ignored.add(string(id), claim{})
		r.tell(kind, why, id, &pair)
		return addresses{}
	}
	class.add(pair.Unique, claim{id, ends})
	return ends
}

// judge says what an id is that no request has brought before, and whom it names.
func (r *reader) judge(p *pairid.Pair, ok bool) (kind string, ends addresses) {
	switch {
	case !ok:
		return idMalformed, ends
	case p.Signature != "" && r.verify(p):
		return idSigned, addresses{p.Prefill, p.Decode}
	case p.Signature != "":
		return idForged, ends
	case len(r.listed) == 0:
		return idUnsigned, ends
	}
	prefill, decode := r.listed.find(p.Prefill), r.listed.find(p.Decode)
	if prefill == "" || decode == "" {
		return idUnlisted, ends
	}
	return idTrusted, addresses{prefill, decode}
}

// verify reports whether a router of the deployment signed what an id says.
func (r *reader) verify(p *pairid.Pair) bool {
	return slices.ContainsFunc(r.keys, func(key connector.Secret) bool {
		return ticket.VerifyText(key, ticket.RequestIDText, p.Text, p.Signature)
	})
}

// tell has the log say once of each kind what was met and why it is ignored: a client could write any number of them.
func (r *reader) tell(kind, why string, id connector.RequestID, p *pairid.Pair) {
	if r.told[kind] {
		return
	}
	r.told[kind] = true
	met := []any{"kind", kind, "reason", why, "prefill", p.Prefill, "decode", p.Decode}
	if kind == idMalformed {
		met = []any{"kind", kind, "reason", why + ": " + pairid.Problem(string(id))}
	}
	r.log.Warn("a request id that names engines is ignored; more of this kind are only counted", met...)
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
