package nixl

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// peerEnv makes the test binary a peer: peerMain, with UCX's error handling mode.
const peerEnv = "KVPORT_NIXL_PEER"

// peerMain is a peer in a process of its own. It writes a line with its metadata and its memory, reads one
// with metadata, answers every notification "x" with "got x" and ends with its stdin.
func peerMain() int {
	err := func() error {
		l, err := Open(dir())
		if err != nil {
			return err
		}
		a, err := l.NewAgent("peer", Options{})
		if err != nil {
			return err
		}
		b, err := a.Backend("UCX", map[string]string{"ucx_error_handling_mode": os.Getenv(peerEnv)})
		if err != nil {
			return err
		}
		data, err := syscall.Mmap(-1, 0, 64<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_SHARED)
		if err != nil {
			return err
		}
		for i := range data {
			data[i] = byte(i % 251)
		}
		if _, err := a.Register(b, DRAM, Bytes(data)); err != nil {
			return err
		}
		md, err := a.Metadata()
		if err != nil {
			return err
		}
		fmt.Printf("PEER %x %d %d\n", md, Bytes(data).Addr, len(data)) //nolint:forbidigo // it is a command here
		return answer(a)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func answer(a *Agent) error {
	in := bufio.NewReader(os.Stdin)
	line, err := in.ReadString('\n')
	if err != nil {
		return err
	}
	md, err := hex.DecodeString(strings.TrimSpace(line))
	if err != nil {
		return err
	}
	to, err := a.AddPeer(md)
	if err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() { _, _ = io.Copy(io.Discard, in); close(ended) }()
	ticker := time.NewTicker(100 * time.Microsecond)
	for {
		all, err := a.Notifications()
		if err != nil {
			return err
		}
		for _, n := range all {
			if err := a.Notify(to, append([]byte("got "), n.Message...)); err != nil {
				return err
			}
		}
		select {
		case <-ended:
			return a.Close()
		case <-ticker.C:
		}
	}
}

// process is a peer in a process of its own.
type process struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	name   string
	memory Region
}

// meet starts a peer's process, which must speak as peerMain does, and introduces it to e.
func meet(t *testing.T, e *end, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{cmd: cmd}
	var err error
	p.stdin, err = cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	var md []byte
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() && md == nil {
		if strings.HasPrefix(lines.Text(), "PEER ") {
			_, err := fmt.Sscanf(lines.Text(), "PEER %x %d %d", &md, &p.memory.Addr, &p.memory.Len)
			require.NoError(t, err)
			break
		}
	}
	require.NotEmpty(t, md, "the peer says nothing")
	p.name, err = e.AddPeer(md)
	require.NoError(t, err)
	own, err := e.Metadata()
	require.NoError(t, err)
	_, err = fmt.Fprintf(p.stdin, "%x\n", own)
	require.NoError(t, err)
	return p
}

// exchange reads from, writes to and exchanges notifications with a peer's process.
func exchange(t *testing.T, e *end, p *process) {
	t.Helper()
	came, stop := progressUntil(e.Agent)
	defer stop()
	n := p.memory.Len
	local := Bytes(e.data[:n])
	run(t, e, Request{Op: Read, Peer: p.name, Local: []Region{local}, Remote: []Region{p.memory}})
	for i, b := range e.data[:n] {
		if b != byte(i%251) {
			require.FailNow(t, "the read brought a wrong byte", "at %d", i)
		}
	}
	for i := range e.data[:n] {
		e.data[i] = byte(i % 199)
	}
	run(t, e, Request{Op: Write, Peer: p.name, Local: []Region{local}, Remote: []Region{p.memory}, Notify: []byte("written")})
	require.Equal(t, "got written", string(receive(t, came).Message))
	clear(e.data)
	run(t, e, Request{Op: Read, Peer: p.name, Local: []Region{local}, Remote: []Region{p.memory}})
	for i, b := range e.data[:n] {
		if b != byte(i%199) {
			require.FailNow(t, "the write left a wrong byte", "at %d", i)
		}
	}
	for i := range 50 {
		require.NoError(t, e.Notify(p.name, fmt.Append(nil, i)))
		got := receive(t, came)
		require.Equal(t, Notification{p.name, fmt.Appendf(nil, "got %d", i)}, got)
	}
}

func TestOtherProcess(t *testing.T) {
	l := open(t)
	for _, mode := range []string{"peer", "none"} {
		t.Run(mode, func(t *testing.T) {
			e := newEnd(t, l, 64<<20, map[string]string{"ucx_error_handling_mode": mode})
			cmd := exec.CommandContext(t.Context(), os.Args[0])
			cmd.Env = append(os.Environ(), peerEnv+"="+mode)
			p := meet(t, e, cmd)
			exchange(t, e, p)
			require.NoError(t, p.stdin.Close())
			require.NoError(t, cmd.Wait())
		})
	}
}

// A Python program with the same wheel is a peer like any other.
func TestPython(t *testing.T) {
	l := open(t)
	e := newEnd(t, l, 64<<20, nil)
	cmd := exec.CommandContext(t.Context(), filepath.Join("..", "..", ".deps", "venv", "bin", "python"), filepath.Join("testdata", "peer.py"))
	cmd.Env = append(os.Environ(), "PYTHONPATH="+dir())
	p := meet(t, e, cmd)
	exchange(t, e, p)
	require.NoError(t, p.stdin.Close())
	require.NoError(t, cmd.Wait())
}

// A peer that is killed is an error of the transfers with it, and of nothing else.
func TestPeerKilled(t *testing.T) {
	l := open(t)
	for _, when := range []string{"before a transfer", "during transfers"} {
		t.Run(when, func(t *testing.T) {
			e := newEnd(t, l, 64<<20, nil)
			cmd := exec.CommandContext(t.Context(), os.Args[0])
			cmd.Env = append(os.Environ(), peerEnv+"=peer")
			p := meet(t, e, cmd)
			exchange(t, e, p)
			x, err := e.Prepare(Request{Op: Read, Peer: p.name, Local: []Region{Bytes(e.data)}, Remote: []Region{p.memory}})
			require.NoError(t, err)
			require.NoError(t, x.Run(t.Context()))
			killed := make(chan error, 1)
			if when == "before a transfer" {
				killed <- cmd.Process.Kill()
				_ = cmd.Wait()
			} else {
				time.AfterFunc(20*time.Millisecond, func() { killed <- cmd.Process.Kill() })
			}
			for began := time.Now(); err == nil; err = x.Run(t.Context()) {
				require.Less(t, time.Since(began), time.Minute, "reads go on")
			}
			require.NoError(t, <-killed)
			require.ErrorIs(t, err, ErrBackend)
			require.NoError(t, x.Close())
			// The agent is as good as before.
			again := exec.CommandContext(t.Context(), os.Args[0])
			again.Env = cmd.Env
			require.NoError(t, e.RemovePeer(p.name))
			exchange(t, e, meet(t, e, again))
		})
	}
}
