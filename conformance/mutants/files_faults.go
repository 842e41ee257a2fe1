package mutants

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/kvport/kvport/connector"
)

// fileFault is one way in which Files can be wrong.
type fileFault struct {
	fault, caseID string
	name          string
	binary        bool // it shows only where the plugin is a process
	plant         func(*badFiles) error
}

// fileMutants are the faults of Files as mutants.
func fileMutants() []Mutant {
	var out []Mutant
	for _, f := range fileFaults() {
		m := Mutant{Name: f.name, Case: f.caseID, Plugin: Files, Config: `{"dir": "@TMP@/kv", "fault": "` + f.fault + `"}`}
		if f.binary {
			m.Program = "kvport-files"
		}
		out = append(out, m)
	}
	return append(out,
		Mutant{Name: "resets its index of a file only", Case: "reset", Plugin: resetsIndex, Config: `{"dir": "@TMP@/kv"}`},
		Mutant{Name: "takes any start for a good one", Case: "by-hand", Plugin: Files, Config: `{"dir": "@TMP@/kv"}`, Program: "kvport-files-service"},
		Mutant{Name: "does not notice that its host is dead", Case: "host-death", Plugin: Files, Config: `{"dir": "@TMP@/kv"}`, Program: "kvport-files-daemon"})
}

func fileFaults() []fileFault {
	return slices.Concat(damageFaults(), endingFaults(), tornFaults(), carelessFaults())
}

// badFiles is Files with some calls replaced.
type badFiles struct {
	*files
	lookup   func(context.Context, [][]connector.StoreKey) ([]int, error)
	get, put func(connector.Item) error
	close    func() error
	first    bool // Put names the first item that failed alone
}

// faulty plants a fault.
func (s *files) faulty(name string) (connector.Store, error) {
	bad := &badFiles{files: s, lookup: s.Lookup, get: s.get, put: s.put, close: s.Close}
	for _, f := range fileFaults() {
		if f.fault == name {
			return bad, f.plant(bad)
		}
	}
	return bad, nil
}

// Lookup implements connector.Store.
func (b *badFiles) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	return b.lookup(ctx, runs)
}

// Get implements connector.Store.
func (b *badFiles) Get(ctx context.Context, items []connector.Item) error {
	return each(ctx, items, b.get)
}

// Put implements connector.Store.
func (b *badFiles) Put(ctx context.Context, items []connector.Item) error {
	err := each(ctx, items, b.put)
	if b.first {
		return ofFirst(err)
	}
	return err
}

// Close implements connector.Store.
func (b *badFiles) Close() error { return b.close() }

// unkind loses the kind of the errors of Get that is picks.
func unkind(is func(s *files, it connector.Item, err error) bool) func(*badFiles) error {
	return func(b *badFiles) error {
		b.get = func(it connector.Item) error {
			err := b.files.get(it)
			if err != nil && is(b.files, it, err) {
				return errors.New("cannot read the block")
			}
			return err
		}
		return nil
	}
}

// sized picks errors by the length of the item's file, compared with what it should be.
func sized(is func(have, want int64) bool) func(*badFiles) error {
	return unkind(func(s *files, it connector.Item, _ error) bool {
		info, err := os.Lstat(s.path(it.Key))
		return err == nil && info.Mode().IsRegular() && is(info.Size(), int64(len(content(it))))
	})
}

func damageFaults() []fileFault {
	away := func(s *files) bool {
		info, err := os.Stat(s.dir)
		return err != nil || !info.IsDir()
	}
	return []fileFault{
		{"checksum", "flipped", "has its own error for a wrong checksum", false, unkind(func(_ *files, _ connector.Item, err error) bool {
			return errors.Is(err, connector.ErrCorrupt)
		})},
		{"short", "truncated", "has its own error for a short file", false, sized(func(have, want int64) bool { return have < want })},
		{"empty", "emptied", "has its own error for an empty file", false, sized(func(have, _ int64) bool { return have == 0 })},
		{"long", "oversized", "has its own error for a long file", false, sized(func(have, want int64) bool { return have > want })},
		{"gone", "removed", "has its own error for a file that is gone", false, unkind(func(s *files, _ connector.Item, err error) bool {
			return errors.Is(err, connector.ErrGone) && !away(s)
		})},
		{"other", "swapped", "has its own error for another block's file", false, sized(func(have, want int64) bool { return have == want })},
		{"foreign", "foreign", "has its own error for what is no file", false, unkind(func(s *files, it connector.Item, _ error) bool {
			info, err := os.Lstat(s.path(it.Key))
			return err == nil && !info.Mode().IsRegular()
		})},
		{"away", "folder-gone", "has its own error for a folder that is away", false, unkind(func(s *files, _ connector.Item, _ error) bool {
			return away(s)
		})},
		{"notdir", "folder-file", "has its own error for a folder that is a file", false, unkind(func(s *files, _ connector.Item, _ error) bool {
			info, err := os.Stat(filepath.Dir(s.dir))
			return err == nil && !info.IsDir()
		})},
		{"tidy", "foreign-files", "removes what it does not know", false, func(b *badFiles) error {
			for _, path := range b.foreign() {
				_ = os.RemoveAll(path)
			}
			return nil
		}},
		{"enospc", "disk-full", "acknowledges what did not fit", false, func(b *badFiles) error {
			b.put = func(it connector.Item) error {
				err := b.files.put(it)
				if errors.Is(err, syscall.ENOSPC) {
					return nil
				}
				return err
			}
			return nil
		}},
		{"first", "disk-full", "names the first block alone that did not fit", false, func(b *badFiles) error {
			b.first = true
			return nil
		}},
		{"unlinked", "removed-open", "goes on in a file that was removed", false, inOneFile},
		{"beside", "removed-open", "goes on in a file that was removed, beside one that it does not need", false, inOneFileBeside},
		{"known", "removed-open", "skips the save of what it knows from a file that was removed", false, inOneFileAgain},
		{"readwrite", "read-only-disk", "reads only what it could write", false, func(b *badFiles) error {
			b.get = func(it connector.Item) error {
				f, err := os.OpenFile(b.path(it.Key), os.O_RDWR, 0)
				if err != nil {
					return err
				}
				return errors.Join(f.Close(), b.files.get(it))
			}
			return nil
		}},
	}
}

// endingFaults are processes that end or freeze where they should go on.
func endingFaults() []fileFault {
	return []fileFault{
		{"freeze", "heartbeat", "freezes while it loads", true, func(b *badFiles) error {
			b.get = func(it connector.Item) error {
				return errors.Join(syscall.Kill(os.Getpid(), syscall.SIGSTOP), b.files.get(it))
			}
			return nil
		}},
		{"sigterm", "sigterm", "ends on SIGTERM", true, func(*badFiles) error { return exitOn(syscall.SIGTERM) }},
		{"sigcont", "stopped", "ends when it is continued", true, func(*badFiles) error { return exitOn(syscall.SIGCONT) }},
		{"emfile", "few-files", "ends when it cannot open a file", true, func(b *badFiles) error {
			b.get = func(it connector.Item) error {
				err := b.files.get(it)
				if errors.Is(err, syscall.EMFILE) {
					os.Exit(3)
				}
				return err
			}
			return nil
		}},
	}
}

// tornFaults leave something behind when they are killed.
func tornFaults() []fileFault {
	return []fileFault{
		{"memory", "kill-idle", "writes when it closes", true, func(b *badFiles) error { return later(b, time.Hour) }},
		{"behind", "kill-acked", "writes 60 ms after it acknowledged", true, func(b *badFiles) error { return later(b, 60*time.Millisecond) }},
		{"queue", "random-kills", "writes 5 ms after it acknowledged", true, func(b *badFiles) error { return later(b, 5*time.Millisecond) }},
		{"looks", "kill-match", "moves blocks aside while it looks at them", true, func(b *badFiles) error {
			b.lookup = func(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
				for _, keys := range runs {
					for _, k := range keys {
						_ = b.aside(k, func() error { return nil })
					}
				}
				return b.files.Lookup(ctx, runs)
			}
			return nil
		}},
		{"takes", "kill-load", "moves blocks aside while others might read them", true, func(b *badFiles) error {
			var mu sync.Mutex
			b.get = func(it connector.Item) error {
				mu.Lock()
				defer mu.Unlock()
				return b.aside(it.Key, func() error { return b.files.get(it) })
			}
			return nil
		}},
		{"inplace", "kill-save", "writes blocks in place", true, func(b *badFiles) error {
			b.put = b.inPlace
			return nil
		}},
		{"overwrite", "kill-replace", "replaces blocks in place", true, func(b *badFiles) error {
			b.put = func(it connector.Item) error {
				if it.Replace {
					return b.inPlace(it)
				}
				return b.files.put(it)
			}
			return nil
		}},
		{"lock", "kill-open", "leaves a lock when it is killed", true, func(b *badFiles) error {
			lock := filepath.Join(b.dir, "lock")
			b.close = func() error { return os.Remove(lock) }
			return claim(lock)
		}},
		{"keylock", "kill-two", "leaves locks of blocks when it is killed", true, func(b *badFiles) error {
			b.put = func(it connector.Item) error {
				lock := b.path(it.Key) + ".lock"
				err := claim(lock)
				for n := 0; errors.Is(err, fs.ErrExist) && n < 200; n++ {
					pause(time.Millisecond)
					err = claim(lock)
				}
				if err != nil {
					return err
				}
				pause(5 * time.Millisecond) // long enough for the kill to come while the lock is held
				return errors.Join(b.files.put(it), os.Remove(lock))
			}
			return nil
		}},
	}
}

// pause waits, to make a window of time wide enough to be found.
func pause(d time.Duration) {
	t := time.NewTimer(d)
	<-t.C
}

// claim makes a file that must not exist.
func claim(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// exitOn ends the process when the signal comes.
func exitOn(s os.Signal) error {
	c := make(chan os.Signal, 1)
	signal.Notify(c, s)
	go func() {
		<-c
		os.Exit(3)
	}()
	return nil
}

// aside moves a block's file away during a call.
func (b *badFiles) aside(k connector.StoreKey, call func() error) error {
	from, to := b.path(k), b.path(k)+".aside"
	if err := os.Rename(from, to); err != nil {
		return call()
	}
	pause(time.Millisecond)
	err := os.Rename(to, from)
	return errors.Join(err, call())
}

// inPlace writes a file in two halves under its name.
func (b *badFiles) inPlace(it connector.Item) error {
	data := content(it)
	f, err := os.Create(b.path(it.Key))
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(data[:len(data)/2]); err != nil {
		return err
	}
	pause(300 * time.Microsecond)
	_, err = f.Write(data[len(data)/2:])
	return err
}

// later acknowledges puts, which it writes after a while or when it closes.
func later(b *badFiles, delay time.Duration) error {
	m := &memory{blocks: map[connector.StoreKey][]byte{}}
	var mu sync.Mutex
	kept := map[connector.StoreKey]connector.Item{}
	flush := func() {
		mu.Lock()
		defer mu.Unlock()
		for k, it := range kept {
			_ = b.files.put(it)
			delete(kept, k)
		}
	}
	b.put = func(it connector.Item) error {
		it.Replace = true
		copied := connector.Item{Key: it.Key}
		for _, s := range it.Spans {
			copied.Spans = append(copied.Spans, append([]byte(nil), s...))
		}
		mu.Lock()
		kept[it.Key] = copied
		mu.Unlock()
		time.AfterFunc(delay, flush)
		return m.Put(context.Background(), []connector.Item{it})
	}
	b.lookup = func(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
		found, err := m.Lookup(ctx, runs)
		for i, keys := range runs {
			if found[i] == 0 && err == nil {
				var more []int
				more, err = b.files.Lookup(ctx, [][]connector.StoreKey{keys})
				found[i] = more[0]
			}
		}
		return found, err
	}
	b.get = func(it connector.Item) error {
		if m.Get(context.Background(), []connector.Item{it}) == nil {
			return nil
		}
		return b.files.get(it)
	}
	b.close = func() error {
		flush()
		return nil
	}
	return nil
}
