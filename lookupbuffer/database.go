package lookupbuffer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// KV is the part of a key-value database that a Database needs. Keys are 64 hexadecimal digits. Calls
// arrive concurrently.
type KV interface {
	// Exists reports for each key whether it is present.
	Exists(ctx context.Context, keys []string) ([]bool, error)
	// Get returns the value of a key, which the caller may keep. If the key is missing, the error is
	// connector.ErrGone.
	Get(ctx context.Context, key string) ([]byte, error)
	// Put stores a value completely or not at all. It must not keep the slice after the call. If the
	// database is full, the error is connector.ErrBusy.
	Put(ctx context.Context, key string, value []byte) error
	// Delete removes a key. A missing key is not an error.
	Delete(ctx context.Context, key string) error
}

// RangeReader is what a KV may be, too: it reads parts of values. A Database with Keep then compares a block that is saved again with what is
// stored by 16 bytes of that; otherwise it reads all of it.
type RangeReader interface {
	// GetRange returns n bytes of a value from at on, or fewer if it ends before, and the size of the whole value in bytes. n may be 0. The
	// caller may keep the bytes. If the key is missing, the error is connector.ErrGone.
	GetRange(ctx context.Context, key string, at, n int) (part []byte, size int, err error)
}

// DatabaseOptions are the options of a Database.
type DatabaseOptions struct {
	Keep  bool          // blocks stay after they are selected; the database evicts them by its own rules
	Poll  time.Duration // how often a waiting selection asks; 0 means 10 ms
	Close func() error  // closes the database, after the last call; may be nil
}

// Database is a Buffer on top of a key-value database that other processes may also use. Within this
// process, all selections of a block that run at the same time get it; a selection in another process may
// come too late, unless Keep is set.
type Database struct {
	kv     KV
	o      DatabaseOptions
	closed chan struct{}
	once   sync.Once

	mu      sync.Mutex
	readers map[connector.StoreKey]*reading
}

// reading counts the running selections of one key. The last one removes the block.
type reading struct {
	n     int
	taken bool
}

// deleteTimeout is how long a successful selection waits until its blocks are removed.
const deleteTimeout = time.Second

// NewDatabase makes a Buffer on top of a database.
func NewDatabase(kv KV, o DatabaseOptions) *Database {
	if o.Poll <= 0 {
		o.Poll = 10 * time.Millisecond
	}
	return &Database{kv: kv, o: o, closed: make(chan struct{}), readers: map[connector.StoreKey]*reading{}}
}

func (d *Database) over() error {
	select {
	case <-d.closed:
		return ErrClosed
	default:
		return nil
	}
}

// Lookup implements Buffer, with one query for all runs.
func (d *Database) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	if err := d.over(); err != nil {
		return nil, err
	}
	var names []string
	for _, run := range runs {
		for _, k := range run {
			names = append(names, k.String())
		}
	}
	found := make([]int, len(runs))
	if len(names) == 0 {
		return found, nil
	}
	there, err := d.kv.Exists(ctx, names)
	if err == nil && len(there) != len(names) {
		err = fmt.Errorf("the database answered for %d of %d keys: %w", len(there), len(names), connector.ErrIncompatible)
	}
	if err != nil {
		return nil, err
	}
	for i, run := range runs {
		mine := there[:len(run)]
		there = there[len(run):]
		if found[i] = slices.Index(mine, false); found[i] < 0 {
			found[i] = len(run)
		}
	}
	return found, nil
}

// Insert implements Buffer.
func (d *Database) Insert(ctx context.Context, items []connector.Item) error {
	var failed failures
	for i, it := range items {
		err := d.over()
		if err == nil {
			err = ctx.Err()
		}
		if err == nil {
			err = d.insert(ctx, &it)
		}
		if err != nil {
			failed.add(i, err)
		}
	}
	return failed.error()
}

func (d *Database) insert(ctx context.Context, it *connector.Item) error {
	name := it.Key.String()
	if !it.Replace {
		if there, err := d.kv.Exists(ctx, []string{name}); err == nil && len(there) == 1 && there[0] && d.same(ctx, name, it) {
			return nil
		}
	}
	return d.kv.Put(ctx, name, bytes.Join(it.Spans, nil))
}

// same reports whether the value of a key is the block as it is, as far as the rule STORE-07 asks for. One that is given out once is not looked
// at: it does not outlive its engines for long.
func (d *Database) same(ctx context.Context, name string, it *connector.Item) bool {
	if !d.o.Keep || len(it.Spans) == 0 {
		return true
	}
	const header = 16
	digests, at, n := it.Spans[len(it.Spans)-1], 0, 0
	if len(digests) >= header && digests[0] != 0 && [7]byte(digests[1:8]) == [7]byte{} { // otherwise there are none
		at, n = it.Size()-len(digests), header
	}
	have, size, err := d.part(ctx, name, at, n)
	return err == nil && size == it.Size() && bytes.Equal(have, digests[:n])
}

// part is GetRange, of any KV.
func (d *Database) part(ctx context.Context, name string, at, n int) (have []byte, size int, err error) {
	if r, is := d.kv.(RangeReader); is {
		return r.GetRange(ctx, name, at, n)
	}
	value, err := d.kv.Get(ctx, name)
	size = len(value)
	return value[min(at, size):min(at+n, size)], size, err
}

// DropSelect implements Buffer.
func (d *Database) DropSelect(ctx context.Context, items []connector.Item) error {
	var pending []int
	for i := range items {
		d.begin(items[i].Key)
		pending = append(pending, i)
	}
	var failed failures
	tick := time.NewTicker(d.o.Poll)
	defer tick.Stop()
	for len(pending) > 0 {
		pending = slices.DeleteFunc(pending, func(i int) bool {
			there, err := d.get(ctx, &items[i])
			if err != nil {
				failed.add(i, err)
			}
			if there || err != nil {
				d.end(ctx, items[i].Key, there)
			}
			return there || err != nil
		})
		if len(pending) > 0 {
			select {
			case <-tick.C:
			case <-ctx.Done():
			case <-d.closed:
			}
		}
	}
	return failed.error()
}

// get copies one block into the item's spans, if the database has it.
func (d *Database) get(ctx context.Context, it *connector.Item) (there bool, err error) {
	if err := errors.Join(d.over(), ctx.Err()); err != nil {
		return false, err
	}
	value, err := d.kv.Get(ctx, it.Key.String())
	switch {
	case errors.Is(err, connector.ErrGone):
		return false, nil
	case err == nil:
		if n := it.Size(); n != len(value) { // another version has stored it, or somebody has cut it: nothing in it says which
			err = fmt.Errorf("block %v has %d bytes, there is room for %d: %w", it.Key, len(value), n, connector.ErrOutdated)
		}
	}
	if err != nil {
		return false, err
	}
	pipe.Copy(it.Spans, [][]byte{value})
	return true, nil
}

func (d *Database) begin(k connector.StoreKey) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.readers[k] == nil {
		d.readers[k] = &reading{}
	}
	d.readers[k].n++
}

// end ends one selection of a key; the last one removes a block that was taken. If the removal fails, the
// block stays, which costs nothing except room.
func (d *Database) end(ctx context.Context, k connector.StoreKey, taken bool) {
	d.mu.Lock()
	r := d.readers[k]
	r.n--
	r.taken = r.taken || taken
	last := r.n == 0
	if last {
		delete(d.readers, k)
	}
	d.mu.Unlock()
	if last && r.taken && !d.o.Keep {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteTimeout)
		defer cancel()
		_ = d.kv.Delete(ctx, k.String())
	}
}

// Close implements Buffer.
func (d *Database) Close() (err error) {
	d.once.Do(func() {
		close(d.closed)
		if d.o.Close != nil {
			err = d.o.Close()
		}
	})
	return err
}
