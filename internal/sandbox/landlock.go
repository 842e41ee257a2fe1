package sandbox

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Rights in Landlock's words.
const (
	reading = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	running = reading | unix.LANDLOCK_ACCESS_FS_EXECUTE
	writing = reading | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_REFER |
		unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_SOCK |
		unix.LANDLOCK_ACCESS_FS_REMOVE_FILE | unix.LANDLOCK_ACCESS_FS_REMOVE_DIR
	ofFiles = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_TRUNCATE
)

// grant is a right to some paths.
type grant struct {
	rights uint64
	paths  []string
}

// grants are everything that a policy permits of files.
func (p *Policy) grants() []grant {
	list := []grant{{reading, common()}, {writing, devices()}, {reading, p.Read}, {running, p.Run}, {writing, p.Write}}
	if p.Network {
		list = append(list, grant{reading, online()})
	}
	return list
}

// handled is what Landlock decides under a policy: all that the kernel knows, and of the network only all or nothing.
func (p *Policy) handled(s *Support) unix.LandlockRulesetAttr {
	attr := unix.LandlockRulesetAttr{Handled_access_fs: s.files, Handled_access_net: s.ports, Scoped: s.scopes}
	if p.Network {
		attr.Handled_access_fs &^= unix.LANDLOCK_ACCESS_FS_RESOLVE_UNIX
		attr.Handled_access_net = 0
	}
	return attr
}

// restrict puts this thread, and what it becomes, under the policy's Landlock rules.
func (p *Policy) restrict(s *Support) error {
	attr := p.handled(s)
	ruleset, err := newRuleset(&attr)
	if err != nil {
		return err
	}
	defer unix.Close(ruleset)
	for _, g := range p.grants() {
		for _, path := range g.paths {
			if err := permit(ruleset, path, g.rights&attr.Handled_access_fs); err != nil {
				return err
			}
		}
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(ruleset), 0, 0); errno != 0 {
		return fmt.Errorf("landlock_restrict_self: %w", errno)
	}
	return nil
}

// permit adds a rule. A path that does not exist, or that this user cannot reach, has none.
func permit(ruleset int, path string, rights uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("stat %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= ofFiles
	}
	rule := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	_, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(ruleset), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&rule)), 0, 0, 0)
	if errno != 0 {
		return fmt.Errorf("landlock_add_rule %s: %w", path, errno)
	}
	return nil
}
