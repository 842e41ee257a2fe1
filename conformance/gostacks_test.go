package conformance

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/host"
)

// quitTrace is what a plugin in Go writes for SIGQUIT, with few of its goroutines.
const quitTrace = `SIGQUIT: quit
PC=0x4741c1 m=0 sigcode=0

goroutine 0 gp=0x5a7420 m=0 mp=0x5a8280 [idle]:
runtime.futex(0x5a83c0, 0x80, 0x0, 0x0, 0x0, 0x0)
	/go/src/runtime/sys_linux_amd64.s:557 +0x21
main.neverShown()
	main.go:1 +0x21

goroutine 1 gp=0xc0000061c0 m=nil [select, 1 minutes]:
github.com/hashicorp/go-plugin.Serve(0xc000012345)
	github.com/hashicorp/go-plugin@v1.6.0/server.go:472 +0x99
github.com/kvport/kvport/sdk.Serve({{0x1, 0x2}, {0x0, 0x0, 0x0}})
	github.com/kvport/kvport/sdk/serve.go:44 +0x1f
main.main()
	example.com/mine/main.go:90 +0x1f

goroutine 7 gp=0xc000008888 m=nil [chan receive, 1 minutes]:
example.com/mine/queue.(*Queue).run(0xc0001)
	example.com/mine/queue/queue.go:31 +0x1f
created by example.com/mine/queue.New in goroutine 34
	example.com/mine/queue/queue.go:20 +0x1f

goroutine 34 gp=0xc000009999 m=nil [sync.Mutex.Lock, 1 minutes]:
sync.(*Mutex).Lock(...)
	sync/mutex.go:90
go.etcd.io/bbolt.(*DB).beginTx(0xc000, {0x0})
	go.etcd.io/bbolt@v1.4.3/db.go:600 +0x1
main.(*store).Get(0xc000, {0x7ff, 0xc0}, {0x1, 0x2})
	example.com/mine/main.go:42 +0x1
github.com/kvport/kvport/sdk.(*storeWorker).Load.func1()
	github.com/kvport/kvport/sdk/store.go:300 +0x1
github.com/kvport/kvport/internal/wire.Guard(0xc000, {0x0, 0x3}, 0xc000)
	github.com/kvport/kvport/internal/wire/guard.go:30 +0x1
created by github.com/kvport/kvport/sdk.(*session).run in goroutine 12
	github.com/kvport/kvport/sdk/session.go:99 +0x1

goroutine 35 gp=0xc000009999 m=nil [sync.Mutex.Lock, 1 minutes]:
main.(*store).Get(0xc000, {0x7ff, 0xc0}, {0x1, 0x2})
	example.com/mine/main.go:42 +0x1
github.com/kvport/kvport/sdk.(*storeWorker).Load.func1()
	github.com/kvport/kvport/sdk/store.go:300 +0x1

goroutine 36 [IO wait]:
internal/poll.runtime_pollWait(0x7f, 0x72)
	runtime/netpoll.go:351 +0x85
created by google.golang.org/grpc/internal/transport.NewServerTransport in goroutine 9
	google.golang.org/grpc@v1.70.0/internal/transport/http2_server.go:330 +0x1

rax    0xca
rbx    0x0
`

// Of a trace people see the goroutines in the connector's own code, first those in which the sdk has called it.
func TestStacksOfAPlugin(t *testing.T) {
	trace := strings.Split(quitTrace, "\n")
	got := whereabouts("/no/such/program", 7, append([]string{"a line before"}, trace...))
	require.Equal(t, []string{
		"the plugin's process 7 had to be killed, with 2 of its 5 goroutines in the connector's own code; --log FILE has all",
		"  [sync.Mutex.Lock, 1 minutes] main.(*store).Get (main.go:42), 2 times",
	}, got, "a program without a module has its package main")
	count, own := ownStacks(trace, "example.com/mine")
	require.Equal(t, 5, count)
	require.Equal(t, []string{
		"[sync.Mutex.Lock, 1 minutes] main.(*store).Get (main.go:42)",
		"[sync.Mutex.Lock, 1 minutes] main.(*store).Get (main.go:42)",
		"[chan receive, 1 minutes] queue.(*Queue).run (queue.go:31) < started by queue.New (queue.go:20)",
	}, own)
	for name, want := range map[string]bool{
		"example.com/mine.Do": true, "example.com/mine/queue.New": true, "example.com/mineral.Do": false, "main.main": true, "mainly.Do": false, "runtime.gopark": false,
	} {
		require.Equal(t, want, isOwn(name, "example.com/mine"), name)
	}
	for name, want := range map[string]bool{"/connectors/disk.Do": true, "/sdk.Serve": false, "/internal/wire.Guard": false, "/proto/kvport/v1.Handler": false, "/connector.Worker.Load-fm": false, "/sdk/internal/peer.New": false, "/sdk/tier.Open": true} {
		require.Equal(t, want, isOwn(ownModule+name, ownModule), name)
	}
}

// What is no trace of Go is shown as it is, and silence with what to do about it.
func TestWhereOtherPluginsHang(t *testing.T) {
	require.Equal(t, []string{"the plugin's process 7 had to be killed; to SIGQUIT it said:", "  Thread 0x1 (most recent call first):", "    File \"x.py\", line 3 in load"},
		whereabouts("/no/such/program", 7, []string{"Thread 0x1 (most recent call first):", "  File \"x.py\", line 3 in load", ""}))
	got := whereabouts("/no/such/program", 7, []string{""})
	require.Len(t, got, 2)
	require.Contains(t, got[0], "wrote nothing")
	require.Contains(t, got[1], "py-spy dump --pid")
	thread := host.OfKernel + `a thread "python" in state S waits in futex_do_wait`
	require.Equal(t, append(got, "  "+thread+", 2 times"), whereabouts("/no/such/program", 7, []string{thread, thread}))
}
