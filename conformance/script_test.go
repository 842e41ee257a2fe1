package conformance

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// runner is a kvport whose runs have ended already: it prints what is in a file beside the plugin, and exits with the number on its last line.
const runner = `#!/bin/sh
for plugin; do :; done
sed '$d' "$plugin.said"
exit "$(tail -n 1 "$plugin.said")"
`

// scripted runs scripts/conform.sh on plugins whose runs have these results, and gives what it says at its end and its exit code.
func scripted(t *testing.T, runs ...[]Result) (said string, code int) {
	t.Helper()
	dir := t.TempDir()
	write := func(rel, text string) {
		path := filepath.Join(dir, rel)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o700)) //nolint:gosec // a program
	}
	script, err := os.ReadFile("../scripts/conform.sh")
	require.NoError(t, err)
	write("scripts/conform.sh", string(script))
	write("bin/kvport", runner)
	var names []string
	for n, results := range runs {
		name := fmt.Sprintf("p%d", n)
		names = append(names, name)
		var b bytes.Buffer
		require.NoError(t, WriteText(&b, results))
		exit := 0
		for _, r := range results {
			switch {
			case r.Status == Fail:
				exit = 1
			case r.Status == Inconclusive && exit == 0:
				exit = 3
			}
		}
		write("bin/kvport-"+name, "")
		write("bin/kvport-"+name+".said", fmt.Sprintf("%s%d\n", &b, exit))
		write("plugins/"+name+"/fixture.json", `{"profiles": ["store", "fault"]}`)
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(dir, "scripts", "conform.sh"))
	cmd.Env = append(os.Environ(), "PLUGINS="+strings.Join(names, " "), "EXAMPLES=")
	out, err := cmd.CombinedOutput()
	if err != nil {
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit, "%s", out)
		code = exit.ExitCode()
	}
	return string(out), code
}

// The script says for how long the profiles ran and how many cases had no verdict, and its exit code says whether that is well.
func TestConformScript(t *testing.T) {
	some := func(status Status, n int, required ...Profile) (out []Result) {
		for i := range n {
			out = append(out, Result{ID: fmt.Sprintf("%s-%d", status, i), Rule: "WORK-01", Status: status, Took: time.Second, Profiles: required, Log: []string{"it was so"}})
		}
		return out
	}
	with := func(all ...[]Result) (out []Result) {
		for _, some := range all {
			out = append(out, some...)
		}
		return out
	}
	said, code := scripted(t, with(some(Pass, 60, Store), some(Pass, 30, Store, Fault)), with(some(Pass, 30, Store), some(Skip, 7)))
	require.Zero(t, code, said)
	require.Contains(t, said, "conform: profile store: 2.0 minutes in all, 1.5 in the longest run\nconform: profile fault: 0.5 minutes in all, 0.5 in the longest run\n")
	require.Contains(t, said, "conform: 0 of 120 cases were inconclusive after they had run again (0.0 %, at most 2 %)\nconform: 2 passed, 0 failed, 0 without all verdicts\n")

	said, code = scripted(t, with(some(Pass, 99), some(Inconclusive, 2)))
	require.Zero(t, code, said)
	require.Contains(t, said, "conform: 2 of 101 cases were inconclusive after they had run again (2.0 %, at most 2 %)\nconform: 0 passed, 0 failed, 1 without all verdicts\n")

	said, code = scripted(t, with(some(Pass, 99), some(Inconclusive, 1, Store)))
	require.Equal(t, 3, code, said)
	require.Contains(t, said, "conform: required and without a verdict: inconclusive-0\nconform: 0 passed, 0 failed, 1 without all verdicts\n")

	said, code = scripted(t, with(some(Pass, 96), some(Inconclusive, 4, Store)))
	require.Equal(t, 1, code, "more than 2 %% are inconclusive: %s", said)

	said, code = scripted(t, with(some(Pass, 99), some(Inconclusive, 1, Store)), some(Fail, 1, Store))
	require.Equal(t, 1, code, said)
	require.Contains(t, said, "conform: 0 passed, 1 failed, 1 without all verdicts\n")
}
