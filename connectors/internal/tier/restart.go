package tier

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
)

// maxFiles is how many processes may use one folder at the same time.
const maxFiles = 64

// errInUse says that a file has another process as its user.
var errInUse = errors.New("in use")

// claim opens a file of the folder that nobody else uses: one with the given superblock if there is
// one, else the first, which is then emptied.
func claim(folder string, super []byte) (*os.File, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(folder)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	for _, fresh := range []bool{false, true} {
		for n := range maxFiles {
			f, err := claimFile(root, fmt.Sprintf("tier-%d.kv", n), super, fresh)
			if errors.Is(err, errInUse) {
				continue
			}
			if err != nil {
				return nil, err
			}
			if f != nil {
				return f, nil
			}
		}
	}
	return nil, fmt.Errorf("all %d files are in use", maxFiles)
}

// claimFile opens and locks one file. Unless fresh it gives nil for one that is missing or has another
// superblock.
func claimFile(root *os.Root, name string, super []byte, fresh bool) (_ *os.File, err error) {
	flags := os.O_RDWR | unix.O_NOFOLLOW | unix.O_NONBLOCK
	if fresh {
		flags |= os.O_CREATE
	}
	f, err := root.OpenFile(name, flags, 0o600)
	if errors.Is(err, unix.EROFS) && !fresh { // what it holds can still be read; writes fail one by one
		f, err = root.OpenFile(name, flags&^os.O_RDWR, 0o600)
	}
	if errors.Is(err, os.ErrNotExist) && !fresh {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	keep := false
	defer func() {
		if !keep {
			err = errors.Join(err, f.Close())
		}
	}()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, errors.Join(err, fmt.Errorf("%s is no regular file", filepath.Join(root.Name(), name)))
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errInUse
	}
	fits, err := prepare(f, super, fresh)
	if err != nil || !fits {
		return nil, err
	}
	keep = true
	return f, nil
}

// prepare reports whether a file has the superblock, and with fresh gives it to one that has not.
func prepare(f *os.File, super []byte, fresh bool) (fits bool, err error) {
	have := make([]byte, len(super))
	if _, err := f.ReadAt(have, 0); err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	if bytes.Equal(have, super) || !fresh {
		return bytes.Equal(have, super), nil
	}
	if err := f.Truncate(0); err != nil {
		return false, err
	}
	_, err = f.WriteAt(super, 0)
	return err == nil, err
}

// restart takes over the blocks whose headers are whole. Whether their bytes are is found out when they
// are read.
func (d *Disk) restart() error {
	var whole []found
	best := map[connector.StoreKey]uint64{}
	buf := make([]byte, 4096*headerSize)
	for first := 0; first < d.slots; first += 4096 {
		n, err := d.readAt(buf, d.headerAt(uint32(first)))
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		for i := range min(n/headerSize, d.slots-first) {
			b := buf[i*headerSize:][:headerSize]
			f := found{id: uint32(first + i)}
			switch {
			case stateOf(b) == stateFree:
			case stateOf(b) != stateReady || !f.decode(b) || int64(f.length) > d.slotBytes:
				d.c.torn.Add(1)
			default:
				whole = append(whole, f)
				best[f.key] = max(best[f.key], f.generation)
			}
		}
	}
	slices.SortFunc(whole, func(a, b found) int { return cmp.Compare(a.generation, b.generation) })
	for _, f := range whole {
		if f.generation < best[f.key] {
			continue
		}
		d.serial.Store(f.generation)
		if d.expires != nil {
			d.expires[f.id].Store(f.expires)
		}
		d.index.adopt(f.id, f.key)
		d.c.adopted.Add(1)
	}
	return nil
}

func stateOf(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }

func putState(b []byte, state uint32) { binary.LittleEndian.PutUint32(b, state) }
