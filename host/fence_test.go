package host

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// park is a socket in a folder of its own to which a plugin can send its fence. Nobody takes it out.
func park(t *testing.T) (dir string, l *net.UnixListener) {
	t.Helper()
	dir, err := os.MkdirTemp("", "p") //nolint:usetesting // the name of a socket must be short
	require.NoError(t, err)
	l, err = net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "park.sock"), Net: "unix"})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		require.NoError(t, os.RemoveAll(dir))
	})
	return dir, l
}

func hiding(dir, wait string) rigOptions {
	return rigOptions{
		dir: dir, extra: map[string]any{"fault": "hide_fence", "at": 1, "once": true},
		settings: map[string]any{"trust": "in-place", "deadlines": map[string]any{"fence": wait, "transfer": "30s"}},
	}
}

func (r *rig) becomes(state string) {
	r.t.Helper()
	require.Eventually(r.t, func() bool { return r.Health().State == state }, time.Minute, time.Millisecond, "%s, is %+v", state, r.Health())
}

// start begins a load and does not wait for its end.
func (r *rig) start(id string, ks []connector.BlockKey, first connector.BlockID) {
	r.t.Helper()
	tr := transfer(id, ks, first)
	r.wipe(tr.Blocks)
	r.send(&connector.Step{Admitted: []connector.Transfer{tr}})
}

// works saves and loads something with blocks that nothing else has.
func (r *rig) works(seed int, first connector.BlockID) {
	r.t.Helper()
	ks := keys(seed, 2)
	id := strconv.Itoa(seed)
	require.Empty(r.t, r.save("s"+id, ks, first).Failed)
	require.Equal(r.t, 32, r.match(query("l"+id, ks), nil).Tokens)
	require.NoError(r.t, r.load("l"+id, ks, first+2).Err)
	require.True(r.t, r.same(blocksOf(ks, first+2)))
}

// A fence that never comes back costs the blocks that its life had, and nothing else; operators see it.
func TestHiddenFenceCostsMemoryOnly(t *testing.T) {
	dir, _ := park(t)
	r := newRig(t, hiding(dir, "2s"))
	ks := keys(1, 3)
	r.save("a", ks, 0)
	require.Equal(t, 48, r.match(query("b", ks), nil).Tokens)
	r.start("b", ks, 20)
	r.becomes("waiting_for_fence")
	r.reaches("kvport_plugin_up", "TestConnector", equals(0))
	e := r.next(Loaded)
	require.True(t, e.Lost)
	require.Equal(t, []connector.BlockID{20, 21, 22}, e.Blocks)
	require.Equal(t, e.Blocks, e.Failed)
	require.ErrorIs(t, e.Err, connector.ErrGone)
	r.becomes("degraded")
	h := r.Health()
	require.Equal(t, 3, h.BlocksLost)
	require.Equal(t, 1, h.FencesLost)
	require.Contains(t, h.Error, "may write its memory for ever")
	require.InDelta(t, 3, r.metric("kvport_blocks_lost"), 0)
	require.Equal(t, connector.Match{}, r.match(query("b", ks), nil), "a load that was lost is not offered again")
	r.works(7, 40)
}

// The blocks of holds are lost in the same way, and the engine is told.
func TestHiddenFenceCostsHolds(t *testing.T) {
	dir, _ := park(t)
	o := hiding(dir, "300ms")
	o.extra["fault"] = "hold_fence"
	r := newRig(t, o)
	r.losesHold()
	r.becomes("degraded")
	require.Equal(t, 6, r.Health().BlocksLost)
	require.Zero(t, r.Health().Held)
	r.works(7, 40)
}

// The end of the engine does not wait for a fence.
func TestCloseDoesNotWaitForFence(t *testing.T) {
	dir, _ := park(t)
	r := newRig(t, hiding(dir, "10m"))
	ks := keys(1, 3)
	r.save("a", ks, 0)
	r.start("b", ks, 20)
	r.becomes("waiting_for_fence")
	began := time.Now()
	require.NoError(t, r.closeNow())
	require.Less(t, time.Since(began), 5*time.Minute)
	r.exactlyOnce(2, 0)
}

// A plugin can hand its fence to any process of its user. Only those that descend from it are killed for that.
func TestStrangerWithFenceLives(t *testing.T) {
	dir, l := park(t)
	r := newRig(t, hiding(dir, "1500ms"))
	ks := keys(1, 2)
	r.save("a", ks, 0)
	r.start("b", ks, 20)
	stranger := exec.Command("sleep", "1000")
	stranger.ExtraFiles = []*os.File{takeFile(t, l)}
	require.NoError(t, stranger.Start())
	ended := make(chan error, 1)
	go func() { ended <- stranger.Wait() }()
	require.NoError(t, stranger.ExtraFiles[0].Close())
	require.True(t, r.next(Loaded).Lost)
	select {
	case err := <-ended:
		require.FailNow(t, "a stranger was killed", "%v", err)
	default:
	}
	require.NoError(t, stranger.Process.Kill())
	<-ended
}

// takeFile is what somebody does to whom a plugin sends a descriptor.
func takeFile(t *testing.T, l *net.UnixListener) *os.File {
	t.Helper()
	c, err := l.AcceptUnix()
	require.NoError(t, err)
	defer c.Close()
	oob := make([]byte, 64)
	_, n, _, _, err := c.ReadMsgUnix(make([]byte, 1), oob)
	require.NoError(t, err)
	messages, err := syscall.ParseSocketControlMessage(oob[:n])
	require.NoError(t, err)
	fds, err := syscall.ParseUnixRights(&messages[0])
	require.NoError(t, err)
	syscall.CloseOnExec(fds[0])
	return os.NewFile(uintptr(fds[0]), "fence")
}

// What a plugin has started and left behind is killed, also in a session of its own, and no block is lost.
func TestChildLeftBehindIsKilled(t *testing.T) {
	o := hiding(t.TempDir(), "1m")
	o.extra["fault"] = "leave_child"
	r := newRig(t, o)
	ks := keys(1, 2)
	r.save("a", ks, 0)
	e := r.load("b", ks, 20)
	require.False(t, e.Lost)
	require.NoError(t, e.Err, "it is run again by the next life")
	text, err := os.ReadFile(filepath.Join(r.dir, "child"))
	require.NoError(t, err)
	pid, err := strconv.Atoi(string(text))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return dead(pid) }, time.Minute, time.Millisecond)
	require.Zero(t, r.Health().BlocksLost)
	require.Equal(t, "ready", r.Health().State)
}

// dead says that a process has ended, whether or not somebody has asked how.
func dead(pid int) bool {
	return syscall.Kill(pid, 0) == syscall.ESRCH || state(pid) == "Z"
}

// At trust level staged nobody but the plugin had the memory: it gets another one, and no block of the cache
// is lost.
func TestHiddenFenceAtStaged(t *testing.T) {
	dir, _ := park(t)
	o := hiding(dir, "300ms")
	o.settings["trust"], o.settings["landing_bytes"] = "staged", landingBytes(12)
	o.settings["sandbox"] = "off" // in it nobody can be given the fence: there is no connect
	o.extra["arena"] = 4096
	r := newRig(t, o)
	ks := keys(1, 3)
	r.save("a", ks, 0)
	old := r.src.regions[0]
	e := r.load("b", ks, 20)
	require.False(t, e.Lost)
	require.NoError(t, e.Err)
	require.True(t, r.same(blocksOf(ks, 20)))
	r.becomes("degraded")
	require.Zero(t, r.Health().BlocksLost)
	require.Zero(t, r.Health().LandingUsed)
	require.NotSame(t, old, r.src.regions[0])
	require.EqualValues(t, 1, r.src.arena.Bytes()[0], "an arena that only this life has written")
	r.works(7, 40)
}

// A plugin that never gives its fence back is not started for ever.
func TestHidingPluginIsNotStartedAgain(t *testing.T) {
	dir, _ := park(t)
	o := hiding(dir, "100ms")
	o.extra["once"] = false
	o.settings["breaker"] = map[string]any{"deaths": 1000}
	r := newRig(t, o)
	ks := keys(1, 2)
	r.save("a", ks, 0)
	for i := range maxAbandoned {
		require.Eventually(t, func() bool { return r.Health().PID != 0 }, time.Minute, time.Millisecond)
		r.start(strconv.Itoa(i), ks, connector.BlockID(20+2*i))
		require.True(t, r.next(Loaded).Lost)
	}
	require.Eventually(t, func() bool { return r.Health().StartFailures > 0 }, time.Minute, time.Millisecond)
	require.Contains(t, r.Health().Error, "did not give their fences back")
	require.Equal(t, 2*maxAbandoned, r.Health().BlocksLost)
}

// A child of a MultiConnector costs no more than that either, and its siblings go on.
func TestHiddenFenceOfChild(t *testing.T) {
	dir, _ := park(t)
	settings := map[string]any{"deadlines": map[string]any{"fence": "300ms"}}
	r := multiRigWith(t, rigOptions{settings: map[string]any{"trust": "in-place"}},
		kid(map[string]any{"dir": dir, "fault": "hide_fence", "at": 1, "once": true}, settings, nil), kid(map[string]any{"dir": t.TempDir()}, nil, nil))
	ks := keys(1, 3)
	r.save("a", ks, 0)
	r.start("b", ks, 20)
	e := r.next(Loaded)
	require.True(t, e.Lost)
	require.Equal(t, []connector.BlockID{20, 21, 22}, e.Blocks)
	require.Eventually(t, func() bool { return r.Health().Children[0].State == "degraded" }, time.Minute, time.Millisecond)
	h := r.Health()
	require.Equal(t, "degraded", h.State)
	require.Equal(t, "ready", h.Children[1].State)
	require.Equal(t, 3, h.BlocksLost)
	r.works(7, 40)
}

// losesHold holds three blocks and begins a load, amid which the plugin dies and leaves somebody behind.
func (r *rig) losesHold() {
	ks := keys(1, 3)
	r.save("a", ks, 0)
	fin := r.end("a", 48, true, blocksOf(ks, 0)...)
	require.True(r.t, fin.Held)
	r.start("b", ks, 20)
	e := r.next(Released)
	require.True(r.t, e.Lost)
	require.Equal(r.t, []connector.BlockID{0, 1, 2}, e.Blocks)
	require.Equal(r.t, fin.Step, e.Step)
}

// Nor do its holds: their blocks are lost, although its sibling keeps a part of each, and they do not count as consumed.
func TestHiddenFenceCostsHoldsOfChild(t *testing.T) {
	dir, _ := park(t)
	settings := map[string]any{"deadlines": map[string]any{"fence": "300ms"}}
	r := multiRigWith(t, rigOptions{settings: map[string]any{"trust": "in-place"}},
		kid(map[string]any{"dir": dir, "fault": "hold_fence", "at": 1, "once": true}, settings, nil),
		kid(map[string]any{"dir": t.TempDir(), "fault": "hold"}, nil, nil))
	r.losesHold()
	if r.count(Loaded) == 0 {
		r.next(Loaded)
	}
	require.Equal(t, map[string]float64{"plugin_died": 1}, r.released())
	require.Equal(t, 6, r.Health().BlocksLost)
	require.Zero(t, r.Health().Held)
	r.works(7, 40)
}
