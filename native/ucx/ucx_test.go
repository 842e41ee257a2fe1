package ucx

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// peerEnv makes the test binary a peer: peerMain.
const peerEnv = "KVPORT_UCX_PEER"

func TestMain(m *testing.M) {
	// Without ib: native/nixl says why.
	for k, v := range map[string]string{"UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib"} {
		if err := os.Setenv(k, v); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	if os.Getenv(peerEnv) != "" {
		if err := peerMain(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func dir() string { return filepath.Join("..", "..", ".deps", "nixl") }

// open loads UCX. It skips the test only where make deps has not put it there, and never under make
// native-test.
func open(t testing.TB) *Library {
	t.Helper()
	_, err := os.Stat(filepath.Join(dir(), "lock.sha256"))
	if err != nil && os.Getenv("KVPORT_NATIVE_TEST") == "" {
		t.Skip("UCX IS NOT TESTED: it is not in .deps/nixl; run make deps")
	}
	l, err := Open(dir())
	require.NoError(t, err)
	return l
}

// worker is one that makes progress until the test ends.
func worker(t testing.TB, l *Library, o Options) *Worker {
	t.Helper()
	w, err := l.NewWorker(o)
	require.NoError(t, err)
	stop, stopped := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() {
		close(stop)
		<-stopped
		require.NoError(t, w.Close())
		require.NoError(t, w.Close(), "again")
	})
	go func() {
		defer close(stopped)
		ticker := time.NewTicker(100 * time.Microsecond)
		defer ticker.Stop()
		for {
			if _, err := w.Progress(); err != nil {
				return
			}
			select {
			case <-stop:
				return
			case <-ticker.C:
			}
		}
	}()
	return w
}

func connect(t testing.TB, from, to *Worker) *Endpoint {
	t.Helper()
	address, err := to.Address()
	require.NoError(t, err)
	e, err := from.Connect(address)
	require.NoError(t, err)
	return e
}

func wait(t testing.TB, r *Request, err error) {
	t.Helper()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, r.Wait(ctx))
}

func transports() map[string]Options {
	return map[string]Options{
		"all": {}, "tcp": {Transports: "tcp", Devices: "lo"}, "posix": {Transports: "posix,self"}, "peer errors": {PeerErrors: true},
	}
}

func TestMessages(t *testing.T) {
	l := open(t)
	for name, o := range transports() {
		t.Run(name, func(t *testing.T) {
			a, b := worker(t, l, o), worker(t, l, o)
			there, back := connect(t, a, b), connect(t, b, a)
			rng := rand.New(rand.NewPCG(1, 2))
			for i, size := range []int{0, 1, 100, 8192, 1 << 20, 5<<20 + 1} {
				for _, way := range []struct {
					from *Endpoint
					to   *Worker
				}{{there, b}, {back, a}} {
					message, buffer := make([]byte, size), make([]byte, size+1)
					for j := range message {
						message[j] = byte(rng.Uint32())
					}
					tag := uint64(i)<<8 | 7
					receive, err := way.to.Receive(buffer, tag, ^uint64(0))
					require.NoError(t, err)
					send, err := way.from.Send(message, tag)
					wait(t, send, err)
					wait(t, receive, nil)
					n, got, err := receive.Received()
					require.NoError(t, err)
					require.Equal(t, size, n)
					require.Equal(t, tag, got)
					require.True(t, bytes.Equal(message, buffer[:n]))
				}
			}
		})
	}
}

// Messages of one tag arrive in the order in which they were sent.
func TestOrder(t *testing.T) {
	l := open(t)
	a, b := worker(t, l, Options{}), worker(t, l, Options{})
	there := connect(t, a, b)
	const n = 500
	var wg sync.WaitGroup
	defer wg.Wait()
	failed := make(chan error, 1)
	wg.Go(func() {
		for i := range n {
			r, err := there.Send(bytes.Repeat([]byte{byte(i)}, 1+i*37), 3)
			if err == nil {
				err = r.Wait(t.Context())
			}
			if err != nil {
				failed <- err
				return
			}
		}
		close(failed)
	})
	buffer := make([]byte, 1<<16)
	for i := range n {
		r, err := b.Receive(buffer, 3, ^uint64(0))
		wait(t, r, err)
		got, _, err := r.Received()
		require.NoError(t, err)
		require.Equal(t, bytes.Repeat([]byte{byte(i)}, 1+i*37), buffer[:got])
	}
	require.NoError(t, <-failed)
}

func mapped(t testing.TB, size int) []byte {
	t.Helper()
	b, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_SHARED)
	require.NoError(t, err)
	return b
}

func TestPutGet(t *testing.T) {
	l := open(t)
	for name, o := range transports() {
		t.Run(name, func(t *testing.T) {
			a, b := worker(t, l, o), worker(t, l, o)
			there := connect(t, a, b)
			mine, theirs := mapped(t, 4<<20), mapped(t, 4<<20)
			local, err := a.Map(mine)
			require.NoError(t, err)
			remote, err := b.Map(theirs)
			require.NoError(t, err)
			packed, err := remote.Key()
			require.NoError(t, err)
			key, err := there.Unpack(packed)
			require.NoError(t, err)
			rng := rand.New(rand.NewPCG(3, 4))
			for _, size := range []int{1, 4096, 1<<20 + 3, 4 << 20} {
				for i := range mine[:size] {
					mine[i] = byte(rng.Uint32())
				}
				want := bytes.Clone(mine[:size])
				r, err := there.Put(mine[:size], local, remote.Addr(), key)
				wait(t, r, err)
				r, err = there.Flush()
				wait(t, r, err)
				require.True(t, bytes.Equal(want, theirs[:size]))
				clear(mine)
				r, err = there.Get(mine[:size], local, remote.Addr(), key)
				wait(t, r, err)
				require.True(t, bytes.Equal(want, mine[:size]))
				unregistered := make([]byte, size)
				r, err = there.Get(unregistered, nil, remote.Addr(), key)
				wait(t, r, err)
				require.True(t, bytes.Equal(want, unregistered))
			}
			require.NoError(t, there.Close())
			_, err = there.Get(mine, local, remote.Addr(), key)
			require.ErrorIs(t, err, ErrClosed)
			require.NoError(t, local.Close())
			require.NoError(t, local.Close(), "again")
			_, err = local.Key()
			require.ErrorIs(t, err, ErrClosed)
		})
	}
}

// A worker with nothing to do sleeps until something comes.
func TestArm(t *testing.T) {
	l := open(t)
	a := worker(t, l, Options{Transports: "tcp", Devices: "lo"})
	b, err := l.NewWorker(Options{Transports: "tcp", Devices: "lo"})
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	fd, err := b.FD()
	require.NoError(t, err)
	there := connect(t, a, b)
	buffer := make([]byte, 100)
	receive, err := b.Receive(buffer, 1, 1)
	require.NoError(t, err)
	_, err = there.Send([]byte("wake up"), 1)
	require.NoError(t, err)
	for deadline := time.Now().Add(time.Minute); ; {
		done, err := receive.Poll()
		require.NoError(t, err)
		if done {
			break
		}
		require.Less(t, time.Now(), deadline)
		armed, err := b.Arm()
		require.NoError(t, err)
		if armed {
			_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 1000)
			if err != unix.EINTR {
				require.NoError(t, err)
			}
		}
	}
	n, _, err := receive.Received()
	require.NoError(t, err)
	require.Equal(t, "wake up", string(buffer[:n]))
}

func TestFailures(t *testing.T) {
	l := open(t)
	require.Regexp(t, `^1\.\d+`, l.Version())
	a, b := worker(t, l, Options{}), worker(t, l, Options{})
	there := connect(t, a, b)
	small, err := b.Receive(make([]byte, 4), 1, 1)
	require.NoError(t, err)
	_, err = there.Send(make([]byte, 8), 1)
	require.NoError(t, err)
	require.ErrorIs(t, small.Wait(t.Context()), ErrTruncated)
	_, _, err = small.Received()
	require.ErrorIs(t, err, ErrTruncated)
	never, err := b.Receive(make([]byte, 4), 2, ^uint64(0))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, never.Wait(ctx), context.DeadlineExceeded)
	never.Cancel()
	require.ErrorIs(t, never.Wait(t.Context()), ErrCanceled)
	_, err = l.NewWorker(Options{Transports: "carrier_pigeon"})
	require.Error(t, err)
	_, err = a.Connect(nil)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = a.Map(nil)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = there.Unpack(nil)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = there.Put(nil, nil, 0, nil)
	require.ErrorIs(t, err, ErrInvalid)

	closed, err := l.NewWorker(Options{})
	require.NoError(t, err)
	pending, err := closed.Receive(make([]byte, 4), 1, 1)
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	require.Error(t, pending.Wait(t.Context()))
	_, err = closed.Address()
	require.ErrorIs(t, err, ErrClosed)
	require.Equal(t, "destination is unreachable UCX status -77", fmt.Sprint(ErrUnreachable, StatusError(-77)))
}

// peerMain offers memory and ends with its stdin.
func peerMain() error {
	l, err := Open(dir())
	if err != nil {
		return err
	}
	w, err := l.NewWorker(Options{PeerErrors: true})
	if err != nil {
		return err
	}
	data, err := syscall.Mmap(-1, 0, 16<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_SHARED)
	if err != nil {
		return err
	}
	for i := range data {
		data[i] = byte(i % 251)
	}
	m, err := w.Map(data)
	if err != nil {
		return err
	}
	address, err := w.Address()
	if err != nil {
		return err
	}
	key, err := m.Key()
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(os.Stdout, "PEER %x %x %d\n", address, key, m.Addr()); err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); close(ended) }()
	for ticker := time.NewTicker(100 * time.Microsecond); ; {
		if _, err := w.Progress(); err != nil {
			return err
		}
		select {
		case <-ended:
			return nil
		case <-ticker.C:
		}
	}
}

// A peer that is killed is an error of what is asked of it, and of nothing else.
func TestPeerKilled(t *testing.T) {
	l := open(t)
	w := worker(t, l, Options{PeerErrors: true})
	for range 2 {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), peerEnv+"=1")
		_, err := cmd.StdinPipe()
		require.NoError(t, err)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		cmd.Stderr = os.Stderr
		require.NoError(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		line, err := bufio.NewReader(out).ReadString('\n')
		require.NoError(t, err)
		var address, packed []byte
		var at uint64
		_, err = fmt.Sscanf(line, "PEER %x %x %d\n", &address, &packed, &at)
		require.NoError(t, err)
		e, err := w.Connect(address)
		require.NoError(t, err)
		key, err := e.Unpack(packed)
		require.NoError(t, err)
		data := mapped(t, 16<<20)
		r, err := e.Get(data, nil, at, key)
		wait(t, r, err)
		for i, b := range data {
			if b != byte(i%251) {
				require.FailNow(t, "the read brought a wrong byte", "at %d", i)
			}
		}
		require.NoError(t, cmd.Process.Kill())
		for began := time.Now(); err == nil; {
			require.Less(t, time.Since(began), time.Minute, "reads go on")
			if r, err = e.Get(data, nil, at, key); err == nil {
				err = r.Wait(t.Context())
			}
		}
		var status StatusError
		require.ErrorAs(t, err, &status)
		t.Logf("after the kill: %v", err)
		require.NoError(t, e.Close())
	}
}

func TestOpenFails(t *testing.T) {
	empty, broken, other := t.TempDir(), t.TempDir(), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(broken, "libucp.so"), []byte("not a library"), 0o600))
	_, err := Open(empty)
	require.ErrorIs(t, err, ErrUnavailable)
	require.Equal(t, fmt.Sprintf("ucx: no libucp in %s: %s", empty, mendMissing), err.Error())
	t.Setenv(EnvDir, empty)
	_, err = Open("")
	require.ErrorIs(t, err, ErrUnavailable)
	var failed *LoadError
	_, err = Open(broken)
	require.ErrorAs(t, err, &failed)
	require.Equal(t, filepath.Join(broken, "libucp.so"), failed.Path)
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("no gcc to make a library without functions")
	}
	out, err := exec.CommandContext(t.Context(), gcc, "-shared", "-o", filepath.Join(other, "libucp.so"), "-x", "c", os.DevNull).CombinedOutput()
	require.NoError(t, err, string(out))
	_, err = Open(other)
	require.ErrorAs(t, err, &failed)
	require.ErrorContains(t, err, "has no function ucp_get_version_string: it is older than UCX 1.22")
}
