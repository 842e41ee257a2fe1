package cluster

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Children lists the pids of the live children of pid, zombies left out.
func Children(pid int) []int {
	var out []int
	folder := fmt.Sprintf("/proc/%d/task", pid)
	tasks, _ := os.ReadDir(folder)
	for _, task := range tasks {
		data, err := os.ReadFile(filepath.Join(folder, task.Name(), "children"))
		if err != nil {
			continue
		}
		for field := range strings.FieldsSeq(string(data)) {
			if child, err := strconv.Atoi(field); err == nil && Alive(child) {
				out = append(out, child)
			}
		}
	}
	return out
}

// Descendants lists the pids of the live children of pid, and of theirs.
func Descendants(pid int) []int {
	out := Children(pid)
	for _, child := range out {
		out = append(out, Descendants(child)...)
	}
	return out
}

// Plugins lists the pids of the plugin processes of an engine.
func Plugins(engine int) []int {
	var out []int
	for _, child := range Children(engine) {
		if strings.HasPrefix(command(child), "kvport-") {
			out = append(out, child)
		}
	}
	return out
}

func command(pid int) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return ""
	}
	name, _, _ := bytes.Cut(data, []byte{0})
	return filepath.Base(string(name))
}

// Alive reports whether a process exists and is no zombie.
func Alive(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, found := bytes.Cut(data, []byte(") "))
	return found && len(rest) > 0 && rest[0] != 'Z' && rest[0] != 'X'
}

// BytesRead is how much a process has read so far by read calls, from cache or disk.
func BytesRead(pid int) int64 {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		if value, found := strings.CutPrefix(line, "rchar: "); found {
			n, _ := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
			return n
		}
	}
	return 0
}

// Resources counts what a process holds. TCP connections are left out: they are its clients' to keep.
type Resources struct {
	Children int
	Files    int // open descriptors that are neither sockets nor shared memory
	Sockets  int // unix sockets
	Shared   int // descriptors of memfds
}

// Usage counts what a process holds at this moment.
func Usage(pid int) Resources {
	r := Resources{Children: len(Children(pid))}
	unix := unixSockets(pid)
	fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	for _, fd := range fds {
		target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name()))
		switch {
		case err != nil:
		case unix[target]:
			r.Sockets++
		case strings.HasPrefix(target, "socket:"):
		case strings.HasPrefix(target, "/memfd:"):
			r.Shared++
		default:
			r.Files++
		}
	}
	return r
}

// unixSockets are the unix sockets of a process's network namespace, as its descriptors name them.
func unixSockets(pid int) map[string]bool {
	out := map[string]bool{}
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/net/unix", pid))
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) >= 7 {
			out["socket:["+fields[6]+"]"] = true
		}
	}
	return out
}

// Weight is what a process costs at a moment.
type Weight struct {
	Memory      int64 // resident bytes that it has for itself: neither shared memory nor pages of files
	Descriptors int
	Threads     int
}

// Weigh measures a process. A process that has ended is an error.
func Weigh(pid int) (w Weight, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return w, err
	}
	for line := range strings.Lines(string(data)) {
		name, value, _ := strings.Cut(line, ":")
		number, _, _ := strings.Cut(strings.TrimSpace(value), " ")
		switch name {
		case "RssAnon":
			w.Memory, err = strconv.ParseInt(number, 10, 64)
			w.Memory *= 1024
		case "Threads":
			w.Threads, err = strconv.Atoi(number)
		}
		if err != nil {
			return w, err
		}
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	w.Descriptors = len(fds)
	return w, err
}
