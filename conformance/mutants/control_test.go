package mutants_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
	"github.com/kvport/kvport/conformance/redistest"
)

const (
	addressVariable = "KVPORT_TEST_REDIS"
	password        = "pw"
	controlUser     = "control" // to whom the server never closes
)

// changing are the cases that need a control program where the server is somebody else's.
func changing() []string {
	return []string{
		"remote-restart", "remote-length", "remote-swapped", "remote-evicted", "remote-flushed", "remote-full", "remote-busy", "remote-others", "remote-secret",
	}
}

// controlServer is a control program for a Redis server, as an author would write one for another server. The test binary is it by another name.
func controlServer(words []string) (code int) {
	ctx := context.Background()
	c := redis.NewClient(&redis.Options{Addr: os.Getenv(addressVariable), Username: controlUser, Password: password, Protocol: 2, DisableIdentity: true})
	defer c.Close()
	var err error
	switch words[0] {
	case "list":
		for _, name := range c.Keys(ctx, os.Getenv(conformance.UniqueVariable)+"*").Val() {
			_, _ = fmt.Fprintln(os.Stdout, name)
		}
	case "get":
		var value []byte
		if value, err = c.Get(ctx, words[1]).Bytes(); err == nil {
			_, err = os.Stdout.Write(value)
		}
	case "put":
		var value []byte
		if value, err = io.ReadAll(os.Stdin); err == nil {
			err = c.Set(ctx, words[1], value, 0).Err()
		}
	case "remove":
		err = c.Del(ctx, words[1]).Err()
	case "refuse":
		err = jam(ctx, c)
	default:
		orders, known := controlOrders()[words[0]]
		if !known {
			return 64
		}
		if words[0] == "mend" {
			for c.Do(ctx, "script", "kill").Err() == nil { // until there is none any more
			}
		}
		err = give(ctx, c, orders)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// give sends orders until one fails.
func give(ctx context.Context, c *redis.Client, orders [][]any) error {
	for _, order := range orders {
		if err := c.Do(ctx, order...).Err(); err != nil {
			return err
		}
	}
	return nil
}

// jam has the server run a script without an end: it answers every request with BUSY meanwhile.
func jam(ctx context.Context, c *redis.Client) error {
	if err := c.Do(ctx, "config", "set", "lua-time-limit", "20").Err(); err != nil {
		return err
	}
	o := *c.Options()
	o.ReadTimeout, o.MaxRetries = 20*time.Millisecond, -1
	once := redis.NewClient(&o)
	defer once.Close()
	_ = once.Do(ctx, "eval", "while true do end", "0").Err() // nobody waits for the answer
	for {
		if err := c.Ping(ctx).Err(); err != nil && strings.HasPrefix(err.Error(), "BUSY") {
			return nil
		}
	}
}

func controlOrders() map[string][][]any {
	return map[string][][]any{
		"restart": {{"flushall"}, {"client", "kill", "type", "normal", "skipme", "yes"}},
		"full":    {{"config", "set", "maxmemory-policy", "noeviction"}, {"config", "set", "maxmemory", "1"}},
		"lock":    {{"config", "set", "requirepass", "another"}},
		"mend":    {{"config", "set", "maxmemory", "0"}, {"config", "set", "requirepass", password}},
	}
}

// controlled makes what the suite needs for a server that it does not know: Remote with a relay to the server, and a control program.
func controlled(t *testing.T) func(fault, program string) conformance.Maker {
	t.Helper()
	server, err := redistest.Start("--requirepass", password)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Close()) })
	require.NoError(t, server.Do(t.Context(), "acl", "setuser", controlUser, "on", ">"+password, "~*", "&*", "+@all"))
	t.Setenv(addressVariable, server.Address)
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
	maker, program := controlled(t), plugin(t, "kvport-control")
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
	maker, inner := controlled(t), plugin(t, "kvport-control")
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
	maker, inner := controlled(t), plugin(t, "kvport-control")
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
