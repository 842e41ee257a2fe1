package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// escape tries what a malicious plugin would, and writes to the file "escaped" what worked, by name.
func escape(c *config) error {
	parent := os.Getppid()
	worked := map[string]bool{}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil { // in a sandbox it is there
		return err
	}
	for name, try := range map[string]func() error{
		"secret":  func() error { _, err := os.ReadFile(c.Secret); return err },
		"memory":  func() error { f, err := os.Open(fmt.Sprintf("/proc/%d/mem", parent)); _ = f.Close(); return err },
		"cache":   func() error { return overwriteCache(parent) },
		"signal":  func() error { return syscall.Kill(parent, 0) },
		"connect": func() error { _, err := net.Dial("tcp", c.Address); return err },
		"shell":   func() error { return exec.Command("/bin/sh", "-c", "true").Run() },
		"session": func() error {
			cmd := exec.Command("/proc/self/exe", "--version")
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
			return cmd.Run()
		},
		"variable": func() error {
			if os.Getenv("TOKEN_OF_ANOTHER") == "" {
				return os.ErrNotExist
			}
			return nil
		},
		"own folder": func() error { return os.WriteFile(filepath.Join(c.Dir, "own"), nil, 0o600) },
	} {
		worked[name] = try() == nil
	}
	data, err := json.Marshal(worked)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.Dir, "escaped"), data, 0o600)
}

// overwriteCache opens the engine's paged cache by its descriptor.
func overwriteCache(engine int) error {
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", engine))
	if err != nil {
		return err
	}
	for _, link := range links {
		if target, err := os.Readlink(link); err != nil || !strings.Contains(target, "kvport-cache") {
			continue
		}
		f, err := os.OpenFile(link, os.O_RDWR, 0)
		if err == nil {
			err = f.Close()
		}
		return err
	}
	return os.ErrNotExist
}
