package admission

// Share is how much one client may hold of what the others leave: seven eighths, so that neither it nor a few others can take all.
func Share(left int) int { return left - left/8 }

// Room shares bytes that requests hold while they wait and run. A client may hold its Share. It is not safe for concurrent use.
type Room struct {
	Bytes int // of all clients together

	held  int
	names map[string]int // what each client holds, if that is not 0
}

// Take gives a client n bytes, or fails with a *RefusedError.
func (r *Room) Take(name string, n int) error {
	mine := r.names[name]
	if left := r.Bytes - (r.held - mine); mine+n > Share(left) {
		return &RefusedError{Bodies, shortestAfter}
	}
	if r.names == nil {
		r.names = map[string]int{}
	}
	r.held += n
	r.names[name] += n
	return nil
}

// Give takes back what Take gave.
func (r *Room) Give(name string, n int) {
	r.held -= n
	if r.names[name] -= n; r.names[name] == 0 {
		delete(r.names, name)
	}
}
