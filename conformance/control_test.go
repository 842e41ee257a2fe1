package conformance

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// A control program gets a case's name, words and values as they are.
func TestControl(t *testing.T) {
	program := filepath.Join(t.TempDir(), "control")
	require.NoError(t, os.WriteFile(program, []byte(`#!/bin/sh
cd "$(dirname "$0")" || exit 1
mkdir -p "$KVPORT_UNIQUE"
case $1 in
list) find "$KVPORT_UNIQUE" -type f | sort ;;
get) cat "./$2" ;;
put) cat > "./$2" ;;
remove) rm "./$2" ;;
*) exit 64 ;;
esac
`), 0o700))
	newHarness := Controlled(InProcess(connector.Plugin{}, json.RawMessage(`{"url": "@PROXY:127.0.0.1:1@", "bucket": "@UNIQUE@"}`)), program)
	var folders []string
	for range 2 {
		h, err := newHarness()
		require.NoError(t, err)
		c := h.(*inProcess).remoteServer().control
		var config struct{ Bucket string }
		require.NoError(t, json.Unmarshal(h.Config(), &config))
		require.Equal(t, config.Bucket, c.unique)
		folders = append(folders, c.unique)

		names, err := c.names(t.Context())
		require.NoError(t, err)
		require.Empty(t, names)
		value := []byte("\x00\nvalue\n\n")
		first, second := c.unique+"/a name", c.unique+"/b"
		require.NoError(t, c.put(t.Context(), first, value))
		require.NoError(t, c.put(t.Context(), second, nil))
		require.NoError(t, c.put(t.Context(), "kvport-others-1", value))
		names, err = c.names(t.Context())
		require.NoError(t, err)
		require.Equal(t, []string{first, second}, names)
		have, err := c.get(t.Context(), first)
		require.NoError(t, err)
		require.Equal(t, value, have)
		require.NoError(t, c.remove(t.Context(), first))
		_, err = c.get(t.Context(), first)
		require.ErrorIs(t, err, errControl)
		require.True(t, absent(err))
		require.ErrorContains(t, err, "the control program of the server failed: exit status 1: get "+first+": ")
		have, err = c.get(t.Context(), second)
		require.NoError(t, err)
		require.Equal(t, []byte{}, have, "an empty value is one")
		_, err = c.run(t.Context(), nil, "restart")
		require.ErrorIs(t, err, errCannot)
		require.NoError(t, h.Close())
	}
	require.NotEqual(t, folders[0], folders[1])
}

// A control program without a server that it could change, or without a name for what it may change, is a mistake in the config.
func TestControlNeedsAServer(t *testing.T) {
	for config, want := range map[string]string{
		`{"url": "127.0.0.1:1", "bucket": "@UNIQUE@"}`:       "@PROXY:HOST:PORT@",
		`{"url": "@PROXY:127.0.0.1:1@", "bucket": "blocks"}`: "@UNIQUE@",
	} {
		_, err := Controlled(InProcess(connector.Plugin{}, json.RawMessage(config)), "control")()
		require.ErrorContains(t, err, want)
	}
}

// controlled is the control of a harness with a script as its control program, which has called the script with mend already.
func controlled(t *testing.T, script string) (c *control, h Harness, folder string) {
	t.Helper()
	folder = t.TempDir()
	program := filepath.Join(folder, "control")
	require.NoError(t, os.WriteFile(program, []byte("#!/bin/sh\ncd '"+folder+"' || exit 1\necho $1 >> calls\n"+script), 0o700))
	h, err := Controlled(InProcess(connector.Plugin{}, json.RawMessage(`{"url": "@PROXY:127.0.0.1:1@", "bucket": "@UNIQUE@"}`)), program)()
	require.NoError(t, err)
	return h.(*inProcess).remoteServer().control, h, folder
}

// What a control program did is mended once; what it cannot do is not. A harness mends what no case has mended, and says so if it cannot.
func TestControlMends(t *testing.T) {
	const strict = `
case $1 in
full) touch full ;;
refuse) touch full; exit 1 ;;
mend) rm full ;;
*) exit 64 ;;
esac
`
	c, h, folder := controlled(t, strict)
	ctx := t.Context()
	require.ErrorIs(t, c.order(ctx, "lock"), errCannot)
	require.NoError(t, c.mend(ctx))
	require.NoError(t, c.order(ctx, "full"))
	require.NoError(t, c.mend(ctx))
	require.NoError(t, c.mend(ctx))
	require.ErrorIs(t, c.order(ctx, "refuse"), errControl)
	require.ErrorIs(t, c.order(ctx, "lock"), errCannot, "what it owes it still owes")
	require.NoError(t, h.Close())
	calls, err := os.ReadFile(filepath.Join(folder, "calls"))
	require.NoError(t, err)
	require.Equal(t, []string{"mend", "lock", "full", "mend", "refuse", "lock", "mend"}, strings.Fields(string(calls)))

	c, h, _ = controlled(t, "[ $1 = full ] || exit 64\n")
	require.NoError(t, c.order(ctx, "full"))
	err = h.Close()
	require.ErrorIs(t, err, errControl)
	require.ErrorContains(t, err, "it knows no mend for what it did")
}

// A word may start a server that goes on, and writes when the call is over. A program whose time is over is killed with all that it has started.
func TestControlLeaves(t *testing.T) {
	c, h, folder := controlled(t, `
case $1 in
restart)
	(until [ -e over ]; do sleep 0.05; done; echo one; echo two >&2; echo three; touch alive; exec sleep 1000) &
	echo $! > left ;;
full) sleep 1000 & echo $! > left; echo waiting > now; wait ;;
esac
`)
	left := func() (pid int) {
		text, err := os.ReadFile(filepath.Join(folder, "left"))
		require.NoError(t, err)
		pid, err = strconv.Atoi(strings.TrimSpace(string(text)))
		require.NoError(t, err)
		return pid
	}
	_, err := c.run(t.Context(), nil, "restart")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(folder, "over"), nil, 0o600))
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(folder, "alive"))
		return err == nil
	}, time.Minute, 10*time.Millisecond)
	require.NoError(t, syscall.Kill(left(), syscall.SIGKILL), "what it has started goes on")

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.order(ctx, "full") }()
	now := filepath.Join(folder, "now")
	require.Eventually(t, func() bool {
		_, err := os.Stat(now)
		return err == nil
	}, time.Minute, 10*time.Millisecond)
	cancel()
	require.ErrorIs(t, <-ended, errControl)
	stat := filepath.Join("/proc", strconv.Itoa(left()), "stat")
	require.Eventually(t, func() bool {
		text, err := os.ReadFile(stat)
		return err != nil || strings.Contains(string(text), ") Z ")
	}, time.Minute, 10*time.Millisecond)
	require.NoError(t, h.Close())
}

// What a program is killed for is not its answer that there is no value.
func TestControlThatIsKilled(t *testing.T) {
	c, h, _ := controlled(t, "[ $1 = get ] && kill -9 $$\nexit 64\n")
	_, err := c.get(t.Context(), "a")
	require.ErrorIs(t, err, errControl)
	require.False(t, absent(err))
	require.ErrorIs(t, c.put(t.Context(), "a", nil), errCannot)
	require.NoError(t, h.Close())
}

// A server may be mended slowly, also when the time of the case is over. What fails to be mended hides no other failure.
func TestControlHasItsTime(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for a slow program")
	}
	folder := t.TempDir()
	program := filepath.Join(folder, "control")
	require.NoError(t, os.WriteFile(program, []byte("#!/bin/sh\n[ $1 = mend ] || { touch '"+folder+"/full'; exit 0; }\nrm '"+folder+"/full' && sleep 6\n"), 0o700))
	newHarness := Controlled(InProcess(connector.Plugin{}, json.RawMessage(`{"url": "@PROXY:127.0.0.1:1@", "bucket": "@UNIQUE@"}`)), program)
	warmUp()
	c := Case{ID: "case", Run: func(c T, h Harness) {
		r := newRig(c, h)
		defer r.close()
		control := r.server().control
		require.NoError(t, control.order(t.Context(), "full"))
		r.afterwards(control.mend)
		<-c.Context().Done()
	}}
	r := checkCase(t.Context(), c, newHarness, settings{deadline: time.Second})
	require.Equal(t, Pass, r.Status, "%v", r.Log)

	h, err := newHarness()
	require.NoError(t, err)
	require.NoError(t, h.(*inProcess).remoteServer().control.order(t.Context(), "full"))
	require.NoError(t, h.Close(), "what the case did not mend")
	require.NoFileExists(t, filepath.Join(folder, "full"))
}

// A control program that fails is no excuse for something else that fails.
func TestControlIsNoExcuse(t *testing.T) {
	c, h, _ := controlled(t, "exit 1\n")
	require.ErrorIs(t, c.order(t.Context(), "full"), errControl)
	require.NoError(t, h.(*inProcess).proxies[0].Close())
	err := h.Close()
	require.ErrorIs(t, err, net.ErrClosed)
	require.NotErrorIs(t, err, errControl)
}
