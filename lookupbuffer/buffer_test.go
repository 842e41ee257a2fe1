package lookupbuffer_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/lookupbuffer"
	"github.com/kvport/kvport/lookupbuffer/lookupbuffertest"
	"github.com/kvport/kvport/pipe"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const capacity = 1 << 20

func one(b lookupbuffer.Buffer) lookupbuffertest.Ends {
	return lookupbuffertest.Ends{Insert: b, Select: b}
}

func TestMemory(t *testing.T) {
	for _, o := range []lookupbuffer.Options{{}, {Refuse: true}, {Keep: true}} {
		o.Bytes = capacity
		t.Run(fmt.Sprintf("%+v", o), func(t *testing.T) {
			lookupbuffertest.Run(t, lookupbuffertest.Harness{Capacity: capacity, Keep: o.Keep, Open: func(lookupbuffertest.T) lookupbuffertest.Ends {
				return one(lookupbuffer.NewMemory(o))
			}})
		})
	}
}

// kv is a database in memory.
type kv struct {
	mu     sync.Mutex
	values map[string][]byte
	bytes  int
}

func (d *kv) Exists(_ context.Context, keys []string) ([]bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	there := make([]bool, len(keys))
	for i, k := range keys {
		_, there[i] = d.values[k]
	}
	return there, nil
}

func (d *kv) Get(_ context.Context, key string) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	v, ok := d.values[key]
	if !ok {
		return nil, connector.ErrGone
	}
	return v, nil
}

func (d *kv) Put(_ context.Context, key string, value []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.bytes+len(value) > capacity {
		return connector.ErrBusy
	}
	d.bytes += len(value) - len(d.values[key])
	d.values[key] = value
	return nil
}

func (d *kv) Delete(_ context.Context, key string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.bytes -= len(d.values[key])
	delete(d.values, key)
	return nil
}

// ranged is a kv that reads parts of values, and counts the values that are read whole.
type ranged struct {
	*kv
	whole int
}

func (d *ranged) Get(ctx context.Context, key string) ([]byte, error) {
	d.whole++
	return d.kv.Get(ctx, key)
}

func (d *ranged) GetRange(ctx context.Context, key string, at, n int) (part []byte, size int, err error) {
	value, err := d.kv.Get(ctx, key)
	return value[min(at, len(value)):min(at+n, len(value))], len(value), err
}

func TestDatabase(t *testing.T) {
	for _, keep := range []bool{false, true} {
		cases := lookupbuffertest.Cases()
		for _, c := range cases {
			if keep && (c.Name == "room-again" || c.Name == "at-once") {
				continue // this database evicts nothing
			}
			t.Run(fmt.Sprintf("%s keep=%v", c.Name, keep), func(t *testing.T) {
				c.Run(t, lookupbuffertest.Harness{Capacity: capacity, Keep: keep, Shared: true, Open: func(lookupbuffertest.T) lookupbuffertest.Ends {
					return one(lookupbuffer.NewDatabase(&kv{values: map[string][]byte{}}, lookupbuffer.DatabaseOptions{Keep: keep, Poll: time.Millisecond}))
				}})
			})
		}
	}
}

// queue is a pipe for the tests of this package, which may not import those below package pipe.
type queue struct {
	frames chan frame
	once   sync.Once
	closed chan struct{}
}

type frame struct{ header, payload []byte }

func newQueue() *queue { return &queue{frames: make(chan frame, 4), closed: make(chan struct{})} }

func (q *queue) Send(ctx context.Context, header []byte, spans [][]byte) error {
	f := frame{append([]byte(nil), header...), make([]byte, pipe.Size(spans))}
	pipe.Copy([][]byte{f.payload}, spans)
	select {
	case <-q.closed:
		return pipe.ErrClosed
	default:
	}
	select {
	case q.frames <- f:
		return nil
	case <-q.closed:
		return pipe.ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (q *queue) Recv(ctx context.Context, place pipe.Place) error {
	select {
	case f := <-q.frames:
		spans, err := pipe.Ask(place, f.header, len(f.payload))
		pipe.Copy(spans, [][]byte{f.payload})
		return err
	case <-q.closed:
		return pipe.ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (q *queue) Close() error {
	q.once.Do(func() { close(q.closed) })
	return nil
}

func TestPiped(t *testing.T) {
	lookupbuffertest.Run(t, lookupbuffertest.Harness{Capacity: capacity, Open: func(lookupbuffertest.T) lookupbuffertest.Ends {
		q := newQueue()
		return lookupbuffertest.Ends{
			Insert: lookupbuffer.NewPiped(q, nil, lookupbuffer.NewMemory(lookupbuffer.Options{})),
			Select: lookupbuffer.NewPiped(nil, q, lookupbuffer.NewMemory(lookupbuffer.Options{Bytes: capacity})),
		}
	}})
}

// If a consumer is stopped, the pipe fills up, and Insert returns ErrBusy after a second.
func TestPipedPeerIsStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := lookupbuffer.NewPiped(newQueue(), nil, lookupbuffer.NewMemory(lookupbuffer.Options{}))
		items := make([]connector.Item, 10)
		for i := range items {
			items[i] = connector.Item{Key: connector.StoreKey{byte(i)}, Spans: [][]byte{{1}}}
		}
		began := time.Now()
		err := b.Insert(t.Context(), items)
		require.ErrorIs(t, err, connector.ErrBusy)
		var failed *connector.ItemError
		require.ErrorAs(t, err, &failed)
		require.Equal(t, []int{4, 5, 6, 7, 8, 9}, failed.Items)
		require.Equal(t, time.Second, time.Since(began))
		require.NoError(t, b.Close())
	})
}

func TestMemoryCountsEveryByte(t *testing.T) {
	m := lookupbuffer.NewMemory(lookupbuffer.Options{Bytes: 100})
	put := func(k byte, size int) error {
		return m.Insert(t.Context(), []connector.Item{{Key: connector.StoreKey{k}, Spans: [][]byte{make([]byte, size)}}})
	}
	require.NoError(t, put(1, 60))
	require.NoError(t, put(2, 40))
	require.EqualValues(t, 100, m.Bytes())
	require.ErrorIs(t, put(3, 101), connector.ErrIncompatible)
	require.EqualValues(t, 100, m.Bytes())
	found, err := m.Read(connector.StoreKey{1}, func([]byte) error {
		require.ErrorIs(t, put(3, 61), connector.ErrBusy, "a block that is being read stays")
		return nil
	})
	require.True(t, found)
	require.NoError(t, err)
	require.NoError(t, put(4, 30))
	require.EqualValues(t, 90, m.Bytes())
	sum := fmt.Errorf("half of it")
	require.ErrorIs(t, m.Fill(t.Context(), connector.StoreKey{5}, 50, func([]byte) error { return sum }), sum)
	require.LessOrEqual(t, m.Bytes(), int64(90))
	n, err := m.Lookup(t.Context(), [][]connector.StoreKey{{{5}}})
	require.NoError(t, err)
	require.Equal(t, []int{0}, n)
	require.NoError(t, m.Close())
}

func FuzzItemHeader(f *testing.F) {
	good := lookupbuffer.ItemHeader(connector.StoreKey{1, 2}, true)
	for _, seed := range [][]byte{good, nil, {1}, good[:len(good)-1], append([]byte{2}, good[1:]...), append(good[:1:1], 0xff)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, header []byte) {
		k, replace, err := lookupbuffer.ParseItemHeader(header)
		if err != nil {
			require.ErrorIs(t, err, connector.ErrIncompatible)
			return
		}
		require.Equal(t, header, lookupbuffer.ItemHeader(k, replace))
	})
}

func TestDatabaseDeletesOnce(t *testing.T) {
	d := &kv{values: map[string][]byte{}}
	b := lookupbuffer.NewDatabase(d, lookupbuffer.DatabaseOptions{})
	it := connector.Item{Key: connector.StoreKey{7}, Spans: [][]byte{[]byte("block")}}
	require.NoError(t, b.Insert(t.Context(), []connector.Item{it}))
	require.Len(t, maps.Clone(d.values), 1)
	require.NoError(t, b.DropSelect(t.Context(), []connector.Item{it}))
	require.Empty(t, d.values)
	require.NoError(t, b.Close())
	require.NoError(t, b.Close())
}

// Rule STORE-07: what a database keeps is written again if it has another length, or digests by another key, and only then.
func TestDatabaseVersions(t *testing.T) {
	digests := append([]byte{2, 0, 0, 0, 0, 0, 0, 0}, "the key...and a digest"...)
	other := bytes.Replace(digests, []byte("the key."), []byte("another."), 1)
	at := connector.StoreKey{7}
	for name, c := range map[string]struct {
		stored string
		want   bool // it is written again
	}{
		"nothing":             {"", true},
		"the same":            {"block" + string(digests), false},
		"other bytes":         {"BLOCK" + string(digests), false},
		"another key":         {"block" + string(other), true},
		"longer, another key": {"blocks" + string(other), true},
		"longer":              {"blocks" + string(digests), true},
		"shorter":             {"b", true},
	} {
		for _, parts := range []bool{false, true} {
			d := &ranged{kv: &kv{values: map[string][]byte{}}}
			if c.stored != "" {
				d.values[at.String()] = []byte(c.stored)
			}
			var of lookupbuffer.KV = d.kv
			if parts {
				of = d
			}
			b := lookupbuffer.NewDatabase(of, lookupbuffer.DatabaseOptions{Keep: true})
			require.NoError(t, b.Insert(t.Context(), []connector.Item{{Key: at, Spans: [][]byte{[]byte("block"), digests}}}))
			want := c.stored
			if c.want {
				want = "block" + string(digests)
			}
			require.Equal(t, want, string(d.values[at.String()]), name)
			require.Zero(t, d.whole, "a value of which a part is enough is not read whole")
			require.NoError(t, b.Close())
		}
	}
}

// A block without digests is compared by its length.
func TestDatabaseWithoutDigests(t *testing.T) {
	d := &ranged{kv: &kv{values: map[string][]byte{}}}
	b := lookupbuffer.NewDatabase(d, lookupbuffer.DatabaseOptions{Keep: true})
	at := connector.StoreKey{7}
	for _, put := range []struct{ block, want string }{{"one", "one"}, {"two", "one"}, {"three", "three"}} {
		require.NoError(t, b.Insert(t.Context(), []connector.Item{{Key: at, Spans: [][]byte{[]byte(put.block)}}}))
		require.Equal(t, put.want, string(d.values[at.String()]))
	}
	require.Zero(t, d.whole)
	require.NoError(t, b.Close())
}
