package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// strangerArg makes this program another user.
const strangerArg = "as-a-stranger"

// strangerID is the user and the group that a stranger becomes: nobody.
const strangerID = 65534

// aim is what a stranger is told.
type aim struct {
	Folder  string   `json:"folder,omitempty"`
	Names   []string `json:"names,omitempty"`
	Paths   []string `json:"paths,omitempty"`
	PIDs    []int    `json:"pids,omitempty"`
	Address string   `json:"address,omitempty"`
	Count   int      `json:"count,omitempty"`
	Seed    uint64   `json:"seed,omitempty"`
}

// loot is what a stranger got, each thing in a few words.
type loot struct {
	Got []string `json:"got"`
	Err string   `json:"err,omitempty"`
}

// acts are what strangers do.
func acts() map[string]func(aim) ([]string, error) {
	return map[string]func(aim) ([]string, error){"squat": actSquat, "look": actLook, "connect": actConnect, "noise": actNoise, "read": actRead}
}

// another is a process that runs as another user.
func (r *rig) another(ctx context.Context, args ...string) (*exec.Cmd, error) {
	if os.Getuid() != 0 {
		return nil, &skipped{"it needs another user, and only root can become one"}
	}
	return exec.CommandContext(ctx, r.strangerBinary(), append([]string{strangerArg}, args...)...), nil
}

// stranger has another user do something, and gives what that user got.
func (r *rig) stranger(ctx context.Context, act string, a aim) ([]string, error) {
	cmd, err := r.another(ctx, act)
	if err != nil {
		return nil, err
	}
	in, err := json.Marshal(a)
	if err != nil {
		return nil, err
	}
	cmd.Stdin = bytes.NewReader(in)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("stranger %s: %w: %s", act, err, cut(errOut.String()))
	}
	var l loot
	if err := json.Unmarshal(out, &l); err != nil {
		return nil, fmt.Errorf("stranger %s: %w", act, err)
	}
	if l.Err != "" {
		return nil, fmt.Errorf("stranger %s: %s", act, l.Err)
	}
	return l.Got, nil
}

// beStranger becomes another user, and then another program or an act.
func beStranger(args []string, in io.Reader, out io.Writer) int {
	err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(strangerID), syscall.Setuid(strangerID))
	if err != nil || len(args) == 0 {
		fmt.Fprintln(os.Stderr, "cannot become another user:", err)
		return 1
	}
	if args[0] == "exec" {
		fmt.Fprintln(os.Stderr, syscall.Exec(args[1], args[1:], os.Environ()))
		return 1
	}
	var a aim
	var l loot
	act := acts()[args[0]]
	err = json.NewDecoder(in).Decode(&a)
	if err == nil && act == nil {
		err = fmt.Errorf("there is no act %q", args[0])
	}
	if err == nil {
		l.Got, err = act(a)
	}
	if err != nil {
		l.Err = err.Error()
	}
	if json.NewEncoder(out).Encode(l) != nil {
		return 1
	}
	return 0
}

// reach connects within some seconds.
func reach(network, address string) (net.Conn, error) {
	return (&net.Dialer{Timeout: 5 * time.Second}).DialContext(context.Background(), network, address)
}

// actSquat makes folders that others may use.
func actSquat(a aim) ([]string, error) {
	for _, name := range a.Names {
		path := filepath.Join(a.Folder, name)
		if err := errors.Join(os.Mkdir(path, 0o777), os.Chmod(path, 0o777)); err != nil { //nolint:gosec // that is the probe
			return nil, err
		}
	}
	return nil, nil
}

// actLook tries everything of processes and below folders that another user may not have.
func actLook(a aim) (got []string, err error) {
	for _, pid := range a.PIDs {
		for _, name := range []string{"environ", "mem", "maps", "auxv", "io", "syscall", "stack"} {
			f, err := os.Open(fmt.Sprintf("/proc/%d/%s", pid, name))
			if err != nil {
				continue
			}
			if n, _ := f.Read(make([]byte, 16)); n > 0 || name == "mem" {
				got = append(got, f.Name())
			}
			_ = f.Close()
		}
		for _, name := range []string{"fd", "map_files", "cwd", "root"} {
			if entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/%s", pid, name)); err == nil && len(entries) > 0 {
				got = append(got, fmt.Sprintf("/proc/%d/%s", pid, name))
			}
		}
		for fd := range 64 {
			if f, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/%d", pid, fd), os.O_RDWR, 0); err == nil {
				got = append(got, f.Name())
				_ = f.Close()
			}
		}
		if syscall.Kill(pid, 0) == nil {
			got = append(got, fmt.Sprintf("may signal %d", pid))
		}
	}
	for _, root := range a.Paths {
		more, err := readable(root)
		if err != nil {
			return nil, err
		}
		got = append(got, more...)
	}
	return got, nil
}

// readable lists what this user may read, write or connect to.
func readable(root string) (got []string, err error) {
	return got, filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || slices.Contains([]string{"bin"}, filepath.Base(filepath.Dir(path))) {
			return nil //nolint:nilerr // others may not list it
		}
		if d.Type()&os.ModeSocket != 0 {
			if conn, err := reach("unix", path); err == nil {
				got = append(got, "connects to "+path)
				_ = conn.Close()
			}
			return nil
		}
		for _, mode := range []int{os.O_RDONLY, os.O_WRONLY} {
			if f, err := os.OpenFile(path, mode|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0); err == nil {
				got = append(got, fmt.Sprintf("opens %s (%d)", path, mode))
				_ = f.Close()
			}
		}
		return nil
	})
}

// actRead reads files and gives what is in them.
func actRead(a aim) (got []string, _ error) {
	for _, path := range a.Paths {
		if data, err := os.ReadFile(path); err == nil {
			got = append(got, string(data))
		}
	}
	return got, nil
}

// actConnect makes connections and says nothing, or half a word, and leaves.
func actConnect(a aim) (got []string, err error) {
	var open []net.Conn
	for i := range a.Count {
		conn, err := reach("tcp", a.Address)
		if err != nil {
			return nil, err
		}
		if i%2 == 1 {
			_, _ = conn.Write([]byte(strings.Repeat("\x16\x03", i%7)))
		}
		open = append(open, conn)
	}
	for _, conn := range open {
		_ = conn.Close()
	}
	return nil, nil
}

// actNoise sends what no protocol expects, UCX's frame that writes memory among it, and gives what is answered beyond a refusal.
func actNoise(a aim) (got []string, err error) {
	for _, text := range noises(a.Seed) {
		conn, err := reach("tcp", a.Address)
		if err != nil {
			return nil, err
		}
		_ = conn.SetDeadline(time.Now().Add(300 * time.Millisecond))
		_, _ = io.WriteString(conn, text)
		data, _ := io.ReadAll(io.LimitReader(conn, 1<<20))
		if len(data) > 4096 {
			got = append(got, fmt.Sprintf("%d bytes for %.20q", len(data), text))
		}
		_ = conn.Close()
	}
	return got, nil
}
