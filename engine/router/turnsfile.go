package router

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"
)

// turnsFile is what a router writes of the answers that it remembers, so that its next life knows them. Marks are
// hashes with a seed of the file's own; tickets are secret, so nobody else may read it.
type turnsFile struct {
	Version int         `json:"version"`
	Seed    uint64      `json:"seed,string"`
	Turns   []savedTurn `json:"turns"` // the least recently used first
}

type savedTurn struct {
	Mark     uint64          `json:"mark,string"`
	Client   uint64          `json:"client,omitempty"`
	Instance string          `json:"instance"` // its base URL
	Params   json.RawMessage `json:"params"`
	used     uint64
}

const (
	turnsVersion = 1
	// maxTurnsFile bounds a file, in bytes.
	maxTurnsFile = 128 << 20
	// turnsFileHead is how much of it the file has beside its turns at most.
	turnsFileHead = 128
	// saveTurnsEvery is how much of what is remembered a router loses at most that is killed.
	saveTurnsEvery = 5 * time.Second
)

// readTurns reads a file. One that is not there is empty, but its folder must be; and so is one without turns that this
// release can read, such as a damaged one, which the next takes the place of. Errors name the file.
func readTurns(path string, log *slog.Logger) (*turnsFile, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO must not block us
	if errors.Is(err, fs.ErrNotExist) {
		_, err = os.Stat(filepath.Dir(path))
		return &turnsFile{}, err
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s is no regular file", path)
	case info.Mode().Perm()&0o077 != 0:
		return nil, fmt.Errorf("%s: mode %#o lets others read tickets, use chmod 600", path, info.Mode().Perm())
	}
	data, err := io.ReadAll(io.LimitReader(file, maxTurnsFile+1))
	if err != nil {
		return nil, err
	}
	f := &turnsFile{}
	if err = json.Unmarshal(data, f); err == nil && f.Version != turnsVersion {
		err = fmt.Errorf("version is %d, want %d", f.Version, turnsVersion)
	}
	if err != nil {
		log.Warn("what was known of conversations is forgotten: its file is damaged, or not of this release", "file", path, "err", err)
		return &turnsFile{}, nil
	}
	return f, nil
}

// restoreTurns reads Config.TurnsFile, if there is one.
func (r *Router) restoreTurns() error {
	if r.turns == nil || r.config.TurnsFile == "" {
		return nil
	}
	f, err := readTurns(r.config.TurnsFile, r.config.Log)
	if err != nil {
		return fmt.Errorf("--bidirectional-file: %w", err)
	}
	r.turns.restore(f)
	return nil
}

// restore takes over what an earlier life has written. Answers on instances that are not there wait for them, until others
// take their room. It must be called before any mark is made.
func (t *turns) restore(f *turnsFile) {
	if f.Version != turnsVersion {
		return // there was no file
	}
	t.seed = f.Seed
	for _, s := range f.Turns {
		t.keep([]uint64{s.Mark}, s.Client, s.Instance, s.Params)
	}
}

// snapshot is what the file must have; nil if nothing has changed. What serves once is left out: the next life could not know
// whether this one has used it since.
func (t *turns) snapshot() *turnsFile {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.changed {
		return nil
	}
	t.changed = false
	f := &turnsFile{Version: turnsVersion, Seed: t.seed, Turns: make([]savedTurn, 0, t.marked.Len())}
	for mark, slot := range t.marked.All() {
		s := &t.held[slot]
		if !s.once() {
			f.Turns = append(f.Turns, savedTurn{mark, s.client, s.instance, s.params, s.used})
		}
	}
	slices.SortFunc(f.Turns, func(a, b savedTurn) int { return cmp.Compare(a.used, b.used) })
	return f
}

// unsaved lets the next snapshot be another, since this one could not be written.
func (t *turns) unsaved() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.changed = true
}

// encode is the content of the file, with as many turns as fit into limit bytes, those that were used last.
func (f *turnsFile) encode(limit int) ([]byte, error) {
	first := len(f.Turns)
	for limit -= turnsFileHead; first > 0; first-- {
		one, err := json.Marshal(f.Turns[first-1])
		if err != nil {
			return nil, err
		}
		if limit -= len(one) + len(","); limit < 0 {
			break
		}
	}
	return json.Marshal(turnsFile{f.Version, f.Seed, f.Turns[first:]})
}

// write puts the file in place as a whole: whoever reads it sees all of it or its predecessor.
func (f *turnsFile) write(path string) (err error) {
	data, err := f.encode(maxTurnsFile)
	if err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*") // mode 0600
	if err != nil {
		return err
	}
	if _, err = file.Write(data); err == nil {
		err = file.Sync() // or a crash of the machine could leave an empty file under the name
	}
	if err = errors.Join(err, file.Close()); err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		err = errors.Join(err, os.Remove(file.Name()))
	}
	return err
}

// saveTurns writes what is remembered from time to time until ctx ends, and then once more.
func (r *Router) saveTurns(ctx context.Context) {
	tick := time.NewTicker(saveTurnsEvery)
	defer tick.Stop()
	for over := false; !over; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			over = true
		}
		f := r.turns.snapshot()
		if f == nil {
			continue
		}
		if err := f.write(r.config.TurnsFile); err != nil {
			r.turns.unsaved()
			r.config.Log.Warn("what is known of conversations could not be written, and a restart forgets it", "err", err)
		}
	}
}
