package conformance

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/kvport/kvport/connector"
)

// damageCase is a case in which files of the backend are damaged. It does not apply to connectors
// that keep their blocks elsewhere.
func damageCase(id, text string, damage func(r *rig, files []string) error) Case {
	c := faultCase(id, "FAULT-06", text, func(r *rig) { damaged(r, id, damage) })
	c.Optional = true
	return c
}

func damageCases() []Case {
	return []Case{
		damageCase("flipped", "Bytes are flipped in every file of the backend.", func(r *rig, files []string) error {
			return edit(files, func(data []byte) []byte {
				for range 3 {
					data[r.rand.IntN(len(data))] ^= 1 << r.rand.IntN(8)
				}
				return data
			})
		}),
		damageCase("truncated", "Files of the backend are cut short.", func(r *rig, files []string) error {
			return edit(files, func(data []byte) []byte { return data[:r.rand.IntN(len(data))] })
		}),
		damageCase("emptied", "Files of the backend are empty.", func(_ *rig, files []string) error {
			return edit(files, func([]byte) []byte { return nil })
		}),
		damageCase("oversized", "Files of the backend have grown.", func(_ *rig, files []string) error {
			return edit(files, func(data []byte) []byte { return append(data, data...) })
		}),
		damageCase("removed", "Files of the backend are removed.", func(_ *rig, files []string) error { return remove(files) }),
		removedOpenCase(),
		damageCase("swapped", "Files of the backend have each other's content.", swap),
		damageCase("foreign", "Links and pipes lie where files of the backend were.", func(r *rig, files []string) error {
			n := 0
			return replaceEach(files, func(path string) error {
				n++
				if n%2 == 1 { // the first: a store may have one file only
					return syscall.Mkfifo(path, 0o600)
				}
				return os.Symlink(filepath.Join(r.folder(), "nowhere"), path)
			})
		}),
	}
}

// edit changes the content of files in place.
func edit(files []string, change func([]byte) []byte) error {
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		if len(data) == 0 {
			continue
		}
		if err := os.WriteFile(f, change(data), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// replaceEach puts something else where files are.
func replaceEach(files []string, with func(path string) error) error {
	for _, f := range files {
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := with(f); err != nil {
			return err
		}
	}
	return nil
}

func remove(files []string) error { return replaceEach(files, func(string) error { return nil }) }

// swap gives each file the content of the next.
func swap(_ *rig, files []string) error {
	contents := make([][]byte, len(files))
	for i, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		contents[(i+1)%len(files)] = data
	}
	for i, f := range files {
		if err := os.WriteFile(f, contents[i], 0o600); err != nil {
			return err
		}
	}
	return nil
}

// fileState is how long a file is and when it changed.
type fileState struct{ size, changed int64 }

// state is the backend's files.
func state(folder string) (map[string]fileState, error) {
	files := map[string]fileState{}
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the backend has removed it meanwhile
		}
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		if info, err := d.Info(); err == nil {
			files[path] = fileState{info.Size(), info.ModTime().UnixNano()}
		}
		return nil
	})
	return files, err
}

// changed lists the files that are new or differ, in order.
func changed(before, after map[string]fileState) []string {
	files := maps.Clone(after)
	maps.DeleteFunc(files, func(path string, at fileState) bool { return before[path] == at })
	return slices.Sorted(maps.Keys(files))
}

// files are those of the backend.
func (r *rig) files(folder string) map[string]fileState {
	r.Helper()
	files, err := state(folder)
	r.must(err, "files of the backend")
	return files
}

// damaged saves some blocks that stay as they are and some that are damaged, once while the engine
// runs and once before its next life.
func damaged(r *rig, id string, damage func(*rig, []string) error) {
	replaced := id == "removed" || id == "foreign" // files, under a connector that may have the old ones open
	folder := r.folder()
	e := r.engine(setup{})
	kept := e.keys(4)
	e.fill(blocks(0, kept...)...)
	r.must(e.saveOnly(r.Context(), transfer(blocks(0, kept...))), "save")
	for life := range 2 {
		hit := e.keys(6)
		before := r.files(folder)
		from := blocks(0, hit...)
		e.fill(from...)
		r.must(e.saveOnly(r.Context(), transfer(from)), "save")
		e.closeAll() // what it has not written yet
		after := r.files(folder)
		files := changed(before, after)
		if len(files) == 0 {
			switch {
			case life == 0:
				r.Skipf(noFiles)
			case !replaced:
				r.Skipf("the second save has changed no file of the folder")
			}
			// It writes into files that are not there any more. Case removed-open says whether that matters, where what it keeps outlives its process.
			return
		}
		apart := len(after) == len(before)+len(files)
		ends := life == 1 && r.info.Scope != connector.ScopeEngine
		if ends {
			r.must(e.inst.Close(), "end")
		} else {
			e.openAll()
			e.tryMatch(hit) // it may remember what it saw
		}
		files = current(files, before, r.files(folder))
		r.must(damage(r, files), "damage")
		if ends {
			e = e.life()
		}
		e.hurt(hit, kept, apart)
		touched := r.files(folder) // a load may renew a file's time
		e.mended(hit)
		if id == "removed" && life == 0 {
			e.removedAgain(folder, touched, hit)
		}
		e.works("after the damage was mended")
		if ends && !replaced {
			e.lasting(len(files) == 1, "of those saved after damage was mended")
		}
	}
}

// hurt judges blocks whose files were damaged, and others.
func (e *engine) hurt(hit, kept []connector.BlockKey, apart bool) {
	e.Helper()
	if found := e.tryMatch(hit); found > len(hit) {
		e.Errorf("%d of %d blocks offered", found, len(hit))
	}
	for range 2 { // the second time it knows
		e.judged(hit)
	}
	if intact := e.judged(kept); apart && intact != len(kept) {
		e.Errorf("%d of %d blocks are right whose files nobody touched", intact, len(kept))
	}
}

// removedAgain removes the files of blocks that the sides which are open have saved themselves.
func (e *engine) removedAgain(folder string, before map[string]fileState, keys []connector.BlockKey) {
	e.Helper()
	e.must(remove(changed(before, e.files(folder))), "remove files")
	e.judged(keys) // it may think that they are there until a load has missed
	e.resaved(keys)
	e.mended(keys)
}

// lasting saves blocks, ends the engine, and finds them in its next life: a store that stops reading at what was damaged finds nothing
// behind it. Several files may need each other (rule FAULT-11): where more than one was damaged, the next life may have nothing.
func (e *engine) lasting(one bool, which string) {
	e.Helper()
	keys := e.keys(3)
	e.mended(keys)
	e.end()
	n := e.life()
	found := n.match(keys...)
	if found == 0 && !one {
		return
	}
	e.equal(len(keys), found, "blocks offered in the engine's next life, %s", which)
	if found == len(keys) {
		n.whole(keys, 8)
	}
}

// current gives those of some files that are there now. A database may remove its log when it ends, or opens again: if none is there, what lay in
// them lies in others, which are all that were not there before.
func current(files []string, before, now map[string]fileState) []string {
	there := slices.DeleteFunc(slices.Clone(files), func(path string) bool {
		_, is := now[path]
		return !is
	})
	if len(there) == 0 {
		return changed(before, now)
	}
	return there
}

// noFiles says why files cannot be damaged.
const noFiles = "the connector keeps no block in a file of its folder"

func removedOpenCase() Case {
	c := faultCase("removed-open", "FAULT-11", "Files of the backend are removed while sides are open: what is saved afterwards is there when they open again.", removedOpen)
	c.Optional = true
	return c
}

// removedOpen asks nothing of a connector whose blocks are gone anyway in the engine's next life. One that keeps its blocks in several files
// may need them all: in the next life it may be empty.
func removedOpen(r *rig) {
	folder := r.folder()
	e := r.engine(setup{})
	before := r.files(folder)
	keys := e.keys(4)
	e.save(blocks(0, keys...)...)
	e.closeAll() // what it has not written yet
	r.must(e.inst.Close(), "end")
	if len(changed(before, r.files(folder))) == 0 {
		r.Skipf(noFiles)
	}
	e = e.life()
	if n := e.match(keys...); n < len(keys) {
		r.Skipf("%d of %d blocks are offered in the engine's next life, so that removed files lose nothing", n, len(keys))
	}
	e.whole(keys, 8)       // it may keep in memory what it has loaded
	now := r.files(folder) // they may be others than in the first life: a database begins another log when it opens
	maps.DeleteFunc(now, func(_ string, is fileState) bool { return is.size == 0 })
	files := changed(nil, now)
	r.must(remove(files), "remove files")
	known, fresh := keys[:2], e.keys(4)
	if n := e.match(known...); n > 0 { // an engine saves again what is not offered, or does not come
		_ = e.load(blocks(8, known[:n]...)...)
	}
	e.eventually(e.recovery(), func() string {
		from := blocks(0, known...)
		e.fill(from...)
		if err := e.tryMove(transfer(from), true); err != nil {
			return fmt.Sprintf("save of blocks that were there: %v", err)
		}
		return ""
	})
	e.mended(fresh)
	e.closeAll()
	r.must(e.inst.Close(), "end")
	e = e.life()
	again, n := e.match(known...), e.match(fresh...)
	if again+n == 0 && len(files) > 1 {
		e.works("in the next life after files were removed")
		if !e.inOneFile(folder) {
			return
		}
	}
	r.equal(len(fresh), n, "blocks offered in the engine's next life, of those saved after files had been removed")
	r.equal(len(known), again, "blocks offered in the engine's next life, of those that were there and were saved again after files had been removed")
	if again == len(known) && n == len(fresh) {
		e.whole(slices.Concat(known, fresh), 8)
	}
}

// inOneFile reports whether the connector keeps its blocks in one file that needs no other: a save changes that one only, and what was saved
// is there in a next life that finds nothing else. It ends the engine.
func (e *engine) inOneFile(folder string) bool {
	e.Helper()
	before := e.files(folder)
	keys := e.keys(4)
	e.mended(keys)
	open := changed(before, e.files(folder))
	e.closeAll()
	e.must(e.inst.Close(), "end")
	now := e.files(folder)
	one := changed(before, now)
	if len(one) != 1 || !slices.Equal(one, open) {
		return false
	}
	delete(now, one[0])
	e.must(remove(changed(nil, now)), "remove files")
	next := e.reborn()
	if next.opens() != nil {
		return false
	}
	next.openAll()
	return next.tryMatch(keys) == len(keys)
}

// litter puts what is nobody's into a folder.
func litter(dir string) error {
	at := func(name string) string { return filepath.Join(dir, name) }
	return errors.Join(
		os.WriteFile(at("notes.txt"), []byte("mine"), 0o600),
		os.WriteFile(at(strings.Repeat("0", 64)), nil, 0o600),
		os.WriteFile(at(strings.Repeat("f", 200)), []byte{0xFF}, 0o600),
		os.Symlink("/", at("root")),
		syscall.Mkfifo(at("pipe"), 0o600),
		os.MkdirAll(at("deep/er/folder"), 0o700),
	)
}
