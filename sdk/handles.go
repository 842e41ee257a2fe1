package sdk

import (
	"context"
	"errors"
	"sync"
)

// handles keeps one value for each key, which all its users share: the first of them opens it, and the last one closes it. The zero
// value is ready to use.
type handles[K comparable, V any] struct {
	mu    sync.Mutex
	byKey map[K]*used[V]
}

// used is one value and the number of its users. It stays in the table until it is closed, so that no
// second value touches the same files in the meantime.
type used[V any] struct {
	refs  int           // users that have or await it, under handles.mu; 0 while it closes
	ready chan struct{} // closed when value or err is set
	gone  chan struct{} // closed when the value was closed and has left the table
	value V
	err   error
}

// errNotOpened is what others get that wait for an open which panics.
var errNotOpened = errors.New("what opens it has panicked")

// acquire opens the value of a key, or joins the open one. free gives it back; the last caller of free closes the value with its shut, and
// gets the error of that.
func (c *handles[K, V]) acquire(ctx context.Context, key K, open func(context.Context) (V, error), shut func(V) error) (value V, free func() error, err error) {
	for {
		u, first, closing := c.join(key)
		if first {
			c.start(ctx, key, u, open)
		}
		wait := u.ready
		if closing {
			wait = u.gone
		}
		if err := await(ctx, wait); err != nil && !first {
			if !closing {
				err = errors.Join(err, c.release(key, u, shut))
			}
			return value, nil, err
		}
		switch {
		case closing:
		case u.err == nil:
			return u.value, sync.OnceValue(func() error { return c.release(key, u, shut) }), nil
		case first || ctx.Err() != nil || !isDone(u.err):
			return value, nil, u.err
		}
		// The deadline of the first user ended the attempt, not that of this one: try again.
	}
}

func await(ctx context.Context, done <-chan struct{}) error {
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func isDone(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// join finds or makes the entry of a key and takes a reference, unless it is closing.
func (c *handles[K, V]) join(key K) (u *used[V], first, closing bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	u = c.byKey[key]
	if u == nil {
		u = &used[V]{ready: make(chan struct{}), gone: make(chan struct{})}
		if c.byKey == nil {
			c.byKey = map[K]*used[V]{}
		}
		c.byKey[key], first = u, true
	} else if u.refs == 0 {
		return u, false, true
	}
	u.refs++
	return u, first, false
}

// start opens the value of a new entry. An entry that fails leaves the table at once.
func (c *handles[K, V]) start(ctx context.Context, key K, u *used[V], open func(context.Context) (V, error)) {
	u.err = errNotOpened
	defer func() {
		if u.err != nil {
			c.remove(key, u)
		}
		close(u.ready)
	}()
	u.value, u.err = open(ctx)
}

// release gives one reference back.
func (c *handles[K, V]) release(key K, u *used[V], shut func(V) error) error {
	c.mu.Lock()
	u.refs--
	last := u.refs == 0
	c.mu.Unlock()
	if !last || u.err != nil {
		return nil
	}
	defer c.remove(key, u)
	return shut(u.value)
}

func (c *handles[K, V]) remove(key K, u *used[V]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byKey[key] == u {
		delete(c.byKey, key)
	}
	close(u.gone)
}
