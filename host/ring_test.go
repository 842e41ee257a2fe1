package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/shm"
)

// ringMemory opens the rings of the plugin that is at work. It finds them in the plugin's process: this one has those
// of all hosts.
func (r *rig) ringMemory() *os.File {
	r.t.Helper()
	fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", r.Health().PID))
	require.NoError(r.t, err)
	var found []string
	for _, fd := range fds {
		if link, err := os.Readlink(fd); err == nil && strings.HasPrefix(link, "/memfd:kvport-rings") {
			found = append(found, fd)
		}
	}
	require.Len(r.t, found, 1)
	f, err := os.OpenFile(found[0], os.O_RDWR, 0)
	require.NoError(r.t, err)
	return f
}

// A plugin that scribbles over its rings loses its process, and nothing else is lost.
func TestScribbledRings(t *testing.T) {
	for _, harm := range []struct {
		name  string
		bytes string
		at    int64
	}{
		{"counters of answers", "\xff\xff\xff\xff", 2048},
		{"counters of requests", "\x00\x00\x00\x70", 64},
		{"all of it", strings.Repeat("\xff", shm.RingArea), 0},
	} {
		t.Run(harm.name, func(t *testing.T) {
			r := newRig(t, rigOptions{ranks: 2, settings: map[string]any{"deadlines": map[string]any{"transfer": "20s"}}})
			ks := keys(1, 4)
			r.save("a", ks, 0)
			rings := r.ringMemory()
			before, err := rings.Stat()
			require.NoError(t, err)
			for n := range int64(3) { // a scheduler side and two worker sides have taken the first areas
				_, err := rings.WriteAt([]byte(harm.bytes), n*shm.RingArea+harm.at)
				require.NoError(t, err)
			}
			require.NoError(t, rings.Close())
			e := r.load("b", ks, 10) // ends on another plugin, unless a busy machine takes longer than a load may
			if e.Err != nil {
				require.ErrorIs(t, e.Err, connector.ErrGone)
			}
			require.Eventually(t, func() bool { return r.Health().Restarts >= 1 }, time.Minute, time.Millisecond)
			e = r.load("c", ks, 20)
			require.NoError(t, e.Err)
			rings = r.ringMemory()
			after, err := rings.Stat()
			require.NoError(t, errors.Join(err, rings.Close()))
			require.False(t, os.SameFile(before, after))
			require.Positive(t, r.metric("kvport_plugin_restarts_total"))
		})
	}
}

func TestRingCanBeTurnedOff(t *testing.T) {
	for _, on := range []bool{true, false} {
		r := newRig(t, rigOptions{settings: map[string]any{"ring": on}})
		ks := keys(1, 2)
		r.save("a", ks, 0)
		require.NoError(t, r.load("b", ks, 10).Err)
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", r.Health().PID))
		require.NoError(t, err)
		require.Equal(t, on, strings.Contains(string(maps), "kvport-rings"))
	}
}
