package plugin

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/host/internal/config"
)

// nobody is a user and a group that are not ours.
const nobody = 65534

// A plugin that others can change is not run.
func TestOthersCanChangeThePlugin(t *testing.T) {
	mode := func(dirMode, fileMode os.FileMode) func(string, string) error {
		return func(dir, file string) error { return errors.Join(os.Chmod(file, fileMode), os.Chmod(dir, dirMode)) }
	}
	type change struct {
		do   func(dir, file string) error
		want string // in the error; empty: it is run
	}
	changes := map[string]change{
		"ours":                     {mode(0o755, 0o755), ""},
		"of our own group":         {mode(0o775, 0o775), ""},
		"in a sticky folder":       {mode(0o777|os.ModeSticky, 0o755), ""},
		"every user, file":         {mode(0o755, 0o757), "can be changed by every user (mode 0757)"},
		"every user, folder":       {mode(0o777, 0o755), "can be changed by every user (mode 0777)"},
		"every user, both rights":  {mode(0o777|os.ModeSticky, 0o777), "can be changed by every user (mode 0777)"},
		"every user, folder above": {func(dir, _ string) error { return os.Chmod(filepath.Dir(dir), 0o777) }, "can be changed by every user (mode 0777)"},
	}
	if os.Getuid() == 0 {
		changes["another owner, file"] = change{func(_, file string) error { return os.Chown(file, nobody, 0) }, "its owner, user 65534"}
		changes["another owner, folder"] = change{func(dir, _ string) error { return os.Chown(dir, nobody, 0) }, "its owner, user 65534"}
		changes["another group"] = change{func(_, file string) error { return errors.Join(os.Chown(file, 0, nobody), os.Chmod(file, 0o775)) }, "group 65534"}
	} else {
		t.Log("other owners are not tried: only the administrator can give a file away")
	}
	for name, c := range changes {
		dir := filepath.Join(t.TempDir(), "plugins")
		require.NoError(t, os.Mkdir(dir, 0o755))
		path := filepath.Join(dir, "kvport-some")
		ran := answering(t, path, "SomeConnector")
		require.NoError(t, c.do(dir, path), name)
		links := t.TempDir()
		require.NoError(t, os.Symlink(path, filepath.Join(links, "kvport-some")))
		require.NoError(t, os.Symlink(dir, filepath.Join(links, "current")))
		for way, w := range map[string]*Wanted{
			"path": {Paths: []string{dir}}, "link": {Paths: []string{links}}, "link to the folder": {Paths: []string{filepath.Join(links, "current")}},
			"module": {Module: path}, "module in a linked folder": {Module: filepath.Join(links, "current", "kvport-some")},
		} {
			w.Connector = "SomeConnector"
			p, _, err := Resolve(t.Context(), w)
			if c.want == "" {
				require.NoError(t, err, "%s by %s", name, way)
				require.NoError(t, p.Close())
				continue
			}
			require.ErrorIs(t, err, config.Err, "%s by %s", name, way)
			require.ErrorContains(t, err, c.want, "%s by %s", name, way)
			require.NotContains(t, err.Error(), "no plugin is called", "%s by %s", name, way)
			require.False(t, ran(), "%s by %s: it was run", name, way)
		}
	}
}

// What runs does not depend on a file that others can change being passed over: it is an error, unless another one comes
// before it anyway.
func TestRefusedIsNotPassedOver(t *testing.T) {
	first, second := t.TempDir(), t.TempDir()
	open := filepath.Join(first, "kvport-some")
	answering(t, open, "SomeConnector")
	require.NoError(t, os.Chmod(open, 0o777))
	good := answering(t, filepath.Join(second, "kvport-some"), "SomeConnector")
	has := answering(t, filepath.Join(second, "kvport-has"), "SomeConnector")
	find := func(paths ...string) error {
		p, _, err := Resolve(t.Context(), &Wanted{Connector: "SomeConnector", Paths: paths})
		if err == nil {
			require.Equal(t, filepath.Join(second, "kvport-some"), p.Path)
			require.NoError(t, p.Close())
		}
		return err
	}
	require.ErrorContains(t, find(first, second), open+" can be changed by every user")
	require.NoError(t, find(second, first))
	require.True(t, good())
	require.NoError(t, os.Remove(filepath.Join(second, "kvport-some")))
	require.ErrorContains(t, find(first, second), open+" can be changed by every user")
	require.False(t, has(), "a file that merely has the name in it was run in its place")
	require.NoError(t, os.Rename(open, filepath.Join(first, "kvport-also")))
	require.ErrorContains(t, find(first, second), "kvport-also can be changed by every user")
	require.ErrorContains(t, find(first), "kvport-also can be changed by every user")
}

// Nobody who is refused may lead the way to a plugin: not by a link of theirs, nor by a folder between two links.
func TestLinksOfOthers(t *testing.T) {
	dir, between, sticky := t.TempDir(), t.TempDir(), t.TempDir()
	path := filepath.Join(dir, "kvport-some")
	answering(t, path, "SomeConnector")
	require.NoError(t, os.Symlink(path, filepath.Join(between, "kvport-some")))
	link := filepath.Join(sticky, "kvport-some")
	require.NoError(t, os.Symlink(filepath.Join("..", filepath.Base(between), "kvport-some"), link))
	require.NoError(t, os.Chmod(sticky, 0o777|os.ModeSticky))
	file, err := trusted(link)
	require.NoError(t, err)
	require.Equal(t, path, file)

	require.NoError(t, os.Chmod(between, 0o777))
	_, err = trusted(link)
	require.ErrorContains(t, err, "plugin "+link+": "+between+" can be changed by every user (mode 0777)")
	require.NoError(t, os.Chmod(between, 0o755))

	if os.Getuid() == 0 {
		require.NoError(t, os.Lchown(link, nobody, nobody))
		_, err = trusted(link)
		require.ErrorContains(t, err, link+" can be changed by its owner, user 65534")
		require.NoError(t, os.Chmod(sticky, 0o755))
		_, err = trusted(link)
		require.NoError(t, err, "who owns a link does not matter where only we can replace it")
	} else {
		t.Log("a link of somebody else is not tried: only the administrator can give one away")
	}

	require.NoError(t, os.Remove(link))
	require.NoError(t, os.Symlink(link, link))
	_, err = trusted(link)
	require.ErrorIs(t, err, unix.ELOOP)
}

// Each start looks again, and runs the file that it has looked at.
func TestEachStartLooksAgain(t *testing.T) {
	dir := t.TempDir()
	path, link := filepath.Join(dir, "kvport-real"), filepath.Join(dir, "kvport-some")
	answering(t, path, "SomeConnector")
	require.NoError(t, os.Symlink(path, link))
	p, _, err := Resolve(t.Context(), &Wanted{Connector: "SomeConnector", Module: link})
	require.NoError(t, err)
	require.Equal(t, link, p.Path)
	cmd, err := p.command(t.Context())
	require.NoError(t, err)
	require.Equal(t, path, cmd.Path)
	require.Equal(t, link, cmd.Args[0])
	require.NoError(t, os.Chmod(path, 0o757))
	_, err = p.Manifest(t.Context(), time.Minute, nil)
	require.ErrorContains(t, err, "can be changed by every user")
	_, err = Launch(t.Context(), p, &Options{Handshake: time.Minute})
	require.ErrorIs(t, err, config.Err)
	require.ErrorContains(t, err, "can be changed by every user")
}

// Only programs can be pinned, so only for those that is a remedy.
func TestRemedies(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kvport-some")
	for content, pin := range map[string]bool{"#!/bin/sh\n": false, "\x7fELF and so on": true, "": false} {
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		require.NoError(t, os.Chmod(path, 0o757))
		_, err := trusted(path)
		require.ErrorContains(t, err, "chmod or chown")
		require.Equal(t, pin, isELF(path))
		if pin {
			require.ErrorContains(t, err, "kvport.plugin_sha256")
		} else {
			require.NotContains(t, err.Error(), "kvport.plugin_sha256")
		}
	}
	// A script cannot be pinned, but nobody says that it could be changed.
	answering(t, path, "SomeConnector")
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	_, _, err = Resolve(t.Context(), &Wanted{Connector: "SomeConnector", Paths: []string{filepath.Dir(path)}, SHA256: fmt.Sprintf("%x", sha256.Sum256(data))})
	require.ErrorIs(t, err, config.Err)
	require.NotContains(t, err.Error(), "can be changed")
}

// Whoever can replace the program that runs may change plugins, too: nothing is won by refusing them.
func TestWhoCanReplaceTheProgram(t *testing.T) {
	if os.Getuid() != 0 {
		t.Log("not tried: only the administrator can give a file away")
		return
	}
	file := filepath.Join(t.TempDir(), "kvport-some")
	require.NoError(t, os.WriteFile(file, nil, 0o755))
	others := func(program string) string {
		t.Helper()
		in := insiders()
		if program != "" {
			in.adopt(program)
		}
		info, err := os.Lstat(file)
		require.NoError(t, err)
		return in.others(file, info)
	}
	install := func(change func(dir, program string) error) string {
		dir := t.TempDir()
		program := filepath.Join(dir, "kvport")
		require.NoError(t, os.WriteFile(program, nil, 0o755))
		require.NoError(t, change(dir, program))
		return program
	}
	theirs := install(func(_, program string) error { return os.Chown(program, nobody, 0) })
	inTheirs := install(func(dir, _ string) error { return os.Chown(dir, nobody, 0) })
	group := install(func(dir, _ string) error { return errors.Join(os.Chown(dir, 0, nobody), os.Chmod(dir, 0o775)) })
	everybody := install(func(dir, _ string) error { return os.Chmod(dir, 0o777) })
	sticky := install(func(dir, _ string) error {
		return errors.Join(os.Chown(dir, 0, nobody), os.Chmod(dir, 0o777|fs.ModeSticky))
	})

	require.NoError(t, os.Chown(file, nobody, 0))
	require.Equal(t, "its owner, user 65534", others(""))
	for program, may := range map[string]bool{theirs: true, inTheirs: true, group: false, everybody: true, sticky: false} {
		require.Equal(t, may, others(program) == "", program)
	}
	require.NoError(t, errors.Join(os.Chown(file, 0, nobody), os.Chmod(file, 0o775)))
	for program, may := range map[string]bool{theirs: false, inTheirs: false, group: true, everybody: true, sticky: false} {
		require.Equal(t, may, others(program) == "", program)
	}
	require.NoError(t, os.Chmod(file, 0o777))
	for program, may := range map[string]bool{theirs: false, inTheirs: false, group: false, everybody: true, sticky: false} {
		require.Equal(t, may, others(program) == "", program)
	}
}

// Plugins of installations as they are made every day are run. What is refused is said in one line, with what to do.
func TestOrdinaryInstallations(t *testing.T) {
	if os.Getuid() != 0 {
		t.Log("not tried: only the administrator can give files away")
		return
	}
	const user, service, volume = 1000, 2000, 3000
	umask022, umask002 := fs.FileMode(0o755), fs.FileMode(0o775)
	type install struct {
		owner, group int
		mode         fs.FileMode // of folders and files
		plugin       string
		links        map[string]string // in the folder of the installation, to what they lead
		path         string            // of the plugin, as it is found
		program      string            // that runs; empty: it is elsewhere, and root's
		runs         []int             // the user and the group of the engine
		want         string            // in the error
	}
	home := map[string]string{"home/me/venv/bin/python": "/usr/bin/python3", "home/me/bin": "venv/bin"}
	for name, i := range map[string]install{
		"a linked release":                    {0, 0, umask022, "opt/kvport-2/bin/kvport-some", map[string]string{"opt/kvport": "kvport-2"}, "opt/kvport/bin/kvport-some", "", []int{user, user}, ""},
		"links of a package":                  {0, 0, umask022, "store/x/bin/kvport-some", map[string]string{"bin": "profile/bin", "profile": "store/x"}, "bin/kvport-some", "", []int{user, user}, ""},
		"root's folder in PATH":               {0, 0, umask022, "usr/local/bin/kvport-some", nil, "usr/local/bin/kvport-some", "usr/local/bin/kvport", []int{user, user}, ""},
		"Debian's /usr/local, group staff":    {0, 50, umask002 | fs.ModeSetgid, "usr/local/bin/kvport-some", nil, "usr/local/bin/kvport-some", "usr/local/bin/kvport", []int{user, user}, ""},
		"the user's folder in PATH":           {user, user, umask022, "home/me/bin/kvport-some", nil, "home/me/bin/kvport-some", "", []int{user, user}, ""},
		"the user's own group may write":      {user, user, umask002, "home/me/bin/kvport-some", nil, "home/me/bin/kvport-some", "", []int{user, user}, ""},
		"the user's virtual environment":      {user, user, umask002, "home/me/venv/bin/kvport-some", home, "home/me/bin/kvport-some", "home/me/venv/bin/kvport", []int{user, user}, ""},
		"the same, run by root":               {user, user, umask002, "home/me/venv/bin/kvport-some", home, "home/me/bin/kvport-some", "home/me/venv/bin/kvport", []int{0, 0}, ""},
		"the same, in another group for once": {user, user, umask002, "home/me/venv/bin/kvport-some", home, "home/me/bin/kvport-some", "home/me/venv/bin/kvport", []int{user, service}, ""},
		"a container of root's":               {0, 0, umask022, "app/kvport-some", nil, "app/kvport-some", "app/kvport", []int{0, 0}, ""},
		"root's, and any user in group 0":     {1001, 0, umask002, "app/kvport-some", nil, "app/kvport-some", "app/kvport", []int{1000660000, 0}, ""},
		"a wheel that a service installed":    {service, service, umask002, "lib/site-packages/kvport_agent/bin/kvport-some", nil, "lib/site-packages/kvport_agent/bin/kvport-some", "lib/site-packages/kvport_agent/bin/kvport", []int{user, user}, ""},
		"an open volume with kvport in it":    {0, 0, 0o777, "volume/kvport-some", nil, "volume/kvport-some", "volume/kvport", []int{user, user}, ""},
		"an open volume":                      {0, 0, 0o777, "volume/kvport-some", nil, "volume/kvport-some", "", []int{user, user}, "every user (mode 0777)"},
		"a volume of a group":                 {0, volume, umask002, "volume/kvport-some", nil, "volume/kvport-some", "", []int{user, user}, "group 3000 (mode 0775)"},
		"another user's folder":               {service, service, umask022, "home/other/kvport-some", nil, "home/other/kvport-some", "", []int{user, user}, "its owner, user 2000 (mode 0755)"},
	} {
		root := t.TempDir() // below a folder where everybody may write, and which is sticky, as long as that is not set otherwise
		require.NoError(t, os.MkdirAll(filepath.Join(root, filepath.Dir(i.plugin)), 0o700), name)
		require.NoError(t, os.WriteFile(filepath.Join(root, i.plugin), nil, 0o700), name)
		if i.program != "" {
			require.NoError(t, os.WriteFile(filepath.Join(root, i.program), nil, 0o700), name)
		}
		for link, to := range i.links {
			require.NoError(t, os.Symlink(to, filepath.Join(root, link)), name)
		}
		require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || path == root {
				return err
			}
			err = os.Lchown(path, i.owner, i.group)
			if d.Type()&fs.ModeSymlink == 0 {
				err = errors.Join(err, os.Chmod(path, i.mode))
			}
			return err
		}), name)

		in := insidersOf(i.runs[0], i.runs[1])
		if i.program != "" {
			in.adopt(filepath.Join(root, i.program))
		}
		file, err := in.follow(filepath.Join(root, i.path))
		if i.want == "" {
			require.NoError(t, err, name)
			require.Equal(t, filepath.Join(root, i.plugin), file, name)
			continue
		}
		require.ErrorContains(t, err, "can be changed by "+i.want+": take that right from them with chmod or chown", name)
		require.NotContains(t, err.Error(), "\n", name)
	}
}

// Where root is not in the user namespace, its files seem to be those of the user that stands for all who are not.
func TestRootOutsideTheNamespace(t *testing.T) {
	files := map[string]string{"/proc/sys/kernel/overflowuid": "65534\n"}
	read := func(path string) ([]byte, error) {
		text, ok := files[path]
		if !ok {
			return nil, fs.ErrNotExist
		}
		return []byte(text), nil
	}
	seen := func() bool {
		id, is := rootSeenAs(read)
		require.Equal(t, is, id == 65534)
		return is
	}
	require.False(t, seen())
	for table, want := range map[string]bool{
		"         0          0 4294967295\n":                                   false,
		"      1000       1000          1\n":                                   true,
		"         0       1000          1\n         1     100000      65536\n": true,
		"         1       1000          1\n         0          0          1\n": false,
		"what\n": false,
	} {
		files["/proc/self/uid_map"] = table
		require.Equal(t, want, seen(), table)
	}
	delete(files, "/proc/sys/kernel/overflowuid")
	files["/proc/self/uid_map"] = "1000 1000 1\n"
	require.False(t, seen())
}

// The mode does not show who an access control list lets in.
func TestAccessControlList(t *testing.T) {
	list := func(tag uint16, id uint32) []byte {
		b := binary.LittleEndian.AppendUint32(nil, 2)
		for _, e := range []struct {
			tag, rights uint16
			id          uint32
		}{{1, 7, 1<<32 - 1}, {tag, 7, id}, {4, 5, 1<<32 - 1}, {16, 7, 1<<32 - 1}, {32, 5, 1<<32 - 1}} {
			b = binary.LittleEndian.AppendUint16(binary.LittleEndian.AppendUint16(b, e.tag), e.rights)
			b = binary.LittleEndian.AppendUint32(b, e.id)
		}
		return b
	}
	in := insiders()
	require.Equal(t, "user 65534 by its access control list", in.inList(list(tagUser, nobody)))
	require.Equal(t, "group 65534 by its access control list", in.inList(list(tagGroup, nobody)))
	require.Empty(t, in.inList(list(tagUser, uint32(os.Getuid()))))
	require.Empty(t, in.inList(list(tagGroup, 0)))
	require.Empty(t, in.inList(nil))

	path := filepath.Join(t.TempDir(), "kvport-some")
	require.NoError(t, os.WriteFile(path, nil, 0o755))
	err := unix.Setxattr(path, "system.posix_acl_access", list(tagUser, nobody), 0)
	if errors.Is(err, unix.ENOTSUP) {
		t.Log("the file system of the temporary folder has no access control lists")
		return
	}
	require.NoError(t, err)
	_, err = trusted(path)
	require.ErrorContains(t, err, path+" can be changed by user 65534 by its access control list (mode 0775)")
}
