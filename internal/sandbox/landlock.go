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
		unix.LANDLOCK_ACCESS_FS_REMOVE_FILE | unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | connecting
	connecting = unix.LANDLOCK_ACCESS_FS_RESOLVE_UNIX
	ofFiles    = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_TRUNCATE | connecting
)

// grant is a right to some paths.
type grant struct {
	rights   uint64
	paths    []string
	programs bool // only files that somebody may start: the paths are from a file of the program's author
}

// grants are everything that a policy permits of files.
func (p *Policy) grants(program []string) []grant {
	list := []grant{
		{rights: reading, paths: common()},
		{rights: writing, paths: devices()},
		{rights: running, paths: program, programs: true},
		{rights: reading, paths: p.Read},
		{rights: running, paths: p.Run},
		{rights: writing, paths: p.Write},
	}
	if p.Network {
		list = append(list, grant{rights: reading, paths: online()}, grant{rights: connecting, paths: p.Connect})
	}
	return list
}

// handled is what Landlock decides under a policy: all that the kernel knows, and of the network only all or nothing.
func (p *Policy) handled(s *Support) unix.LandlockRulesetAttr {
	attr := unix.LandlockRulesetAttr{Handled_access_fs: s.files, Handled_access_net: s.ports, Scoped: s.scopes}
	if p.Network {
		attr.Handled_access_net = 0
	}
	return attr
}

// restrict puts this thread, and what it becomes, under the policy's Landlock rules.
func (p *Policy) restrict(s *Support, program []string) error {
	attr := p.handled(s)
	if attr == (unix.LandlockRulesetAttr{}) {
		return nil // the kernel makes no ruleset without rights
	}
	ruleset, err := newRuleset(&attr)
	if err != nil {
		return err
	}
	defer unix.Close(ruleset)
	for _, g := range p.grants(program) {
		g.rights &= attr.Handled_access_fs
		if g.rights == 0 {
			continue
		}
		for _, path := range g.paths {
			if err := g.permit(ruleset, path); err != nil {
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
func (g *grant) permit(ruleset int, path string) error {
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
	if g.programs && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o111 == 0) {
		return nil
	}
	rights := g.rights
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= ofFiles
	}
	if rights == 0 {
		return nil
	}
	rule := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	_, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(ruleset), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&rule)), 0, 0, 0)
	if g.programs && errno == unix.EBADFD {
		return nil // it is in memory, which needs no rule
	}
	if errno != 0 {
		return fmt.Errorf("landlock_add_rule %s: %w", path, errno)
	}
	return nil
}
