package nixl

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/peerkey"
	"github.com/kvport/kvport/internal/machine"
)

// TestLoad: what a consumer loads is what the producer has, whatever slots both use.
func TestLoad(t *testing.T) { eachMode(t, testLoad) }

func testLoad(t *testing.T, mode string) {
	libDir(t)
	defer goleak.VerifyNone(t)
	t.Run("pair", func(t *testing.T) {
		rng := rand.New(rand.NewPCG(1, 2))
		p, d := open(t, connector.RoleProducer, Config{}, nil), open(t, connector.RoleConsumer, Config{Mode: mode}, nil)
		for i := range 30 {
			n := 1 + rng.IntN(12)
			theirs, hold := p.finish(rng, byte(i), n)
			m, err := d.s.Match(t.Context(), []connector.Query{
				{Request: "r", Tokens: tokens(n), Keys: keys(byte(i), n-1), Ticket: hold.Ticket},
				{Request: "other", Tokens: tokens(n), Keys: keys(byte(i)+100, n-1), Ticket: hold.Ticket},
				{Request: "none", Tokens: tokens(n), Keys: keys(byte(i), n-1)},
			})
			require.NoError(t, err)
			require.Equal(t, connector.Match{Tokens: tokens(n), Async: true}, m[0])
			require.Zero(t, m[2])
			if n > 1 {
				require.Zero(t, m[1], "the ticket of another prompt")
			}
			ours, err := d.load(rng, byte(i), n, hold.Ticket)
			require.NoError(t, err)
			require.Equal(t, p.bytes(theirs), d.bytes(ours))
			require.Equal(t, []connector.HoldID{hold.ID}, p.consumed())
		}
	})
}

// TestRegistersInTheBackground: loads, and the questions of consumers, wait until the caches of both ends are registered.
func TestRegistersInTheBackground(t *testing.T) {
	eachMode(t, func(t *testing.T, mode string) {
		libDir(t)
		rng := rand.New(rand.NewPCG(5, 6))
		late := func(env *connector.Env) { env.Engine = unregistered }
		p, d := open(t, connector.RoleProducer, Config{}, late), open(t, connector.RoleConsumer, Config{Mode: mode}, late)
		theirs, hold := p.finish(rng, 1, 3)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, d.w.Load(ended, &connector.Transfer{Request: "r", Ticket: hold.Ticket}, d.kv), context.Canceled)
		type loaded struct {
			blocks []connector.Block
			err    error
		}
		done := make(chan loaded, 1)
		go func() {
			ours, err := d.load(rng, 1, 3, hold.Ticket)
			done <- loaded{ours, err}
		}()
		d.register()
		p.register()
		got := <-done
		require.NoError(t, got.err)
		require.Equal(t, p.bytes(theirs), d.bytes(got.blocks))
		require.Equal(t, []connector.HoldID{hold.ID}, p.consumed())
	})
}

// TestRefused: tickets that are good for nothing cost an error that says why, and no block.
func TestRefused(t *testing.T) { eachMode(t, testRefused) }

func testRefused(t *testing.T, mode string) {
	rng := rand.New(rand.NewPCG(3, 4))
	p, d := open(t, connector.RoleProducer, Config{}, nil), open(t, connector.RoleConsumer, Config{Mode: mode}, nil)
	other := open(t, connector.RoleConsumer, Config{Mode: mode}, func(e *connector.Env) { e.Shape[5]++ })
	stranger := open(t, connector.RoleConsumer, Config{Mode: mode}, func(e *connector.Env) { e.Model[5]++ })
	ticketOf := func() (t ticket, raw []byte) {
		_, h := p.finish(rng, 1, 3)
		require.NoError(p, json.Unmarshal(h.Ticket, &t))
		return t, h.Ticket
	}
	changed := func(change func(*ticket)) []byte {
		x, _ := ticketOf()
		change(&x)
		data, err := x.encode()
		require.NoError(t, err)
		return data
	}
	once, used := ticketOf()
	_, err := d.load(rng, 1, 3, used)
	require.NoError(t, err)
	p.fetched(once.Hold)
	_, good := ticketOf()
	nobody, err := machine.FreePort(t.Context())
	require.NoError(t, err)
	for what, c := range map[string]struct {
		on     *side
		ticket []byte
		is     error
		says   string
	}{
		"shape":       {other, good, connector.ErrIncompatible, "layout, block size"},
		"model":       {stranger, good, connector.ErrIncompatible, "another model"},
		"used":        {d, used, connector.ErrGone, "consumed"},
		"unknown":     {d, changed(func(t *ticket) { t.Hold += 1000 }), connector.ErrGone, "never was"},
		"secret":      {d, changed(func(t *ticket) { t.Secret[0]++ }), connector.ErrGone, "another secret"},
		"no producer": {d, changed(func(t *ticket) { t.Address = net.JoinHostPort("127.0.0.1", nobody) }), connector.ErrGone, "refused"},
		"elsewhere":   {d, changed(func(t *ticket) { t.Address = "192.0.2.1:1" }), connector.ErrGone, "key_file"},
		"no address":  {d, changed(func(t *ticket) { t.Address = "x" }), connector.ErrGone, "not a ticket"},
		"version":     {d, changed(func(t *ticket) { t.Version++ }), connector.ErrGone, "not a ticket"},
		"garbage":     {d, []byte("x"), connector.ErrGone, "not a ticket"},
	} {
		_, err := c.on.load(rng, 1, 3, c.ticket)
		require.ErrorIs(t, err, c.is, what)
		require.ErrorContains(t, err, c.says, what)
	}
	blocks, err := d.load(rng, 2, 3, good) // the keys of another prompt
	var some *connector.BlockError
	require.ErrorAs(t, err, &some)
	require.NotEmpty(t, some.Blocks)
	require.Subset(t, ids(blocks), some.Blocks)
}

func ids(blocks []connector.Block) (out []connector.BlockID) {
	for _, b := range blocks {
		out = append(out, b.ID)
	}
	return out
}

// TestHoldsExpire: a hold is there for its lease and no longer, and is not reported as consumed then.
func TestHoldsExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHolds(1, time.Second, newTally())
		id, secret := h.add(connector.Ended{Tokens: 4})
		<-time.After(time.Second - 1)
		_, err := h.find(id, secret)
		require.NoError(t, err)
		<-time.After(1)
		_, err = h.find(id, secret)
		require.ErrorIs(t, err, connector.ErrGone)
		require.ErrorContains(t, h.done(&question{Hold: id, Secret: secret}, h.now()), "never was")
		require.Empty(t, h.take())
	})
}

// TestHoldsOfRanks: a hold is over when every rank has read it, and no rank counts twice.
func TestHoldsOfRanks(t *testing.T) {
	h := newHolds(2, time.Hour, newTally())
	id, secret := h.add(connector.Ended{})
	require.NoError(t, h.done(&question{Hold: id, Secret: secret, Rank: 1}, h.now()))
	require.NoError(t, h.done(&question{Hold: id, Secret: secret, Rank: 1}, h.now()))
	require.Empty(t, h.take())
	require.NoError(t, h.done(&question{Hold: id, Secret: secret}, h.now()))
	require.Equal(t, []connector.HoldID{id}, h.take())
	require.ErrorIs(t, h.done(&question{Hold: id, Secret: secret}, h.now()), connector.ErrGone)
}

// TestSettle: what the config leaves out comes from vLLM's environment, and what is unsafe is refused.
func TestSettle(t *testing.T) {
	env := func(pairs ...string) func(string) string {
		return func(k string) string {
			for i := 0; i < len(pairs); i += 2 {
				if pairs[i] == k {
					return pairs[i+1]
				}
			}
			return ""
		}
	}
	c, err := Config{}.settle(env())
	require.NoError(t, err)
	require.Equal(t, Config{Host: "127.0.0.1", NetDevices: "lo", Mode: "auto", LeaseMS: 30000, Backends: []string{"UCX"}}, c)
	c, err = Config{}.settle(env(EnvHost, "127.0.0.2", EnvPort, "5600"))
	require.NoError(t, err)
	require.Equal(t, "127.0.0.2", c.Host)
	require.Equal(t, 5600, c.Port)
	c, err = Config{Host: "localhost", Port: 7}.settle(env(EnvHost, "127.0.0.2", EnvPort, "5600"))
	require.NoError(t, err)
	require.Equal(t, "localhost:7", net.JoinHostPort(c.Host, "7"))
	require.Equal(t, 7, c.Port)
	_, err = Config{Host: "0.0.0.0"}.settle(env())
	require.ErrorContains(t, err, "key_file")
	_, err = Config{UCXTCP: "yes"}.settle(env())
	require.ErrorContains(t, err, "ucx_tcp")
	_, err = Config{Mode: "shove"}.settle(env())
	require.ErrorContains(t, err, "mode")
	_, err = Config{}.settle(env(EnvPort, "many"))
	require.ErrorContains(t, err, EnvPort)
}

// TestKeyFile: with a key both ends speak TLS, and who has another key is not answered.
func TestKeyFile(t *testing.T) { eachMode(t, testKeyFile) }

func testKeyFile(t *testing.T, mode string) {
	libDir(t)
	key := func(name, content string) string {
		path := filepath.Join(t.TempDir(), name)
		require.NoError(t, os.WriteFile(path, []byte(strings.Repeat(content, 32)), 0o600))
		return path
	}
	a, b := key("a", "a"), key("b", "b")
	rng := rand.New(rand.NewPCG(5, 6))
	p := open(t, connector.RoleProducer, Config{KeyFile: a}, nil)
	friend, stranger := open(t, connector.RoleConsumer, Config{Mode: mode, KeyFile: a}, nil), open(t, connector.RoleConsumer, Config{Mode: mode, KeyFile: b}, nil)
	theirs, hold := p.finish(rng, 1, 4)
	_, err := stranger.load(rng, 1, 4, hold.Ticket)
	require.ErrorIs(t, err, connector.ErrGone)
	ours, err := friend.load(rng, 1, 4, hold.Ticket)
	require.NoError(t, err)
	require.Equal(t, p.bytes(theirs), friend.bytes(ours))
	require.NoError(t, os.Chmod(a, 0o644))
	_, err = peerkey.TLS(a, nil)
	require.ErrorContains(t, err, "only its owner")
}

// TestNextLife: a producer that starts again at the same port knows nothing about the tickets of its former life,
// and a consumer continues with it.
func TestNextLife(t *testing.T) { eachMode(t, testNextLife) }

func testNextLife(t *testing.T, mode string) {
	free, err := machine.FreePort(t.Context())
	require.NoError(t, err)
	port, err := strconv.Atoi(free)
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(10, 11))
	d := open(t, connector.RoleConsumer, Config{Mode: mode}, nil)
	var former []byte
	for life := range 3 {
		t.Run("life", func(t *testing.T) {
			p := open(t, connector.RoleProducer, Config{Port: port}, func(e *connector.Env) { e.Epoch = uint64(life) })
			theirs, hold := p.finish(rng, 1, 4) // the number that a hold of the former life had
			if former != nil {
				_, err := d.load(rng, 1, 4, former)
				require.ErrorIs(t, err, connector.ErrGone)
				require.ErrorContains(t, err, "another secret")
			}
			ours, err := d.load(rng, 1, 4, hold.Ticket)
			require.NoError(t, err)
			require.Equal(t, p.bytes(theirs), d.bytes(ours))
			_, kept := p.finish(rng, 1, 4)
			former = bytes.Replace(kept.Ticket, []byte(`"hold":2`), []byte(`"hold":1`), 1)
			require.NotEqual(t, kept.Ticket, former)
		})
	}
	_, err = d.load(rng, 1, 4, former)
	require.ErrorIs(t, err, connector.ErrGone, "nobody listens")
}

// TestBackends: those that can start here are used, others are named in the log with what the library has; where
// none starts that reaches another engine, that is an error.
func TestBackends(t *testing.T) {
	for _, list := range [][]string{{"GDS_MT", "NONE"}, {"NONE", "POSIX"}} {
		n, err := Open(t.Context(), testEnv(connector.RoleConsumer, 1), Config{LibDir: libDir(t), Backends: list})
		require.NoError(t, err)
		_, err = n.Worker(t.Context(), testEnv(connector.RoleConsumer, 1), func() error { return nil })
		require.ErrorIs(t, err, connector.ErrIncompatible)
		require.ErrorContains(t, err, "backends[0]")
		require.ErrorContains(t, err, "NONE")
		require.ErrorContains(t, err, "UCX")
		require.NoError(t, n.Close())
	}
	p := open(t, connector.RoleProducer, Config{Backends: []string{"UCX", "POSIX"}}, nil)
	require.NotNil(t, p.w)
	for i, list := range [][]string{{"UCX", "GDS"}, {"GDS", "UCX"}} {
		var said bytes.Buffer
		log := func(e *connector.Env) { e.Log = slog.New(slog.NewTextHandler(&said, nil)) }
		rng := rand.New(rand.NewPCG(14, uint64(i)))
		p, d := open(t, connector.RoleProducer, Config{Backends: list}, log), open(t, connector.RoleConsumer, Config{Backends: list}, nil)
		require.Contains(t, said.String(), fmt.Sprintf("level=WARN msg=\"a backend does not start and is not used\" rank=0 error=\"backends[%d]: GDS needs an NVIDIA GPU", 1-i))
		theirs, hold := p.finish(rng, 1, 4)
		ours, err := d.load(rng, 1, 4, hold.Ticket)
		require.NoError(t, err)
		require.Equal(t, p.bytes(theirs), d.bytes(ours))
	}
}

// TestWithoutLibrary: the error says what is missing and how to mend it.
func TestWithoutLibrary(t *testing.T) {
	_, err := Open(t.Context(), testEnv(connector.RoleConsumer, 1), Config{LibDir: t.TempDir()})
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "make deps")
}

// TestOwnTicket: an engine may fetch from itself.
func TestOwnTicket(t *testing.T) {
	rng := rand.New(rand.NewPCG(12, 13))
	b := open(t, connector.RoleBoth, Config{}, nil)
	for range 5 {
		theirs, hold := b.finish(rng, 1, 4)
		want := b.bytes(theirs)
		taken := map[connector.BlockID]bool{}
		for _, x := range theirs {
			taken[x.ID] = true
		}
		var ours []connector.Block
		for overlap := true; overlap; {
			overlap = false
			ours = run(rng, 1, 4)
			for _, x := range ours {
				overlap = overlap || taken[x.ID]
			}
		}
		require.NoError(t, b.w.Load(t.Context(), &connector.Transfer{Request: "r", Tokens: tokens(4), Blocks: ours, Ticket: hold.Ticket}, b.kv))
		require.Equal(t, want, b.bytes(ours))
		require.Equal(t, []connector.HoldID{hold.ID}, b.consumed())
	}
}
