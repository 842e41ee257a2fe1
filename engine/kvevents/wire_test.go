package kvevents

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/internal/zmtp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is more than anything takes that a test waits for.
const patience = 2 * time.Minute

// recorder is a sink that remembers what it is told, as text: the first token of each event, or "lost".
type recorder struct {
	mu    sync.Mutex
	log   []string
	from  []uint64
	count map[Counted]int
	news  chan struct{}
}

func newRecorder() *recorder {
	return &recorder{count: map[Counted]int{}, news: make(chan struct{}, 1)}
}

func (r *recorder) Apply(events []Event) {
	for _, ev := range events {
		r.note(fmt.Sprint(ev.Tokens[0]))
	}
}

func (r *recorder) From(seq uint64) { r.from = append(r.from, seq) }

func (r *recorder) Lost() { r.note("lost") }

func (r *recorder) note(text string) {
	r.mu.Lock()
	r.log = append(r.log, text)
	r.mu.Unlock()
	wake(r.news)
}

func (r *recorder) counted(what Counted, n int) {
	r.mu.Lock()
	r.count[what] += n
	r.mu.Unlock()
	wake(r.news)
}

func (r *recorder) text() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.log, " ")
}

// await waits until something is so.
func (r *recorder) await(t *testing.T, so func() bool) {
	late := time.After(patience)
	for !so() {
		select {
		case <-r.news:
		case <-late:
			require.Fail(t, "nothing came", r.text())
		}
	}
}

// has waits until the sink was told exactly this.
func (r *recorder) has(t *testing.T, text string) {
	r.await(t, func() bool { return r.text() == text })
}

func (r *recorder) counts(what Counted) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.count[what]
}

// follow runs a subscription until the test ends.
func follow(t *testing.T, place Place) *recorder {
	r := newRecorder()
	s := &Subscription{
		Place: place, Sink: r, Log: slog.New(slog.DiscardHandler), Count: r.counted,
		pause: func(ctx context.Context, _ time.Duration) { pause(ctx, time.Millisecond) },
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return r
}

// event is one whose first token is n.
func event(n int) Event {
	return Event{Kind: Stored, Hashes: []Hash{NumberHash(uint64(n))}, Tokens: []int32{int32(n)}, BlockSize: 1, Medium: GPU}
}

// publisher makes one that publishes in sockets of its own; text changes the config.
func publisher(t *testing.T, text string) *Publisher {
	c, err := ParseConfig([]byte(`{"enable_kv_cache_events": true` + text + `}`))
	require.NoError(t, err)
	p, err := NewPublisher(*c, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

// subscribed waits until a publisher has that many readers that want events.
func subscribed(t *testing.T, p *Publisher, n int) {
	require.Eventually(t, func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		ready := 0
		for r := range p.readers {
			r.mu.Lock()
			if len(r.topics) > 0 {
				ready++
			}
			r.mu.Unlock()
		}
		return ready == n
	}, patience, time.Millisecond)
}

// Readers get what was published before they came, and what comes.
func TestPublishAndFollow(t *testing.T) {
	p := publisher(t, "")
	p.Publish([]Event{event(1), event(2)})
	p.Publish([]Event{event(3)})
	r := follow(t, p.Place())
	r.has(t, "1 2 3")
	subscribed(t, p, 1)
	p.Publish([]Event{event(4)})
	r.has(t, "1 2 3 4")
	late := follow(t, p.Place())
	late.has(t, "1 2 3 4")
	require.Equal(t, 4, late.counts(CountedEvents))
	require.Zero(t, late.counts(CountedLost)+late.counts(CountedInvalid))
	require.EqualValues(t, 4, testutil.ToFloat64(p.published))
}

// Only the engine's user can open the sockets, and nothing of them stays behind.
func TestSockets(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	p := publisher(t, "")
	for _, endpoint := range []string{p.Place().Endpoint, p.Place().ReplayEndpoint} {
		path := strings.TrimPrefix(endpoint, "ipc://")
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600)|os.ModeSocket, info.Mode())
		info, err = os.Stat(filepath.Dir(path))
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o700)|os.ModeDir, info.Mode())
	}
	require.NoError(t, p.Close())
	left, err := os.ReadDir(os.TempDir())
	require.NoError(t, err)
	require.Empty(t, left)

	named := filepath.Join(t.TempDir(), "s")
	text := fmt.Sprintf(`, "endpoint": "ipc://%s"`, named)
	first := publisher(t, text)
	info, err := os.Stat(named)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600)|os.ModeSocket, info.Mode())
	c := first.config
	refused := func(message string) {
		_, err := NewPublisher(c, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorContains(t, err, message)
	}
	refused("somebody listens at")
	require.NoError(t, first.Close())
	require.NoFileExists(t, named)
	require.NoError(t, os.WriteFile(named, []byte("mine"), 0o600))
	refused("is not a socket")
	require.NoError(t, os.Remove(named))
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: named, Net: "unix"})
	require.NoError(t, err)
	dead.SetUnlinkOnClose(false)
	require.NoError(t, dead.Close())
	second := publisher(t, text) // it takes the place of the dead one
	second.Publish([]Event{event(5)})
	c.Endpoint = "ipc:///none/" + strings.Repeat("x", 100)
	refused("no such file")
	c.Endpoint = fmt.Sprintf("ipc://%s/%s", t.TempDir(), strings.Repeat("x", 100))
	refused("too long for a socket")
	c.Endpoint = "ipc:///none/s"
	refused("endpoint: ")
}

// Folders of engines that were killed are removed, and nothing else: neither a folder of an engine that lives, nor one with
// anything in it that is not such an engine's.
func TestDeadFolders(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	socket := func(dir, name string) net.Listener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name), Net: "unix"})
		require.NoError(t, err)
		l.SetUnlinkOnClose(false)
		return l
	}
	died := func(dir string) {
		for _, name := range []string{"events", "replay"} {
			require.NoError(t, socket(dir, name).Close())
		}
	}
	kept := map[string]bool{}
	for name, fill := range map[string]func(dir string){
		"-died":  died,
		"-empty": func(string) {},
		"file":   func(dir string) { died(dir); require.NoError(t, os.WriteFile(filepath.Join(dir, "notes"), nil, 0o600)) },
		"events": func(dir string) { require.NoError(t, os.WriteFile(filepath.Join(dir, "events"), nil, 0o600)) },
		"folder": func(dir string) { require.NoError(t, os.Mkdir(filepath.Join(dir, "replay"), 0o700)) },
		"mode":   func(dir string) { died(dir); require.NoError(t, os.Chmod(dir, 0o750)) },
		"replay": func(dir string) {
			l := socket(dir, "replay") // somebody listens, whatever became of the other one
			t.Cleanup(func() { _ = l.Close() })
		},
	} {
		dir := filepath.Join(os.TempDir(), folder+name)
		require.NoError(t, os.Mkdir(dir, 0o700))
		fill(dir)
		old := time.Now().Add(-time.Hour)
		require.NoError(t, os.Chtimes(dir, old, old))
		kept[dir] = name[0] != '-'
	}
	young := filepath.Join(os.TempDir(), folder+"young")
	require.NoError(t, os.Mkdir(young, 0o700))
	died(young)
	kept[young] = true
	link := filepath.Join(os.TempDir(), folder+"link")
	elsewhere := t.TempDir()
	require.NoError(t, os.Symlink(elsewhere, link))
	kept[elsewhere] = true
	publisher(t, "")
	for dir, want := range kept {
		if want {
			require.DirExists(t, dir)
		} else {
			require.NoDirExists(t, dir)
		}
	}
}

// A socket is advertised by a path that readers elsewhere can use.
func TestRelativePath(t *testing.T) {
	t.Chdir(t.TempDir())
	dir, err := os.Getwd()
	require.NoError(t, err)
	p := publisher(t, `, "endpoint": "ipc://e", "replay_endpoint": "ipc://./r"`)
	require.Equal(t, Place{Endpoint: "ipc://" + dir + "/e", ReplayEndpoint: "ipc://" + dir + "/r"}, p.Place())
}

// TCP is warned of, and the port that was taken is told.
func TestTCP(t *testing.T) {
	var log bytes.Buffer
	c, err := ParseConfig([]byte(`{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "topic": "kv@a"}`))
	require.NoError(t, err)
	p, err := NewPublisher(*c, slog.New(slog.NewTextHandler(&log, nil)), prometheus.NewRegistry())
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close()) }()
	require.Equal(t, 2, strings.Count(log.String(), "level=WARN msg=\"KV events are published over TCP without encryption: whoever reaches the port reads the token ids of all prompts\""))
	require.NotContains(t, p.Place().Endpoint, ":0")
	p.Publish([]Event{event(1)})
	follow(t, p.Place()).has(t, "1")
}

// A publisher that starts again has other blocks: what was known is forgotten.
func TestRestart(t *testing.T) {
	dir := t.TempDir()
	text := fmt.Sprintf(`, "endpoint": "ipc://%s/e", "replay_endpoint": "ipc://%s/r"`, dir, dir)
	p := publisher(t, text)
	for i := range 3 {
		p.Publish([]Event{event(i)})
	}
	r := follow(t, p.Place())
	r.has(t, "0 1 2")
	require.NoError(t, p.Close())
	r.has(t, "0 1 2 lost")
	p = publisher(t, text)
	for i := range 5 { // more than before: the numbers alone would not tell
		p.Publish([]Event{event(10 + i)})
	}
	r.has(t, "0 1 2 lost 10 11 12 13 14")
}

// The numbers of one connection decide what is applied, asked for again, or lost.
func TestFollower(t *testing.T) {
	p := publisher(t, `, "buffer_steps": 3`)
	for i := range 10 {
		p.Publish([]Event{event(i)}) // of which 7, 8 and 9 are kept
	}
	require.Eventually(t, func() bool { return testutil.ToFloat64(p.published) == 10 }, patience, time.Millisecond)
	kept, err := zmtp.ParseEndpoint(p.Place().ReplayEndpoint)
	require.NoError(t, err)
	payload := func(n int) []byte {
		b, err := (&Batch{Events: []Event{event(n)}}).Append(nil)
		require.NoError(t, err)
		return b
	}
	for name, c := range map[string]struct {
		replays bool
		live    []int
		want    string
		gaps    int
		from    []uint64
	}{
		"in order":                {false, []int{0, 1, 2}, "0 1 2", 0, []uint64{0}},
		"from the middle":         {false, []int{5, 6}, "5 6", 0, []uint64{5}},
		"gap":                     {false, []int{0, 1, 4}, "0 1 lost 4", 1, []uint64{0, 4}},
		"again":                   {false, []int{3, 4, 0, 1}, "3 4 lost 0 1", 0, []uint64{3, 0}},
		"again, further":          {false, []int{3, 4, 2, 3}, "3 4 lost" + " lost 2 3", 1, []uint64{3, 2}},
		"same":                    {false, []int{3, 3}, "3 lost" + " lost 3", 1, []uint64{3, 3}},
		"filled":                  {true, []int{5, 6, 9}, "7 8 9", 1, []uint64{7}},
		"filled in the middle":    {true, []int{7, 9, 10}, "7 8 9 10", 1, []uint64{7}},
		"what was replayed":       {true, []int{7, 10, 11}, "7 8 9 10 11", 1, []uint64{7}},
		"gap before what is kept": {true, []int{4, 6}, "7 8 9", 1, []uint64{7}},
		"gap behind":              {true, []int{12}, "7 8 9 lost 12", 1, []uint64{7, 12}},
	} {
		r := newRecorder()
		s := &Subscription{Place: p.Place(), Sink: r, Log: slog.New(slog.DiscardHandler), Count: r.counted, pause: func(context.Context, time.Duration) {}}
		s.begin()
		f := newFollower(s, nil)
		if c.replays {
			f = newFollower(s, &kept)
		}
		for _, seq := range c.live {
			require.NoError(t, f.live(t.Context(), uint64(seq), payload(seq)), name)
		}
		require.Equal(t, c.want, r.text(), name)
		require.Equal(t, c.gaps, r.counts(CountedGaps), name)
		require.Equal(t, c.from, r.from, name)
	}
}

// A batch that cannot be read is missing, and what comes behind it is read, live or in a replay: the publisher would send the
// same again.
func TestBadBatch(t *testing.T) {
	p := publisher(t, "")
	for i := range 4 {
		p.Publish([]Event{event(i)})
	}
	require.Eventually(t, func() bool { return testutil.ToFloat64(p.published) == 4 }, patience, time.Millisecond)
	bad := &message{1, binary.BigEndian.AppendUint64(nil, 1), []byte("x")}
	p.mu.Lock()
	p.buffer[1] = bad
	p.mu.Unlock()
	r := follow(t, p.Place())
	r.has(t, "0 lost 2 3")
	subscribed(t, p, 1)
	p.mu.Lock()
	for reader := range p.readers {
		require.True(t, reader.offer(&message{4, binary.BigEndian.AppendUint64(nil, 4), []byte("y")}, 10))
	}
	p.next++
	p.mu.Unlock()
	p.Publish([]Event{event(5)})
	r.has(t, "0 lost 2 3 lost 5")
	require.Equal(t, 2, r.counts(CountedInvalid))
	require.Equal(t, 1, r.counts(CountedReplays), "over one connection")
	require.Equal(t, []uint64{0, 2, 5}, r.from)
}

// A reader that takes nothing keeps neither the engine nor other readers waiting. It sees a gap.
func TestSlowReader(t *testing.T) {
	p := publisher(t, `, "hwm": 4, "buffer_steps": 2`)
	p.slow = time.Hour
	e, err := zmtp.ParseEndpoint(p.Place().Endpoint)
	require.NoError(t, err)
	conn, err := net.Dial(e.Network, e.Address)
	require.NoError(t, err)
	defer conn.Close()
	z, err := zmtp.Open(conn, maxMessage, zmtp.Sub, zmtp.Pub)
	require.NoError(t, err)
	require.NoError(t, z.Send([]byte{1}))
	subscribed(t, p, 1)
	quick := follow(t, p.Place())
	subscribed(t, p, 2)

	const batches = 20
	want := []string{}
	for i := range batches { // more than sockets hold
		ev := Event{Kind: Stored, BlockSize: 50_000, Hashes: []Hash{NumberHash(1)}, Tokens: make([]int32, 50_000)}
		for k := range ev.Tokens {
			ev.Tokens[k] = 1 << 20
		}
		ev.Tokens[0] = int32(i)
		p.Publish([]Event{ev})
		want = append(want, fmt.Sprint(i))
		quick.has(t, strings.Join(want, " "))
	}
	require.Positive(t, testutil.ToFloat64(p.dropped.WithLabelValues("slow")))
	for next := uint64(0); ; next++ {
		frames, err := z.Receive()
		require.NoError(t, err)
		if binary.BigEndian.Uint64(frames[1]) > next {
			break // a gap
		}
		p.Publish([]Event{event(1)}) // something always comes next
	}
}

// An engine whose events are not sent in time goes on, and the numbers show what is lost.
func TestFullQueue(t *testing.T) {
	p := &Publisher{config: Config{MaxQueueSize: 2}, wake: make(chan struct{}, 1), lost: prometheus.NewCounter(prometheus.CounterOpts{Name: "lost"})}
	for i := range 5 {
		p.Publish([]Event{event(i)})
	}
	require.Len(t, p.queue, 2)
	require.EqualValues(t, 5, p.next)
	require.EqualValues(t, 3, testutil.ToFloat64(p.lost))
	p.queue = nil
	big := event(1)
	big.Tokens = make([]int32, batchTokens)
	p.config.MaxQueueSize = 10
	p.Publish([]Event{event(1), event(2), big, event(3)})
	require.Len(t, p.queue, 3, "a step with very many tokens is divided")
}

// What is being written to a reader counts as long as it has not taken it.
func TestReaderQueue(t *testing.T) {
	r := &reader{wake: make(chan struct{}, 1), topics: []string{""}}
	m := &message{payload: make([]byte, maxWaiting/4)}
	require.True(t, r.offer(m, 2))
	require.True(t, r.offer(m, 2))
	first, closed := r.first()
	require.Equal(t, m, first)
	require.False(t, closed)
	require.False(t, r.offer(m, 2), "it is on its way")
	r.sent()
	require.True(t, r.offer(m, 5))
	require.True(t, r.offer(m, 5))
	require.True(t, r.offer(m, 5))
	require.False(t, r.offer(m, 5), "too many bytes")
	for range 4 {
		r.sent()
	}
	require.Zero(t, r.bytes)
	require.True(t, r.offer(&message{payload: make([]byte, maxWaiting+1)}, 5), "a message alone")
}

// watched is a connection that remembers its deadline.
type watched struct {
	net.Conn
	mu    sync.Mutex
	until time.Time
}

func (w *watched) SetWriteDeadline(until time.Time) error {
	w.mu.Lock()
	w.until = until
	w.mu.Unlock()
	return w.Conn.SetWriteDeadline(until)
}

// When nothing is left to be written, no deadline is left that would end the answer to a heartbeat.
func TestHeartbeats(t *testing.T) {
	for name, replays := range map[string]bool{"events": false, "replay": true} {
		p := publisher(t, "")
		p.Publish([]Event{event(1)})
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		client, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		server, err := l.Accept()
		require.NoError(t, err)
		require.NoError(t, l.Close())
		w := &watched{Conn: server}
		done := make(chan struct{})
		go func() {
			defer close(done)
			if replays {
				p.replay(w)
			} else {
				p.read(w)
			}
			_ = server.Close()
		}()
		kind, peer, ask := zmtp.Sub, zmtp.Pub, [][]byte{{1}}
		if replays {
			kind, peer, ask = zmtp.Dealer, zmtp.Router, [][]byte{nil, {0}}
		}
		z, err := zmtp.Open(client, maxMessage, kind, peer)
		require.NoError(t, err, name)
		require.NoError(t, z.Send(ask...))
		if !replays {
			subscribed(t, p, 1)
			p.Publish([]Event{event(2)})
		}
		_, err = z.Receive()
		require.NoError(t, err, name)
		require.Eventually(t, func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.until.IsZero()
		}, patience, time.Millisecond, name)
		require.NoError(t, client.Close())
		<-done
	}
}

// Each endpoint has its own connections.
func TestConnectionsOfEndpoints(t *testing.T) {
	p := publisher(t, "")
	conn := func() net.Conn {
		a, b := net.Pipe()
		t.Cleanup(func() { _, _ = a.Close(), b.Close() })
		return a
	}
	for range maxReaders {
		require.True(t, p.enter(p.listeners[1], conn()))
	}
	require.False(t, p.enter(p.listeners[1], conn()))
	require.True(t, p.enter(p.listeners[0], conn()))
	p.Publish([]Event{event(1)})
	place := p.Place()
	r := follow(t, Place{Endpoint: place.Endpoint})
	subscribed(t, p, 1)
	p.Publish([]Event{event(2)})
	r.await(t, func() bool { return strings.HasSuffix(r.text(), "2") })
}

// Whatever connects to a publisher and does not behave is cut off, and others are served.
func TestHostileReaders(t *testing.T) {
	p := publisher(t, "")
	dial := func(endpoint string) net.Conn {
		e, err := zmtp.ParseEndpoint(endpoint)
		require.NoError(t, err)
		conn, err := net.Dial(e.Network, e.Address)
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	cut := func(conn net.Conn) {
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(patience)))
		for {
			if _, err := conn.Read(make([]byte, 1<<10)); err != nil {
				require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
				return
			}
		}
	}
	web := dial(p.Place().Endpoint)
	_, err := fmt.Fprintf(web, "GET / HTTP/1.1\r\n%s\r\n\r\n", strings.Repeat("x", 100))
	require.NoError(t, err)
	cut(web)
	for _, c := range []struct {
		endpoint, own, peer string
		frames              [][]byte
	}{
		{p.Place().Endpoint, zmtp.Req, zmtp.Pub, nil},
		{p.Place().Endpoint, zmtp.Sub, zmtp.Pub, [][]byte{{7}}},
		{p.Place().Endpoint, zmtp.Sub, zmtp.Pub, [][]byte{make([]byte, maxRequest+1)}},
		{p.Place().ReplayEndpoint, zmtp.Dealer, zmtp.Router, [][]byte{{1}}},
		{p.Place().ReplayEndpoint, zmtp.Dealer, zmtp.Router, [][]byte{nil, make([]byte, 9)}},
	} {
		conn := dial(c.endpoint)
		z, err := zmtp.Open(conn, maxMessage, c.own, c.peer)
		if err == nil && c.frames != nil {
			_ = z.Send(c.frames...)
		}
		cut(conn)
	}
	greedy := dial(p.Place().Endpoint)
	z, err := zmtp.Open(greedy, maxMessage, zmtp.Sub, zmtp.Pub)
	require.NoError(t, err)
	for range maxTopics + 1 {
		_ = z.Send([]byte{1})
	}
	cut(greedy)
	_ = dial(p.Place().Endpoint) // says nothing at all
	p.Publish([]Event{event(1)})
	follow(t, p.Place()).has(t, "1")
}

// Whatever a publisher sends, the subscription goes on and knows nothing wrong.
func TestHostilePublishers(t *testing.T) {
	good, err := (&Batch{Events: []Event{event(1)}}).Append(nil)
	require.NoError(t, err)
	number := func(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
	for name, frames := range map[string][][]byte{
		"no number":   {nil, {1}, good},
		"two frames":  {number(1), good},
		"many frames": {nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil},
		"too long":    {nil, number(1), make([]byte, maxMessage)},
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		served := make(chan struct{})
		go func() {
			defer close(served)
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				if z, err := zmtp.Open(conn, maxRequest, zmtp.Pub, zmtp.Sub); err == nil {
					_, _ = z.Receive()
					_ = z.Send(nil, number(0), good)
					_ = z.Send(frames...)
					_, _ = z.Receive() // until the subscriber leaves
				}
				_ = conn.Close()
			}
		}()
		r := follow(t, Place{Endpoint: "tcp://" + l.Addr().String()})
		r.await(t, func() bool { return strings.HasPrefix(r.text(), "1 lost 1 lost") })
		require.NoError(t, l.Close(), name)
		<-served
	}
}

// A publisher that breaks again and again is asked after ever longer pauses, and the log has one line about it, though it
// sends something good each time. When all was well for a while, it starts again from the shortest pause.
func TestPauses(t *testing.T) {
	good, err := (&Batch{Events: []Event{event(1)}}).Append(nil)
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if z, err := zmtp.Open(conn, maxRequest, zmtp.Pub, zmtp.Sub); err == nil {
				_, _ = z.Receive()
				_ = z.Send(nil, binary.BigEndian.AppendUint64(nil, 0), good)
				_ = z.Send([]byte("no number"), good)
				_, _ = z.Receive() // until the subscriber leaves
			}
			_ = conn.Close()
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	r, now, step := newRecorder(), time.Now(), time.Duration(0)
	var log bytes.Buffer
	var pauses []time.Duration
	s := &Subscription{
		Place: Place{Endpoint: "tcp://" + l.Addr().String()}, Sink: r, Log: slog.New(slog.NewTextHandler(&log, nil)), Count: r.counted,
		now: func() time.Time { now = now.Add(step); return now },
	}
	s.pause = func(_ context.Context, d time.Duration) {
		pauses = append(pauses, d)
		switch len(pauses) {
		case 9:
			require.Equal(t, 1, strings.Count(log.String(), "level=WARN"), log.String())
			step = settled
		case 10:
			require.Equal(t, 2, strings.Count(log.String(), "level=WARN"), log.String())
			cancel()
		}
	}
	require.NoError(t, s.Run(ctx))
	require.NoError(t, l.Close())
	serving.Wait()
	const ms = time.Millisecond
	require.Equal(t, []time.Duration{100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 6400 * ms, longestPause, longestPause, 100 * ms}, pauses)
}

// The log has each warning once, also if the port of the connection is in its text, and not more than some.
func TestTell(t *testing.T) {
	var log bytes.Buffer
	s := &Subscription{Log: slog.New(slog.NewTextHandler(&log, nil))}
	s.begin()
	for port := range 3 {
		s.tell("broken", "e", &net.OpError{Op: "read", Net: "tcp", Source: &net.TCPAddr{Port: port}, Err: os.ErrDeadlineExceeded})
	}
	require.Equal(t, 1, strings.Count(log.String(), "level=WARN"))
	for n := range 100 {
		s.tell("broken", "e", fmt.Errorf("%w: %d", ErrFormat, n))
	}
	require.Equal(t, maxTold, strings.Count(log.String(), "level=WARN"))
}

func TestConfig(t *testing.T) {
	c, err := ParseConfig([]byte(`{"enable_kv_cache_events": true}`))
	require.NoError(t, err)
	require.Equal(t, &Config{Enable: true, Publisher: "zmq", BufferSteps: 10_000, HWM: 100_000, MaxQueueSize: 100_000}, c)
	c, err = ParseConfig([]byte(`{"enable_kv_cache_events": true, "publisher": "null"}`))
	require.NoError(t, err)
	require.False(t, c.Enable)
	c, err = ParseConfig([]byte(`{"publisher": "zmq", "replay_endpoint": null}`))
	require.NoError(t, err)
	require.False(t, c.Enable)
	for text, message := range map[string]string{
		`{"enable_kv_cache_event": true}`:                         `did you mean "enable_kv_cache_events"`,
		`{"enable_kv_cache_events": "yes"}`:                       "enable_kv_cache_events: must be",
		`{"publisher": "kafka"}`:                                  "publisher",
		`{"endpoint": "udp://a:1"}`:                               `endpoint: "udp://a:1" is no endpoint, want ipc://PATH or tcp://HOST:PORT`,
		`{"endpoint": "tcp://*:1", "replay_endpoint": "tcp://a"}`: `replay_endpoint: "tcp://a" is no endpoint`,
		`{"replay_endpoint": "tcp://*:1"}`:                        "is of no use without endpoint",
		`{"hwm": 0}`:                                              "hwm",
		`{"buffer_steps": -1}`:                                    "buffer_steps",
		`[]`:                                                      "object",
		`{`:                                                       "",
	} {
		_, err := ParseConfig([]byte(text))
		require.ErrorIs(t, err, ErrConfig, text)
		require.ErrorContains(t, err, message, text)
	}
	require.ErrorContains(t, (&Subscription{Place: Place{Endpoint: "a"}}).Run(t.Context()), "endpoint: ")
	require.ErrorContains(t, (&Subscription{Place: Place{Endpoint: "ipc:///a", ReplayEndpoint: "b"}}).Run(t.Context()), "replay_endpoint: ")
}

// A socket that an instance has named is left if another user's process listens there: what lies at its path may have changed since it was
// looked at. A place of the config is as it is.
func TestSocketsOfOthersAreLeft(t *testing.T) {
	p := publisher(t, "")
	told := p.Place()
	named, err := told.Of("localhost")
	require.NoError(t, err)
	e, err := zmtp.ParseEndpoint(named.Endpoint)
	require.NoError(t, err)
	for _, c := range []struct {
		place   Place
		user    int
		refused bool
	}{
		{named, os.Getuid(), false}, {named, os.Getuid() + 1, true}, {told, os.Getuid() + 1, false},
	} {
		s := &Subscription{Place: c.place, user: c.user}
		s.begin()
		_, _, release, err := s.dial(t.Context(), e, zmtp.Sub, zmtp.Pub)
		if c.refused {
			require.ErrorContains(t, err, "a process of user ")
			continue
		}
		require.NoError(t, err)
		release()
	}
}

// An instance tells a router where its events are, and can send it nowhere else than to itself.
func TestPlaces(t *testing.T) {
	own := publisher(t, "").Place()
	got, err := own.Of("127.0.0.1")
	require.NoError(t, err)
	own.own = true
	require.Equal(t, own, got)
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for _, c := range []struct{ endpoint, host, want, message string }{
		{"tcp://*:5557", "10.0.0.1", "tcp://10.0.0.1:5557", ""},
		{"tcp://0.0.0.0:5557", "worker", "tcp://worker:5557", ""},
		{"tcp://worker:5557", "Worker", "tcp://Worker:5557", ""},
		{"tcp://[::]:5557", "::1", "tcp://[::1]:5557", ""},
		{"tcp://10.0.0.2:5557", "10.0.0.1", "", "a port of another host than the instance's"},
		{own.Endpoint, "10.0.0.1", "", "a socket of another machine"},
		{"ipc://" + file, "localhost", "", "not a socket of this user"},
		{"ipc:///none", "localhost", "", "no such file"},
		{"", "localhost", "", "is no endpoint"},
	} {
		got, err := (&Place{Endpoint: c.endpoint, ReplayEndpoint: c.endpoint}).Of(c.host)
		if c.message != "" {
			require.ErrorContains(t, err, c.message, c.endpoint)
			continue
		}
		require.NoError(t, err, c.endpoint)
		require.Equal(t, Place{Endpoint: c.want, ReplayEndpoint: c.want, own: true}, got)
	}
	_, err = (&Place{Endpoint: "tcp://*:1", Topic: strings.Repeat("x", maxText+1)}).Of("a")
	require.ErrorContains(t, err, "the topic has 1025 bytes")
	require.NoError(t, (&Place{Endpoint: "tcp://a:1"}).Check())
	require.ErrorContains(t, (&Place{}).Check(), "is no endpoint")
	require.ErrorContains(t, (&Place{Endpoint: "tcp://a:1", ReplayEndpoint: "b"}).Check(), `"b" is no endpoint`)
}
