package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// fence is the descriptor that says that this process lives.
func fence() int {
	first, _, _ := strings.Cut(os.Getenv("KVPORT_FENCE"), ",")
	fd, err := strconv.Atoi(first)
	if err != nil {
		panic(err)
	}
	return fd
}

// hideFence sends the fence to whoever listens in dir, and ends: it lies in a socket then, in nobody's
// table of descriptors.
func hideFence(dir string) {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: filepath.Join(dir, "park.sock"), Net: "unix"})
	if err != nil {
		panic(err)
	}
	if _, _, err := c.WriteMsgUnix([]byte{1}, syscall.UnixRights(fence()), nil); err != nil {
		panic(err)
	}
	os.Exit(3)
}

// leaveChild ends and leaves a process behind that holds the fence in a session of its own. Its number is in
// the file "child".
func leaveChild(dir string) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{"kvport-hang"} // see main
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.ExtraFiles = []*os.File{os.NewFile(uintptr(fence()), "fence")}
	if err := cmd.Start(); err != nil {
		panic(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "child"), fmt.Append(nil, cmd.Process.Pid), 0o600); err != nil {
		panic(err)
	}
	os.Exit(3)
}
