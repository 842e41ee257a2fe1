package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/native/cuda"
	"github.com/kvport/kvport/native/nccl"
	"github.com/kvport/kvport/native/nixl"
	"github.com/kvport/kvport/native/ucx"
)

// probeWait is how long the look at one library may take: NIXL's UCX starts in half a second on a quiet machine.
const probeWait = 20 * time.Second

// probe looks at one library.
type probe struct {
	name string
	run  func() check
}

// probes are the libraries that connectors may move blocks with, in the order of doctor's lines.
func probes() []probe {
	return []probe{{"nixl", probeNIXL}, {"ucx", probeUCX}, {"cuda", probeCUDA}, {"nccl", probeNCCL}}
}

// checkNative says which libraries this host can use and why not the others. Each is loaded in a process of its
// own: they write to stderr, start threads, and may crash.
func checkNative(ctx context.Context) []check {
	var checks []check
	for _, p := range probes() {
		checks = append(checks, probeApart(ctx, p.name))
	}
	return checks
}

func probeApart(ctx context.Context, name string) check {
	ctx, cancel := context.WithTimeout(ctx, probeWait)
	defer cancel()
	const mend = "only connectors that use it are concerned; kvport probe " // and the name
	exe, err := os.Executable()
	if err != nil {
		return check{name, statusWarn, err.Error(), mend + name}
	}
	cmd := exec.CommandContext(ctx, exe, "probe", name)
	cmd.Args[0] = os.Args[0]
	cmd.WaitDelay = time.Second
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	var c check
	err = cmd.Run()
	if err == nil {
		err = json.Unmarshal(out.Bytes(), &c)
	}
	if err != nil {
		last := strings.TrimSpace(said.String())
		last = last[strings.LastIndexByte(last, '\n')+1:]
		return check{name, statusWarn, fmt.Sprintf("looking at it failed: %v: %s", err, last), mend + name + " shows all of it"}
	}
	return c
}

// newProbe is the process of probeApart.
func newProbe() *cobra.Command {
	var names []string
	for _, p := range probes() {
		names = append(names, p.name)
	}
	return &cobra.Command{
		Use:    "probe NAME",
		Short:  "Look at one of the libraries that doctor looks at, with all that it says",
		Hidden: true,
		Args:   cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs), ValidArgs: names,
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, p := range probes() {
				if p.name == args[0] {
					if err := writeJSONLines(cmd.OutOrStdout(), []check{p.run()}); err != nil {
						return fail(err)
					}
				}
			}
			return nil
		},
	}
}

// missing is the line of a library that cannot be loaded: its error says what to do.
func missing(name string, err error) check {
	c := check{name, statusWarn, err.Error(), "see the message"}
	var n *nixl.LoadError
	var u *ucx.LoadError
	var d *cuda.LoadError
	var l *nccl.LoadError
	switch {
	case errors.As(err, &n):
		c.Mend = n.Mend
	case errors.As(err, &u):
		c.Mend = u.Mend
	case errors.As(err, &d):
		c.Mend = d.Mend
	case errors.As(err, &l):
		c.Mend = l.Mend
	}
	c.Detail = strings.TrimSuffix(c.Detail, ": "+c.Mend)
	return c
}

// tried sorts names by whether they worked. What each would need is in brackets.
func tried(names []string, needs map[string]string, try func(name string) error) string {
	var here, not []string
	for _, name := range names {
		if err := try(name); err == nil {
			here = append(here, name)
		} else {
			not = append(not, strings.TrimSuffix(fmt.Sprintf("%s (%s)", name, needs[name]), " ()"))
		}
	}
	text := strings.Join(here, ", ")
	if len(here) == 0 {
		text = "none"
	}
	if len(not) > 0 {
		text += "; not here: " + strings.Join(not, ", ")
	}
	return text
}

func probeNIXL() check {
	const name = "nixl"
	lib, err := nixl.Open("")
	if err != nil {
		return missing(name, err)
	}
	agent, err := lib.NewAgent("doctor", nixl.Options{})
	if err != nil {
		return check{name, statusWarn, err.Error(), "see the message"}
	}
	backends := tried([]string{"UCX", "POSIX", "GDS"}, map[string]string{"GDS": "needs an NVIDIA GPU with GPUDirect Storage"}, func(backend string) error {
		// So UCX opens no port.
		if err := errors.Join(os.Setenv("UCX_TLS", ucx.SharedMemory), os.Setenv("UCX_POSIX_ERROR_HANDLING", "y")); err != nil {
			return err
		}
		_, err := agent.Backend(backend, nil)
		return err
	})
	if err := agent.Close(); err != nil {
		return check{name, statusWarn, err.Error(), "see the message"}
	}
	return check{Check: name, Status: statusOK, Detail: fmt.Sprintf("%s, backends: %s", lib.Path(), backends)}
}

func probeUCX() check {
	const name = "ucx"
	lib, err := ucx.Open("")
	if err != nil {
		return missing(name, err)
	}
	needs := map[string]string{
		"cma": "needs leave to read another process's memory: kernel.yama.ptrace_scope, container capabilities",
		"rc":  "needs an RDMA device, without which UCX moves nothing between machines by default", "cuda_ipc": "needs an NVIDIA GPU",
	}
	transports := tried([]string{"cma", "posix", "rc", "cuda_ipc"}, needs, func(transport string) error {
		w, err := lib.NewWorker(ucx.Options{Transports: transport})
		if err != nil {
			return err
		}
		return w.Close()
	})
	return check{Check: name, Status: statusOK, Detail: fmt.Sprintf("%s %s, transports: %s; over tcp it authenticates nobody, so connectors use that only where ucx_tcp is trusted-network",
		lib.Version(), lib.Path(), transports)}
}

func probeCUDA() check {
	const name = "cuda"
	lib, err := cuda.Open("")
	if err != nil {
		return missing(name, err)
	}
	n, err := lib.Devices()
	if err != nil {
		return check{name, statusWarn, err.Error(), "nothing, unless this host has an NVIDIA GPU: then install its driver"}
	}
	return check{Check: name, Status: statusOK, Detail: fmt.Sprintf("%s, devices: %d", lib.Path(), n)}
}

func probeNCCL() check {
	const name = "nccl"
	lib, err := nccl.Open("")
	if err != nil {
		return missing(name, err)
	}
	version, err := lib.Version()
	if err != nil {
		return check{name, statusWarn, err.Error(), "see the message"}
	}
	return check{Check: name, Status: statusOK, Detail: fmt.Sprintf("%s %s; it works only with a device of cuda", version, lib.Path())}
}
