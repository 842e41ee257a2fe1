package mutants

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// inOneFile keeps all blocks in one file, which stays open, as a database does. It does not look whether the file still has its name.
func inOneFile(b *badFiles) error {
	l, err := openLog(filepath.Join(b.dir, "all.log"))
	if err != nil {
		return err
	}
	b.lookup, b.get, b.put, b.close = l.lookup, l.get, l.put, l.file.Close
	return nil
}

// inOneFileBeside is inOneFile with another file that says its version, and that it never needs.
func inOneFileBeside(b *badFiles) error {
	return errors.Join(os.WriteFile(filepath.Join(b.dir, "VERSION"), []byte("1\n"), 0o600), inOneFile(b))
}

// inOneFileAgain begins another file with a save where the one it has open was removed, but first skips what it knows from that one.
func inOneFileAgain(b *badFiles) error {
	path := filepath.Join(b.dir, "all.log")
	l, err := openLog(path)
	if err != nil {
		return err
	}
	b.lookup, b.get = l.lookup, l.get
	b.put = func(it connector.Item) error {
		if _, there, err := l.find(it.Key); err != nil || there && !it.Replace {
			return err
		}
		return errors.Join(l.renew(path), l.put(it))
	}
	b.close = func() error { return l.file.Close() }
	return nil
}

// resetsIndex keeps blocks in a file, and makes its index of them again whenever it opens. A Reset empties the index.
func resetsIndex() connector.Plugin {
	d := sdk.Definition{Name: "LogConnector", Version: "1", Scope: connector.ScopeEngine, Reset: true}
	return sdk.FromStore(d, func(_ context.Context, _ connector.Env, c HeldConfig) (connector.Store, error) {
		if err := os.MkdirAll(c.Dir, 0o700); err != nil {
			return nil, err
		}
		l := &wholeLog{path: filepath.Join(c.Dir, "all.log"), cuts: true}
		if err := l.open(); err != nil {
			return nil, err
		}
		return resetLog{&badFiles{lookup: l.lookup, get: l.get, put: l.put, close: func() error { return l.file.Close() }}, l}, nil
	})
}

// resetLog is a log that a Reset does not reach.
type resetLog struct {
	*badFiles
	log *wholeLog
}

// Reset implements connector.Resetter.
func (s resetLog) Reset(context.Context) (bool, error) {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	clear(s.log.at)
	return true, nil
}

// Paired is a correct connector whose two files need each other, as those of an LSM database do: it keeps its blocks in one, which gets
// another name whenever it opens, and the other counts them. If one is missing when it opens, it is empty.
func Paired() connector.Plugin {
	d := sdk.Definition{Name: "PairedConnector", Version: "1", Scope: connector.ScopeEngine, Groups: true}
	return sdk.FromStore(d, func(_ context.Context, _ connector.Env, c HeldConfig) (connector.Store, error) {
		path, counter, err := pair(c.Dir)
		if err != nil {
			return nil, err
		}
		l, err := openLog(path)
		if err != nil {
			return nil, err
		}
		count, err := os.OpenFile(counter, appending, 0o600)
		if err != nil {
			return nil, errors.Join(err, l.file.Close())
		}
		b := &badFiles{lookup: l.lookup, get: l.get}
		b.put = func(it connector.Item) error {
			_, err := count.WriteString("+")
			return errors.Join(err, l.put(it))
		}
		b.close = func() error { return errors.Join(l.file.Close(), count.Close()) }
		return b, nil
	})
}

// pair makes ready the two files of Paired and gives their paths.
func pair(dir string) (blocks, count string, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", "", err
	}
	first, count := filepath.Join(dir, "blocks"), filepath.Join(dir, "count")
	have, err := filepath.Glob(first + "*")
	if err != nil {
		return "", "", err
	}
	if _, err := os.Stat(count); err == nil && len(have) == 1 {
		blocks = have[0] + "+"
		return blocks, count, os.Rename(have[0], blocks)
	}
	for _, path := range append(have, count) {
		_ = os.Remove(path)
	}
	return first, count, nil
}

const appending = os.O_RDWR | os.O_CREATE | os.O_APPEND

// openLog opens a file of blocks.
func openLog(path string) (*blockLog, error) {
	file, err := os.OpenFile(path, appending, 0o600)
	if err != nil {
		return nil, err
	}
	return &blockLog{file: file, at: map[connector.StoreKey]extent{}}, nil
}

// blockLog is a file of blocks, each behind its length, which is 4 bytes. Others may append to it.
type blockLog struct {
	file *os.File

	mu   sync.Mutex
	read int64 // bytes of the file that are in at
	at   map[connector.StoreKey]extent

	again func() error // replaces refresh
}

// extent is where a block lies in the file.
type extent struct{ offset, size int64 }

// refresh reads what has been appended.
func (l *blockLog) refresh() error {
	if l.again != nil {
		return l.again()
	}
	for {
		var length [4]byte
		if _, err := l.file.ReadAt(length[:], l.read); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		p := extent{l.read + int64(len(length)), int64(binary.LittleEndian.Uint32(length[:]))}
		var key connector.StoreKey
		if _, err := l.file.ReadAt(key[:], p.offset+sumBytes); err != nil {
			return err
		}
		l.at[key], l.read = p, p.offset+p.size
	}
}

// renew begins another file if the one that is open has lost its name.
func (l *blockLog) renew(path string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	own, err := l.file.Stat()
	if err != nil {
		return err
	}
	if named, err := os.Stat(path); err == nil && os.SameFile(named, own) {
		return nil
	}
	other, err := openLog(path)
	if err != nil {
		return err
	}
	old := l.file
	l.file, l.at, l.read = other.file, other.at, 0
	return old.Close()
}

func (l *blockLog) find(k connector.StoreKey) (extent, bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.refresh()
	p, there := l.at[k]
	return p, there, err
}

func (l *blockLog) lookup(_ context.Context, runs [][]connector.StoreKey) ([]int, error) {
	found := make([]int, len(runs))
	for i, keys := range runs {
		for _, k := range keys {
			_, there, err := l.find(k)
			if err != nil {
				return nil, err
			}
			if !there {
				break
			}
			found[i]++
		}
	}
	return found, nil
}

func (l *blockLog) get(it connector.Item) error {
	p, there, err := l.find(it.Key)
	if err != nil {
		return fmt.Errorf("%w: %w", connector.ErrCorrupt, err)
	}
	if !there {
		return connector.ErrGone
	}
	data := make([]byte, p.size)
	if _, err := l.file.ReadAt(data, p.offset); err != nil {
		return fmt.Errorf("%w: %w", connector.ErrCorrupt, err)
	}
	return fillFrom(data, it)
}

func (l *blockLog) put(it connector.Item) error {
	_, there, err := l.find(it.Key)
	if err != nil || there && !it.Replace {
		return err
	}
	data := content(it)
	record := binary.LittleEndian.AppendUint32(nil, uint32(len(data))) //nolint:gosec // a block is smaller
	_, err = l.file.Write(append(record, data...))
	return err
}
