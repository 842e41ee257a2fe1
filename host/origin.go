package host

import (
	"slices"

	"github.com/kvport/kvport/connector"
)

// Origin is where the tokens are that the last Match of a request has offered. It is a hint: what is found may be gone
// when it is loaded.
type Origin struct {
	Parts []Part // in order of the prompt, from Query.Computed on; the last may end beyond the offer
	// Unknown are the scopes of connectors that gave no answer in time, or none that could be used: they may have
	// more than is said here. Each scope is listed once.
	Unknown []connector.Scope
}

// Part is a piece of a prompt that connectors of one scope have: up to token End, counted from 0.
type Part struct {
	Scope connector.Scope
	End   int
}

// Origin says where what the last Match of a live request has offered comes from, if that answer was not Later.
func (h *Host) Origin(request connector.RequestID) (f Origin) {
	h.mu.Lock()
	sure := h.tracker.Sure(request)
	h.mu.Unlock()
	switch {
	case h.composite == nil:
		f.add(h.info.Scope, wholePrompt)
		if !sure {
			f.doubt(h.info.Scope)
		}
	case sure:
		h.composite.found(request, wholePrompt, &f)
	default:
		h.composite.found(request, wholePrompt, &f)
		h.composite.doubt(&f)
	}
	return f
}

// wholePrompt is the end of a part that has no other.
const wholePrompt = 1 << 30

// add appends a part, or lengthens the last one.
func (f *Origin) add(s connector.Scope, end int) {
	n := len(f.Parts)
	switch {
	case n > 0 && f.Parts[n-1].End >= end:
	case n > 0 && f.Parts[n-1].Scope == s:
		f.Parts[n-1].End = end
	default:
		f.Parts = append(f.Parts, Part{s, end})
	}
}

// doubt notes that not all is known of a scope.
func (f *Origin) doubt(s connector.Scope) {
	if !slices.Contains(f.Unknown, s) {
		f.Unknown = append(f.Unknown, s)
	}
}

// found adds what the children have of a request's prompt before token end.
func (c *composite) found(request connector.RequestID, end int, f *Origin) {
	pieces, silent := c.multi.Found(request)
	for _, p := range pieces {
		m := &c.members[p.Child]
		if m.composite != nil {
			m.composite.found(request, min(p.End, end), f)
		}
		f.add(m.info().Scope, min(p.End, end))
	}
	for i, is := range silent {
		if is {
			c.members[i].doubt(f)
		}
	}
}

// doubt notes that none of the children that load has said all.
func (c *composite) doubt(f *Origin) {
	for i := range c.members {
		if c.cfg.Children[i].Role.Loads() {
			c.members[i].doubt(f)
		}
	}
}

func (m *member) doubt(f *Origin) {
	if m.composite != nil {
		m.composite.doubt(f)
		return
	}
	f.doubt(m.info().Scope)
}
