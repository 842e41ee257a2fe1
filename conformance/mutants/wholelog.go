package mutants

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// wholeLog is a blockLog that reads up to the first block which is not whole, and begins another file where its own has lost its name.
type wholeLog struct {
	blockLog
	path string
	cuts bool // its file ends there before it appends; else, which is a fault, it appends behind what lies there
}

// OneFile is a correct connector that keeps all blocks in one file.
func OneFile() connector.Plugin {
	return sdk.FromStore(sdk.Definition{Name: "FilesConnector", Version: "1", Scope: connector.ScopeNode, Groups: true}, openOneFile)
}

// inOneFileTorn is a wholeLog that does not cut.
func inOneFileTorn(b *badFiles) error { return b.inWholeLog(false) }

// inWholeLog has blocks lie in a wholeLog.
func (b *badFiles) inWholeLog(cuts bool) error {
	l := &wholeLog{path: filepath.Join(b.dir, "all.log"), cuts: cuts}
	if err := l.open(); err != nil {
		return err
	}
	b.lookup, b.get, b.put, b.close = l.lookup, l.get, l.put, func() error { return l.file.Close() }
	return nil
}

// openOneFile opens the file of a folder.
func openOneFile(_ context.Context, _ connector.Env, c FilesConfig) (connector.Store, error) {
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("dir %s: %w: %w", c.Dir, err, connector.ErrGone)
	}
	b := &badFiles{files: &files{dir: c.Dir}}
	return b, b.inWholeLog(true)
}

// open opens the file, in place of a link or a pipe.
func (l *wholeLog) open() error {
	if info, err := os.Lstat(l.path); err == nil && !info.Mode().IsRegular() {
		if err := os.Remove(l.path); err != nil {
			return err
		}
	}
	file, err := os.OpenFile(l.path, appending|syscall.O_NOFOLLOW, 0o600)
	if errors.Is(err, syscall.EROFS) {
		file, err = os.Open(l.path)
	}
	if err != nil {
		return errors.Join(connector.ErrGone, err)
	}
	l.file, l.at, l.read, l.again = file, map[connector.StoreKey]extent{}, 0, l.scan
	if err := l.locked(l.settle); err != nil && !errors.Is(err, syscall.EINVAL) { // which cannot be cut where it is open for reading only
		return errors.Join(err, file.Close())
	}
	return nil
}

// locked keeps others from appending meanwhile.
func (l *wholeLog) locked(do func() error) error {
	file := l.file
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		return err
	}
	defer func() { _ = syscall.Flock(int(file.Fd()), syscall.LOCK_UN) }()
	return do()
}

// settle finds the end of the file.
func (l *wholeLog) settle() error {
	if err := l.scan(); err != nil {
		return err
	}
	info, err := l.file.Stat()
	if err != nil || info.Size() == l.read {
		return err
	}
	if l.cuts {
		return l.file.Truncate(l.read)
	}
	l.read = info.Size()
	return nil
}

// scan reads on up to the first block that is not whole. What was cut is read again from its beginning.
func (l *wholeLog) scan() error {
	info, err := l.file.Stat()
	if err != nil {
		return err
	}
	if info.Size() < l.read {
		clear(l.at)
		l.read = 0
	}
	data := make([]byte, info.Size()-l.read)
	if _, err := l.file.ReadAt(data, l.read); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	const length, head = 4, sumBytes + keyBytes
	for len(data) > length+head {
		size := int(binary.LittleEndian.Uint32(data))
		if size < head || size > len(data)-length || sha256.Sum256(data[length+sumBytes:length+size]) != [sumBytes]byte(data[length:]) {
			break
		}
		l.at[connector.StoreKey(data[length+sumBytes:])] = extent{l.read + length, int64(size)}
		l.read += int64(length + size)
		data = data[length+size:]
	}
	return nil
}

func (l *wholeLog) put(it connector.Item) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	own, err := l.file.Stat()
	if err != nil {
		return err
	}
	if named, err := os.Lstat(l.path); err != nil || !os.SameFile(named, own) {
		old := l.file
		if err := l.open(); err != nil {
			return err
		}
		_ = old.Close()
	}
	return l.locked(func() error { return l.add(it) })
}

// add appends a block, or nothing.
func (l *wholeLog) add(it connector.Item) error {
	if err := l.settle(); err != nil {
		return err
	}
	data := content(it)
	if p, there := l.at[it.Key]; there && !it.Replace && p.size == int64(len(data)) {
		stored := make([]byte, p.size)
		if _, err := l.file.ReadAt(stored, p.offset); err == nil && sameVersion(stored[sumBytes+keyBytes:], it.Spans) {
			return nil
		}
	}
	end := l.read
	record := binary.LittleEndian.AppendUint32(nil, uint32(len(data))) //nolint:gosec // a block is smaller
	if _, err := l.file.Write(append(record, data...)); err != nil {
		return errors.Join(err, l.file.Truncate(end))
	}
	return nil
}
