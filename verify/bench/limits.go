package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
)

// limit is what a store is compared with: the same bytes moved in the plainest way, and with digests one XXH3
// pass over them while they are hot.
type limit interface {
	save(t *connector.Transfer, digests bool) error
	load(t *connector.Transfer, digests bool) error
	close() error
}

// hot is one XXH3 pass over a transfer.
type hot struct {
	link *link
	sum  xxh3.Uint128
}

func (h *hot) pass(t *connector.Transfer, digests bool) {
	if digests {
		h.link.each(t, func(part []byte) { h.sum.Lo ^= xxh3.Hash128(part).Lo })
	}
}

// copies is the limit of stores in memory: memcpy between the cache and memory of this process.
type copies struct {
	hot
	slab []byte
}

func copyLimit(_ context.Context, _ *store, l *link, _ string) (limit, error) {
	c := &copies{hot: hot{link: l}, slab: make([]byte, int64(l.blocks)*l.shape.block())}
	fill(c.slab)
	return c, nil
}

// place is where a transfer's bytes are in the slab.
func (c *copies) place(t *connector.Transfer) []byte {
	return c.slab[int64(t.Blocks[0].ID)*c.link.shape.block():]
}

func (c *copies) save(t *connector.Transfer, digests bool) error {
	c.pass(t, digests)
	to := c.place(t)
	c.link.each(t, func(part []byte) { to = to[copy(to, part):] })
	return nil
}

func (c *copies) load(t *connector.Transfer, digests bool) error {
	from := c.place(t)
	c.link.each(t, func(part []byte) { from = from[copy(part, from):] })
	c.pass(t, digests)
	return nil
}

func (c *copies) close() error { return nil }

// plainFiles is the limit of stores in files: a file for each block, written at once and renamed, or read.
type plainFiles struct {
	hot
	dir     string
	written int
}

func fileLimit(_ context.Context, _ *store, l *link, dir string) (limit, error) {
	f := &plainFiles{hot: hot{link: l}, dir: filepath.Join(dir, "plain")}
	return f, os.Mkdir(f.dir, 0o700)
}

func (f *plainFiles) save(t *connector.Transfer, digests bool) error {
	f.pass(t, digests)
	for _, b := range t.Blocks {
		name := filepath.Join(f.dir, strconv.Itoa(f.written))
		f.written++
		file, err := os.Create(name + ".tmp")
		if err != nil {
			return err
		}
		if err := f.vector(file, b, func(fd int, parts [][]byte) (int, error) { return unix.Writev(fd, parts) }); err != nil {
			return err
		}
		if err := os.Rename(name+".tmp", name); err != nil {
			return err
		}
	}
	return nil
}

func (f *plainFiles) load(t *connector.Transfer, digests bool) error {
	for _, b := range t.Blocks {
		file, err := os.Open(filepath.Join(f.dir, strconv.Itoa(int(b.ID)%f.written)))
		if err != nil {
			return err
		}
		if err := f.vector(file, b, func(fd int, parts [][]byte) (int, error) { return unix.Preadv(fd, parts, 0) }); err != nil {
			return err
		}
	}
	f.pass(t, digests)
	return nil
}

// vector moves the parts of a block with one call and closes the file.
func (f *plainFiles) vector(file *os.File, b connector.Block, move func(int, [][]byte) (int, error)) error {
	var parts [][]byte
	f.link.each(&connector.Transfer{Blocks: []connector.Block{b}}, func(part []byte) { parts = append(parts, part) })
	n, err := move(int(file.Fd()), parts)
	if e := file.Close(); err == nil {
		err = e
	}
	if err == nil && int64(n) != f.link.shape.block() {
		err = fmt.Errorf("%s: %d bytes of %d", file.Name(), n, f.link.shape.block())
	}
	return err
}

func (f *plainFiles) close() error { return nil }
