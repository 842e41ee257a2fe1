package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/verify/cluster"
)

// storeProbes are for somebody else who can write a shared folder.
func storeProbes() []probe {
	out := []probe{
		{id: "store/poison", group: "digests", does: "runs engines with another key and without one, changes a bit of the KV that they store, and puts their blocks in the place of a victim's, half of them under the name of the victim's key", cost: 15, run: poison},
		{id: "store/other-block", group: "digests", does: "puts one block of the victim's in the place of another", cost: 10, run: otherBlock},
		{id: "store/leave-shared", group: "shared-folders", does: "deletes, empties and fills the shared folder while an engine uses it", cost: 10, run: churnStore},
	}
	for _, kind := range oddFiles() {
		out = append(out, probe{id: "store/" + kind.name, group: "shared-folders", does: "puts " + kind.what + " where blocks are", cost: 10, run: func(ctx context.Context, r *rig, _ bool) (string, error) {
			return oddFile(ctx, r, kind.put)
		}})
	}
	return out
}

// blockHead is the length of the head of a block file.
const blockHead = 128

// blockFiles lists stored blocks.
func blockFiles(folder string) (files []string, err error) {
	err = filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && len(d.Name()) >= 64 {
			files = append(files, path)
		}
		return err
	})
	if err == nil && len(files) == 0 {
		err = errors.New("no block is stored")
	}
	return files, err
}

// stored starts an engine on a store that has blocks of two prompts already.
func (r *rig) stored(ctx context.Context) (d *cluster.Process, files []string, err error) {
	folder, err := r.folder()
	if err != nil {
		return nil, nil, err
	}
	if _, err := r.expected(ctx, sim, prompt(1), prompt(2)); err != nil {
		return nil, nil, err
	}
	p, err := r.serve(ctx, sim, r.storeConfig("kv_producer", folder, `{}`))
	if err != nil {
		return nil, nil, err
	}
	if err := r.same(ctx, sim, p.URL, prompt(1), prompt(2)); err != nil {
		return nil, nil, err
	}
	if err := errors.Join(r.idle(ctx, p, time.Minute), r.stop(ctx, p)); err != nil {
		return nil, nil, err
	}
	if files, err = blockFiles(folder); err != nil {
		return nil, nil, err
	}
	d, err = r.serve(ctx, sim, r.storeConfig("kv_both", folder, `{}`), "--enable-prefix-caching=false")
	if err != nil {
		return nil, nil, err
	}
	if err := r.same(ctx, sim, d.URL, prompt(1), prompt(2)); err != nil {
		return nil, nil, err
	}
	external, _, err := r.took(ctx, d)
	if err == nil && external == 0 {
		err = errors.New("nothing is loaded from the store")
	}
	return d, files, err
}

// rejected is what an engine has refused of a store, of which it must have noticed something.
func (r *rig) rejected(ctx context.Context, d *cluster.Process) (string, error) {
	m, err := r.client.Metrics(ctx, d.URL)
	if err == nil && m.Sum(damaged)+m.Sum(unknown) == 0 {
		err = holef("the engine has noticed nothing")
	}
	return fmt.Sprintf("right tokens; %.0f blocks damaged, %.0f of another edition or key", m.Sum("kvport_integrity_failures_total"), m.Sum("kvport_digest_misses_total")), err
}

// saved are the blocks that an engine with certain settings stores, by the names of their files.
func (r *rig) saved(ctx context.Context, settings string) (map[string][]byte, error) {
	folder, err := r.folder()
	if err != nil {
		return nil, err
	}
	p, err := r.serve(ctx, sim, r.storeConfig("kv_producer", folder, settings))
	if err != nil {
		return nil, err
	}
	if err := r.same(ctx, sim, p.URL, prompt(1), prompt(2)); err != nil {
		return nil, err
	}
	if err := errors.Join(r.idle(ctx, p, time.Minute), r.stop(ctx, p)); err != nil {
		return nil, err
	}
	files, err := blockFiles(folder)
	if err != nil {
		return nil, err
	}
	out := map[string][]byte{}
	for _, path := range files {
		if out[filepath.Base(path)], err = os.ReadFile(path); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// poison puts blocks into a victim's store that somebody has made and changed who can run engines and lacks the victim's key.
func poison(ctx context.Context, r *rig, _ bool) (string, error) {
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	ring := filepath.Join(folder, "ring")
	if _, _, err := r.ends(ctx, "keys", "init", "--file", ring); err != nil {
		return "", err
	}
	theirs, err := r.saved(ctx, fmt.Sprintf(`{"ticket_key_file":%q}`, ring))
	if err != nil {
		return "", err
	}
	plain, err := r.saved(ctx, "{"+withoutKey+"}")
	if err != nil {
		return "", err
	}
	d, files, err := r.stored(ctx)
	if err != nil {
		return "", err
	}
	for n, path := range files {
		ours, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		forged := slices.Clone([][]byte{theirs[filepath.Base(path)], plain[filepath.Base(path)], ours}[n%3])
		if len(forged) != len(ours) {
			return "", fmt.Errorf("a block has %d bytes at the attacker's, and %d at the victim's", len(forged), len(ours))
		}
		forged[blockHead+r.rng.IntN(1024)] ^= 1 // of KV
		if n%2 == 0 {                           // under the name of the victim's key
			at := digestsAt(ours, theirs[filepath.Base(path)])
			copy(forged[at:at+digestHeader], ours[at:])
		}
		if err := os.WriteFile(path, wholeFile(forged), 0o600); err != nil {
			return "", err
		}
	}
	if err := r.same(ctx, sim, d.URL, prompt(1), prompt(2)); err != nil {
		return "", err
	}
	return r.rejected(ctx, d)
}

// digestHeader is the length of what precedes a block's digests: the edition and the name of the key.
const digestHeader = 16

// digestsAt is where the digests of a block begin: before that, the KV of two engines of one model is equal.
func digestsAt(ours, theirs []byte) int {
	at := blockHead
	for at < len(ours) && ours[at] == theirs[at] {
		at++
	}
	return at / digestHeader * digestHeader
}

func otherBlock(ctx context.Context, r *rig, _ bool) (string, error) {
	d, files, err := r.stored(ctx)
	if err != nil {
		return "", err
	}
	blocks := make([][]byte, len(files))
	for i, path := range files {
		if blocks[i], err = os.ReadFile(path); err != nil {
			return "", err
		}
	}
	for i, path := range files { // the head is that of the name, the block another one
		other := blocks[(i+1)%len(files)]
		if err := os.WriteFile(path, slices.Concat(blocks[i][:blockHead], other[min(blockHead, len(other)):]), 0o600); err != nil {
			return "", err
		}
	}
	if err := r.same(ctx, sim, d.URL, prompt(1), prompt(2)); err != nil {
		return "", err
	}
	return r.rejected(ctx, d)
}

// wholeFile mends the head of a block file.
func wholeFile(value []byte) []byte {
	binary.LittleEndian.PutUint64(value[16:], uint64(len(value)-blockHead))
	binary.LittleEndian.PutUint32(value[blockHead-4:], crc32.Checksum(value[:blockHead-4], crc32.MakeTable(crc32.Castagnoli)))
	return value
}

func churnStore(ctx context.Context, r *rig, _ bool) (string, error) {
	d, files, err := r.stored(ctx)
	if err != nil {
		return "", err
	}
	folder := filepath.Dir(filepath.Dir(files[0]))
	for n := range 6 {
		switch n % 3 {
		case 0:
			err = os.RemoveAll(folder)
		case 1:
			for _, path := range files {
				_ = os.Truncate(path, int64(r.rng.IntN(3000)))
			}
		case 2:
			err = errors.Join(os.MkdirAll(folder, 0o700), os.WriteFile(filepath.Join(folder, "junk"), bytes.Repeat([]byte("x"), 1<<20), 0o600))
		}
		if err != nil {
			return "", err
		}
		if err := r.same(ctx, sim, d.URL, prompt(1), prompt(2)); err != nil {
			return "", err
		}
	}
	return r.rejected(ctx, d)
}

// oddKind is something that is no block file.
type oddKind struct {
	name, what string
	put        func(r *rig, path string) error
}

func oddFiles() []oddKind {
	return []oddKind{
		{"symlink", "links to a secret file", func(r *rig, path string) error { return os.Symlink(r.secret(), path) }},
		{"device-link", "links to an endless device", func(_ *rig, path string) error { return os.Symlink("/dev/zero", path) }},
		{"fifo", "FIFOs", func(_ *rig, path string) error { return syscall.Mkfifo(path, 0o600) }},
		{"folder", "folders", func(_ *rig, path string) error { return os.Mkdir(path, 0o700) }},
		{"sparse", "sparse files of a terabyte", func(_ *rig, path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 1<<40))
		}},
		{"socket", "sockets", func(r *rig, path string) error {
			here := filepath.Join(r.dir, "tmp", fmt.Sprintf("s%d", r.rng.Uint32())) // a socket's name must be short
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: here, Net: "unix"})
			if err != nil {
				return err
			}
			l.SetUnlinkOnClose(false)
			return errors.Join(os.Rename(here, path), l.Close())
		}},
		{"hardlink", "hard links to a secret file", func(r *rig, path string) error { return os.Link(r.secret(), path) }},
		{"device", "devices", func(_ *rig, path string) error {
			if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5))); err != nil {
				return &skipped{"this user cannot make devices"}
			}
			return nil
		}},
		{"empty", "empty files", func(_ *rig, path string) error { return os.WriteFile(path, nil, 0o600) }},
	}
}

func oddFile(ctx context.Context, r *rig, put func(r *rig, path string) error) (string, error) {
	d, files, err := r.stored(ctx)
	if err != nil {
		return "", err
	}
	for _, path := range files {
		if err := errors.Join(os.Remove(path), put(r, path)); err != nil {
			return "", err
		}
	}
	began := time.Now()
	if err := r.same(ctx, sim, d.URL, prompt(1), prompt(2), prompt(1)); err != nil {
		return "", err
	}
	if data, err := os.ReadFile(r.secret()); err != nil || string(data) != r.canary {
		return "", holef("the secret file was changed: %q, %v", cut(string(data)), err)
	}
	return fmt.Sprintf("%d in place of blocks: right tokens in %d ms", len(files), time.Since(began).Milliseconds()), r.alive(ctx, d)
}
