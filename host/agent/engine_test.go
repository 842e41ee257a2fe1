package agent

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// engineVariable makes this test binary a whole engine in one process: its value is the socket.
const engineVariable = "KVPORT_TEST_ENGINE"

// playEngine attaches a scheduler and two ranks, says so, and waits to be killed.
func playEngine() int {
	if err := attachAll(os.Getenv(engineVariable)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Fprintln(os.Stdout, "attached")
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

func attachAll(socket string) error {
	for _, a := range []*wire.Attach{{Side: kvportv1.Side_SIDE_SCHEDULER, Engine: "e"}, rankAt(0, 2), rankAt(1, 2)} {
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
		if err != nil {
			return err
		}
		var oob []byte
		if a.Region > 0 {
			fd, err := unix.MemfdCreate("engine", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
			if err != nil {
				return err
			}
			if err := unix.Ftruncate(fd, a.Region); err != nil {
				return err
			}
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
				return err
			}
			oob = unix.UnixRights(fd)
		}
		call := attachCall(a)
		call.Id = 1
		frame, err := wire.AgentFrame(call)
		if err != nil {
			return err
		}
		if _, _, err := c.WriteMsgUnix(frame, oob, nil); err != nil {
			return err
		}
		for {
			frame, err := wire.ReadFrame(&intake{conn: c})
			if err != nil {
				return err
			}
			m := &kvportv1.AgentAnswer{}
			if err := proto.Unmarshal(frame, m); err != nil {
				return err
			}
			if m.GetError() != nil {
				return wire.ErrorFromProto(m.GetError())
			}
			if m.GetId() == 1 {
				break
			}
		}
	}
	return nil
}

// spawned is an agent as a process of its own.
type spawned struct {
	*exec.Cmd
	socket string
	log    *strings.Builder
	over   chan error
}

// spawn starts kvport agent.
func spawn(t testing.TB, transfer string) *spawned {
	t.Helper()
	dir, err := os.MkdirTemp("", "a") //nolint:usetesting // of mode 0700, and short
	require.NoError(t, err)
	s := &spawned{socket: filepath.Join(dir, "s"), log: &strings.Builder{}, over: make(chan error, 1)}
	s.Cmd = exec.Command(filepath.Join(bin, "kvport"), "agent", "--kv-transfer-config", transfer, "--socket", s.socket)
	s.Stderr = s.log
	out, err := s.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, s.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "kvport: ready socket="+s.socket+"\n", line)
	go func() { s.over <- s.Wait() }()
	t.Cleanup(func() {
		_ = s.Process.Kill()
		if t.Failed() {
			t.Log(s.log.String())
		}
		require.Eventually(t, func() bool { return len(processes(t, filepath.Join(bin, "kvport-shared"))) == 0 }, time.Minute, 10*time.Millisecond)
		require.NoError(t, os.RemoveAll(dir))
	})
	return s
}

// ended waits for the end of the agent's process.
func (s *spawned) ended(t testing.TB) error {
	t.Helper()
	select {
	case err := <-s.over:
		return err
	case <-time.After(time.Minute):
		require.FailNow(t, "the agent does not end")
		return nil
	}
}

// An engine is killed: agent and plugin are gone, with socket and lock, although a child of the engine
// has inherited its connections.
func TestEngineKilled(t *testing.T) {
	a := spawn(t, config(t.TempDir(), nil))
	engine := exec.Command(os.Args[0])
	engine.Env = append(os.Environ(), engineVariable+"="+a.socket)
	out, err := engine.StdoutPipe()
	require.NoError(t, err)
	in, err := engine.StdinPipe()
	require.NoError(t, err)
	defer in.Close()
	require.NoError(t, engine.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "attached\n", line)
	require.Len(t, processes(t, filepath.Join(bin, "kvport-shared")), 1)
	began := time.Now()
	require.NoError(t, engine.Process.Kill())
	_ = engine.Wait()
	require.NoError(t, a.ended(t), "exit code 0")
	require.Less(t, time.Since(began), defaultLimits().alone, "it does not wait for anybody else")
	require.Empty(t, processes(t, filepath.Join(bin, "kvport-shared")))
	left, err := os.ReadDir(filepath.Dir(a.socket))
	require.NoError(t, err)
	require.Empty(t, left)
}

// An agent is killed in the middle of a load: whoever holds the plugin's pidfd can make sure that
// nothing writes the blocks any more.
func TestAgentKilledMidLoad(t *testing.T) {
	a := spawn(t, config(t.TempDir(), nil))
	w := worker(t, a.socket, rankAt(0, 1))
	life := w.attached().GetLife()
	s := scheduler(t, a.socket)
	hs := hashes("a", 3)
	s.save(w, "r", hs, 0)
	pidfd := w.announced(1)
	halt(t, pidfd)
	s.step(&connector.Step{ID: 3, Admitted: []connector.Transfer{transfer("q", hs, 10)}})
	require.Zero(t, s.call(&kvportv1.AgentCall{Call: &kvportv1.AgentCall_Match{Match: &kvportv1.Query{}}}).GetMatch().GetTokens())
	require.NoError(t, a.Process.Kill())
	require.Error(t, a.ended(t))
	<-w.over
	<-s.over
	_ = unix.PidfdSendSignal(int(pidfd.Fd()), unix.SIGKILL, nil, 0)
	ended(t, pidfd)
	ended(t, s.announced(1))

	// The same memory goes to the next agent, which replaces the socket that was left behind.
	b := &spawned{socket: a.socket, log: a.log, over: make(chan error, 1)}
	b.Cmd = exec.Command(a.Path, a.Args[1:]...)
	out, err := b.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, b.Start())
	_, err = bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	go func() { b.over <- b.Wait() }()
	again := dial(t, b.socket)
	again.post(attachCall(rankAt(0, 1)), w.file)
	require.NotEqual(t, life, again.attached().GetLife())
	s = scheduler(t, b.socket)
	require.Equal(t, 48, s.match(query("q", hs)))
	s.step(&connector.Step{ID: 4, Admitted: []connector.Transfer{transfer("q", hs, 10)}})
	require.Empty(t, s.event(loaded, "q").GetFailed())
	require.True(t, w.same(blocksOf(hs, 10), 0))
	require.NoError(t, b.Process.Signal(unix.SIGTERM))
	require.NoError(t, b.ended(t), "exit code 0")
}

// processes counts running processes whose command line has all the words.
func processes(t testing.TB, words ...string) (pids []string) {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	for _, path := range lines {
		line, err := os.ReadFile(path)
		all := err == nil
		for _, w := range words {
			all = all && strings.Contains(string(line), w)
		}
		if all {
			pids = append(pids, strings.Split(path, "/")[2])
		}
	}
	return pids
}

// ended waits until the process behind a pidfd has ended.
func ended(t testing.TB, pidfd *os.File) {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(pidfd.Fd()), Events: unix.POLLIN}}
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		n, err := unix.Poll(fds, 1000)
		if n == 1 {
			return
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			require.NoError(t, err)
		}
	}
	require.FailNow(t, "the process does not end")
}
