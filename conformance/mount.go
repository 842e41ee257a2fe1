package conformance

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

// moved is the config with another folder in the place of the harness's.
func (r *rig) moved(folder string) json.RawMessage {
	old, _ := json.Marshal(r.folder())
	quoted, err := json.Marshal(folder)
	r.must(err, "config")
	trim := func(b []byte) string { return strings.Trim(string(b), `"`) }
	return json.RawMessage(strings.ReplaceAll(string(r.h.Config()), trim(old), trim(quoted)))
}

// smallDisk is a file system of its own in memory, in user and mount namespaces that a helper
// process holds. Everyone reaches it by the helper's root.
type smallDisk struct {
	path string // of its folder
	in   io.WriteCloser
	out  *bufio.Reader
	cmd  *exec.Cmd
	dir  string
}

// holder mounts the file system and changes its options, one line each, until its input ends.
const holder = `mount -t tmpfs -o "$1" tmpfs "$0" && echo ok || exit 1
while read -r options; do mount -o "remount,$options" "$0" && echo ok || echo failed; done`

// newSmallDisk mounts a file system. What keeps it from that is the machine's matter, not the
// connector's.
func newSmallDisk(options string) (*smallDisk, error) {
	d := &smallDisk{}
	var err error
	if d.dir, err = os.MkdirTemp("", "kvport-conform-"); err != nil {
		return nil, err
	}
	d.cmd = exec.CommandContext(context.Background(), "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", holder, d.dir, options)
	var said strings.Builder
	d.cmd.Stderr = &said
	in, inErr := d.cmd.StdinPipe()
	out, outErr := d.cmd.StdoutPipe()
	if err := errors.Join(inErr, outErr, d.cmd.Start()); err != nil {
		return nil, errors.Join(err, os.RemoveAll(d.dir))
	}
	d.in, d.out = in, bufio.NewReader(out)
	d.path = fmt.Sprintf("/proc/%d/root%s", d.cmd.Process.Pid, d.dir)
	if err := d.answer(); err != nil {
		return nil, errors.Join(fmt.Errorf("mount in a user namespace: %w: %s", err, strings.TrimSpace(said.String())), d.close())
	}
	if _, err := os.ReadDir(d.path); err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

func (d *smallDisk) answer() error {
	line, err := d.out.ReadString('\n')
	if err == nil && line != "ok\n" {
		err = errors.New("refused")
	}
	return err
}

// remount changes the options, such as size=1m or ro.
func (d *smallDisk) remount(options string) error {
	if _, err := io.WriteString(d.in, options+"\n"); err != nil {
		return err
	}
	return d.answer()
}

// close unmounts the file system.
func (d *smallDisk) close() error {
	_ = d.in.Close()
	_ = d.cmd.Wait() // the helper ends with its input
	return os.RemoveAll(d.dir)
}

// disk gives the case a small disk as the connector's folder. Where the machine does not permit
// that, the case is skipped and counted as such.
func (r *rig) disk(options string) *smallDisk {
	r.Helper()
	r.folder()
	if p, ok := r.harness().(*process); ok && p.trampoline != "" {
		r.Skipf("the disk is reached through another process, which a plugin in a sandbox cannot do")
	}
	d, err := newSmallDisk(options)
	if err != nil {
		r.Skipf("this machine permits no file system of our own: %v", err)
	}
	r.closers = append([]func() error{d.close}, r.closers...) // after the connector
	r.config = r.moved(d.path)
	return d
}
