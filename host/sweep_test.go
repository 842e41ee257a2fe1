package host

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/host/internal/plugin"
)

// The folder of a plugin that starts is in use, however old it is, and no folder is left while one
// runs: an engine that is killed then leaves nothing behind. Opening a host sweeps.
func TestRunningPluginHasNoFolder(t *testing.T) {
	root, err := os.MkdirTemp("/tmp", "kvport") //nolint:usetesting // short: a unix socket lies below it
	require.NoError(t, err)
	defer os.RemoveAll(root)
	t.Setenv("TMPDIR", root)
	left := filepath.Join(root, "kvport-plugin-left")
	require.NoError(t, os.Mkdir(left, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(left, "lock"), nil, 0o600))
	then := time.Now().Add(-time.Minute)
	require.NoError(t, os.Chtimes(left, then, then))
	o := rigOptions{}
	cfg, eng, opts := o.build(t)
	h, err := Open(t.Context(), cfg, eng, opts)
	require.NoError(t, err)
	r := &rig{Host: h, t: t}
	folders, err := filepath.Glob(filepath.Join(root, "kvport-plugin-*"))
	require.NoError(t, err)
	require.Empty(t, folders, "the plugin is connected")
	r.mu.Lock()
	p := r.gen.proc.(*plugin.Process)
	r.mu.Unlock()
	require.NoError(t, p.Heartbeat(t.Context()), "the connection does not need the folder")
	require.NoError(t, r.closeNow())
}
