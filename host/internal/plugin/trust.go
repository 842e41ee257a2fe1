package plugin

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/host/internal/config"
)

// untrustedError says that somebody else can change a plugin.
type untrustedError struct {
	plugin, at string // at is the file, folder or link that they can change
	mode       uint32 // of at, as chmod takes it
	by         string
}

func (e *untrustedError) Error() string {
	remedy := "take that right from them with chmod or chown"
	if isELF(e.plugin) { // else its interpreter cannot read the pinned copy
		remedy += ", or pin the content with kvport.plugin_sha256"
	}
	return fmt.Sprintf("plugin %s: %s can be changed by %s (mode %04o): %s", e.plugin, e.at, e.by, e.mode, remedy)
}

func isUntrusted(err error) bool {
	_, is := errors.AsType[*untrustedError](err)
	return is
}

func isELF(path string) bool {
	f, err := config.OpenFile(path)
	if err != nil {
		return false
	}
	defer f.Close()
	magic := make([]byte, 4)
	n, _ := f.Read(magic)
	return bytes.Equal(magic[:n], []byte("\x7fELF"))
}

// maxLinks is how many symbolic links a path may go through, as in Linux.
const maxLinks = 40

// trusted resolves the path of a plugin. It refuses one that others can change: the file, every folder on the way to it
// from the root, and links in folders where everybody may replace their own files. What it gives has no links, so nobody
// else can change what is there afterwards. Errors are untrustedErrors where others can.
func trusted(path string) (file string, err error) { return insiders().follow(path) }

func (in *insider) follow(path string) (file string, err error) {
	if path, err = filepath.Abs(path); err != nil {
		return "", err
	}
	w := &way{plugin: path, at: "/", rest: parts(path), ours: in}
	for {
		info, err := os.Lstat(w.at)
		if err != nil {
			return "", err
		}
		if by := w.ours.others(w.at, info); by != "" {
			return "", &untrustedError{path, w.at, modeOf(info), by}
		}
		if len(w.rest) == 0 {
			return w.at, nil
		}
		if err := w.step(info); err != nil {
			return "", err
		}
	}
}

// way is how far the path of a plugin was followed.
type way struct {
	plugin, at string   // at has no links
	rest       []string // names behind it
	links      int
	ours       *insider
}

// step goes on to what has the next name in a folder, or to where that leads if it is a link.
func (w *way) step(folder fs.FileInfo) error {
	next := filepath.Join(w.at, w.rest[0])
	w.rest = w.rest[1:]
	info, err := os.Lstat(next)
	if err != nil {
		return err
	}
	if info.Mode()&fs.ModeSymlink == 0 {
		w.at = next
		return nil
	}
	replaced := folder.Mode()&fs.ModeSticky != 0 && folder.Mode().Perm()&0o022 != 0 // by its owner
	if by := w.ours.otherOwner(info); by != "" && replaced {
		return &untrustedError{w.plugin, next, modeOf(info), by}
	}
	target, err := os.Readlink(next)
	if err != nil {
		return err
	}
	if w.links++; w.links > maxLinks {
		return fmt.Errorf("%s: %w", w.plugin, syscall.ELOOP)
	}
	if filepath.IsAbs(target) {
		w.at = "/"
	}
	w.rest = append(parts(target), w.rest...)
	return nil
}

// parts are the names in a path, as they are: a ".." behind a link is not what filepath.Clean makes of it.
func parts(path string) []string {
	return slices.DeleteFunc(strings.Split(path, "/"), func(name string) bool { return name == "" || name == "." })
}

// insider are those who may change a plugin: this user, root, and whoever can replace the running program anyway.
type insider struct {
	users, groups map[uint32]bool
	everybody     bool
}

func insiders() *insider {
	in := insidersOf(os.Getuid(), os.Getgid())
	if id, is := rootSeenAs(os.ReadFile); is {
		in.users[id] = true
	}
	if program, err := os.Executable(); err == nil {
		in.adopt(program)
	}
	return in
}

func insidersOf(user, group int) *insider {
	return &insider{users: map[uint32]bool{0: true, uint32(user): true}, groups: map[uint32]bool{0: true, uint32(group): true}}
}

// adopt adds who can replace a program: its own mode and those of the folders that it lies below say so.
func (in *insider) adopt(program string) {
	program, err := filepath.EvalSymlinks(program)
	for ; err == nil; program = filepath.Dir(program) {
		var info fs.FileInfo
		if info, err = os.Lstat(program); err != nil {
			return
		}
		stat, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return
		}
		in.users[stat.Uid] = true
		if info.Mode()&fs.ModeSticky == 0 {
			in.everybody = in.everybody || info.Mode().Perm()&0o002 != 0
			if info.Mode().Perm()&0o020 != 0 {
				in.groups[stat.Gid] = true
			}
		}
		if program == "/" {
			return
		}
	}
}

// rootSeenAs is the user that root's files seem to belong to in a user namespace that does not have the root outside it.
func rootSeenAs(read func(string) ([]byte, error)) (id uint32, is bool) {
	table, err := read("/proc/self/uid_map")
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(table)) {
		var inside, outside, count uint64
		if n, _ := fmt.Sscan(line, &inside, &outside, &count); n != 3 || outside == 0 {
			return 0, false
		}
	}
	text, err := read("/proc/sys/kernel/overflowuid")
	if err != nil {
		return 0, false
	}
	overflow, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
	return uint32(overflow), err == nil
}

// others names those who can change a file, or the files of a folder, apart from insiders; empty: nobody.
func (in *insider) others(path string, info fs.FileInfo) string {
	if by := in.otherOwner(info); by != "" || in.everybody {
		return by
	}
	stat, _ := info.Sys().(*syscall.Stat_t) // which otherOwner has seen
	switch mode := info.Mode(); {
	case mode.IsDir() && mode&fs.ModeSticky != 0: // there everybody changes their own files
		return ""
	case mode.Perm()&0o002 != 0:
		return "every user"
	case mode.Perm()&0o020 == 0:
		return ""
	case !in.groups[stat.Gid]:
		return fmt.Sprintf("group %d", stat.Gid)
	}
	// The group's bits are the most that entries of an access control list permit.
	list := make([]byte, 64<<10)
	n, err := unix.Lgetxattr(path, "system.posix_acl_access", list)
	if err != nil {
		if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOTSUP) {
			return ""
		}
		return fmt.Sprintf("nobody knows whom, as its access control list cannot be read (%v)", err)
	}
	return in.inList(list[:n])
}

// otherOwner names the owner of a file, who can change its mode, unless it is an insider.
func (in *insider) otherOwner(info fs.FileInfo) string {
	stat, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !ok:
		return "nobody knows whom"
	case in.everybody || in.users[stat.Uid]:
		return ""
	}
	return fmt.Sprintf("its owner, user %d", stat.Uid)
}

// Of an access control list, as Linux gives it: a version, then entries of a tag, rights and an id.
const (
	listHeader = 4
	listEntry  = 8
	tagUser    = 2
	tagGroup   = 8
	mayWrite   = 2
)

// inList names somebody else to whom a list gives the right to write.
func (in *insider) inList(list []byte) string {
	for at := listHeader; at+listEntry <= len(list); at += listEntry {
		tag, rights, id := binary.LittleEndian.Uint16(list[at:]), binary.LittleEndian.Uint16(list[at+2:]), binary.LittleEndian.Uint32(list[at+4:])
		switch {
		case rights&mayWrite == 0:
		case tag == tagUser && !in.users[id]:
			return fmt.Sprintf("user %d by its access control list", id)
		case tag == tagGroup && !in.groups[id]:
			return fmt.Sprintf("group %d by its access control list", id)
		}
	}
	return ""
}

// modeOf is a mode as chmod takes it.
func modeOf(info fs.FileInfo) uint32 {
	mode := uint32(info.Mode().Perm())
	if info.Mode()&fs.ModeSticky != 0 {
		mode |= 0o1000
	}
	return mode
}
