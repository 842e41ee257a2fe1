// Package sharedstorage keeps KV blocks as files in a folder that several engines may share: on one
// machine, or on several through a network file system.
//
// A block is one file, written under a temporary name and renamed when complete, so that a reader
// sees all of a block or nothing, whoever crashes when. Bytes move between the file and the paged
// cache without a copy in between. Whatever is wrong with the folder, requests are computed instead
// and the service goes on.
package sharedstorage

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/storekit"
)

const (
	checkEvery  = time.Second            // how often a miss looks whether the folder is still there
	firstWait   = 100 * time.Millisecond // after the first failed attempt to open the folder again
	longestWait = 5 * time.Second
	lockedWait  = 10 * time.Second // after the folder turned out to be unwritable
)

// ErrReadOnly is the cause of every failed Put while the folder cannot be written.
var ErrReadOnly = errors.New("shared storage is read-only")

// Store is a connector.Store over one folder.
type Store struct {
	config Config
	log    *slog.Logger
	writer string        // prefix of temporary names, unique in all processes
	slots  chan struct{} // one for each file being read or written
	index  index
	budget budget
	write  func(fd int, it connector.Item) error // writeItem, except in tests
	serial atomic.Uint64

	mu     sync.RWMutex // held for reading while dir is used
	dir    *dir         // nil between a failed and the next attempt to open it
	closed bool

	health  sync.Mutex // guards the rest
	checked time.Time
	retryAt time.Time
	wait    time.Duration
	locked  time.Time // until then Put is refused without an attempt

	removed func([]connector.StoreKey) // of Watch

	counts storekit.Counts[Counts]
}

// Open opens the folder of config; env's log is used for what an operator should know. Errors name
// the config field and wrap connector.ErrIncompatible.
func Open(_ context.Context, env connector.Env, config Config) (connector.Store, error) {
	return newStore(env.Log, config)
}

func newStore(log *slog.Logger, config Config) (*Store, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	config, err := config.settle(log)
	if err != nil {
		return nil, err
	}
	if err := fault.Point("store.open"); err != nil {
		return nil, err
	}
	d, err := openDir(config.Path, config.ReadOnly)
	if err != nil {
		return nil, fmt.Errorf("shared_storage_path %s: %w: %w", config.Path, err, connector.ErrIncompatible)
	}
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	s := &Store{
		config: config, log: log, dir: d, writer: hex.EncodeToString(id[:]),
		slots: make(chan struct{}, config.Workers), write: writeItem, wait: firstWait,
		budget: budget{max: config.MaxBytes}, removed: func([]connector.StoreKey) {},
	}
	fault.Crash("store.open.sweep")
	s.counts.Count(func(n *Counts) { n.StaleTemporaries = uint64(d.sweep(time.Now())) })
	return s, nil
}

// Close implements connector.Store.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.dir == nil {
		return nil
	}
	d := s.dir
	s.dir = nil
	return d.close()
}

// Lookup implements connector.Store.
func (s *Store) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	if err := fault.Point("store.lookup"); err != nil {
		return nil, err
	}
	found := make([]int, len(runs))
	missed := false
	for i, keys := range runs {
		for _, k := range keys {
			if found[i]%256 == 255 && ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if !s.present(k) {
				missed = true
				break
			}
			found[i]++
		}
	}
	if missed {
		s.check()
	}
	return found, nil
}

// present reports whether a key's file is on disk, of whatever size: that a file is damaged is found,
// reported and mended by the Get that reads it.
func (s *Store) present(k connector.StoreKey) bool {
	now := time.Now()
	if s.index.has(k, now) {
		return true
	}
	ok := false
	s.mu.RLock()
	if s.dir != nil {
		ok = s.dir.has(k)
	}
	s.mu.RUnlock()
	if !ok {
		return false
	}
	s.index.add(k, now)
	return true
}

// Get implements connector.Store.
func (s *Store) Get(ctx context.Context, items []connector.Item) error {
	return s.each(ctx, items, func(it connector.Item) error {
		err := s.with(func(d *dir) error { return s.get(d, it) })
		if err != nil {
			s.index.drop(it.Key)
		}
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errStale) {
			return fmt.Errorf("%s is not stored: %w", fileName(it.Key), connector.ErrGone)
		}
		return err
	})
}

func (s *Store) get(d *dir, it connector.Item) error {
	if err := fault.Point("store.get.open"); err != nil {
		return err
	}
	fd, st, err := d.open(it.Key)
	if err == nil {
		fault.Crash("store.get.opened")
		err = readItem(fd, st.Size, it)
		if err == nil && !s.config.ReadOnly && time.Since(time.Unix(st.Mtim.Unix())) > touchAfter {
			_ = unix.Futimes(fd, now()) // a hint for eviction; the block was read
		}
		_ = unix.Close(fd)
	}
	fault.Crash("store.get.done")
	if errors.Is(err, connector.ErrCorrupt) {
		fault.Crash("store.get.remove")
		s.counts.Count(func(n *Counts) { n.Corrupt++ })
		s.log.Warn("damaged block file", "key", fileName(it.Key), "error", err, "removed", !s.config.ReadOnly)
		if !s.config.ReadOnly {
			_ = d.remove(it.Key)
			s.removed([]connector.StoreKey{it.Key})
		}
	}
	if errors.Is(err, connector.ErrOutdated) {
		s.counts.Count(func(n *Counts) { n.Outdated++ })
	}
	if err == nil {
		s.counts.Count(func(n *Counts) {
			n.Loaded++
			n.LoadedBytes += uint64(headerSize + it.Size())
		})
	}
	return err
}

// now is the current time twice, as futimes expects it.
func now() []unix.Timeval {
	t := unix.NsecToTimeval(time.Now().UnixNano())
	return []unix.Timeval{t, t}
}

// Put implements connector.Store.
func (s *Store) Put(ctx context.Context, items []connector.Item) error {
	return s.each(ctx, items, func(it connector.Item) error {
		if err := s.writable(); err != nil {
			return err
		}
		err := s.with(func(d *dir) error { return s.put(d, it) })
		if unwritable(err) {
			return s.lock(err)
		}
		if err == nil {
			s.index.add(it.Key, time.Now())
		}
		return err
	})
}

func (s *Store) put(d *dir, it connector.Item) error {
	if err := fault.Point("store.put.begin"); err != nil {
		return err
	}
	size := headerSize + int64(it.Size())
	if !it.Replace && stored(d, it, size) {
		s.counts.Count(func(n *Counts) { n.Known++ })
		return nil
	}
	gone, err := s.budget.reserve(d, size)
	for _, k := range gone {
		s.index.drop(k)
	}
	s.counts.Count(func(n *Counts) { n.Evicted += uint64(len(gone)) })
	if len(gone) > 0 {
		s.removed(gone)
	}
	if err != nil {
		return err
	}
	err = s.writeFile(d, it)
	s.budget.settle(size, err == nil)
	if err == nil {
		s.counts.Count(func(n *Counts) {
			n.Saved++
			n.SavedBytes += uint64(size)
		})
		s.unlock()
	}
	return err
}

// stored reports whether a block's file is on disk, as far as its size and the beginning of its digests say.
func stored(d *dir, it connector.Item, size int64) bool {
	fd, st, err := d.open(it.Key)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	want, at := storekit.Mark(it)
	have := make([]byte, len(want))
	n, err := unix.Pread(fd, have, headerSize+int64(at))
	return st.Size == size && err == nil && n == len(have) && bytes.Equal(have, want)
}

// writeFile writes the file under a temporary name and renames it. Whatever goes wrong, the
// temporary file does not stay.
func (s *Store) writeFile(d *dir, it connector.Item) error {
	name := fmt.Sprintf("%s-%d", s.writer, s.serial.Add(1))
	if err := fault.Point("store.put.create"); err != nil {
		return err
	}
	fd, err := d.create(name)
	if err != nil {
		return err
	}
	fault.Crash("store.put.created")
	err = s.write(fd, it)
	if err == nil {
		err = fault.Point("store.put.written")
	}
	if err == nil && s.config.Fsync {
		err = unix.Fdatasync(fd)
	}
	err = errors.Join(err, unix.Close(fd))
	if err == nil {
		err = fault.Point("store.put.rename")
	}
	if err == nil {
		err = d.publish(name, it.Key, s.config.Fsync)
		fault.Crash("store.put.renamed")
	}
	if err != nil {
		fault.Crash("store.put.discard")
		d.discard(name)
	}
	return err
}

// each runs do for every item, at most config.Workers at a time over all calls, and returns when
// all have ended. The error is a *connector.ItemError that names the failed items.
func (s *Store) each(ctx context.Context, items []connector.Item, do func(connector.Item) error) error {
	errs := make([]error, len(items))
	storekit.Parallel(len(items), s.config.Workers, func(i int) {
		select {
		case <-ctx.Done():
			errs[i] = ctx.Err()
			return
		case s.slots <- struct{}{}:
		}
		if errs[i] = ctx.Err(); errs[i] == nil {
			errs[i] = do(items[i])
		}
		<-s.slots
	})
	return storekit.ItemError(errs)
}

// Capabilities are the optional powers of a Store.
const Capabilities = connector.CanReset | connector.CanStat | connector.CanEvents

// Medium is where the blocks are.
const Medium = connector.MediumDisk

// Counts is what a Store did since it was opened.
type Counts struct {
	Loaded      uint64 `stat:"loaded_blocks_total" help:"Block files read."`
	LoadedBytes uint64 `stat:"loaded_bytes_total" help:"Bytes of the block files read."`
	Saved       uint64 `stat:"saved_blocks_total" help:"Block files written."`
	SavedBytes  uint64 `stat:"saved_bytes_total" help:"Bytes of the block files written."`
	Known       uint64 `stat:"known_blocks_total" help:"Saves of blocks that were stored already."`
	Evicted     uint64 `stat:"evicted_blocks_total" help:"Block files evicted by this engine to keep max_bytes."`
	Corrupt     uint64 `stat:"corrupt_blocks_total" help:"Damaged block files found."`
	Outdated    uint64 `stat:"outdated_blocks_total" help:"Whole block files of another length found: another version has stored them."`
	Refused     uint64 `stat:"refused_saves_total" help:"Saves refused because the folder cannot be written."`
	Reopened    uint64 `stat:"reopened_total" help:"Times that the folder had to be opened again."`

	StaleTemporaries uint64
}

// Counts gives the counts so far.
func (s *Store) Counts() Counts { return s.counts.Now() }

// StatInfos declares what Stats gives.
func StatInfos() []connector.StatInfo {
	used := connector.StatInfo{Name: "used_bytes", Help: "Bytes of all block files, as far as this engine knows; only with max_bytes.", Kind: connector.Gauge}
	return append(storekit.Infos[Counts](""), used)
}

// Stats implements connector.StatsSource.
func (s *Store) Stats(context.Context) ([]connector.Stat, error) {
	stats := storekit.Stats("", s.Counts())
	if used, known := s.budget.known(); known {
		stats = append(stats, connector.Stat{Name: "used_bytes", Value: float64(used)})
	}
	return stats, nil
}

// Watch implements sdk.Watchable: removed is called with the keys of the blocks that this engine has
// evicted, or removed as damaged, and with nil when the folder is gone with all of them. It is not called
// for what other engines evict.
func (s *Store) Watch(removed func(keys []connector.StoreKey)) { s.removed = removed }

// Reset implements connector.Resetter: it removes every block file of the folder, those of other
// engines too. They may believe for a second that a block is there which they have just seen, so it
// takes as long. A folder that cannot be written keeps its blocks.
func (s *Store) Reset(ctx context.Context) (emptied bool, err error) {
	if s.writable() != nil {
		return false, nil
	}
	err = s.with(func(d *dir) error {
		for n := range shards {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := emptyShard(d, n); err != nil {
				return err
			}
		}
		return nil
	})
	s.index.clear()
	s.budget.forget()
	if err != nil {
		return false, fmt.Errorf("reset: %w", err)
	}
	timer := time.NewTimer(fresh)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// emptyShard removes the block files of one shard. One that cannot be removed is an error; one that another save has
// made again meanwhile is not.
func emptyShard(d *dir, n int) error {
	removed := map[connector.StoreKey]bool{}
	for {
		left := false
		for _, f := range appendShard(nil, d, n) {
			if removed[f.key] {
				continue
			}
			if err := d.remove(f.key); err != nil {
				return err
			}
			removed[f.key], left = true, true
		}
		if !left {
			return nil
		}
	}
}

// with runs op on the open folder. When op finds that the folder was removed it is made again and
// op runs once more.
func (s *Store) with(op func(*dir) error) error {
	for attempt := 0; ; attempt++ {
		s.mu.RLock()
		d := s.dir
		err := errStale
		if d != nil {
			err = op(d)
		}
		s.mu.RUnlock()
		if !errors.Is(err, errStale) || attempt > 0 {
			return err
		}
		if err := s.reopen(d); err != nil {
			return err
		}
	}
}

// check opens the folder again if it is no longer the one at its path. It looks at most once in
// checkEvery: a miss is common, a folder that went away is not.
func (s *Store) check() {
	s.health.Lock()
	due := time.Since(s.checked) >= checkEvery
	if due {
		s.checked = time.Now()
	}
	s.health.Unlock()
	if !due {
		return
	}
	s.mu.RLock()
	d := s.dir
	ok := d != nil && d.current()
	if ok {
		d.forgetRemoved()
	}
	s.mu.RUnlock()
	if !ok {
		_ = s.reopen(d) // logged; the lookup is a miss in any case
	}
}

// reopen replaces the folder old, which is gone, unless that has happened already. After a failure
// it makes no new attempt for a while.
func (s *Store) reopen(old *dir) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("%s was closed: %w", s.config.Path, connector.ErrGone)
	}
	if s.dir != old {
		return nil
	}
	s.health.Lock()
	defer s.health.Unlock()
	if time.Now().Before(s.retryAt) {
		return fmt.Errorf("%s is not there, next attempt soon: %w", s.config.Path, connector.ErrGone)
	}
	if old != nil {
		_ = old.close() // nothing was written through these descriptors
		s.dir = nil
		s.log.Warn("opening the folder again", "shared_storage_path", s.config.Path)
	}
	s.index.clear()
	if err := fault.Point("store.reopen"); err != nil {
		return err
	}
	d, err := openDir(s.config.Path, s.config.ReadOnly)
	if err != nil {
		s.retryAt, s.wait = time.Now().Add(s.wait), min(2*s.wait, longestWait)
		s.log.Error("cannot open the folder, computing instead", "error", err, "next_attempt_in", s.wait)
		return fmt.Errorf("shared_storage_path %s: %w: %w", s.config.Path, err, connector.ErrGone)
	}
	s.budget.forget()
	s.dir, s.wait = d, firstWait
	s.counts.Count(func(n *Counts) { n.Reopened++ })
	s.removed(nil)
	return nil
}

// writable reports why nothing can be saved now.
func (s *Store) writable() error {
	s.health.Lock()
	until := s.locked
	s.health.Unlock()
	if s.config.ReadOnly || time.Now().Before(until) {
		s.counts.Count(func(n *Counts) { n.Refused++ })
		return fmt.Errorf("%s: %w", s.config.Path, ErrReadOnly)
	}
	if until.IsZero() {
		return nil
	}
	s.mu.RLock()
	d := s.dir
	s.mu.RUnlock()
	if d != nil && d.tmp == nil { // it was opened while it could not be written
		return s.reopen(d)
	}
	return nil
}

// lock refuses saves for a while after cause showed that the folder cannot be written. It says so
// once; loads go on.
func (s *Store) lock(cause error) error {
	s.health.Lock()
	first := s.locked.IsZero()
	s.locked = time.Now().Add(lockedWait)
	s.health.Unlock()
	s.counts.Count(func(n *Counts) { n.Refused++ })
	if first {
		s.log.Error("folder cannot be written: nothing is saved, stored blocks are still loaded", "error", cause)
	}
	return fmt.Errorf("%w: %w", ErrReadOnly, cause)
}

// unlock takes note that a save after the lock's time succeeded, so that the next failure is told
// again. One that began before the lock says nothing.
func (s *Store) unlock() {
	s.health.Lock()
	defer s.health.Unlock()
	if s.locked.IsZero() || time.Now().Before(s.locked) {
		return
	}
	s.locked = time.Time{}
	s.log.Info("folder can be written again", "shared_storage_path", s.config.Path)
}
