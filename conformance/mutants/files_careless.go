package mutants

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvport/kvport/connector"
)

// carelessFaults are about what lies beside a block, and what is read of it.
func carelessFaults() []fileFault {
	return []fileFault{
		{"index", "kill-save", "writes its whole index with each save, in place", true, rewritesIndex},
		{"one-name", "beside-cancelled", "writes all saves of a block to one temporary file", false, oneTemporary},
		{"log-torn", "flipped", "appends behind a block that is not whole, where it stops reading when it opens", false, inOneFileTorn},
		{"once", "removed", "never writes again what it has written", false, func(b *badFiles) error {
			var written sync.Map
			b.put = func(it connector.Item) error {
				if _, known := written.Load(it.Key); known && !it.Replace {
					return nil
				}
				err := b.files.put(it)
				if err == nil {
					written.Store(it.Key, true)
				}
				return err
			}
			return nil
		}},
		{"buffered", "shapes", "reads as much of a block as its buffer has", false, func(b *badFiles) error {
			b.get = func(it connector.Item) error {
				f, err := os.OpenFile(b.path(it.Key), os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
				if err != nil {
					return b.files.get(it)
				}
				defer f.Close()
				r := bufio.NewReaderSize(f, 16<<10)
				head := make([]byte, sumBytes+len(it.Key))
				if _, err := r.Read(head); err != nil {
					return connector.ErrCorrupt
				}
				for _, span := range it.Spans {
					if _, err := r.Read(span); err != nil {
						return connector.ErrCorrupt
					}
				}
				return nil
			}
			return nil
		}},
	}
}

// oneTemporary takes a file away from another save of the same block, which is about to rename it.
func oneTemporary(b *badFiles) error {
	b.put = func(it connector.Item) error {
		path := b.path(it.Key)
		if err := os.WriteFile(path+".tmp", content(it), 0o600); err != nil {
			return b.absent(err)
		}
		pause(diskTime)
		return os.Rename(path+".tmp", path)
	}
	return nil
}

// rewritesIndex looks for blocks in one file of all keys.
func rewritesIndex(b *badFiles) error {
	index := filepath.Join(b.dir, "index")
	var mu sync.Mutex
	locked := func(do func() error) error {
		mu.Lock()
		defer mu.Unlock()
		lock, err := os.OpenFile(filepath.Join(b.dir, "index.lock"), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return b.absent(err)
		}
		defer lock.Close()
		if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
			return err
		}
		return do()
	}
	b.put = func(it connector.Item) error {
		if err := b.files.put(it); err != nil {
			return err
		}
		return locked(func() error {
			old, err := os.ReadFile(index)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			name := hex.EncodeToString(it.Key[:])
			if strings.Contains(string(old), name) {
				return nil
			}
			f, err := os.Create(index)
			if err != nil {
				return err
			}
			defer f.Close()
			pause(500 * time.Microsecond)
			_, err = f.WriteString(string(old) + name + "\n")
			return err
		})
	}
	b.lookup = func(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
		found := make([]int, len(runs))
		err := locked(func() error {
			text, _ := os.ReadFile(index)
			for i, run := range runs {
				for found[i] < len(run) && strings.Contains(string(text), hex.EncodeToString(run[found[i]][:])) {
					found[i]++
				}
			}
			return nil
		})
		return found, err
	}
	return nil
}

// absent is the error of a folder that is away.
func (s *files) absent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return errors.Join(connector.ErrGone, err)
	}
	return err
}
