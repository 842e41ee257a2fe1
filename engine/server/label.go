package server

import (
	"fmt"
	"strings"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/pairid"
)

// label is the client's id if it is fit for a header and a log line.
func label(given, own string) string {
	longest := 128
	if strings.HasPrefix(given, pairid.Prefix) {
		longest = pairid.Longest
	}
	bad := func(r rune) bool { return r <= ' ' || r > '~' }
	if given == "" || len(given) > longest || strings.ContainsFunc(given, bad) {
		return own
	}
	return given
}

// pairOf is what a label adds to the engine's request ids: all of it if it begins as one that names two engines, and else nothing.
func pairOf(label string) string {
	if !strings.HasPrefix(label, pairid.Prefix) {
		return ""
	}
	return label + "-"
}

// requestID is the engine's id of one prompt of a request. Connectors read it.
func (x *exchange) requestID(prompt int) string { return fmt.Sprintf("%s%s-%d", x.pair, x.id, prompt) }

// takePair sees to what it means for a request that its label names two engines, once the request is known.
func (s *Server) takePair(x *exchange, prompts int) {
	switch {
	case x.pair == "":
	case x.params.query: // no other engine is asked to send blocks for it
		x.pair = ""
	case !x.mayName():
		s.ignoreID(ignoredKey, strings.TrimSuffix(x.pair, "-"))
		x.pair = ""
	}
	if prompts == 1 && s.isPrefill(x) {
		x.params.remote = true
	}
}

// Why an id that names two engines does not get to the connector.
const (
	ignoredKey   = "key"
	ignoredUnfit = "unfit"
)

// ignoreID counts an id that does not get to the connector, and has the log say once of each reason what was met and what to do: a client
// could write any number of them.
func (s *Server) ignoreID(reason, id string) {
	s.metrics.ignoredIDs.WithLabelValues(reason).Inc()
	if _, told := s.toldIDs.LoadOrStore(reason, true); told {
		return
	}
	why := "nobody has signed it, and its client's API key is no router's: give the router in front a key whose line says router"
	if reason == ignoredUnfit {
		why = fmt.Sprintf("it is over %d bytes long, or has a space or what is not ASCII in it", pairid.Longest)
	}
	if problem := pairid.Problem(id); problem != "" {
		why += "; moreover " + problem
	}
	s.config.Log.Warn("a request id names two engines and does not get to the connector; more of this kind are only counted", "kind", reason, "reason", why)
}

// mayName reports whether the connector gets to know which engines a label names. Where clients have API keys, one that is no router may only pass
// on what a router has signed. The signature is the connector's to check. Both ask the same function about the same id.
func (x *exchange) mayName() bool {
	if x.key == nil || x.key.Router {
		return true
	}
	p, ok := pairid.Parse(x.requestID(0))
	return ok && p.Signature != ""
}

// isPrefill reports whether a request is the first of the two that vLLM's proxy for P2P NCCL makes: it comes to a prefill engine whose connector
// believes ids that nobody has signed, has such an id, asks for one token, and says nothing of a handover. Its answer waits until its blocks are
// where the other engine finds them, as with do_remote_decode.
func (s *Server) isPrefill(x *exchange) bool {
	if !s.info.UnsignedPairs || s.info.Fit.Role != connector.RoleProducer.String() || x.params.maxTokens != 1 || x.params.transfer {
		return false
	}
	p, ok := pairid.Parse(x.requestID(0))
	return ok && p.Signature == ""
}
