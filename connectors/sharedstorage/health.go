package sharedstorage

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
)

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
	s.reopened.Add(1)
	s.removed(nil)
	return nil
}

// writable reports why nothing can be saved now.
func (s *Store) writable() error {
	s.health.Lock()
	until := s.locked
	s.health.Unlock()
	if s.config.ReadOnly || time.Now().Before(until) {
		s.refused.Add(1)
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
	s.refused.Add(1)
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
