package nixl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	// Without ib: see the package comment on programs that end by C's exit, as the race detector's do.
	for k, v := range map[string]string{"UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib"} {
		if err := os.Setenv(k, v); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	if os.Getenv(peerEnv) != "" {
		os.Exit(peerMain())
	}
	os.Exit(m.Run())
}

// dir is where make deps puts NIXL.
func dir() string { return filepath.Join("..", "..", ".deps", "nixl") }

// open loads NIXL. It skips the test only where make deps has not put it there, and never under make
// native-test.
func open(t testing.TB) *Library {
	t.Helper()
	_, err := os.Stat(filepath.Join(dir(), "lock.sha256"))
	if err != nil && os.Getenv("KVPORT_NATIVE_TEST") == "" {
		t.Skip("NIXL IS NOT TESTED: it is not in .deps/nixl; run make deps")
	}
	l, err := Open(dir())
	require.NoError(t, err)
	return l
}

// end is an agent with UCX and some registered memory.
type end struct {
	*Agent
	backend *Backend
	data    []byte
	memory  *Memory
}

func newEnd(t testing.TB, l *Library, size int, params map[string]string) *end {
	t.Helper()
	a, err := l.NewAgent(fmt.Sprintf("%s-%d", t.Name(), rand.Uint32()), Options{Telemetry: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close()) })
	e := &end{Agent: a, data: mapped(t, size)}
	e.backend, err = a.Backend("UCX", params)
	require.NoError(t, err)
	e.memory, err = a.Register(e.backend, DRAM, Bytes(e.data))
	require.NoError(t, err)
	return e
}

// mapped is memory outside Go's heap. It is unmapped by the process's end only: agents are closed later.
func mapped(t testing.TB, size int) []byte {
	t.Helper()
	b, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_SHARED)
	require.NoError(t, err)
	return b
}

func introduce(t testing.TB, a, b *end) {
	t.Helper()
	for _, pair := range [][2]*end{{a, b}, {b, a}} {
		md, err := pair[0].Metadata()
		require.NoError(t, err)
		name, err := pair[1].AddPeer(md)
		require.NoError(t, err)
		require.Equal(t, pair[0].Name(), name)
	}
}

// parts cuts n regions of size bytes from b, in an order that rng picks, with a gap after each.
func parts(rng *rand.Rand, b []byte, n, size int) []Region {
	out := make([]Region, n)
	for i, j := range rng.Perm(n) {
		out[i] = Bytes(b[j*2*size:][:size])
	}
	return out
}

func fill(rng *rand.Rand, b []byte) {
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
}

// run runs a request to its end.
func run(t testing.TB, a *end, r Request) {
	t.Helper()
	x, err := a.Prepare(r)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, x.Run(ctx))
	require.NoError(t, x.Close())
}

// modes are the ways that UCX takes between two processes of one host.
func modes() map[string]map[string]string {
	return map[string]map[string]string{
		"default": nil,
		"none":    {"ucx_error_handling_mode": "none"},
		"tcp":     {"engine_config": "TLS=tcp"},
	}
}

func TestReadWrite(t *testing.T) {
	l := open(t)
	for mode, params := range modes() {
		t.Run(mode, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 2))
			a, b := newEnd(t, l, 4<<20, params), newEnd(t, l, 4<<20, params)
			introduce(t, a, b)
			require.NoError(t, a.Connect(b.Name()))
			progress(t, b.Agent)
			for _, op := range []Op{Write, Read} {
				fill(rng, a.data)
				fill(rng, b.data)
				before := bytes.Clone(a.data)
				request := Request{
					Op: op, Peer: b.Name(), Backend: a.backend,
					Local: parts(rng, a.data, 100, 7777), Remote: parts(rng, b.data, 100, 7777),
				}
				want := bytes.Clone(map[Op][]byte{Read: a.data, Write: b.data}[op])
				for i, l := range request.Local {
					local, remote := l.Addr-Bytes(a.data).Addr, request.Remote[i].Addr-Bytes(b.data).Addr
					if op == Read {
						copy(want[local:], b.data[remote:][:l.Len])
					} else {
						copy(want[remote:], a.data[local:][:l.Len])
					}
				}
				run(t, a, request)
				if op == Read {
					require.True(t, bytes.Equal(want, a.data), "%v placed other bytes", op)
				} else {
					require.True(t, bytes.Equal(want, b.data), "%v placed other bytes", op)
					require.True(t, bytes.Equal(before, a.data), "%v changed its source", op)
				}
			}
		})
	}
}

// progress has an agent do its part, as one over TCP needs, until the test ends; what comes in is sent to
// the channel.
func progress(t testing.TB, a *Agent) <-chan Notification {
	out, stop := progressUntil(a)
	t.Cleanup(stop)
	return out
}

func progressUntil(a *Agent) (<-chan Notification, func()) {
	out := make(chan Notification, 10_000)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		ticker := time.NewTicker(100 * time.Microsecond)
		defer ticker.Stop()
		for {
			all, err := a.Notifications()
			if err != nil {
				return
			}
			for _, n := range all {
				out <- n
			}
			select {
			case <-stop:
				return
			case <-ticker.C:
			}
		}
	}()
	return out, func() { close(stop); <-stopped }
}

func receive(t testing.TB, from <-chan Notification) Notification {
	t.Helper()
	select {
	case n := <-from:
		return n
	case <-time.After(time.Minute):
		require.FailNow(t, "no notification came")
		return Notification{}
	}
}

func TestNotifications(t *testing.T) {
	l := open(t)
	for mode, params := range modes() {
		t.Run(mode, func(t *testing.T) {
			a, b := newEnd(t, l, 1<<20, params), newEnd(t, l, 1<<20, params)
			introduce(t, a, b)
			atA, atB := progress(t, a.Agent), progress(t, b.Agent)
			const n = 300
			for i := range n {
				require.NoError(t, a.Notify(b.Name(), fmt.Appendf(nil, "to b %d\x00\xff", i)))
				require.NoError(t, b.Notify(a.Name(), fmt.Appendf(nil, "to a %d", i)))
			}
			for i := range n {
				require.Equal(t, Notification{a.Name(), fmt.Appendf(nil, "to b %d\x00\xff", i)}, receive(t, atB))
				require.Equal(t, Notification{b.Name(), fmt.Appendf(nil, "to a %d", i)}, receive(t, atA))
			}
			// One that comes with a transfer finds its bytes there.
			for i := range 20 {
				a.data[0], b.data[1] = byte(i+1), 0
				run(t, a, Request{
					Op: Write, Peer: b.Name(), Local: []Region{Bytes(a.data[:1])}, Remote: []Region{Bytes(b.data[1:2])},
					Notify: fmt.Appendf(nil, "written %d", i),
				})
				require.Equal(t, fmt.Sprintf("written %d", i), string(receive(t, atB).Message))
				require.Equal(t, byte(i+1), b.data[1])
			}
		})
	}
}

func TestRepost(t *testing.T) {
	l := open(t)
	a, b := newEnd(t, l, 1<<20, nil), newEnd(t, l, 1<<20, nil)
	introduce(t, a, b)
	progress(t, b.Agent)
	x, err := a.Prepare(Request{Op: Read, Peer: b.Name(), Local: []Region{Bytes(a.data)}, Remote: []Region{Bytes(b.data)}})
	require.NoError(t, err)
	done, err := x.Poll()
	require.NoError(t, err)
	require.True(t, done, "nothing is in flight")
	for i := range 50 {
		b.data[i] = byte(i + 1)
		require.NoError(t, x.Run(t.Context()))
		require.Equal(t, byte(i+1), a.data[i])
	}
	figures, err := x.Telemetry()
	require.NoError(t, err)
	require.Equal(t, uint64(1<<20), figures.Bytes)
	require.Equal(t, uint64(1), figures.Descriptors)
	require.Positive(t, figures.Duration)
	require.NoError(t, x.Close())
	require.NoError(t, x.Close(), "again")
	_, err = x.Post()
	require.ErrorIs(t, err, ErrClosed)
}

func TestFiles(t *testing.T) {
	l := open(t)
	for _, params := range []map[string]string{nil, {"use_uring": "true"}, {"use_posix_aio": "true"}} {
		t.Run(fmt.Sprint(params), func(t *testing.T) {
			a, err := l.NewAgent("files", Options{})
			require.NoError(t, err)
			defer func() { require.NoError(t, a.Close()) }()
			backend, err := a.Backend("POSIX", params)
			if params["use_uring"] != "" && err != nil {
				t.Skipf("this kernel or container has no io_uring: %v", err)
			}
			require.NoError(t, err)
			data, size := mapped(t, 1<<20), uint64(1<<20)
			rng := rand.New(rand.NewPCG(3, 4))
			fill(rng, data)
			want := bytes.Clone(data)
			f, err := os.Create(filepath.Join(t.TempDir(), "blocks"))
			require.NoError(t, err)
			defer f.Close()
			file := Region{Len: size, Device: uint64(f.Fd())}
			_, err = a.Register(backend, DRAM, Bytes(data))
			require.NoError(t, err)
			_, err = a.Register(backend, File, file)
			require.NoError(t, err)
			for _, op := range []Op{Write, Read} {
				x, err := a.Prepare(Request{Op: op, Peer: a.Name(), RemoteKind: File, Local: []Region{Bytes(data)}, Remote: []Region{file}})
				require.NoError(t, err)
				require.NoError(t, x.Run(t.Context()))
				require.NoError(t, x.Close())
				if op == Write {
					onDisk, err := os.ReadFile(f.Name())
					require.NoError(t, err)
					require.True(t, bytes.Equal(want, onDisk))
					clear(data)
				}
			}
			require.True(t, bytes.Equal(want, data))
		})
	}
}

func TestRefusals(t *testing.T) {
	l := open(t)
	a, b := newEnd(t, l, 1<<16, nil), newEnd(t, l, 1<<16, nil)
	introduce(t, a, b)
	elsewhere := mapped(t, 1<<16)
	mine, theirs := []Region{Bytes(a.data)}, []Region{Bytes(b.data)}
	past := []Region{{Addr: theirs[0].Addr + 1, Len: theirs[0].Len}}
	for name, r := range map[string]struct {
		request Request
		want    error
	}{
		"unknown peer":         {Request{Peer: "nobody", Local: mine, Remote: theirs}, ErrNotFound},
		"local not registered": {Request{Peer: b.Name(), Local: []Region{Bytes(elsewhere)}, Remote: theirs}, ErrNotFound},
		"past the peer's end":  {Request{Peer: b.Name(), Local: mine, Remote: past}, ErrBackend},
		"lengths differ":       {Request{Peer: b.Name(), Local: mine, Remote: []Region{Bytes(b.data[1:])}}, ErrInvalid},
		"counts differ":        {Request{Peer: b.Name(), Local: mine}, ErrInvalid},
		"nothing":              {Request{Peer: b.Name()}, ErrInvalid},
		"no such operation":    {Request{Op: 7, Peer: b.Name(), Local: mine, Remote: theirs}, ErrInvalid},
		"no such kind":         {Request{LocalKind: Object, Peer: b.Name(), Local: mine, Remote: theirs}, ErrNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := a.Prepare(r.request)
			require.ErrorIs(t, err, r.want)
			require.ErrorContains(t, err, "nixl: prepare ")
		})
	}
	_, err := a.AddPeer([]byte("nonsense"))
	require.Error(t, err)
	_, err = a.AddPeer(nil)
	require.ErrorIs(t, err, ErrInvalid)
	require.Error(t, a.Notify("nobody", []byte("x")))
	require.ErrorIs(t, a.Notify(b.Name(), nil), ErrInvalid)
	require.Error(t, a.Connect("nobody"))
	require.Error(t, a.RemovePeer("nobody"))
	_, err = a.Register(a.backend, DRAM)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = a.Register(a.backend, DRAM, Region{})
	require.ErrorIs(t, err, ErrInvalid)
	_, err = a.Backend("CARRIER_PIGEON", nil)
	require.ErrorContains(t, err, "UCX")
	_, err = l.NewAgent("", Options{})
	require.ErrorIs(t, err, ErrInvalid)
}

func TestClose(t *testing.T) {
	l := open(t)
	a, b := newEnd(t, l, 1<<20, map[string]string{"engine_config": "TLS=tcp"}), newEnd(t, l, 1<<20, map[string]string{"engine_config": "TLS=tcp"})
	introduce(t, a, b)
	x, err := a.Prepare(Request{Op: Read, Peer: b.Name(), Local: []Region{Bytes(a.data)}, Remote: []Region{Bytes(b.data)}})
	require.NoError(t, err)
	done, err := x.Post()
	require.NoError(t, err)
	require.False(t, done, "the peer has not made progress")
	_, err = x.Post()
	require.ErrorIs(t, err, ErrInFlight)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, x.Wait(ctx), context.DeadlineExceeded)
	require.NoError(t, a.Close())
	_, err = x.Poll()
	require.ErrorIs(t, err, ErrClosed)
	_, err = a.Notifications()
	require.ErrorIs(t, err, ErrClosed)
	_, err = a.Metadata()
	require.ErrorIs(t, err, ErrClosed)
	_, err = a.Plugins()
	require.ErrorIs(t, err, ErrClosed)
	require.NoError(t, x.Close())
	require.NoError(t, a.memory.Close())
	require.NoError(t, a.Close())
}

// Several goroutines, each with transfers of its own, while the garbage collector runs and memory comes
// and goes.
func TestConcurrent(t *testing.T) {
	l := open(t)
	a, b := newEnd(t, l, 8<<20, nil), newEnd(t, l, 8<<20, nil)
	introduce(t, a, b)
	atB := progress(t, b.Agent)
	const workers, rounds = 4, 150
	errs := make(chan error, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() { errs <- hammer(t.Context(), a, b, w, rounds) })
	}
	wg.Wait()
	for range workers {
		require.NoError(t, <-errs)
	}
	seen := map[string]int{}
	for range workers * rounds {
		seen[string(receive(t, atB).Message)]++
	}
	require.Len(t, seen, workers*rounds, "every notification once")
}

func hammer(ctx context.Context, a, b *end, w, rounds int) error {
	rng := rand.New(rand.NewPCG(uint64(w), 5))
	mine, theirs := a.data[w<<21:][:1<<20], b.data[w<<21:][:1<<20]
	for i := range rounds {
		fill(rng, mine[:4096])
		want := bytes.Clone(mine[:4096])
		write := Request{Op: Write, Peer: b.Name(), Local: []Region{Bytes(mine)}, Remote: []Region{Bytes(theirs)}, Notify: fmt.Appendf(nil, "%d/%d", w, i)}
		read := Request{Op: Read, Peer: b.Name(), Local: []Region{Bytes(mine)}, Remote: []Region{Bytes(theirs)}}
		for _, r := range []Request{write, read} {
			x, err := a.Prepare(r)
			if err != nil {
				return err
			}
			if err := errors.Join(x.Run(ctx), x.Close()); err != nil {
				return err
			}
			if r.Op == Write {
				clear(mine[:4096])
			}
		}
		if !bytes.Equal(want, mine[:4096]) {
			return fmt.Errorf("worker %d, round %d: what was written was not read", w, i)
		}
		if i%50 == 0 {
			runtime.GC()
		}
	}
	return nil
}

func TestPlugins(t *testing.T) {
	a := newEnd(t, open(t), 4096, nil)
	names, err := a.Plugins()
	require.NoError(t, err)
	require.Contains(t, names, "UCX")
	require.Contains(t, names, "POSIX")
	require.IsNonDecreasing(t, names)
	require.Equal(t, "UCX", a.backend.Name())
	require.Equal(t, DRAM, a.memory.Kind())
	require.Equal(t, []Region{Bytes(a.data)}, a.memory.Regions())
}

func TestOpenFails(t *testing.T) {
	empty, broken, other := t.TempDir(), t.TempDir(), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(broken, libraryName), []byte("not a library"), 0o600))
	var failed *LoadError
	_, err := Open(empty)
	require.ErrorAs(t, err, &failed)
	require.ErrorIs(t, err, ErrUnavailable)
	require.Equal(t, fmt.Sprintf("nixl: no libnixl_capi.so in %s: %s", empty, mendMissing), err.Error())
	t.Setenv(EnvDir, empty)
	_, err = Open("")
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, empty)
	_, err = Open(broken)
	require.ErrorAs(t, err, &failed)
	require.Equal(t, filepath.Join(broken, libraryName), failed.Path)
	require.Empty(t, failed.Symbol)
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("no gcc to make a library without functions")
	}
	out, err := exec.CommandContext(t.Context(), gcc, "-shared", "-o", filepath.Join(other, libraryName), "-x", "c", os.DevNull).CombinedOutput()
	require.NoError(t, err, string(out))
	_, err = Open(other)
	require.ErrorAs(t, err, &failed)
	require.Equal(t, "nixl_capi_create_configured_agent", failed.Symbol)
	require.ErrorContains(t, err, "has no function nixl_capi_create_configured_agent: it is not NIXL 1.5.1")
}

func TestMends(t *testing.T) {
	for said, want := range map[string]string{
		"libssl.so.3: cannot open shared object file":                   "libssl3",
		"libstdc++.so.6: cannot open shared object file":                "libstdc++6",
		"/lib/libc.so.6: version `GLIBC_2.28' not found":                "glibc 2.28",
		"libnixl_capi.so: cannot open shared object file: No such file": "make deps",
	} {
		require.ErrorContains(t, loadError("x", "", said), want)
	}
	require.ErrorContains(t, statusError(-99), "-99")
}

func TestSlice(t *testing.T) {
	r := Region{Addr: 1000, Len: 10, Device: 3}
	got, err := r.Slice(4, 6)
	require.NoError(t, err)
	require.Equal(t, Region{1004, 6, 3}, got)
	for _, bad := range [][2]uint64{{11, 0}, {5, 6}, {1, ^uint64(0)}, {^uint64(0), 1}} {
		_, err := r.Slice(bad[0], bad[1])
		require.ErrorIs(t, err, ErrInvalid, bad)
	}
	require.Equal(t, "VRAM FILE Kind(9) read write Op(5)", fmt.Sprint(VRAM, File, Kind(9), Read, Write, Op(5)))
}
