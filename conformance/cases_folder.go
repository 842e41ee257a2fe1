package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// folderCase is a case in which the backend as a whole fails.
func folderCase(id, rule, text string, body func(*rig)) Case {
	c := faultCase(id, rule, text, body)
	c.Optional = true
	return c
}

func folderCases() []Case {
	return []Case{
		folderCase("folder-gone", "FAULT-07", "The backend's folder is away for a while.", func(r *rig) { away(r, nil) }),
		folderCase("folder-file", "FAULT-07", "A file lies where the backend's folder was, for a while.", func(r *rig) {
			away(r, func(path string) error { return os.WriteFile(path, []byte("not a folder"), 0o600) })
		}),
		folderCase("foreign-files", "FAULT-08", "Files, folders, links and pipes of others lie in the backend's folder.", foreignFiles),
		folderCase("disk-full", "FAULT-09", "The disk is full during saves, and has room again.", diskFull),
		folderCase("read-only-disk", "FAULT-10", "The disk becomes read-only: loads go on, saves fail cleanly.", readOnlyDisk),
	}
}

// away moves the folder away, puts something else in its place, and moves it back.
func away(r *rig, instead func(path string) error) {
	folder := r.folder()
	e := r.engine(setup{})
	keys := e.keys(4)
	e.fill(blocks(0, keys...)...)
	r.must(e.saveOnly(r.Context(), transfer(blocks(0, keys...))), "save")
	hidden := folder + ".away"
	r.must(os.Rename(folder, hidden), "move the folder away")
	restore := func() error {
		if _, err := os.Stat(hidden); errors.Is(err, fs.ErrNotExist) {
			return nil // done
		}
		return errors.Join(os.RemoveAll(folder), os.Rename(hidden, folder))
	}
	defer func() { _ = restore() }()
	if instead != nil {
		r.must(instead(folder), "put something in its place")
	}
	for range 5 {
		e.tryMatch(keys)
		e.judged(keys)
		fresh := e.keys(2)
		save := transfer(blocks(8, fresh...))
		e.fill(save.Blocks...)
		if e.tryMove(save, true) == nil {
			e.judged(fresh)
		}
	}
	r.must(restore(), "move the folder back")
	e.mended(e.keys(3))
	e.eventually(e.recovery(), func() string {
		if n := e.tryMatch(keys); n != len(keys) {
			return fmt.Sprintf("%d of %d blocks are offered that were there before", n, len(keys))
		}
		return ""
	})
	r.equal(len(keys), e.judged(keys), "blocks that are right after the folder came back")
}

func foreignFiles(r *rig) {
	folder := r.folder()
	e := r.engine(setup{})
	keys := e.keys(4)
	e.fill(blocks(0, keys...)...)
	r.must(e.saveOnly(r.Context(), transfer(blocks(0, keys...))), "save")
	before := r.files(folder)
	folders := map[string]bool{folder: true}
	for path := range before {
		folders[filepath.Dir(path)] = true
	}
	for dir := range folders {
		r.must(litter(dir), "foreign files")
	}
	e.closeAll()
	e.openAll()
	if r.info.Scope != connector.ScopeEngine {
		r.equal(len(keys), e.match(keys...), "blocks offered beside foreign files")
		r.equal(len(keys), e.judged(keys), "blocks that are right beside foreign files")
	}
	e.mended(e.keys(4))
	e.closeAll()
	for dir := range folders {
		if _, err := os.Stat(filepath.Join(dir, "notes.txt")); err != nil {
			r.Errorf("a file that was not the connector's is gone: %v", err)
		}
	}
}

// diskFull saves until nothing fits any more.
func diskFull(r *rig) {
	const most = 400
	d := r.disk("size=256k")
	e := r.engine(setup{})
	var acked [][]connector.BlockKey
	failures := 0
	for n := 0; n < most && failures < 5; n++ {
		keys := e.keys(4)
		from := blocks(0, keys...)
		e.fill(from...)
		err := e.tryMove(transfer(from), true)
		found := e.tryMatch(keys)
		if err != nil {
			failures++
			e.offersUnnamed(err, from)
		} else {
			acked = append(acked, keys)
			r.equal(len(keys), found, "blocks offered after save %d, which succeeded", n)
		}
		e.whole(keys[:found], 8)
	}
	present := 0
	for _, keys := range acked {
		found := e.match(keys...)
		if found == len(keys) {
			present++
		}
		e.whole(keys[:found], 8)
	}
	// One that never fails makes room by evicting.
	if failures > 0 && present < len(acked) {
		r.Errorf("%d of %d acknowledged saves are offered when the disk is full", present, len(acked))
	}
	r.must(d.remount("size=16m"), "room on the disk")
	e.mended(e.keys(3))
}

func readOnlyDisk(r *rig) {
	d := r.disk("size=8m")
	e := r.engine(setup{})
	keys := e.keys(4)
	e.save(blocks(0, keys...)...)
	if err := d.remount("ro"); err != nil {
		e.closeAll() // it keeps files open for writing: then the disk cannot change under it
		r.must(e.inst.Close(), "end")
		r.must(d.remount("ro"), "make the disk read-only")
		e = e.reborn()
		if r.info.Scope == connector.ScopeEngine {
			keys = keys[:e.onReadOnly(keys)]
		} else {
			e.openAll()
		}
	}
	for range 3 {
		r.equal(len(keys), e.match(keys...), "blocks offered on a read-only disk")
		e.whole(keys, 8)
		fresh := e.keys(2)
		save := transfer(blocks(0, fresh...))
		e.fill(save.Blocks...)
		if err := e.tryMove(save, true); err == nil {
			r.equal(2, e.match(fresh...), "blocks offered after a save that succeeded on a read-only disk")
			e.whole(fresh, 8)
		}
	}
}

// onReadOnly opens an engine on a read-only disk and gives the number of blocks that are offered. What an engine's own store keeps need not be
// there in a next life, and so neither side need open: then there is nothing that could be read.
func (e *engine) onReadOnly(keys []connector.BlockKey) int {
	e.Helper()
	if err := e.opens(); refusesReadOnly(err) {
		e.unfit(fmt.Sprintf("the disk cannot become read-only under the connector, which keeps files open for writing, and with Scope engine it need not open on one: %v", err))
	}
	e.openAll()
	return e.match(keys...)
}

// refusesReadOnly reports whether an error of opening says that a disk is read-only, or that so nothing can be opened. Only its text comes from
// another process.
func refusesReadOnly(err error) bool {
	if err == nil || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, sdk.ErrPanic) {
		return false
	}
	text := strings.ToLower(err.Error())
	return errors.Is(err, connector.ErrIncompatible) || errors.Is(err, syscall.EROFS) || strings.Contains(text, "read-only") || strings.Contains(text, "readonly")
}
