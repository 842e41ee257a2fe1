package router

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
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
}

// parseFit reads a body of /health; nil if it says nothing of what fits.
func parseFit(body []byte) *fit {
	var h struct {
		KV *fit `json:"kv"`
	}
	if json.Unmarshal(body, &h) != nil || h.KV == nil || h.KV.Role == "" {
		return nil
	}
	f := h.KV
	for _, text := range []*string{&f.Role, &f.EngineID, &f.Connector, &f.Scope, &f.Model, &f.Shape, &f.ShapeText, &f.Base, &f.TicketKey} {
		*text = strings.ToValidUTF8((*text)[:min(len(*text), maxWords)], "")
	}
	return f
}

// maxWords bounds each text with which an instance describes itself, in bytes.
const maxWords = 1 << 10

// misfit says why a decode instance cannot load what a prefill instance has; empty if it can, as far as is known.
func misfit(p, d *registered, atP, atD *url.URL) string {
	if atP.Host == atD.Host && atP.Path == atD.Path {
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
	// Stores with one format may have several names, and a MultiConnector any child.
	if p.Connector != d.Connector && p.Connector != multiName && d.Connector != multiName && (p.Scope != "shared" || d.Scope != "shared") {
		reasons = append(reasons, fmt.Sprintf("connector %s / %s", p.Connector, d.Connector))
	}
	return reasons
}

// multiName is the connector that has others.
const multiName = "MultiConnector"

// misfitBlocks is what differs in what the blocks hold, how they are cut, and who may name them.
func (p *fit) misfitBlocks(d *fit) (reasons []string) {
	if p.Model != d.Model {
		reasons = append(reasons, fmt.Sprintf("model %s / %s: other weights", p.Model, d.Model))
	}
	if p.TicketKey != d.TicketKey {
		reasons = append(reasons, "the ticket keys differ, see kvport.ticket_key_file")
	}
	switch {
	case p.Shape == d.Shape, p.Base != "" && p.Base == d.Base:
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

// saw takes the fit that an instance's /health reports.
func (p *pool) saw(i int, f *fit) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if old := p.known[i].fit; old == f || old != nil && f != nil && *old == *f {
		return
	}
	p.known[i].fit = f
	p.compare(i)
}

// compare finds out again which others an instance fits, and tells what has changed. The caller holds mu.
func (p *pool) compare(i int) {
	told := 0
	for j := range p.known {
		is := pair{i, j}
		if p.table.instances[i].role == decode {
			is = pair{j, i}
		}
		if p.table.instances[is.prefill].role != prefill || p.table.instances[is.decode].role != decode {
			continue
		}
		before := p.misfits[is]
		now := misfit(&p.known[is.prefill], &p.known[is.decode], p.urls[is.prefill], p.urls[is.decode])
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

// incompatible lists pairs that do not fit, the first ones if there are many, and counts those of which both
// are available. The caller holds mu.
func (p *pool) incompatible(available func(i int) bool) (list []Misfit, apart int) {
	for _, is := range inOrder(p.misfits) {
		if available(is.prefill) && available(is.decode) {
			apart++
		}
		if len(list) < maxTold && !p.table.instances[is.prefill].left && !p.table.instances[is.decode].left {
			list = append(list, Misfit{p.urls[is.prefill].String(), p.urls[is.decode].String(), p.misfits[is]})
		}
	}
	return list, apart
}
