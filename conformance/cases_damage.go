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
	replaced := id == "removed" || id == "foreign" // files, under a connector that may have the old ones open
	c := faultCase(id, "FAULT-06", text, func(r *rig) { damaged(r, replaced, damage) })
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
		damageCase("removed", "Files of the backend are removed.", func(_ *rig, files []string) error {
			return replaceEach(files, func(string) error { return nil })
		}),
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
		if err := os.Remove(f); err != nil {
			return err
		}
		if err := with(f); err != nil {
			return err
		}
	}
	return nil
}

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

// state is the backend's files, how long they are and when they changed.
func state(folder string) (map[string]string, error) {
	files := map[string]string{}
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			files[path] = fmt.Sprint(info.Size(), " bytes, ", info.ModTime())
		}
		return err
	})
	return files, err
}

// changed lists the files that are new or differ, in order.
func changed(before, after map[string]string) []string {
	files := maps.Clone(after)
	maps.DeleteFunc(files, func(path, at string) bool { return before[path] == at })
	return slices.Sorted(maps.Keys(files))
}

// damaged saves some blocks that stay as they are and some that are damaged, once while the engine
// runs and once before its next life.
func damaged(r *rig, replaced bool, damage func(*rig, []string) error) {
	folder := r.folder()
	e := r.engine(setup{})
	kept := e.keys(4)
	e.fill(blocks(0, kept...)...)
	r.must(e.saveOnly(r.Context(), transfer(blocks(0, kept...))), "save")
	for life := range 2 {
		hit := e.keys(6)
		before, err := state(folder)
		r.must(err, "files of the backend")
		from := blocks(0, hit...)
		e.fill(from...)
		r.must(e.saveOnly(r.Context(), transfer(from)), "save")
		e.closeAll() // what it has not written yet
		after, err := state(folder)
		r.must(err, "files of the backend")
		files := changed(before, after)
		if len(files) == 0 && life == 0 {
			r.Skipf(noFiles)
		}
		if len(files) == 0 && !replaced {
			r.Skipf("the second save has changed no file of the folder")
		}
		if len(files) == 0 {
			return // it writes into files that are not there any more, which is for removed-open to judge
		}
		apart := len(after) == len(before)+len(files)
		if life == 1 && r.info.Scope != connector.ScopeEngine {
			r.must(e.inst.Close(), "end")
			r.must(damage(r, files), "damage")
			e = e.life()
		} else {
			e.openAll()
			e.tryMatch(hit) // it may remember what it saw
			r.must(damage(r, files), "damage")
		}
		if found := e.tryMatch(hit); found > len(hit) {
			r.Errorf("%d of %d blocks offered", found, len(hit))
		}
		for range 2 { // the second time it knows
			e.judged(hit)
		}
		if intact := e.judged(kept); apart && intact != len(kept) {
			r.Errorf("%d of %d blocks are right whose files nobody touched", intact, len(kept))
		}
		e.mended(hit)
		e.works("after the damage was mended")
	}
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
	before, err := state(folder)
	r.must(err, "files of the backend")
	keys := e.keys(4)
	e.save(blocks(0, keys...)...)
	e.closeAll() // what it has not written yet
	after, err := state(folder)
	r.must(err, "files of the backend")
	files := changed(before, after)
	if len(files) == 0 {
		r.Skipf(noFiles)
	}
	r.must(e.inst.Close(), "end")
	e = e.life()
	if n := e.match(keys...); n < len(keys) {
		r.Skipf("%d of %d blocks are offered in the engine's next life, so that removed files lose nothing", n, len(keys))
	}
	r.must(replaceEach(files, func(string) error { return nil }), "remove files")
	later := e.keys(4)
	e.mended(later)
	e.closeAll()
	r.must(e.inst.Close(), "end")
	e = e.life()
	n := e.match(later...)
	if n == 0 && len(files) > 1 {
		e.works("in the next life after files were removed")
		return
	}
	r.equal(len(later), n, "blocks offered in the engine's next life, of those saved after files had been removed")
	e.whole(later, 8)
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
