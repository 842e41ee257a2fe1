package router

import (
	"net/http"
	"slices"
	"strings"
)

// handoffHeader is where a decode instance says what became of its ticket: a result and, behind a semicolon,
// a reason. It is for the router alone.
const handoffHeader = "X-Kvport-Handoff"

// What a decode instance may say. Anything else is counted as unknown or other, so that nobody makes labels.
var (
	handoffResults = []string{"loaded", "partial", "local", "refused", "none"}
	handoffReasons = []string{
		"", "key", "model", "block_size", "shape", "role", "replayed", "gone", "peer", "prompt", "unsupported", "unverified", "load_failed",
	}
)

// Why a request of a router with prefill instances went to its decode instance without a ticket.
const (
	noPrefill    = "no_prefill"   // no prefill instance is available, or all of them failed
	incompatible = "incompatible" // those that are do not fit the decode instance
	noTicket     = "no_ticket"    // the prefill instance answered and kept nothing, as for a short prompt
)

// handedOver counts what became of a ticket and says what that makes of the request. An instance that says
// nothing about it is believed to have loaded.
func (c *call) handedOver(d target, h http.Header) outcome {
	said := h.Get(handoffHeader)
	result, rest, _ := strings.Cut(said, ";")
	_, reason, _ := strings.Cut(rest, "reason=")
	result, reason = strings.TrimSpace(result), strings.TrimSpace(reason)
	if !slices.Contains(handoffResults, result) {
		result, reason = "unknown", ""
	}
	if !slices.Contains(handoffReasons, reason) {
		reason = "other"
	}
	c.router.metrics.handoffs.WithLabelValues(result, reason).Inc()
	vain := result == "refused" || result == "none"
	c.router.pool.handedOver(pair{c.from, d.index}, vain, strings.Trim(result+": "+reason, ": "))
	switch {
	case vain:
		return recomputed
	case result == "local":
		return local
	}
	return disaggregated
}

// maxWasted is how many hand-offs of a pair in a row may lead to nothing before the operator is told.
const maxWasted = 20

// wasted is what became of the last hand-offs of a pair.
type wasted struct {
	count  int // in a row
	reason string
}

// handedOver notes what became of a ticket. It logs a pair once when nothing ever comes of its tickets.
func (p *pool) handedOver(is pair, failed bool, reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	last, attrs := p.wasted[is], []any{"prefill", p.urls[is.prefill].String(), "decode", p.urls[is.decode].String()}
	if !failed {
		if last.count >= maxWasted {
			p.log.Info("hand-offs work again", attrs...)
		}
		delete(p.wasted, is)
		return
	}
	p.wasted[is] = wasted{last.count + 1, reason}
	if last.count+1 == maxWasted {
		p.log.Warn("every hand-off of a pair is wasted, decode computes all prompts again", append(attrs, "requests", maxWasted, "reason", reason)...)
	}
}

// recomputing lists pairs whose hand-offs are all wasted, the first ones if there are many. The caller holds mu.
func (p *pool) recomputing() (list []Misfit) {
	for _, is := range inOrder(p.wasted) {
		if p.wasted[is].count >= maxWasted && len(list) < maxTold && !p.table.instances[is.prefill].left && !p.table.instances[is.decode].left {
			list = append(list, Misfit{p.urls[is.prefill].String(), p.urls[is.decode].String(), p.wasted[is].reason})
		}
	}
	return list
}

// notHandedOver counts a request that had no ticket though the router has prefill instances.
func (c *call) notHandedOver() outcome {
	if c.without != "" {
		c.router.metrics.handoffs.WithLabelValues("none", c.without).Inc()
	}
	return plain
}
