package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// hostProbes are for programs in plugin folders, and for the trust level in-place.
func hostProbes() []probe {
	return []probe{
		{id: "host/search-runs", group: "squatters", does: "puts a program into the plugin folder that does harm when it is asked for its name", door: "its name is that of the connector", run: searched},
		{id: "host/open-folder", group: "squatters", does: "lets everybody write the plugin folder and the plugin in it", run: openFolder},
		{id: "host/in-place", group: "in-place", does: "does at trust level in-place all that docs/operate.md says a plugin can do there", cost: 10, run: inPlace},
		{id: "host/in-place-sandbox", group: "in-place", does: "tries the same at in-place in a sandbox, where only writing the cache is left", door: withoutSandbox, cost: 10, run: inPlaceSandboxed},
	}
}

func sha256Of(path string) (string, error) {
	data, err := os.ReadFile(path)
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:]), err
}

// searched has an engine look for a connector in a folder in which a program lies that does harm.
func searched(ctx context.Context, r *rig, open bool) (string, error) {
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	name := "kvport-other"
	if open {
		name = "kvport-wanted"
	}
	marked := filepath.Join(folder, "marked")
	script := fmt.Sprintf("#!/bin/sh\n: > %q\n", marked)
	if err := os.WriteFile(filepath.Join(folder, name), []byte(script), 0o700); err != nil { //nolint:gosec // a program
		return "", err
	}
	out, code, err := r.ends(ctx, "serve", "--model", sim, "--port", "0", "--plugin-path", folder, "--kv-transfer-config", `{"kv_connector":"WantedConnector","kv_role":"kv_both"}`)
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(marked); err == nil {
		return "", holef("it ran outside a sandbox")
	}
	if code != 2 {
		return "", holef("exit code %d, %s", code, cut(out))
	}
	return "it may write nothing; exit code 2", nil
}

func openFolder(ctx context.Context, r *rig, _ bool) (string, error) {
	s, err := r.scene(ctx, "right")
	if err != nil {
		return "", err
	}
	folder := filepath.Dir(s.binary)
	for _, path := range []string{filepath.Dir(folder), folder, s.binary} {
		if err := os.Chmod(path, 0o777); err != nil { //nolint:gosec // that is the probe
			return "", err
		}
	}
	config := strings.Replace(s.config(`{}`), fmt.Sprintf(`"kv_connector_module_path":%q,`, s.binary), "", 1)
	if err := r.refused(ctx, "can be changed by", "serve", "--model", sim, "--port", "0", "--kv-transfer-config", config, "--plugin-path", folder); err != nil {
		return "", err
	}
	return "the engine refuses to start with it", nil
}

// rowsOf are the tries of the malicious plugin by the row of the table in docs/operate.md.
func rowsOf() map[string][]string {
	return map[string][]string{
		"write wrong bytes into the KV cache":                                                                {ownMapping, "memory: overwrites the cache by a descriptor"},
		"read or write files of this user: keys, configs, blocks of other plugins, `/dev/shm`":               {"files: reads a secret", "files: writes a file of a sibling", "files: writes in /dev/shm"},
		"read or write the memory, the environment or the descriptors of the engine or of any other process": {"memory: opens the engine's memory to write", "memory: reads the engine's environment", "memory: lists the engine's descriptors"},
		"send signals to them, change their limits or priorities":                                            {"signals: may signal the engine", "signals: limits the engine", "signals: lowers the engine's priority"},
		"use the network, connect to local services over their sockets":                                      {"tcp: connects over TCP", "tcp: listens over TCP", "udp: sends over UDP", "unix: connects to another's socket", "unix: connects to another's abstract socket"},
		"start other programs":                {"programs: runs a shell"},
		"leave processes behind when it ends": {"leave: begins a session of its own", leftBehind},
		"use privileges: run as root, set-user-ID programs, mount, namespaces, BPF, kernel keys, `io_uring`, `userfaultfd`": {"privileges: makes a System V segment"},
		"take pages out of memory that it shares with the host":                                                             {"pages: takes a hole into shared memory"},
		"leave a core dump with KV in it":                                                                                   {"core: leaves a core"},
	}
}

// ownMapping is a try that works at in-place, in a sandbox as well.
const ownMapping = "cache: writes its own mapping of the cache"

// leftBehind is a try whose success shows when the engine is gone.
const leftBehind = "leave: a process outlives the engine"

// everything runs the malicious plugin in all its modes at once at a trust level, and gives what worked.
func (r *rig) everything(ctx context.Context, settings string) ([]string, error) {
	s, err := r.scene(ctx, "all")
	if err != nil {
		return nil, err
	}
	p, err := r.serve(ctx, sim, s.config(settings))
	if err != nil {
		return nil, err
	}
	if _, err := r.tokens(ctx, p.URL, prompt(1)); err != nil {
		return nil, err
	}
	if err := r.stop(ctx, p); err != nil {
		return nil, unservedf("the engine does not end as it should: %v", err)
	}
	did := s.did()
	if left := s.left(ctx); len(left) > 0 {
		did = append(did, leftBehind)
	}
	return did, nil
}

// inPlace holds where what the page says is true: at in-place all of it works.
func inPlace(ctx context.Context, r *rig, _ bool) (string, error) {
	did, err := r.everything(ctx, `{"trust":"in-place"}`)
	if err != nil {
		return "", err
	}
	page, err := os.ReadFile(filepath.Join(r.root, "docs", "operate.md"))
	if err != nil {
		return "", err
	}
	n := 0
	for row, tries := range rowsOf() {
		if !strings.Contains(string(page), "| "+row+" |") {
			return "", holef("docs/operate.md has no row %q", row)
		}
		for _, try := range tries {
			if !slices.Contains(did, try) {
				return "", holef("docs/operate.md says that a plugin can %s; this one tried without success: %s", row, try)
			}
			n++
		}
	}
	return fmt.Sprintf("%d tries of %d rows work, as the page says", n, len(rowsOf())), nil
}

func inPlaceSandboxed(ctx context.Context, r *rig, open bool) (string, error) {
	settings := `{"trust":"in-place","sandbox":"on"}`
	if open {
		settings = `{"trust":"in-place",` + withoutSandbox + `}`
	}
	did, err := r.everything(ctx, settings)
	if err != nil {
		return "", err
	}
	if !slices.Equal(did, []string{ownMapping}) {
		return "", holef("it %s", cut(strings.Join(did, "; ")))
	}
	return "it may write its own mapping of the cache, as the page says, and nothing else works", nil
}
