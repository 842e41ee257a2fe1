package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/verify/cluster"
)

// faultProbes are for machines that have little, and processes that are killed.
func faultProbes() []probe {
	return []probe{
		{id: "fault/few-files", group: "scarcity", does: "runs an engine that may open 64 files, and 100 clients", cost: 8, run: fewFiles},
		{id: "fault/little-memory", group: "scarcity", does: "runs an engine that may have 3 GiB of address space", cost: 8, run: littleMemory},
		{id: "fault/small-files", group: "scarcity", does: "runs an engine whose files may have no more than 1 KiB, as on a disk that is full", cost: 8, run: smallFiles},
		{id: "fault/full-disk", group: "scarcity", does: "runs an engine whose store is on a disk that is full", cost: 8, run: fullDisk},
		{id: "fault/full-output", group: "scarcity", does: "runs an engine whose log is on a device that is full", cost: 8, run: fullOutput},
		{id: "fault/port-in-use", group: "scarcity", does: "takes the port first", run: portInUse},
		{id: "fault/stop-prefill", group: "scarcity", does: "kills the prefill engine, and kills and stops its plugin and the decode engine's", cost: 30, run: stopPrefill},
		{id: "fault/churn", group: "leaks", does: "kills the plugin 20 times among 200 requests, some of whose clients leave, and counts what is left", cost: 40, run: churn},
		{id: "fault/orphans", group: "other", does: "kills an engine, and looks for what it has left behind", cost: 8, run: orphans},
		{id: "fault/swapped-plugin", group: "logs", does: "puts another program in the place of a pinned plugin, before the start and while the engine runs", cost: 8, run: swappedPlugin},
	}
}

// limited runs an engine with the typical store behind a shell command.
func (r *rig) limited(ctx context.Context, command string, args ...string) (*cluster.Process, string, error) {
	folder, err := r.folder()
	if err != nil {
		return nil, "", err
	}
	if _, err := r.expected(ctx, sim, prompt(1), prompt(2)); err != nil {
		return nil, "", err
	}
	p, err := r.startShell(ctx, command, r.serveArgs(sim, r.storeConfig("kv_both", folder, `{}`), append(args, "--enable-prefix-caching=false")...)...)
	return p, folder, err
}

func fewFiles(ctx context.Context, r *rig, _ bool) (string, error) {
	p, _, err := r.limited(ctx, "ulimit -n 64")
	if err != nil {
		return "", unservedf("it does not start: %v", err)
	}
	for range 100 {
		if _, err := r.dial(ctx, hostOf(p.URL)); err != nil {
			return "", err
		}
	}
	if err := r.same(ctx, sim, p.URL, prompt(1), prompt(2), prompt(1)); err != nil {
		return "", err
	}
	return "right tokens", r.alive(ctx, p)
}

func littleMemory(ctx context.Context, r *rig, _ bool) (string, error) {
	p, _, err := r.limited(ctx, "ulimit -v 3145728", "--num-blocks", "1024")
	if err != nil {
		if strings.Contains(err.Error(), "goroutine ") {
			return "", holef("%v", err)
		}
		return "it refuses to start with a message", nil
	}
	if err := r.same(ctx, sim, p.URL, prompt(1), prompt(2), prompt(1)); err != nil {
		return "", err
	}
	return "right tokens", r.alive(ctx, p)
}

func smallFiles(ctx context.Context, r *rig, _ bool) (string, error) {
	p, folder, err := r.limited(ctx, "ulimit -f 1; trap '' XFSZ")
	if err != nil {
		if strings.Contains(err.Error(), "goroutine ") {
			return "", holef("%v", err)
		}
		return "it refuses to start with a message", nil
	}
	if err := r.same(ctx, sim, p.URL, prompt(1), prompt(2), prompt(1)); err != nil {
		return "", err
	}
	files, _ := blockFiles(folder)
	return fmt.Sprintf("right tokens, %d blocks are stored", len(files)), r.alive(ctx, p)
}

func fullDisk(ctx context.Context, r *rig, _ bool) (string, error) {
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	if err := unix.Mount("none", folder, "tmpfs", 0, "size=64k"); err != nil {
		return "", &skipped{fmt.Sprintf("it needs a small disk, and cannot make one: %v", err)}
	}
	r.later(func() { _ = unix.Unmount(folder, unix.MNT_DETACH) })
	if _, err := r.expected(ctx, sim, prompt(1), prompt(2)); err != nil {
		return "", err
	}
	p, err := r.serve(ctx, sim, r.storeConfig("kv_both", folder, `{}`), "--enable-prefix-caching=false")
	if err != nil {
		return "", err
	}
	if err := r.same(ctx, sim, p.URL, prompt(1), prompt(2), prompt(1), prompt(2)); err != nil {
		return "", err
	}
	m, err := r.client.Metrics(ctx, p.URL)
	if err != nil {
		return "", err
	}
	failed := m.Sum("kvport_transfer_failed_blocks_total")
	if failed == 0 {
		return "", fmt.Errorf("the disk is not full")
	}
	return fmt.Sprintf("right tokens, %.0f blocks are not stored", failed), r.alive(ctx, p)
}

func fullOutput(ctx context.Context, r *rig, _ bool) (string, error) {
	p, _, err := r.limited(ctx, "exec 2>/dev/full", "--log-level", "debug")
	if err != nil {
		return "", unservedf("it does not start: %v", err)
	}
	if err := r.same(ctx, sim, p.URL, prompt(1), prompt(2), prompt(1)); err != nil {
		return "", err
	}
	return "right tokens", r.alive(ctx, p)
}

func portInUse(ctx context.Context, r *rig, _ bool) (string, error) {
	port, _, err := r.trap(ctx)
	if err != nil {
		return "", err
	}
	if err := r.refused(ctx, "is taken", "serve", "--model", sim, "--port", port); err != nil {
		return "", err
	}
	return "exit code 2, and a line says which", r.refused(ctx, "is taken", "route", "--decode", "http://127.0.0.1:1", "--port", port)
}

func stopPrefill(ctx context.Context, r *rig, _ bool) (string, error) {
	f, err := r.fixed.Typical("peers")
	if err != nil {
		return "", err
	}
	faults := []struct {
		name   string
		signal syscall.Signal
		pid    func(*pair) int
	}{
		{"prefill killed", syscall.SIGKILL, func(c *pair) int { return c.p.PID() }},
		{"prefill's plugin killed", syscall.SIGKILL, func(c *pair) int { return cluster.Plugins(c.p.PID())[0] }},
		{"decode's plugin killed", syscall.SIGKILL, func(c *pair) int { return cluster.Plugins(c.d.PID())[0] }},
		{"prefill's plugin stopped", syscall.SIGSTOP, func(c *pair) int { return cluster.Plugins(c.p.PID())[0] }},
		{"decode's plugin stopped", syscall.SIGSTOP, func(c *pair) int { return cluster.Plugins(c.d.PID())[0] }},
	}
	for _, fault := range faults {
		c, err := r.pairOf(ctx, f, "")
		if err != nil {
			return "", err
		}
		pid := fault.pid(c)
		if err := syscall.Kill(pid, fault.signal); err != nil {
			return "", err
		}
		if err := r.same(ctx, sim, c.url, prompt(1), prompt(2), prompt(3)); err != nil {
			return "", fmt.Errorf("%s: %w", fault.name, err)
		}
		_ = syscall.Kill(pid, syscall.SIGCONT) // a plugin that is stopped is killed or goes on
		r.stopAll()
	}
	return fmt.Sprintf("%d faults, right tokens", len(faults)), nil
}

func churn(ctx context.Context, r *rig, _ bool) (string, error) {
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	if _, err := r.expected(ctx, sim, prompt(1), prompt(2)); err != nil {
		return "", err
	}
	p, err := r.serve(ctx, sim, r.storeConfig("kv_both", folder, `{"breaker":{"deaths":1000}}`), "--enable-prefix-caching=false")
	if err != nil {
		return "", err
	}
	rng := rand.New(rand.NewPCG(r.rng.Uint64(), 0))
	settled := func() cluster.Resources {
		_ = r.idle(ctx, p, 20*time.Second)
		last, since := cluster.Usage(p.PID()), time.Now()
		wait(ctx, time.Minute, func() bool {
			if now := cluster.Usage(p.PID()); now != last {
				last, since = now, time.Now()
			}
			return time.Since(since) > time.Second
		})
		return last
	}
	if err := r.killed(ctx, p, rng, 2); err != nil {
		return "", err
	}
	before := settled()
	if err := r.killed(ctx, p, rng, 18); err != nil {
		return "", err
	}
	after := settled()
	if after.Children > before.Children || after.Files > before.Files+2 || after.Shared > before.Shared || after.Sockets > before.Sockets+2 {
		return "", holef("%+v before, %+v after", before, after)
	}
	return fmt.Sprintf("18 kills: %+v before, %+v after", before, after), nil
}

// killed sends ten requests for each kill of the plugin; some clients leave.
func (r *rig) killed(ctx context.Context, p *cluster.Process, rng *rand.Rand, kills int) error {
	for i := range 10 * kills {
		if i%10 == 5 {
			for _, pid := range cluster.Plugins(p.PID()) {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		if i%3 == 0 {
			short, cancel := context.WithTimeout(ctx, time.Duration(rng.IntN(20))*time.Millisecond)
			_, _ = r.tokens(short, p.URL, prompt(rng.IntN(20)))
			cancel()
			continue
		}
		if err := r.same(ctx, sim, p.URL, prompt(1+i%2)); err != nil {
			return err
		}
	}
	return nil
}

func orphans(ctx context.Context, r *rig, _ bool) (string, error) {
	s, err := r.scene(ctx, "right")
	if err != nil {
		return "", err
	}
	n := 0
	for _, trust := range []string{"staged", "in-place"} {
		p, err := r.serve(ctx, sim, s.config(`{"trust":"`+trust+`"}`))
		if err != nil {
			return "", err
		}
		if len(s.processes()) == 0 {
			return "", fmt.Errorf("no plugin runs")
		}
		p.Kill()
		if left := s.left(ctx); len(left) > 0 {
			return "", holef("at %s %d processes outlive the engine", trust, len(left))
		}
		n++
	}
	return fmt.Sprintf("%d engines killed, no process is left", n), nil
}

func swappedPlugin(ctx context.Context, r *rig, _ bool) (string, error) {
	s, err := r.scene(ctx, "right")
	if err != nil {
		return "", err
	}
	sum, err := sha256Of(s.binary)
	if err != nil {
		return "", err
	}
	config := s.config(fmt.Sprintf(`{"plugin_sha256":%q}`, sum))
	p, err := r.serve(ctx, sim, config)
	if err != nil {
		return "", err
	}
	marked := filepath.Join(s.sibling, "ran")
	evil := fmt.Sprintf("#!/bin/sh\necho ran >> %q\n", marked)
	if err := os.Remove(s.binary); err != nil {
		return "", err
	}
	if err := os.WriteFile(s.binary, []byte(evil), 0o700); err != nil { //nolint:gosec // a program
		return "", err
	}
	plugins := cluster.Plugins(p.PID())
	for _, pid := range plugins {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	wait(ctx, time.Minute, func() bool {
		now := cluster.Plugins(p.PID())
		return len(now) > 0 && !slices.Equal(now, plugins)
	})
	if err := r.same(ctx, sim, p.URL, prompt(1), prompt(1)); err != nil {
		return "", err
	}
	if err := r.refused(ctx, "plugin_sha256", "serve", "--model", sim, "--port", "0", "--kv-transfer-config", config); err != nil {
		return "", err
	}
	if _, err := os.Stat(marked); err == nil {
		return "", holef("the other program ran")
	}
	return "the other program never runs", r.alive(ctx, p)
}
