package host

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/host/internal/leaktest"
	"github.com/kvport/kvport/verify/testkit"
)

// The error of a plugin that fails while it is asked or opened names its binary, the phase, how its
// process ended and what it said last.
func TestEarlyFailuresAreNamed(t *testing.T) {
	for fault, want := range map[string][]string{
		"exit_describe": {"describe: ", "process ended: exit status 3", `"no licence to describe"`},
		"exit_open":     {"open: scheduler side: ", "process ended: exit status 3", `"no licence to open"`},
		"hang_describe": {"describe: no answer from the plugin in time", "raise kvport.deadlines.handshake (700ms) if", `"waiting for a licence to describe"`},
		"hang_open":     {"open: no answer in time: scheduler side: ", "raise kvport.deadlines.handshake (700ms) if", `"waiting for a licence to open"`},
	} {
		t.Run(fault, func(t *testing.T) {
			leaks := leaktest.Watch(t)
			o := rigOptions{extra: map[string]any{"fault": fault}}
			if strings.HasPrefix(fault, "hang") {
				o.settings = map[string]any{"deadlines": map[string]any{"handshake": "700ms"}}
			}
			cfg, eng, opts := o.build(t)
			_, err := Open(t.Context(), cfg, eng, opts)
			require.ErrorIs(t, err, ErrConfig)
			t.Log(err)
			for _, text := range append(want, "plugin "+testPlugin()+": ") {
				require.ErrorContains(t, err, text)
			}
			for _, text := range []string{"\n", "RST_STREAM", "extra_config", "signal: killed"} {
				require.NotContains(t, err.Error(), text)
			}
			leaks()
		})
	}
}

// A plugin that comes back as another one is not put to work; when it is the old one again, it is.
func TestReplacedPluginIsRefused(t *testing.T) {
	r := newRig(t, rigOptions{settings: map[string]any{"breaker": map[string]any{"deaths": 1000}}})
	mark := filepath.Join(r.dir, "replaced")
	require.NoError(t, os.WriteFile(mark, nil, 0o600))
	require.NoError(t, syscall.Kill(r.Health().PID, syscall.SIGKILL))
	require.Eventually(t, func() bool {
		return strings.Contains(r.Health().Error, testPlugin()+" has become another plugin")
	}, time.Minute, time.Millisecond)
	require.Contains(t, r.Health().Error, "incompatible")
	require.NotEqual(t, "ready", r.Health().State)
	require.NoError(t, os.Remove(mark))
	require.Eventually(t, func() bool { return r.Health().State == "ready" }, time.Minute, time.Millisecond)
}

// A plugin whose store other machines see since it was started again goes on, and the log says that it was mounted late.
func TestLateMountIsNamed(t *testing.T) {
	var log testkit.Log
	r := newRig(t, rigOptions{log: slog.New(slog.NewTextHandler(&log, nil)), settings: map[string]any{"breaker": map[string]any{"deaths": 1000}}})
	require.NoError(t, os.WriteFile(filepath.Join(r.dir, "mounted"), nil, 0o600))
	require.NoError(t, syscall.Kill(r.Health().PID, syscall.SIGKILL))
	require.Eventually(t, func() bool { return r.Health().Restarts > 0 && r.Health().State == "ready" }, time.Minute, time.Millisecond)
	require.Contains(t, log.String(), "who sees what is stored has changed")
	require.Contains(t, log.String(), "network file system (NFS)")
}
