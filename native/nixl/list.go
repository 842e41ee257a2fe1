package nixl

import (
	"fmt"
	"slices"
)

// List is the regions of one end of transfers, prepared for many: what a transfer of some of them needs is
// looked up once, and not each time. A cache makes one of all its blocks, and one of each peer's.
type List struct {
	agent   *Agent
	backend *Backend
	peer    string // empty: the agent's own memory
	sizes   []uint64
	handle  handle // nil: closed; guarded by agent.mu
}

// List prepares regions: of the agent itself with an empty peer, which must be registered, or of a peer that
// was added. The backend must not be nil. Regions that touch are not merged. The caller closes the list,
// after the transfers made of it, and a peer's before the peer is removed.
func (a *Agent) List(b *Backend, peer string, kind Kind, regions ...Region) (*List, error) {
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	what := fmt.Sprintf("list %d regions of peer %q", len(regions), peer)
	if b == nil || len(regions) == 0 || slices.ContainsFunc(regions, func(r Region) bool { return r.Len == 0 }) {
		return nil, fmt.Errorf("nixl: %s: it needs a backend, and regions that are not empty: %w", what, ErrInvalid)
	}
	if err := a.listable(peer, kind, regions); err != nil {
		return nil, fmt.Errorf("nixl: %s: %w", what, err)
	}
	h, err := a.lib.list(a.handle, b.handle, peer, kind, regions)
	if err != nil {
		return nil, fmt.Errorf("nixl: %s: %w (or the peer's metadata does not have them)", what, err)
	}
	l := &List{agent: a, backend: b, peer: peer, handle: h, sizes: make([]uint64, len(regions))}
	for i, r := range regions {
		l.sizes[i] = r.Len
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lists[l] = struct{}{}
	return l, nil
}

// listable finds what NIXL would report without saying where.
func (a *Agent) listable(peer string, kind Kind, regions []Region) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if peer != "" {
		if _, ok := a.peers[peer]; !ok && peer != a.name {
			return fmt.Errorf("no such peer was added: %w", ErrNotFound)
		}
		return nil
	}
	for i, r := range regions {
		if !a.registered(kind, r) {
			return fmt.Errorf("region %d is not within registered %v: %w", i, kind, ErrNotFound)
		}
	}
	return nil
}

// Make makes a transfer of regions of two lists: here[i] of the agent's own from or to there[i] of the
// peer's, by their places, which must be of equal length. NIXL merges what touches at both ends. The caller
// closes the transfer.
func (l *List) Make(op Op, remote *List, here, there []int32) (*Transfer, error) {
	a := l.agent
	what := fmt.Sprintf("%v of %d listed regions with peer %q", op, len(here), remote.peer)
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	a.mu.Lock()
	defer a.mu.Unlock()
	if l.handle == nil || remote.handle == nil {
		return nil, fmt.Errorf("nixl: make a %s: a list is %w", what, ErrClosed)
	}
	ours, theirs := listed{l, here}, listed{remote, there}
	err := ours.fit(theirs)
	if err == nil && op != Read && op != Write {
		err = ErrInvalid
	}
	var h handle
	if err == nil {
		h, err = a.lib.makeTransfer(a.handle, op, ours, theirs)
	}
	if err != nil {
		return nil, fmt.Errorf("nixl: make a %s: %w", what, err)
	}
	t := &Transfer{agent: a, what: what, handle: h}
	a.transfers[t] = struct{}{}
	return t, nil
}

// listed is some regions of a list, by their places.
type listed struct {
	*List
	places []int32
}

// fit makes sure that regions of the agent's own and of a peer's go together.
func (l listed) fit(remote listed) error {
	if remote.agent != l.agent || l.peer != "" || remote.peer == "" || len(l.places) == 0 || len(l.places) != len(remote.places) {
		return fmt.Errorf("it needs a list of its own, one of a peer, and as many places in each: %w", ErrInvalid)
	}
	for i := range l.places {
		x, y := int(l.places[i]), int(remote.places[i])
		if x < 0 || x >= len(l.sizes) || y < 0 || y >= len(remote.sizes) || l.sizes[x] != remote.sizes[y] {
			return fmt.Errorf("places %d and %d do not fit: %w", x, y, ErrInvalid)
		}
	}
	return nil
}

// Close frees the list. Closing it again does nothing.
func (l *List) Close() error {
	a := l.agent
	a.life.RLock()
	defer a.life.RUnlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if l.handle == nil || a.handle == nil {
		return nil
	}
	delete(a.lists, l)
	return l.release()
}

// release is Close's last part.
func (l *List) release() error {
	h := l.handle
	l.handle = nil
	if err := l.agent.lib.freeList(l.agent.handle, h); err != nil {
		return fmt.Errorf("nixl: close a list of %d regions: %w", len(l.sizes), err)
	}
	return nil
}
