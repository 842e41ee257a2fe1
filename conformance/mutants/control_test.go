package mutants_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
	"github.com/kvport/kvport/conformance/redistest"
)

const (
	password    = "pw"
	controlUser = "control" // to whom the server never closes
)

// changing are the cases that need a control program where the server is somebody else's.
func changing() []string {
	return []string{
		"remote-restart", "remote-length", "remote-swapped", "remote-evicted", "remote-flushed", "remote-full", "remote-busy", "remote-others", "remote-secret",
	}
}

// controlProgram builds testdata/control. A case starts it for each value, so it is a small program of its own and not this one by another
// name, which takes far longer to start, above all with the race detector in it.
func controlProgram(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "control")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-o", path, "./testdata/control").CombinedOutput()
	require.NoError(t, err, "%s", out)
	return path
}

// controlled makes what the suite needs for a server that it does not know: Remote with a relay to the server, and a control program.
func controlled(t *testing.T) func(fault, program string) conformance.Maker {
	t.Helper()
	server, err := redistest.Start("--requirepass", password)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Close()) })
	require.NoError(t, server.Do(t.Context(), "acl", "setuser", controlUser, "on", ">"+password, "~*", "&*", "+@all"))
	t.Setenv("KVPORT_TEST_REDIS", fmt.Sprintf("redis://%s:%s@%s", controlUser, password, server.Address))
	t.Setenv("KVPORT_TEST_PASSWORD", password)
	file := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(file, []byte(password), 0o600))
	return func(fault, program string) conformance.Maker {
		config, err := json.Marshal(mutants.RemoteConfig{URL: "redis://@PROXY:" + server.Address + "@", PasswordFile: file, Prefix: "@UNIQUE@:", Fault: fault})
		require.NoError(t, err)
		return conformance.Controlled(conformance.InProcess(mutants.Remote(), config), program)
	}
}

// With a control program the cases of profile remote that change what lies in a server run with any server: right connectors pass, and
// wrong ones are found.
func TestControlledServer(t *testing.T) {
	maker, program := controlled(t), controlProgram(t)
	o := conformance.Options{Profiles: []conformance.Profile{conformance.Remote}, Only: changing()}
	for _, r := range conformance.Check(t.Context(), maker("", program), o) {
		require.Equal(t, conformance.Pass, r.Status, "%s: %v", r.ID, r.Log)
	}
	seen := map[string]bool{}
	for _, m := range mutants.All() {
		switch m.Case {
		case "remote-restart", "remote-length", "remote-swapped", "remote-evicted", "remote-flushed", "remote-full", "remote-busy", "remote-others":
		default:
			continue // the faults of the others do not show with a control program
		}
		var c mutants.RemoteConfig
		require.NoError(t, json.Unmarshal([]byte(m.Config), &c))
		o.Only = []string{m.Case}
		r := conformance.Check(t.Context(), maker(c.Fault, program), o)[0]
		if decided(t, r) {
			require.Equal(t, conformance.Fail, r.Status, "%s: nobody noticed", m.Name)
		}
		seen[m.Case] = true
	}
	require.Len(t, seen, 8, "cases with a wrong connector")
}

// What a control program does not know of the words for values of others, or fails to do, is never a fault of the connector.
func TestOthersBehindAControlProgram(t *testing.T) {
	maker, inner := controlled(t), controlProgram(t)
	const third = `if [ $1 = get ]; then echo >> "$0.gets"; n=$(wc -l < "$0.gets"); else n=0; fi; ` // of each run two come before the connector opens
	for name, c := range map[string]struct {
		script string
		want   conformance.Status
		says   string
	}{
		"no remove":             {"[ $1 = remove ] && exit 64", conformance.Pass, ""},
		"no get":                {"[ $1 = get ] && exit 64", conformance.Skip, "does not do it: get"},
		"a get that fails once": {third + "[ $n = 3 ] && exit 1", conformance.Pass, ""},
		"gets that fail":        {third + "[ $n -gt 2 ] && exit 1", conformance.Inconclusive, "get a value of somebody else: "},
		"gets that are killed":  {third + "[ $n -gt 2 ] && kill -9 $$", conformance.Inconclusive, "signal: killed"},
		"a get of another":      {"[ $1 = get ] && { echo another; exit; }", conformance.Inconclusive, "is not what was put there"},
	} {
		path := filepath.Join(t.TempDir(), "control")
		require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+c.script+"\nexec '"+inner+"' \"$@\"\n"), 0o700))
		o := conformance.Options{Profiles: []conformance.Profile{conformance.Remote}, Only: []string{"remote-others"}}
		r := conformance.Check(t.Context(), maker("", path), o)[0]
		require.Equal(t, c.want, r.Status, "%s: %v", name, r.Log)
		require.Contains(t, strings.Join(r.Log, "\n"), c.says, name)
	}
}

// What a control program cannot do is skipped, and one that fails says nothing of the connector.
func TestControlProgramThatCannot(t *testing.T) {
	maker := controlled(t)
	script := func(text string) string {
		path := filepath.Join(t.TempDir(), "control")
		require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o700))
		return path
	}
	o := conformance.Options{Profiles: []conformance.Profile{conformance.Remote}, Only: changing()}
	for _, r := range conformance.Check(t.Context(), maker("", script("echo not me >&2; exit 64")), o) {
		require.Equal(t, conformance.Skip, r.Status, "%s: %v", r.ID, r.Log)
		require.Regexp(t, "^the control program of the server does not do it: .*: not me$", r.Log[0])
	}
	o.Only = []string{"remote-evicted"}
	r := conformance.Check(t.Context(), maker("", script("echo no such bucket >&2; exit 2")), o)[0]
	require.Equal(t, conformance.Inconclusive, r.Status)
	require.Contains(t, r.Log[0], "the control program of the server failed: exit status 2: list: no such bucket")
}

// A control program that fails when there is nothing to mend, as most do, serves all cases whose words it knows; one that cannot end what it
// did is named in the case that it did it in.
func TestControlProgramThatMends(t *testing.T) {
	maker, inner := controlled(t), controlProgram(t)
	script := func(mend string) string {
		dir := t.TempDir()
		path := filepath.Join(dir, "control")
		require.NoError(t, os.WriteFile(path, []byte(`#!/bin/sh
case $1 in
lock) exit 64 ;;
full|refuse) touch '`+dir+`/owed' ;;
mend) `+mend+` ;;
esac
exec '`+inner+`' "$@"
`), 0o700))
		return path
	}
	statuses := func(program string, cases ...string) (found []conformance.Status) {
		o := conformance.Options{Profiles: []conformance.Profile{conformance.Remote}, Only: cases}
		for _, r := range conformance.Check(t.Context(), maker("", program), o) {
			t.Log(r.ID, r.Status, r.Log)
			found = append(found, r.Status)
		}
		return found
	}
	strict := script(`rm "$(dirname "$0")/owed" || exit 1`)
	require.Equal(t, []conformance.Status{conformance.Pass, conformance.Pass, conformance.Skip}, statuses(strict, "remote-full", "remote-busy", "remote-secret"))
	require.Equal(t, []conformance.Status{conformance.Inconclusive}, statuses(script("exit 64"), "remote-full"))
}
