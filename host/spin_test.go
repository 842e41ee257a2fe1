package host

import (
	"bytes"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// spinEnv names the variable that makes the test binary a process that does nothing but use a processor.
const spinEnv = "KVPORT_TEST_SPIN"

// spinMain uses a processor until it is killed.
func spinMain() {
	for n := 0; ; n++ {
		runtime.KeepAlive(n)
	}
}

// spin starts processes that use a processor each. stop ends them and says how much time of processors they had.
func spin(t *testing.T, n int) (stop func() time.Duration) {
	t.Helper()
	var all []*exec.Cmd
	kill := func() (sum time.Duration) {
		for _, cmd := range all {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			sum += cmd.ProcessState.UserTime()
		}
		all = nil
		return sum
	}
	t.Cleanup(func() { kill() })
	for range n {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = []string{spinEnv + "=1", "GOMAXPROCS=1"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		require.NoError(t, cmd.Start())
		all = append(all, cmd)
	}
	return kill
}

// spinner loads blocks in turns, by all ways, and knows what belongs there.
type spinner struct {
	*placedBench
	want [][]byte // of the blocks that were saved

	loads, blocks, byMessage int
	longest                  time.Duration
}

// round loads one batch, hot or after other work, from the index or by message.
func (s *spinner) round(n int, w *loadWatch) {
	batch := []int{1, 8, benchRoom}[n%3]
	message := n%7 == 6
	if n%2 == 1 {
		s.work(20 * time.Millisecond)
	}
	if message {
		s.place.resets.Load().Store(1)
		s.byMessage += batch
	}
	at := n % (benchBlocks - batch)
	began := time.Now()
	w.begin(0)
	to := s.load(at, batch)
	w.end(0)
	s.longest = max(s.longest, time.Since(began))
	s.place.resets.Load().Store(0)
	s.loads++
	s.blocks += batch
	for i, b := range to {
		require.True(s, bytes.Equal(s.want[at+i], s.bytesOf(b)), "load %d: block %d is not what was saved", n, at+i)
		clear(s.ranks[0].kv.View(0, b.ID))
	}
}

// bytesOf is a copy of a block in the cache.
func (p *placedBench) bytesOf(b connector.Block) []byte {
	p.Helper()
	spans, err := p.ranks[0].kv.Spans(b)
	require.NoError(p, err)
	return bytes.Join(spans, nil)
}

// Loads of blocks that a real plugin has placed are right and end in time beside processes that leave them little of the processors, hot and
// after other work, from the index and by message; if one does not, the stacks of all goroutines and the index say why. In soak the time is half
// an hour, and the limit of a load is the host's own.
func TestLoadsBesideSpinners(t *testing.T) {
	if testing.Short() {
		t.Skip("it builds a plugin; make test runs it")
	}
	long, processes, limit := time.Second, 2, time.Minute
	if os.Getenv("KVPORT_SOAK") != "" {
		long, processes, limit = 30*time.Minute, 8, 0
	}
	s := &spinner{placedBench: newPlacedBench(t, 2)}
	if limit == 0 {
		limit = s.cfg.Settings.Deadlines.Transfer
	}
	for i := range benchBlocks {
		s.want = append(s.want, s.bytesOf(connector.Block{ID: connector.BlockID(i)}))
	}
	plugin := s.gen.pid()
	s.stuck = make(chan struct{})
	w := newLoadWatch(1, limit, s.place)
	over := w.start(t, func(text string) {
		t.Error(text)
		close(s.stuck)
	})
	stop := spin(t, processes)
	for n, end := 0, time.Now().Add(long); n < 21 || time.Now().Before(end); n++ {
		s.round(n, w)
	}
	over()
	spun, placed := stop(), testutil.ToFloat64(s.metrics.placed)
	t.Logf("%d loads of %d blocks in %v beside %d processes, which had %v of the processors: 0 wrong, the longest took %v of at most %v; %d blocks by message",
		s.loads, s.blocks, long, processes, spun, s.longest, limit, s.byMessage)
	require.LessOrEqual(t, s.longest, limit)
	require.Positive(t, spun)
	require.Equal(t, plugin, s.gen.pid(), "the plugin lives")
	require.InDelta(t, s.blocks-s.byMessage, placed, 0, "blocks that were loaded from where they were placed")
}
