// Package sharedstorage keeps KV blocks as files in a folder that several engines may share: on one
// machine, or on several through a network file system.
//
// A block is one file, written under a temporary name and renamed when complete, so that a reader
// sees all of a block or nothing, whoever crashes when. Bytes move between the file and the paged
// cache without a copy in between. Whatever is wrong with the folder, requests are computed instead
// and the service goes on.
package sharedstorage

import (
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

	loaded, saved, known, corrupt, evicted, refused, reopened, stale atomic.Uint64
	loadedBytes, savedBytes                                          atomic.Uint64
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
	s.stale.Add(uint64(d.sweep(time.Now())))
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
		_, ok = s.dir.size(k)
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
		s.corrupt.Add(1)
		s.log.Warn("damaged block file", "key", fileName(it.Key), "error", err, "removed", !s.config.ReadOnly)
		if !s.config.ReadOnly {
			d.remove(it.Key)
			s.removed([]connector.StoreKey{it.Key})
		}
	}
	if err == nil {
		s.loaded.Add(1)
		s.loadedBytes.Add(uint64(headerSize + it.Size()))
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
	if have, ok := d.size(it.Key); ok && have == size && !it.Replace {
		s.known.Add(1)
		return nil
	}
	gone, err := s.budget.reserve(d, size)
	for _, k := range gone {
		s.index.drop(k)
	}
	s.evicted.Add(uint64(len(gone)))
	if len(gone) > 0 {
		s.removed(gone)
	}
	if err != nil {
		return err
	}
	err = s.writeFile(d, it)
	s.budget.settle(size, err == nil)
	if err == nil {
		s.saved.Add(1)
		s.savedBytes.Add(uint64(size))
		s.unlock()
	}
	return err
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
	var next atomic.Int64
	work := func() {
		for i := next.Add(1) - 1; i < int64(len(items)); i = next.Add(1) - 1 {
			select {
			case <-ctx.Done():
				errs[i] = ctx.Err()
				continue
			case s.slots <- struct{}{}:
			}
			if errs[i] = ctx.Err(); errs[i] == nil {
				errs[i] = do(items[i])
			}
			<-s.slots
		}
	}
	var wg sync.WaitGroup
	for range min(s.config.Workers, len(items)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	failed := &connector.ItemError{}
	for i, err := range errs {
		if err != nil {
			failed.Items = append(failed.Items, i)
			failed.Err = firstOf(failed.Err, err)
		}
	}
	if len(failed.Items) == 0 {
		return nil
	}
	return failed
}

// firstOf keeps one error of many, corruption before any other: it is what must not be overlooked.
func firstOf(have, err error) error {
	if have == nil || errors.Is(err, connector.ErrCorrupt) && !errors.Is(have, connector.ErrCorrupt) {
		return err
	}
	return have
}
