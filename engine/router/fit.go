package router

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"

	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/router/policy"
)

// fit is the part of an instance's /health that must agree at both ends of a hand-off. Instances that report
// nothing, such as those of other makers, are assumed to fit, as their operator has configured.
type fit struct {
	Role      string `json:"role"` // kv_producer, kv_consumer, kv_both; none: it has no connector
	EngineID  string `json:"engine_id"`
	Connector string `json:"connector"`
	Scope     string `json:"scope"`
	Carries   bool   `json:"carries"` // another engine can load what the connector has
	Model     string `json:"model"`
	BlockSize int    `json:"block_size"`
	Shape     string `json:"shape"`
	ShapeText string `json:"shape_text"`
	Base      string `json:"base"`
	TicketKey string `json:"ticket_key"`
	Tenant    string `json:"tenant"` // which tenant secret; empty: not known
	Digest    string `json:"digest"` // how it makes digests; empty: as earlier versions did

	TicketKeys []string `json:"ticket_keys"` // whose tickets it accepts; nil: those of TicketKey

	Gives []string `json:"gives"` // the ways by which blocks leave the instance; nil: not known
	Takes []string `json:"takes"` // and by which they come to it

	Events  *kvevents.Place `json:"events"` // where it publishes which blocks it has; nil: it does not
	answers bool            // cache queries
}

// parseFit reads a body of /health; nil if it says nothing of what fits.
func parseFit(body []byte) *fit {
	var h struct {
		KV         *fit `json:"kv"`
		CacheQuery bool `json:"cache_query"`
	}
	if json.Unmarshal(body, &h) != nil || h.KV == nil || h.KV.Role == "" {
		return nil
	}
	f := h.KV
	f.answers = h.CacheQuery
	texts := []*string{&f.Role, &f.EngineID, &f.Connector, &f.Scope, &f.Model, &f.Shape, &f.ShapeText, &f.Base, &f.TicketKey, &f.Tenant, &f.Digest}
	for _, ways := range []*[]string{&f.Gives, &f.Takes, &f.TicketKeys} {
		*ways = (*ways)[:min(len(*ways), maxWays)]
		for i := range *ways {
			texts = append(texts, &(*ways)[i])
		}
	}
	for _, text := range texts {
		*text = strings.ToValidUTF8((*text)[:min(len(*text), maxWords)], "")
	}
	return f
}

// maxWords bounds each text with which an instance describes itself, in bytes.
const maxWords = 1 << 10

// maxWays bounds how many ways an instance names.
const maxWays = 64

// misfit says why a decode instance cannot load what a prefill instance has; empty if it can, as far as is known.
func misfit(p, d *registered, atP, atD *url.URL) string {
	if placeOf(atP) == placeOf(atD) {
		return "prefill and decode are the same instance"
	}
	if p.fit == nil || d.fit == nil {
		return ""
	}
	reasons := p.fit.misfitRole(d.fit)
	if p.fit.Role != "none" && d.fit.Role != "none" { // without a connector there is nothing else to compare
		reasons = append(reasons, p.fit.misfitBlocks(d.fit)...)
	}
	if len(reasons) == 0 {
		return ""
	}
	return "incompatible: " + strings.Join(reasons, "; ")
}

// sharedStore is a way by which blocks go from instance to instance.
const sharedStore = "a shared store"

// shares reports whether an instance saves what it has computed to a store that instances share, and whether it loads
// from there. One that does not say how blocks come to it is supposed to.
func (p *fit) shares() (saves, loads bool) {
	if p == nil {
		return false, true
	}
	return slices.Contains(p.Gives, sharedStore), p.Role != "none" && (p.Takes == nil || slices.Contains(p.Takes, sharedStore))
}

// givesTickets reports whether blocks go to another instance by ticket, and not only through a store.
func (p *fit) givesTickets(to *fit) bool {
	return slices.ContainsFunc(p.Gives, func(way string) bool {
		return way != sharedStore && !strings.HasPrefix(way, "the node's ") && slices.Contains(to.Takes, way)
	})
}

// misfitRole is what is wrong with the parts that the two play, and with what they play them by.
func (p *fit) misfitRole(d *fit) (reasons []string) {
	if p.Role == "none" || d.Role == "none" {
		return []string{fmt.Sprintf("kv_role %s / %s: an engine without a connector hands nothing over", p.Role, d.Role)}
	}
	saves, loads := p.Role != "kv_consumer", d.Role != "kv_producer"
	switch {
	case !saves && !loads:
		reasons = append(reasons, fmt.Sprintf("kv_role %s / %s: the roles are swapped", p.Role, d.Role))
	case !saves:
		reasons = append(reasons, fmt.Sprintf("kv_role of the prefill instance is %s, which saves nothing", p.Role))
	case !loads:
		reasons = append(reasons, fmt.Sprintf("kv_role of the decode instance is %s, which loads nothing", d.Role))
	}
	if p.EngineID == d.EngineID {
		reasons = append(reasons, fmt.Sprintf("engine_id %q is that of both", p.EngineID))
	}
	for _, f := range []*fit{p, d} {
		if !f.Carries {
			reasons = append(reasons, f.Connector+" keeps blocks inside one engine, no other can load them")
			break
		}
	}
	if len(reasons) == 0 && !p.reaches(d) {
		return []string{fmt.Sprintf("connector %s / %s: prefill hands blocks over through %s, and decode takes them through %s",
			p.Connector, d.Connector, said(p.Gives), said(d.Takes))}
	}
	return reasons
}

// reaches reports whether there is a way by which blocks of p come to d.
func (p *fit) reaches(d *fit) bool {
	if p.Gives == nil || d.Takes == nil { // not known: a MultiConnector, or an engine of an earlier version
		return p.Connector == d.Connector || p.Connector == multiName || d.Connector == multiName || p.Scope == "shared" && d.Scope == "shared"
	}
	return slices.ContainsFunc(p.Gives, func(way string) bool { return slices.Contains(d.Takes, way) })
}

// multiName is the connector that has others.
const multiName = "MultiConnector"

// said lists ways in words.
func said(ways []string) string { return cmp.Or(strings.Join(ways, ", "), "nothing") }

// earlier stands for the digests of instances that do not say which they make.
const earlier = "of an earlier version"

// divides reports whether blocks of one of the two consist of whole blocks of the other; others cannot be cut.
func (p *fit) divides(d *fit) bool {
	small, large := min(p.BlockSize, d.BlockSize), max(p.BlockSize, d.BlockSize)
	return small <= 0 || large%small == 0
}

// misfitBlocks is what differs in what the blocks hold, how they are cut, and who may name them.
func (p *fit) misfitBlocks(d *fit) (reasons []string) {
	if p.Model != d.Model {
		reasons = append(reasons, fmt.Sprintf("model %s / %s: other weights", p.Model, d.Model))
	}
	if p.TicketKey != d.TicketKey && !slices.Contains(d.TicketKeys, p.TicketKey) {
		reasons = append(reasons, "the ticket keys differ, see kvport.ticket_key_file")
	}
	if p.Tenant != d.Tenant && p.Tenant != "" && d.Tenant != "" {
		reasons = append(reasons, "the tenant secrets differ, see kvport.tenant_secret_file")
	}
	if p.Digest != d.Digest {
		reasons = append(reasons, fmt.Sprintf("kvport.digest %s / %s", cmp.Or(p.Digest, earlier), cmp.Or(d.Digest, earlier)))
	}
	switch {
	case p.Shape == d.Shape, p.Base != "" && p.Base == d.Base && p.divides(d):
	case p.BlockSize != d.BlockSize:
		reasons = append(reasons, fmt.Sprintf("block_size %d / %d", p.BlockSize, d.BlockSize))
	default:
		reasons = append(reasons, fmt.Sprintf("shape %q / %q", p.ShapeText, d.ShapeText))
	}
	return reasons
}

// pair are places of a prefill and a decode instance.
type pair struct{ prefill, decode int }

// maxTold is how many pairs the log and /health name at once.
const maxTold = 32

// sawLocked takes the fit that an instance's /health reports. The caller holds mu.
func (p *pool) sawLocked(i int, f *fit) {
	if old := p.known[i].fit; old == f || old != nil && f != nil && reflect.DeepEqual(old, f) {
		return
	}
	p.known[i].fit = f
	p.shares(i)
	p.compare(i)
}

// shares tells the policy what an instance does with a store that instances share. The caller holds mu.
func (p *pool) shares(i int) {
	saves, loads := p.known[i].fit.shares()
	p.policy.Shares(i, saves, loads)
}

// compare finds out again which others an instance fits, and tells what has changed. The caller holds mu.
func (p *pool) compare(i int) {
	told := 0
	for j := range p.known {
		is := pair{i, j}
		if p.table.instances[i].role == decode {
			is = pair{j, i}
		}
		a, b := &p.table.instances[is.prefill], &p.table.instances[is.decode]
		if p.urls[j] == nil || a.role != prefill || b.role != decode {
			continue
		}
		before := p.misfits[is]
		now := ""
		if a.group == b.group { // else the policy never makes them a pair
			now = misfit(&p.known[is.prefill], &p.known[is.decode], p.urls[is.prefill], p.urls[is.decode])
		}
		if now == before {
			continue
		}
		p.misfits[is] = now
		if now == "" {
			delete(p.misfits, is)
		}
		if told++; told > maxTold || p.table.instances[j].left {
			continue
		}
		attrs := []any{"prefill", p.urls[is.prefill].String(), "decode", p.urls[is.decode].String()}
		if now == "" {
			p.log.Info("prefill and decode instance fit again", attrs...)
			continue
		}
		p.log.Warn("prefill and decode instance do not fit and are never made a pair", append(attrs, "reason", now)...)
	}
}

// inOrder lists the pairs of a map by their places.
func inOrder[T any](of map[pair]T) []pair {
	return slices.SortedFunc(maps.Keys(of), func(a, b pair) int { return cmp.Or(a.prefill-b.prefill, a.decode-b.decode) })
}

// Misfit is how /health reports a prefill and a decode instance that are never paired, or whose hand-offs all fail.
type Misfit struct {
	Prefill string `json:"prefill"`
	Decode  string `json:"decode"`
	Reason  string `json:"reason"`
}

// incompatible lists pairs that do not fit, the first ones if there are many. The caller holds mu.
func (p *pool) incompatible() (list []Misfit) {
	for _, is := range inOrder(p.misfits) {
		if len(list) < maxTold && !p.table.instances[is.prefill].left && !p.table.instances[is.decode].left {
			list = append(list, Misfit{p.urls[is.prefill].String(), p.urls[is.decode].String(), p.misfits[is]})
		}
	}
	return list
}

// handoffHeader is where a decode instance says what became of its ticket: a result and, behind a semicolon,
// a reason. It is for the router alone.
const handoffHeader = "X-Kvport-Handoff"

// What a decode instance may say. Anything else is counted as unknown or other, so that nobody makes labels.
var (
	handoffResults = []string{"loaded", "partial", "local", "refused", "none"}
	handoffReasons = []string{
		"", "key", "foreign_key", "model", "block_size", "shape", "role", "replayed", "gone", "peer", "prompt", "unsupported", "load_failed",
	}
)

// Why a request of a router with prefill instances went to its decode instance without a ticket.
const (
	noPrefill    = policy.NoPrefill // no prefill instance is available, or all of them failed
	incompatible = policy.Misfit    // those that are do not fit the decode instance
	noTicket     = "no_ticket"      // the prefill instance answered and kept nothing, as for a short prompt
)

// handedOver counts what became of a ticket and says what that makes of the request. An instance that says
// nothing about it is believed to have loaded.
func (c *call) handedOver(d target, h http.Header) outcome {
	said := h.Get(handoffHeader)
	result, rest, _ := strings.Cut(said, ";")
	_, detail, _ := strings.Cut(rest, "reason=")
	reason, _, _ := strings.Cut(detail, ";") // behind it, the key that is foreign
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

// turnedAway takes note that a prefill instance refused a request. That is never the client's business: the
// decode instance serves it alone, and refuses it by itself if it is wrong. It reports whether another prefill
// instance may take it, since the reason lies with this one.
func (c *call) turnedAway(p target, got *answer) (another bool) {
	c.router.pool.worked(p) // it is alive
	code := errorCode(got.body)
	if plainlyWrong(got.status) && code != "context_length_exceeded" {
		c.router.config.Log.Debug("prefill instance calls a request invalid, decode judges it", "id", c.id,
			"instance", p.url.String(), "status", got.status, "code", code)
		return false
	}
	remedy := ""
	switch got.status {
	case http.StatusUnauthorized, http.StatusForbidden:
		another, remedy = true, c.router.config.keyRemedy()
	case http.StatusNotFound:
		another, remedy = true, "see whether its URL and the name of its model are those of the decode instances"
	}
	c.router.pool.refuses(p, got.status, code, remedy)
	return another
}

// plainlyWrong reports whether a status says that the request is invalid, as every instance would say.
func plainlyWrong(status int) bool {
	return status == http.StatusBadRequest || status == http.StatusUnprocessableEntity
}

// keyRemedy says what to do about an instance that asks for another API key.
func (c *Config) keyRemedy() string {
	switch {
	case c.UpstreamKey != "":
		return "it does not take the key of --upstream-api-key-file"
	case c.OwnKeys:
		return "it needs --upstream-api-key-file"
	}
	return "it needs --upstream-api-key-file, or the client's own key is wrong"
}

// errorCode is the code in an instance's error; empty if it has none. It is text, or a number as of vLLM.
func errorCode(body []byte) string {
	var e struct {
		Error struct {
			Code json.RawMessage `json:"code"`
		} `json:"error"`
	}
	if json.Unmarshal(body, &e) != nil || string(e.Error.Code) == "null" {
		return ""
	}
	code := strings.Trim(string(e.Error.Code), `"`)
	return strings.ToValidUTF8(code[:min(len(code), maxCode)], "")
}

// maxCode bounds the code of an instance's error, in bytes.
const maxCode = 64

// refuses takes note that an instance turns requests away. The log has each status once until the instance
// changes its state: clients must not be able to fill it.
func (p *pool) refuses(t target, status int, code, remedy string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := &p.known[t.index]
	k.refusal = fmt.Sprintf("it refused a request with HTTP %d", status)
	for _, more := range []string{code, remedy} {
		if more != "" {
			k.refusal += ": " + more
		}
	}
	if k.warned[status] {
		return
	}
	if k.warned == nil {
		k.warned = map[int]bool{}
	}
	k.warned[status] = true
	p.log.Warn("prefill instance refuses a request, decode serves alone if no other takes it", "instance", t.url.String(),
		"status", status, "code", code, "remedy", remedy)
}

// accepted takes note that a prefill instance did what a request asks for.
func (p *pool) accepted(t target) {
	p.worked(t)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known[t.index].refusal = ""
}
