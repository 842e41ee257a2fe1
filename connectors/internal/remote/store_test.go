package remote

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/conformance/relay"
	"github.com/kvport/kvport/connector"
)

// go-redis looks every second whether a server that refused is back, and notices then that it was closed.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial"))
}

// server starts a real server for one test. Without one the test fails: it must be known that it did not run.
func server(t *testing.T, args ...string) *redistest.Server {
	t.Helper()
	s, err := redistest.Start(args...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func newRelay(t *testing.T, target string) *relay.Relay {
	t.Helper()
	r, err := relay.New(target, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	return r
}

// patient gives a busy machine the time that it needs for each call, where a test says nothing about it.
func patient(o Options) Options {
	o.Timeout = cmp.Or(o.Timeout, time.Minute)
	o.openTimeout = o.Timeout
	return o
}

func open(t *testing.T, o Options) *Store {
	t.Helper()
	s, err := Open(t.Context(), patient(o))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// item makes a block of several spans with bytes that belong to its number.
func item(n int, sizes ...int) connector.Item {
	r := rand.NewChaCha8([32]byte{byte(n), byte(n >> 8)})
	it := connector.Item{Key: connector.StoreKey{byte(n), byte(n >> 8), 7}}
	for _, size := range sizes {
		span := make([]byte, size)
		_, _ = r.Read(span)
		it.Spans = append(it.Spans, span)
	}
	return it
}

// blank is an item like it without its bytes.
func blank(it connector.Item) connector.Item {
	out := connector.Item{Key: it.Key}
	for _, s := range it.Spans {
		out.Spans = append(out.Spans, make([]byte, len(s)))
	}
	return out
}

func items(n int, sizes ...int) (full, empty []connector.Item) {
	for i := range n {
		full = append(full, item(i, sizes...))
		empty = append(empty, blank(full[i]))
	}
	return full, empty
}

func keysOf(items []connector.Item) []connector.StoreKey {
	keys := make([]connector.StoreKey, len(items))
	for i, it := range items {
		keys[i] = it.Key
	}
	return keys
}

func requireEqual(t *testing.T, want, got []connector.Item) {
	t.Helper()
	for i := range want {
		for j := range want[i].Spans {
			require.True(t, bytes.Equal(want[i].Spans[j], got[i].Spans[j]), "item %d span %d", i, j)
		}
	}
}

func found(t *testing.T, s *Store, items []connector.Item) int {
	t.Helper()
	n, err := s.Lookup(t.Context(), [][]connector.StoreKey{keysOf(items)})
	require.NoError(t, err)
	return n[0]
}

// Every server of this machine stores and gives back blocks of all sizes.
func TestRoundTrip(t *testing.T) {
	programs := redistest.Programs()
	require.NotEmpty(t, programs, redistest.ErrNoServer)
	for _, program := range programs {
		t.Run(filepath.Base(program), func(t *testing.T) {
			srv, err := redistest.StartProgram(program)
			require.NoError(t, err)
			defer func() { require.NoError(t, srv.Close()) }()
			s := open(t, Options{Addresses: []string{srv.Address}, Prefix: "p:"})
			for n, sizes := range [][]int{{1}, {100, 0, 16}, {4096, 4096, 64}, {48 << 10, 48 << 10, 48 << 10, 480}, {3 << 20, 3 << 20, 1}} {
				full, empty := items(7, sizes...)
				for i := range full {
					full[i].Key[5], empty[i].Key[5] = byte(n), byte(n)
				}
				require.Zero(t, found(t, s, full))
				require.NoError(t, s.Put(t.Context(), full))
				require.Equal(t, 7, found(t, s, full))
				require.NoError(t, s.Get(t.Context(), empty))
				requireEqual(t, full, empty)
			}
			require.Equal(t, Stats{Loaded: 35, Saved: 35, BytesLoaded: s.Stats().BytesSaved, BytesSaved: s.Stats().BytesSaved}, s.Stats())
			keys, err := srv.Keys(t.Context())
			require.NoError(t, err)
			require.Len(t, keys, 35)
			for _, k := range keys {
				require.Regexp(t, `^p:[0-9a-f]{64}$`, k)
			}
		})
	}
}

func TestPutSkipsWhatIsThere(t *testing.T) {
	srv := server(t)
	s := open(t, Options{Addresses: []string{srv.Address}})
	full, empty := items(3, 100, 16)
	require.NoError(t, s.Put(t.Context(), full[:2]))
	require.NoError(t, s.Put(t.Context(), full))
	require.Equal(t, uint64(3), s.Stats().Saved)
	require.Equal(t, uint64(2), s.Stats().Known)

	other := blank(full[0])
	require.NoError(t, s.Put(t.Context(), []connector.Item{other}), "the same key: nothing is written")
	require.NoError(t, s.Get(t.Context(), empty))
	requireEqual(t, full, empty)
	other.Replace = true
	require.NoError(t, s.Put(t.Context(), []connector.Item{other}))
	require.NoError(t, s.Get(t.Context(), empty[:1]))
	requireEqual(t, []connector.Item{other}, empty[:1])
}

// What lies under a key and is not its block is never loaded, and the spans stay as they were.
func TestDamagedValues(t *testing.T) {
	srv := server(t)
	s := open(t, Options{Addresses: []string{srv.Address}})
	full, _ := items(2, 100, 16)
	require.NoError(t, s.Put(t.Context(), full))
	client := srv.Client()
	defer func() { require.NoError(t, client.Close()) }()
	value, err := client.Get(t.Context(), s.key(full[0].Key)).Bytes()
	require.NoError(t, err)
	longer := item(0, 100, 17)
	for name, damaged := range map[string]string{
		"empty":       "",
		"short":       string(value[:len(value)-1]),
		"long":        string(value) + "x",
		"another key": string(appendValue(nil, item(1, 100, 16))),
		"magic":       "KVPORT/1" + string(value[8:]),
		"length":      string(value[:8]) + "\x01" + string(value[9:]),
		"other shape": string(appendValue(nil, longer)),
		"text":        strings.Repeat("hello ", 20),
	} {
		require.NoError(t, client.Set(t.Context(), s.key(full[0].Key), damaged, 0).Err(), name)
		got := []connector.Item{blank(full[0]), blank(full[1])}
		err := s.Get(t.Context(), got)
		want := connector.ErrCorrupt
		if name == "other shape" { // it is whole
			want = connector.ErrOutdated
		}
		require.ErrorIs(t, err, want, name)
		var failed *connector.ItemError
		require.ErrorAs(t, err, &failed, name)
		require.Equal(t, []int{0}, failed.Items, name)
		requireEqual(t, []connector.Item{blank(full[0]), full[1]}, got)
	}
	require.Equal(t, uint64(1), s.Stats().Outdated)
	require.Zero(t, s.Stats().Gone)
	require.NoError(t, client.Del(t.Context(), s.key(full[0].Key)).Err())
	require.NoError(t, client.LPush(t.Context(), s.key(full[0].Key), "a list").Err())
	require.ErrorIs(t, s.Get(t.Context(), []connector.Item{blank(full[0])}), connector.ErrGone, "another type")
	require.NoError(t, s.Get(t.Context(), []connector.Item{blank(full[1])}), "the connection is in step")

	mend := full[0]
	mend.Replace = true
	require.NoError(t, s.Put(t.Context(), []connector.Item{mend}))
	got := []connector.Item{blank(full[0])}
	require.NoError(t, s.Get(t.Context(), got))
	requireEqual(t, full[:1], got)
}

func TestGoneBetweenLookupAndGet(t *testing.T) {
	const ttl = time.Hour
	srv := server(t)
	s := open(t, Options{Addresses: []string{srv.Address}, TTL: ttl})
	full, empty := items(2, 64)
	c := srv.Client()
	defer func() { require.NoError(t, c.Close()) }()
	live := func(left time.Duration) { // as if the rest of their time had passed
		for _, it := range full {
			require.True(t, c.PExpire(t.Context(), s.key(it.Key), left).Val())
		}
	}
	put := func() {
		require.NoError(t, s.Put(t.Context(), full))
		for _, it := range full {
			left, err := c.PTTL(t.Context(), s.key(it.Key)).Result()
			require.NoError(t, err)
			require.Greater(t, left, ttl/2)
			require.LessOrEqual(t, left, ttl)
		}
	}
	put()
	require.Equal(t, 2, found(t, s, full))
	live(time.Millisecond)
	require.Eventually(t, func() bool { return found(t, s, full[:1])+found(t, s, full[1:]) == 0 }, time.Minute, 10*time.Millisecond)
	require.ErrorIs(t, s.Get(t.Context(), empty), connector.ErrGone)
	put()
	for range 5 { // saving again prolongs the life of what is there
		live(ttl / 2)
		put()
	}
	require.Equal(t, uint64(4), s.Stats().Saved)
}

// A stopped server holds a call until the call's own time is over, not longer; cancelling ends it at once.
func TestStoppedServer(t *testing.T) {
	srv := server(t)
	full, empty := items(2, 1<<20, 16)
	calls := map[string]func(context.Context, *Store) error{
		"get": func(ctx context.Context, s *Store) error { return s.Get(ctx, empty) },
		"put": func(ctx context.Context, s *Store) error { return s.Put(ctx, full) },
		"lookup": func(ctx context.Context, s *Store) error {
			_, err := s.Lookup(ctx, [][]connector.StoreKey{keysOf(full)})
			return err
		},
		"": nil, // the one that goes on
	}
	stores := map[string]*Store{} // one each: a call that a busy machine makes long says that the server is away
	for name := range calls {
		stores[name] = open(t, Options{Addresses: []string{srv.Address}, Timeout: time.Hour})
		require.NoError(t, stores[name].Put(t.Context(), full))
	}
	s := stores[""]
	delete(calls, "")
	require.NoError(t, srv.Pause())
	for name, call := range calls {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(50*time.Millisecond, cancel)
		start := time.Now()
		require.ErrorIs(t, call(ctx, stores[name]), context.Canceled, name)
		require.Less(t, time.Since(start), time.Minute, name)
	}
	askAt := func(at time.Time) (away bool) {
		s.health.mu.Lock()
		defer s.health.mu.Unlock()
		s.health.retryAt = at
		return s.health.away
	}
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), patience+200*time.Millisecond)
		defer cancel()
		err := s.Get(ctx, empty)
		return errors.Is(err, connector.ErrGone) && askAt(time.Now().Add(time.Hour))
	}, time.Minute, time.Millisecond)
	require.ErrorIs(t, s.Get(t.Context(), empty), errAway)

	require.NoError(t, srv.Resume())
	askAt(time.Now())
	require.Eventually(t, func() bool { return s.Get(t.Context(), empty) == nil }, time.Minute, 20*time.Millisecond)
	requireEqual(t, full, empty)
}

func TestServerRestartsEmpty(t *testing.T) {
	srv := server(t)
	var log bytes.Buffer
	s := open(t, Options{Addresses: []string{srv.Address}, Log: slog.New(slog.NewTextHandler(&log, nil))})
	full, empty := items(3, 4096, 16)
	require.NoError(t, s.Put(t.Context(), full))
	srv.Kill()
	for range 20 {
		require.Zero(t, found(t, s, full))
		require.ErrorIs(t, s.Get(t.Context(), empty), connector.ErrGone)
		require.ErrorIs(t, s.Put(t.Context(), full), connector.ErrGone)
	}
	require.NoError(t, srv.Restart())
	require.Eventually(t, func() bool { return s.Put(t.Context(), full) == nil }, time.Minute, 10*time.Millisecond)
	require.NoError(t, s.Get(t.Context(), empty))
	requireEqual(t, full, empty)
	require.Equal(t, 1, strings.Count(log.String(), "cannot be used"), log.String())
	require.Equal(t, 1, strings.Count(log.String(), "server is back"), log.String())
}

// Connections are cut after any number of bytes: what a Get calls loaded is whole.
func TestCutConnections(t *testing.T) {
	srv := server(t)
	r := newRelay(t, srv.Address)
	s := open(t, Options{Addresses: []string{r.Address()}, Connections: 2})
	full, _ := items(8, 20000, 20000, 16)
	require.NoError(t, s.Put(t.Context(), full))
	random := rand.New(rand.NewPCG(1, 2))
	whole, failed := 0, 0
	for range 60 {
		r.CutAfter(1 + random.Int64N(330000))
		got := make([]connector.Item, len(full))
		for i := range full {
			got[i] = blank(full[i])
		}
		bad := map[int]bool{}
		if err := s.Get(t.Context(), got); err != nil {
			require.ErrorIs(t, err, connector.ErrGone)
			var part *connector.ItemError
			require.ErrorAs(t, err, &part)
			for _, i := range part.Items {
				bad[i] = true
			}
		}
		for i := range full {
			if bad[i] {
				failed++
				continue
			}
			requireEqual(t, full[i:i+1], got[i:i+1])
			whole++
		}
		r.CutAfter(0)
		r.Cut()
		require.Eventually(t, func() bool { return found(t, s, full) == len(full) }, time.Minute, 5*time.Millisecond)
	}
	t.Logf("%d connections cut, %d items whole, %d failed", r.Cuts(), whole, failed)
	require.Greater(t, r.Cuts(), 20)
	require.Positive(t, whole)
	require.Positive(t, failed)
}

func TestSlowServer(t *testing.T) {
	srv := server(t)
	r := newRelay(t, srv.Address)
	s := open(t, Options{Addresses: []string{r.Address()}})
	full, empty := items(4, 1<<20, 16)
	require.NoError(t, s.Put(t.Context(), full))
	const slow = 200 * time.Millisecond
	r.Delay(slow)
	for range 3 {
		start := time.Now()
		require.Equal(t, 4, found(t, s, full))
		require.NoError(t, s.Get(t.Context(), empty))
		require.GreaterOrEqual(t, time.Since(start), 2*slow, "it was slow")
	}
	requireEqual(t, full, empty)
}

func TestFullServer(t *testing.T) {
	srv := server(t, "--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
	var log bytes.Buffer
	s := open(t, Options{Addresses: []string{srv.Address}, Log: slog.New(slog.NewTextHandler(&log, nil))})
	full, empty := items(30, 300<<10, 16)
	stored := 0
	for i := range full {
		if err := s.Put(t.Context(), full[i:i+1]); err != nil {
			require.ErrorIs(t, err, connector.ErrGone)
			require.ErrorContains(t, err, "no memory left")
			continue
		}
		stored++
		require.Equal(t, 1, found(t, s, full[i:i+1]), "acknowledged")
	}
	require.Positive(t, stored)
	require.Less(t, stored, 30)
	require.NoError(t, s.Get(t.Context(), empty[:stored]), "what was acknowledged is still there")
	requireEqual(t, full[:stored], empty[:stored])
	require.Equal(t, 1, strings.Count(log.String(), "server has no memory left"), log.String())
	require.NoError(t, srv.Do(t.Context(), "config", "set", "maxmemory", "100mb"))
	require.Eventually(t, func() bool { return s.Put(t.Context(), full) == nil }, time.Minute, 20*time.Millisecond)
	require.Contains(t, log.String(), "server has room again")
}

func TestPassword(t *testing.T) {
	const secret = "s3cret-and-long"
	srv := server(t, "--requirepass", secret)
	o := Options{Addresses: []string{srv.Address}, Password: secret, CredentialField: "password_file"}
	s := open(t, o)
	full, _ := items(1, 10)
	require.NoError(t, s.Put(t.Context(), full))

	for name, wrong := range map[string]Options{
		"wrong":     {Password: "wr0ng-password"},
		"none":      {},
		"user":      {Username: "nobody", Password: secret},
		"user only": {Username: "nobody"},
	} {
		wrong.Addresses, wrong.CredentialField = o.Addresses, o.CredentialField
		_, err := Open(t.Context(), patient(wrong))
		require.ErrorIs(t, err, connector.ErrIncompatible, name)
		require.ErrorContains(t, err, "password_file: server", name)
		require.NotContains(t, err.Error(), secret, name)
		require.NotContains(t, err.Error(), "wr0ng", name)
	}
	// The password changes under us: an outage that says what it is.
	client := srv.Client()
	require.NoError(t, client.Do(t.Context(), "config", "set", "requirepass", "another").Err())
	require.NoError(t, client.Do(t.Context(), "client", "kill", "type", "normal").Err())
	require.NoError(t, client.Close())
	require.Zero(t, found(t, s, full))
	err := s.Get(t.Context(), full)
	require.ErrorIs(t, err, connector.ErrGone)
	require.NotContains(t, err.Error(), secret)
}

func TestUserWithoutRights(t *testing.T) {
	srv := server(t)
	require.NoError(t, srv.Do(t.Context(), "acl", "setuser", "reader", "on", ">pw", "~kvport:*", "+get", "+exists"))
	s := open(t, Options{Addresses: []string{srv.Address}, Username: "reader", Password: "pw", Prefix: DefaultPrefix})
	full, _ := items(1, 10)
	err := s.Put(t.Context(), full)
	require.ErrorIs(t, err, connector.ErrGone)
	require.ErrorContains(t, err, "NOPERM")
	_, err = Open(t.Context(), patient(Options{Addresses: []string{srv.Address}, Username: "reader", Password: "pw", Prefix: "other:"}))
	require.ErrorIs(t, err, connector.ErrIncompatible)
}

func TestOtherKindOfServer(t *testing.T) {
	srv := server(t)
	_, err := Open(t.Context(), patient(Options{Addresses: []string{srv.Address}, Cluster: true}))
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "url: ")
	_, err = Open(t.Context(), patient(Options{Addresses: []string{srv.Address}, DB: 99}))
	require.ErrorIs(t, err, connector.ErrIncompatible)
}

func TestServerAwayAtOpen(t *testing.T) {
	srv := server(t)
	srv.Kill()
	var log bytes.Buffer
	s := open(t, Options{Addresses: []string{srv.Address}, Log: slog.New(slog.NewTextHandler(&log, nil))})
	full, _ := items(1, 10)
	require.Zero(t, found(t, s, full))
	require.Contains(t, log.String(), "cannot be used")
	require.NoError(t, srv.Restart())
	require.Eventually(t, func() bool { return s.Put(t.Context(), full) == nil }, time.Minute, 10*time.Millisecond)
}

func TestLargestValue(t *testing.T) {
	srv := server(t)
	s := open(t, Options{Addresses: []string{srv.Address}, MaxValue: 1000})
	full := []connector.Item{item(0, 900), item(1, 1000-headerSize), item(2, 1000-headerSize+1)}
	err := s.Put(t.Context(), full)
	var failed *connector.ItemError
	require.ErrorAs(t, err, &failed)
	require.Equal(t, []int{2}, failed.Items)
	require.ErrorContains(t, err, "largest value")
	require.Equal(t, 2, found(t, s, full))
}

func TestBatches(t *testing.T) {
	sized := func(sizes ...int) (out []connector.Item) {
		for _, n := range sizes {
			out = append(out, connector.Item{Spans: [][]byte{make([]byte, n)}})
		}
		return out
	}
	require.Empty(t, batches(nil))
	require.Equal(t, []int{1}, batches(sized(batchBytes+1)))
	require.Equal(t, []int{1, 2, 3}, batches(sized(batchBytes+1, batchBytes+1, 1)))
	require.Equal(t, []int{2, 3}, batches(sized(batchBytes/2, batchBytes/2, 1)))
	require.Equal(t, []int{4}, batches(sized(0, 1, 0, 1)))
}

// marked is an item whose digests were made with a key.
func marked(n int, key byte) connector.Item {
	it := item(n, 100, 48)
	copy(it.Spans[1], []byte{2, 0, 0, 0, 0, 0, 0, 0, key, 2, 3, 4, 5, 6, 7, 8})
	return it
}

// TestPutReplacesOtherKeys: a block that is there and was made with another key or by another version is written again, and one
// that is there as it is now is not.
func TestPutReplacesOtherKeys(t *testing.T) {
	srv := server(t)
	client := srv.Client()
	defer func() { require.NoError(t, client.Close()) }()
	lm, err := OpenLM(Options{Addresses: []string{lmServer(t)}})
	require.NoError(t, err)
	defer func() { require.NoError(t, lm.Close()) }()
	redis := open(t, Options{Addresses: []string{srv.Address}, TTL: time.Hour})
	for name, s := range map[string]interface {
		connector.Store
		Stats() Stats
	}{"redis": redis, "memory": NewMemory(1 << 20), "lm": lm} {
		put := func(it connector.Item) { require.NoError(t, s.Put(t.Context(), []connector.Item{it}), name) }
		holds := func(it connector.Item) {
			got := []connector.Item{blank(it)}
			require.NoError(t, s.Get(t.Context(), got), name)
			requireEqual(t, []connector.Item{it}, got)
		}
		put(marked(1, 1))
		put(marked(1, 2))
		holds(marked(1, 2))
		put(marked(1, 2))
		require.Equal(t, uint64(1), s.Stats().Known, name)
		longer := marked(1, 2)
		longer.Spans[0] = append(longer.Spans[0], 1)
		if name != "lm" { // its protocol does not say how long a value is
			put(longer)
			holds(longer)
		}
	}
	require.NoError(t, client.Del(t.Context(), redis.key(marked(1, 1).Key)).Err())
	require.NoError(t, client.LPush(t.Context(), redis.key(marked(1, 1).Key), "a list").Err())
	require.NoError(t, redis.Put(t.Context(), []connector.Item{marked(1, 1)}), "another type")
	require.NoError(t, redis.Get(t.Context(), []connector.Item{blank(marked(1, 1))}))
}
