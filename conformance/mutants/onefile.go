package mutants

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// inOneFile keeps all blocks in one file, which stays open, as a database does. It does not look whether the file still has its name.
func inOneFile(b *badFiles) error {
	file, err := os.OpenFile(filepath.Join(b.dir, "all.log"), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	l := &blockLog{file: file, at: map[connector.StoreKey]extent{}}
	b.lookup, b.get, b.put, b.close = l.lookup, l.get, l.put, file.Close
	return nil
}

// Paired is a correct connector whose two files need each other, as those of an LSM database do: it keeps its blocks in one, and the other
// counts them. If one is missing when it opens, it is empty.
func Paired() connector.Plugin {
	d := sdk.Definition{Name: "PairedConnector", Version: "1", Scope: connector.ScopeEngine, Groups: true}
	return sdk.FromStore(d, func(_ context.Context, _ connector.Env, c HeldConfig) (connector.Store, error) {
		if err := os.MkdirAll(c.Dir, 0o700); err != nil {
			return nil, err
		}
		const flags = os.O_RDWR | os.O_CREATE | os.O_APPEND
		paths := []string{filepath.Join(c.Dir, "blocks"), filepath.Join(c.Dir, "count")}
		for _, path := range paths {
			if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
				_, _ = os.Remove(paths[0]), os.Remove(paths[1])
			}
		}
		file, err := os.OpenFile(paths[0], flags, 0o600)
		if err != nil {
			return nil, err
		}
		count, err := os.OpenFile(paths[1], flags, 0o600)
		if err != nil {
			return nil, errors.Join(err, file.Close())
		}
		l := &blockLog{file: file, at: map[connector.StoreKey]extent{}}
		b := &badFiles{lookup: l.lookup, get: l.get}
		b.put = func(it connector.Item) error {
			_, err := count.WriteString("+")
			return errors.Join(err, l.put(it))
		}
		b.close = func() error { return errors.Join(file.Close(), count.Close()) }
		return b, nil
	})
}

// blockLog is a file of blocks, each behind its length, which is 4 bytes. Others may append to it.
type blockLog struct {
	file *os.File

	mu   sync.Mutex
	read int64 // bytes of the file that are in at
	at   map[connector.StoreKey]extent
}

// extent is where a block lies in the file.
type extent struct{ offset, size int64 }

// refresh reads what has been appended.
func (l *blockLog) refresh() error {
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
