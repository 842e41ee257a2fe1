package mutants

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// OffloadConfig is the config of Offload: the fields of rule OFF-01.
type OffloadConfig struct {
	Blocks    int    `json:"num_cpu_blocks,omitempty" jsonschema:"minimum=0" jsonschema_extras:"bounds=blocks"`
	Bytes     int64  `json:"cpu_bytes_to_use,omitempty" jsonschema:"minimum=0"`
	Policy    string `json:"eviction_policy,omitempty" jsonschema:"enum=lru,enum=arc,enum=s3fifo"`
	Piece     int    `json:"block_size,omitempty" jsonschema:"minimum=0"`
	Threshold int    `json:"store_threshold,omitempty" jsonschema:"minimum=0"`
	TTL       int    `json:"ttl_seconds,omitempty" jsonschema:"minimum=0" jsonschema_extras:"bounds=seconds"`
	Quota     int64  `json:"tenant_bytes,omitempty" jsonschema:"minimum=0" jsonschema_extras:"bounds=tenant_bytes"`
	DiskPath  string `json:"disk_path,omitempty"`
	DiskBytes int64  `json:"disk_bytes,omitempty" jsonschema:"minimum=0" jsonschema_extras:"bounds=bytes"`
	DiskAdmit int    `json:"disk_admit_after,omitempty" jsonschema:"minimum=0"`
}

// Offload is a connector with a tier in memory and one on disk that keeps the rules OFF-01 to OFF-13 in
// the simplest way: one lock, one file a block, and LRU by every name. fault says what is wrong with
// it; "" is nothing.
func Offload(fault string) connector.Plugin {
	d := sdk.Definition{Name: "OffloadReference", Version: "1", Scope: connector.ScopeEngine, Reset: true}
	if fault == "lax" {
		return sdk.FromStore(d, func(ctx context.Context, env connector.Env, c laxConfig) (connector.Store, error) {
			return openOffload(fault)(ctx, env, OffloadConfig(c))
		})
	}
	return sdk.FromStore(d, openOffload(fault))
}

// laxConfig is OffloadConfig without a check.
type laxConfig OffloadConfig

// Validate reports sizes that contradict each other.
func (c OffloadConfig) Validate() error {
	if c.Blocks > 0 && c.Bytes > 0 || c.DiskBytes > 0 && c.DiskPath == "" {
		return fmt.Errorf("sizes of the tiers: %w", connector.ErrIncompatible)
	}
	return nil
}

// tiered is the Store of Offload.
type tiered struct {
	c     OffloadConfig
	fault string
	piece int

	mu     sync.Mutex
	memory map[connector.StoreKey]*kept
	order  []connector.StoreKey // what memory gives up first
	files  []connector.StoreKey // the same of the disk
	offers map[connector.StoreKey]int
	gone   int // evictions so far

	spent  map[uint64]int64            // by tenants, where a fault counts it
	pinned map[connector.StoreKey]bool // where a fault pins
}

// kept is one block.
type kept struct {
	data   []byte
	tenant uint64
	until  time.Time // zero: for ever
}

func openOffload(fault string) func(context.Context, connector.Env, OffloadConfig) (connector.Store, error) {
	return func(_ context.Context, env connector.Env, c OffloadConfig) (connector.Store, error) {
		s := &tiered{c: c, fault: fault, piece: 1, memory: map[connector.StoreKey]*kept{}, offers: map[connector.StoreKey]int{}, spent: map[uint64]int64{}, pinned: map[connector.StoreKey]bool{}}
		if own := env.Layout.Groups[0].BlockTokens; c.Piece > 0 {
			if c.Piece%own != 0 {
				return nil, fmt.Errorf("block_size: %w", connector.ErrIncompatible)
			}
			s.piece = c.Piece / own
		}
		if c.Blocks == 0 {
			s.c.Blocks = 4000
		}
		if c.DiskPath == "" {
			return s, nil
		}
		if fault == "cold" {
			_ = os.RemoveAll(c.DiskPath)
		}
		if err := os.MkdirAll(c.DiskPath, 0o700); err != nil {
			return nil, fmt.Errorf("disk_path: %w: %w", err, connector.ErrIncompatible)
		}
		entries, err := os.ReadDir(c.DiskPath)
		for _, e := range entries {
			s.files = append(s.files, parseKey(e.Name()))
		}
		return s, err
	}
}

func parseKey(name string) (k connector.StoreKey) {
	if raw, err := hex.DecodeString(name); err == nil {
		copy(k[:], raw)
	}
	return k
}

func (s *tiered) path(k connector.StoreKey) string { return filepath.Join(s.c.DiskPath, k.String()) }

// Lookup implements connector.Store.
func (s *tiered) Lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := make([]int, len(runs))
	for i, keys := range runs {
		for found[i] < len(keys) && (s.find(keys[found[i]], s.fault == "lookup") != nil || s.fault == "stale" && s.offers[keys[found[i]]] > 0) {
			found[i]++
		}
		if s.fault != "pieces" {
			found[i] -= found[i] % s.piece
		}
	}
	return found, nil
}

// find gives a block from memory or disk; nil if there is none.
func (s *tiered) find(k connector.StoreKey, promote bool) *kept {
	b := s.memory[k]
	if b == nil && slices.Contains(s.files, k) {
		if b = s.read(k); b != nil && promote {
			s.room(nil)
			s.memory[k], s.order = b, append(s.order, k)
		}
	}
	if b != nil && !b.until.IsZero() && time.Now().After(b.until) && s.fault != "ttl" {
		return nil
	}
	return b
}

// read reads a file: its sum, its time, its bytes.
func (s *tiered) read(k connector.StoreKey) *kept {
	raw, err := os.ReadFile(s.path(k))
	if err == nil && s.fault == "cut" && len(raw) < 500 {
		raw = append(raw, make([]byte, 8192)...)
		return &kept{data: raw[sha256.Size+8:]}
	}
	if err != nil || len(raw) < sha256.Size+8 {
		return nil
	}
	body := raw[sha256.Size:]
	if sum := sha256.Sum256(body); !bytes.Equal(sum[:], raw[:sha256.Size]) && s.fault != "unchecked" && s.fault != "cut" {
		return nil
	}
	b := &kept{data: body[8:]}
	if ms := int64(binary.LittleEndian.Uint64(body)); ms != 0 {
		b.until = time.UnixMilli(ms)
	}
	return b
}

// Get implements connector.Store.
func (s *tiered) Get(ctx context.Context, items []connector.Item) error {
	if s.fault == "kept pins" {
		s.pin(items)
		if err := ctx.Err(); err != nil {
			return err
		}
		defer s.unpin(items)
	}
	return each(ctx, items, func(it connector.Item) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		b := s.find(it.Key, false)
		if b == nil {
			return connector.ErrGone
		}
		data := b.data
		if s.fault == "unpinned" { // the slot's bytes at the end of the copy are those of its next block
			before := s.gone
			s.mu.Unlock()
			<-time.After(3 * time.Millisecond)
			s.mu.Lock()
			for _, k := range s.order {
				if s.gone != before && k != it.Key {
					data = s.memory[k].data
				}
			}
		}
		data = s.loaded(it.Key, b, data)
		if len(data) < it.Size() {
			return connector.ErrCorrupt
		}
		for _, span := range it.Spans {
			data = data[copy(span, data):]
		}
		s.use(it.Key)
		return nil
	})
}

// pin keeps what is in memory there.
func (s *tiered) pin(items []connector.Item) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, it := range items {
		s.pinned[it.Key] = s.memory[it.Key] != nil
	}
}

func (s *tiered) unpin(items []connector.Item) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, it := range items {
		delete(s.pinned, it.Key)
	}
}

// loaded is what lies in a block at the end of a load; faults of loads are here.
func (s *tiered) loaded(k connector.StoreKey, b *kept, data []byte) []byte {
	switch s.fault {
	case "ttl again":
		if s.c.TTL == 0 {
			break
		}
		b.until = time.Now().Add(time.Duration(s.c.TTL) * time.Second)
	case "ttl hot":
		b.until = time.Time{}
	case "one pin":
		s.pinned[k] = true
		s.mu.Unlock()
		<-time.After(2 * time.Millisecond)
		s.mu.Lock()
		delete(s.pinned, k)
		if s.memory[k] == nil && len(s.order) > 0 {
			data = s.memory[s.order[len(s.order)-1]].data
		}
	}
	return data
}

// use makes a block the last that memory gives up.
func (s *tiered) use(k connector.StoreKey) {
	if i := slices.Index(s.order, k); i >= 0 && s.fault != "fifo" {
		s.order = append(slices.Delete(s.order, i, i+1), k)
	}
}

// Put implements connector.Store.
func (s *tiered) Put(ctx context.Context, items []connector.Item) error {
	var mine []connector.StoreKey
	failed := &connector.ItemError{}
	s.mu.Lock()
	defer s.mu.Unlock()
	known := 0 // blocks of this call that are there
	for i, it := range items {
		err := ctx.Err()
		if s.fault == "names" && s.memory[it.Key] != nil {
			known++
		}
		if err == nil {
			err = s.put(it, mine)
		}
		if err != nil {
			failed.Items, failed.Err = append(failed.Items, i-known), err
			continue
		}
		if s.fault != "own" {
			mine = append(mine, it.Key)
		}
	}
	if failed.Err != nil {
		return failed
	}
	return nil
}

// declines says why a block is not to be stored; "" if it is.
func (s *tiered) declines(it connector.Item) string {
	if s.offers[it.Key]++; s.offers[it.Key] < s.c.Threshold {
		return "threshold"
	}
	used := int64(it.Size())
	for _, b := range s.memory {
		if b.tenant == it.Tenant {
			used += int64(len(b.data))
		}
	}
	if s.fault == "spent" || s.fault == "reset spent" {
		used = int64(it.Size()) + s.spent[it.Tenant]
	}
	if s.c.Quota > 0 && used > s.c.Quota {
		return "quota"
	}
	return ""
}

func (s *tiered) put(it connector.Item, mine []connector.StoreKey) error {
	if b := s.find(it.Key, false); b != nil && !it.Replace && sameVersion(b.data, it.Spans) {
		s.use(it.Key)
		return nil
	}
	if why := s.declines(it); why != "" {
		if s.fault == why {
			return nil
		}
		return fmt.Errorf("%s: %w", why, connector.ErrDeclined)
	}
	if s.memory[it.Key] == nil && (s.fault != "first room" || len(mine) == 0) && !s.room(mine) {
		return fmt.Errorf("no room: %w", connector.ErrDeclined)
	}
	b := &kept{data: slices.Concat(it.Spans...), tenant: it.Tenant}
	if s.c.TTL > 0 {
		b.until = time.Now().Add(time.Duration(s.c.TTL) * time.Second)
	}
	if s.memory[it.Key] == nil {
		s.order = append(s.order, it.Key)
		s.spent[it.Tenant] += int64(it.Size())
	}
	s.memory[it.Key] = b
	if s.c.DiskPath != "" && s.fault != "no spill" {
		s.write(it.Key, b, mine)
	}
	return nil
}

// room makes place in memory for one block, without the given ones.
func (s *tiered) room(but []connector.StoreKey) bool {
	if s.fault == "unbounded" {
		return true
	}
	for len(s.order) >= s.c.Blocks {
		i := slices.IndexFunc(s.order, func(k connector.StoreKey) bool { return !slices.Contains(but, k) && !s.pinned[k] })
		if s.fault == "newest" {
			i = len(s.order) - 1
		}
		if i < 0 {
			return false
		}
		if b := s.memory[s.order[i]]; s.fault == "reset spent" {
			s.spent[b.tenant] -= int64(len(b.data))
		}
		delete(s.memory, s.order[i])
		s.order = slices.Delete(s.order, i, i+1)
		s.gone++
	}
	return true
}

// write puts a block on disk, within the bound, unless that would take the only copy of the given ones.
func (s *tiered) write(k connector.StoreKey, b *kept, but []connector.StoreKey) {
	var until int64
	if !b.until.IsZero() {
		until = b.until.UnixMilli()
	}
	body := append(binary.LittleEndian.AppendUint64(nil, uint64(until)), b.data...)
	sum := sha256.Sum256(body)
	size := int64(len(sum) + len(body))
	if i := slices.Index(s.files, k); i >= 0 {
		_ = os.Remove(s.path(k))
		s.files = slices.Delete(s.files, i, i+1)
	}
	for s.fault != "disk unbounded" && len(s.files) > 0 && int64(len(s.files)+1)*size > s.c.DiskBytes {
		i := slices.IndexFunc(s.files, func(k connector.StoreKey) bool {
			return s.memory[k] != nil || !slices.Contains(but, k)
		})
		if i < 0 {
			return
		}
		_ = os.Remove(s.path(s.files[i]))
		s.files = slices.Delete(s.files, i, i+1)
	}
	if os.WriteFile(s.path(k), append(sum[:], body...), 0o600) == nil {
		s.files = append(s.files, k)
	}
}

// Reset implements connector.Resetter.
func (s *tiered) Reset(context.Context) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.memory)
	s.order = nil
	if s.fault != "reset spent" {
		clear(s.spent)
	}
	if s.fault == "half reset" {
		return true, nil
	}
	var errs []error
	for _, k := range s.files {
		errs = append(errs, os.Remove(s.path(k)))
	}
	s.files = nil
	return true, errors.Join(errs...)
}

// Close implements connector.Store.
func (s *tiered) Close() error { return nil }

// Watched is Offload whose blocks have events, without limits of time.
func Watched(fault string) connector.Plugin {
	d := sdk.Definition{Name: "WatchedReference", Version: "1", Scope: connector.ScopeEngine, Capabilities: connector.CanReset | connector.CanEvents}
	return sdk.FromStore(d, func(ctx context.Context, env connector.Env, c OffloadConfig) (connector.Store, error) {
		store, err := openOffload(fault)(ctx, env, c)
		if err != nil {
			return nil, err
		}
		return &watched{tiered: store.(*tiered), had: map[connector.StoreKey]bool{}}, nil //nolint:forcetypeassert // it opens nothing else
	})
}

// watched is the Store of Watched.
type watched struct {
	*tiered
	removed func([]connector.StoreKey)
	had     map[connector.StoreKey]bool
}

// Watch implements sdk.Watchable.
func (w *watched) Watch(removed func([]connector.StoreKey)) { w.removed = removed }

// Put implements connector.Store.
func (w *watched) Put(ctx context.Context, items []connector.Item) error {
	err := w.tiered.Put(ctx, items)
	w.mu.Lock()
	defer w.mu.Unlock()
	there := func(k connector.StoreKey) bool { return w.memory[k] != nil || slices.Contains(w.files, k) }
	for _, it := range items {
		w.had[it.Key] = w.had[it.Key] || there(it.Key)
	}
	var gone []connector.StoreKey
	for k, had := range w.had {
		if !there(k) {
			delete(w.had, k)
			if had {
				gone = append(gone, k)
			}
		}
	}
	if w.fault != "untold" && len(gone) > 0 {
		w.removed(gone)
	}
	return err
}

// boundedFaults are about what options bound; no case of tiers notices them.
func boundedFaults() (out []Unseen) {
	for _, f := range []struct {
		name, fault string
		rules       []string
	}{
		{"a tier that makes room once for each save", "first room", []string{"OFF-02"}},
		{"a quota that counts what was given up", "spent", []string{"OFF-05"}},
		{"a quota that a reset does not give back", "reset spent", []string{"OFF-05"}},
		{"a time that begins again with each load", "ttl again", []string{"OFF-10"}},
		{"a time that a load forgets", "ttl hot", []string{"OFF-10"}},
		{"one pin for two loads", "one pin", []string{"KEY-06", "WORK-01"}},
		{"a load that keeps its pins when it is cancelled", "kept pins", []string{"OFF-05"}},
		{"declined blocks that are named by their place among the new ones", "names", []string{"OFF-05", "WORK-02"}},
	} {
		const config = `{"num_cpu_blocks":4000}` // named cases have large batches
		out = append(out, Unseen{Class: bounds, Rules: f.rules, Mutant: Mutant{
			Name: f.name, Case: "random-bounded", Config: config, Plugin: func() connector.Plugin { return Offload(f.fault) },
		}})
	}
	return out
}

// offloadMutants are the faults of a connector with tiers.
func offloadMutants() (out []Mutant) {
	for _, m := range []struct{ name, caseID, fault string }{
		{"tiers whose config is not checked", "offload-config", "lax"},
		{"a memory tier that grows", "offload-bound", "unbounded"},
		{"a disk tier that grows", "offload-disk-bound", "disk unbounded"},
		{"a full tier that takes nothing new", "offload-newest", "newest"},
		{"a tier to which hits mean nothing", "offload-hot", "fifo"},
		{"a tier that offers what it gave up", "offload-policies", "stale"},
		{"a tier that gives up a block while it is loaded", "offload-pinned", "unpinned"},
		{"a tier that gives up what the same call stored", "offload-acknowledged", "own"},
		{"a memory tier that drops what it gives up", "offload-spill", "no spill"},
		{"a disk tier that starts empty", "offload-restart", "cold"},
		{"tiers that move a block when somebody asks for it", "offload-lookups", "lookup"},
		{"a threshold that says nothing", "offload-threshold", "threshold"},
		{"a quota that discards silently", "offload-quota", "quota"},
		{"blocks that outlive their time", "offload-ttl", "ttl"},
		{"a reset that leaves the disk", "offload-reset", "half reset"},
		{"a disk tier that does not check what it reads", "offload-damaged", "unchecked"},
		{"a disk tier that reads what is cut off as zeros", "offload-cut", "cut"},
		{"hits that end in the middle of a piece", "offload-pieces", "pieces"},
	} {
		out = append(out, Mutant{
			Name: m.name, Case: m.caseID, Config: `{"disk_path":"@TMP@/tier","disk_bytes":65536}`,
			Plugin: func() connector.Plugin { return Offload(m.fault) },
		})
	}
	return append(out, Mutant{
		Name: "a tier that does not say what it gives up", Case: "event-evicted", Config: `{"num_cpu_blocks":64}`,
		Plugin: func() connector.Plugin { return Watched("untold") },
	})
}
