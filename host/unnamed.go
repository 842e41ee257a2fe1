package host

import "sync"

// unnamed knows the ranks whose plugin may have blocks that no answer has named: an answer with an error names no slots, and the next
// one without names them, too (rule PLACE-26). Its zero value is ready to use.
type unnamed struct {
	mu    sync.Mutex
	clock uint64           // of beginnings and ends of calls
	since map[*rank]uint64 // when the last call failed
}

// call notes that a save or a load of a rank begins; over notes its end. A nil placement takes note of nothing.
func (p *placement) call(r *rank) (over func(err *error)) {
	if p == nil {
		return func(*error) {}
	}
	u := &p.unnamed
	u.mu.Lock()
	defer u.mu.Unlock()
	u.clock++
	began := u.clock
	return func(err *error) {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.clock++
		switch {
		case *err != nil:
			if u.since == nil {
				u.since = map[*rank]uint64{}
			}
			u.since[r] = u.clock
		case began > u.since[r]:
			delete(u.since, r)
		}
	}
}

// any says whether there is such a rank.
func (u *unnamed) any() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.since) > 0
}
