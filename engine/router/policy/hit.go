package policy

import "fmt"

// Hit is how many tokens at the beginning of a request's prompt an instance need not compute, by where they lie. Each is
// counted from the beginning of the prompt.
type Hit struct {
	Engine int // in the instance's own cache, where they cost nothing
	Node   int // there and in a store of its node, from which it loads
	Shared int // there and in the store that instances share
	// Store is how many lie in the store that instances share by itself: from the first token of the prompt on, and without
	// a gap that only the instance's own cache or its node fills. It is all that counts for other instances.
	Store int
}

// Tokens is all of a hit.
func (h Hit) Tokens() int { return max(h.Engine, h.Node, h.Shared) }

// stored is how many tokens must be loaded from a store of the node, and how many from one that instances share.
func (h Hit) stored() (node, shared int) {
	near := max(h.Engine, h.Node)
	return near - h.Engine, max(0, h.Shared-near)
}

// within bounds a hit to a prompt.
func (h Hit) within(tokens int) Hit {
	bound := func(n int) int { return min(max(0, n), tokens) }
	return Hit{bound(h.Engine), bound(h.Node), bound(h.Shared), bound(h.Store)}
}

// of says how much of a prompt a hit is, and where that lies unless all of it is in the instance's own cache.
func (h Hit) of(tokens int) string {
	text := fmt.Sprintf("%d of %d tokens", h.Tokens(), tokens)
	if node, shared := h.stored(); node+shared > 0 {
		text += fmt.Sprintf(" (engine %d, node %d, shared %d)", h.Engine, node, shared)
	}
	return text
}
