package remote

import (
	"bytes"
	"container/list"
	"context"
	"fmt"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/storekit"
)

// Memory is a connector.Store in the memory of this process, for use without a server. The size of what it
// keeps is limited; the least recently used blocks go first.
type Memory struct {
	counts storekit.Counts[Stats]
	limit  int64

	mu    sync.Mutex
	bytes int64
	order *list.List // of *entry, the last used one in front
	byKey map[connector.StoreKey]*list.Element
}

// entry is one block. Its value never changes, so that it can be read without the lock.
type entry struct {
	key   connector.StoreKey
	value []byte
}

// NewMemory makes an empty store of at most limit bytes.
func NewMemory(limit int64) *Memory {
	return &Memory{limit: limit, order: list.New(), byKey: map[connector.StoreKey]*list.Element{}}
}

// Lookup implements connector.Store.
func (m *Memory) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return storekit.Leading(runs, func(k connector.StoreKey) bool { return m.byKey[k] != nil }), nil
}

// Get implements connector.Store.
func (m *Memory) Get(ctx context.Context, items []connector.Item) error {
	return storekit.Each(ctx, items, m.get)
}

func (m *Memory) get(it connector.Item) error {
	m.mu.Lock()
	e := m.byKey[it.Key]
	if e == nil {
		m.mu.Unlock()
		m.counts.Count(func(n *Stats) { n.Gone++ })
		return fmt.Errorf("%s is not stored: %w", short(it.Key), connector.ErrGone)
	}
	m.order.MoveToFront(e)
	block, _ := e.Value.(*entry)
	m.mu.Unlock()
	value := block.value
	if len(value) != headerSize+it.Size() {
		m.counts.Count(func(n *Stats) { n.Corrupt++ })
		return fmt.Errorf("value of %s has %d bytes, want %d: %w", short(it.Key), len(value), headerSize+it.Size(), connector.ErrCorrupt)
	}
	value = value[headerSize:]
	for _, span := range it.Spans {
		value = value[copy(span, value):]
	}
	m.counts.Count(func(n *Stats) { n.read(it.Size()) })
	return nil
}

// Put implements connector.Store.
func (m *Memory) Put(ctx context.Context, items []connector.Item) error {
	return storekit.Each(ctx, items, m.put)
}

func (m *Memory) put(it connector.Item) error {
	m.mu.Lock()
	e := m.byKey[it.Key]
	if e != nil {
		m.order.MoveToFront(e)
	}
	m.mu.Unlock()
	if e != nil && !it.Replace && sameValue(e, it) {
		m.counts.Count(func(n *Stats) { n.Known++ })
		return nil
	}
	size := int64(headerSize + it.Size())
	if size > m.limit {
		m.counts.Count(func(n *Stats) { n.Refused++ })
		return fmt.Errorf("block of %d bytes, memory_bytes is %d: %w", it.Size(), m.limit, connector.ErrIncompatible)
	}
	block := &entry{key: it.Key, value: appendValue(make([]byte, 0, size), it)}
	m.mu.Lock()
	defer m.mu.Unlock()
	if e := m.byKey[it.Key]; e != nil {
		m.remove(e)
	}
	for m.bytes+size > m.limit {
		m.remove(m.order.Back())
		m.counts.Count(func(n *Stats) { n.Evicted++ })
	}
	m.counts.Count(func(n *Stats) { n.wrote(it.Size()) })
	m.byKey[it.Key] = m.order.PushFront(block)
	m.bytes += size
	return nil
}

// sameValue reports whether a value is that of a block, as far as its length and the beginning of its digests say.
func sameValue(e *list.Element, it connector.Item) bool {
	block, _ := e.Value.(*entry)
	want, at := storekit.Mark(it)
	return len(block.value) == headerSize+it.Size() && bytes.Equal(block.value[headerSize+at:][:len(want)], want)
}

func (m *Memory) remove(e *list.Element) {
	block, _ := m.order.Remove(e).(*entry)
	delete(m.byKey, block.key)
	m.bytes -= int64(len(block.value))
}

// Close implements connector.Store.
func (m *Memory) Close() error { return nil }
