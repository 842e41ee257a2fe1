package host

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/verify/testkit"
)

// newRing makes a file with one key.
func newRing(t *testing.T) (path, id string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "ring")
	ring := keyring.New(time.Unix(1e9, 0))
	require.NoError(t, keyring.Create(path, ring))
	return path, ring.First().ID
}

// misses are what kvport_digest_misses_total counts for a reason.
func (r *rig) misses(reason string) float64 {
	r.t.Helper()
	families, err := r.metrics.Gather()
	require.NoError(r.t, err)
	for _, f := range families {
		if f.GetName() != "kvport_digest_misses_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetValue() == reason {
					return m.GetCounter().GetValue()
				}
			}
		}
	}
	require.FailNow(r.t, "no such series", reason)
	return 0
}

// What another key or edition has made is a miss: it is counted by reason, the log names it once with the remedy, nobody
// is blamed, and the next save replaces it.
func TestDigestMisses(t *testing.T) {
	theirs, theirID := newRing(t)
	ours, ourID := newRing(t)
	for _, c := range []struct {
		name   string
		reason string
		saver  map[string]any
		loader map[string]any
		want   []string
	}{
		{
			"another key", "foreign_key",
			map[string]any{"ticket_key_file": theirs},
			map[string]any{"ticket_key_file": ours},
			[]string{"stored with a key that is not in the ring", "blocks=3", "keys_seen=[" + theirID + "]", "ring=[" + ourID + "]", "file=" + ours, "kvport keys list"},
		},
		{
			"downgraded", "edition",
			map[string]any{"digest": "xxh3"},
			map[string]any{},
			[]string{"stored by another version or with another kvport.digest", "blocks=3", `seen="[edition 1]"`, "edition=2"},
		},
		{
			"upgraded", "edition",
			map[string]any{},
			map[string]any{"digest": "xxh3"},
			[]string{"stored by another version or with another kvport.digest", `seen="[edition 2]"`, "edition=1"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			saver := newRig(t, rigOptions{dir: dir, settings: c.saver})
			ks := keys(1, 3)
			saver.save("a", ks, 0)
			require.Empty(t, saver.load("b", ks, 10).Failed)

			var log testkit.Log
			loader := newRig(t, rigOptions{dir: dir, settings: c.loader, log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))})
			require.Equal(t, 48, loader.match(query("c", ks), nil).Tokens)
			e := loader.load("c", ks, 20)
			require.Equal(t, []connector.BlockID{20, 21, 22}, e.Failed)
			require.NotErrorIs(t, e.Err, connector.ErrCorrupt)
			require.True(t, e.Replace)
			require.InDelta(t, 3, loader.misses(c.reason), 0)
			require.InDelta(t, 3, loader.metric("kvport_digest_misses_total"), 0, "of no other reason")
			for _, name := range []string{"kvport_integrity_failures_total", "kvport_plugin_violations_total", "kvport_plugin_restarts_total", "kvport_plugin_breaker_open"} {
				require.Zero(t, loader.metric(name), name)
			}
			require.Zero(t, loader.match(query("d", ks), nil).Tokens, "nothing is offered until it is saved again")
			for _, want := range c.want {
				require.Contains(t, log.String(), want)
			}
			require.Equal(t, 1, strings.Count(log.String(), "they count as misses"))
			require.NotContains(t, log.String(), "damaged blocks")
			require.NotContains(t, log.String(), "transfer failed")

			loader.save("c", ks, 20)
			require.Equal(t, 48, loader.match(query("e", ks), nil).Tokens)
			require.Empty(t, loader.load("e", ks, 30).Failed)
			require.True(t, loader.same(blocksOf(ks, 30)))
		})
	}
}

// A connector that says that another version has stored a block is believed.
func TestOutdatedBlocks(t *testing.T) {
	var log testkit.Log
	r := newRig(t, rigOptions{
		extra: map[string]any{"fault": "outdated", "at": 1, "once": true},
		log:   slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	ks := keys(1, 3)
	r.save("a", ks, 0)
	e := r.load("b", ks, 10)
	require.Equal(t, []connector.BlockID{10, 11, 12}, e.Failed)
	require.ErrorIs(t, e.Err, connector.ErrOutdated)
	require.InDelta(t, 3, r.misses("edition"), 0)
	require.Contains(t, log.String(), `seen="[another length]"`)
	require.Contains(t, log.String(), "blocks=3", "also if the connector names none")
	require.True(t, e.Replace)
	require.NotContains(t, log.String(), "transfer failed")
	require.Zero(t, r.metric("kvport_integrity_failures_total"))
	r.save("b", ks, 10)
	require.Empty(t, r.load("c", ks, 20).Failed)
}

// Keys that are rotated while the host runs: new saves have the new first key, blocks of the old one load until it is dropped.
func TestDigestsRotate(t *testing.T) {
	path, old := newRing(t)
	dir := t.TempDir()
	r := newRig(t, rigOptions{dir: dir, settings: map[string]any{"ticket_key_file": path}})
	before, after := keys(1, 2), keys(2, 2)
	r.save("a", before, 0)
	change := func(edit func(*keyring.Ring) (*keyring.Ring, error)) *keyring.Ring {
		ring, err := keyring.Change(path, edit)
		require.NoError(t, err)
		require.Eventually(t, func() bool { return r.Fit().TicketKey == ring.First().ID && len(r.Fit().TicketKeys) == len(ring.Keys) }, time.Minute, time.Millisecond)
		return ring
	}
	change(func(ring *keyring.Ring) (*keyring.Ring, error) { return ring.Rotate(time.Unix(2e9, 0)) })
	change(func(ring *keyring.Ring) (*keyring.Ring, error) { return ring.Promote(ring.Keys[1].ID) })
	r.save("b", after, 4)
	require.Empty(t, r.load("c", before, 10).Failed)
	require.Empty(t, r.load("d", after, 12).Failed)
	change(func(ring *keyring.Ring) (*keyring.Ring, error) { return ring.Drop(old) })
	require.Len(t, r.load("e", before, 14).Failed, 2)
	require.Empty(t, r.load("f", after, 16).Failed)
	require.InDelta(t, 2, r.misses("foreign_key"), 0)
}

// A tenant's blocks are forged by nobody who has only the ring.
func TestTenantDigests(t *testing.T) {
	dir, secret := t.TempDir(), filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(secret, []byte("s"), 0o600))
	tenant := newRig(t, rigOptions{dir: dir, settings: map[string]any{"tenant_secret_file": secret}})
	other := newRig(t, rigOptions{dir: dir})
	ks := keys(1, 2)
	other.save("a", ks, 0)
	e := tenant.load("b", ks, 10)
	require.ErrorIs(t, e.Err, connector.ErrCorrupt)
	require.Len(t, e.Failed, 2)
	tenant.save("b", ks, 10)
	require.Empty(t, tenant.load("c", ks, 20).Failed)
}

// A store that machines share requires a key that all of them can have, or digests without one.
func TestSharedStoreNeedsKey(t *testing.T) {
	info := &connector.Info{Name: "X", BeyondMachine: "url has the address 10.0.0.1:6379"}
	err := (&Settings{Digest: DigestKeyed}).CheckShared(info)
	require.ErrorIs(t, err, ErrConfig)
	for _, want := range []string{"kvport.ticket_key_file", "X", "10.0.0.1:6379", "kvport keys init --file FILE", `"xxh3"`} {
		require.ErrorContains(t, err, want)
	}
	require.NoError(t, (&Settings{Digest: DigestKeyed, TicketKeyFile: "f"}).CheckShared(info))
	require.NoError(t, (&Settings{Digest: DigestXXH3}).CheckShared(info))
	require.NoError(t, (&Settings{Digest: DigestKeyed}).CheckShared(&connector.Info{Name: "X"}))
}

// The engine does not start with such a store, alone or in a MultiConnector, and Inspect says so, too.
func TestSharedStoreIsRefused(t *testing.T) {
	o := rigOptions{extra: map[string]any{"beyond": "url has the address 10.0.0.1:6379"}}
	cfg, eng, opts := o.build(t)
	_, err := Open(t.Context(), cfg, eng, opts)
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "kvport.ticket_key_file is not set")
	_, err = Inspect(t.Context(), cfg, opts)
	require.ErrorContains(t, err, "kvport.ticket_key_file is not set")

	o.settings = map[string]any{"digest": "xxh3"}
	require.Equal(t, DigestXXH3, newRig(t, o).Fit().Digest)
	path, _ := newRing(t)
	o.settings = map[string]any{"ticket_key_file": path}
	require.Equal(t, DigestKeyed, newRig(t, o).Fit().Digest)
}

func TestDigestConfig(t *testing.T) {
	for settings, want := range map[string]string{
		`{"digest": "md5"}`:                              `kvport.digest`,
		`{"digest": "XXH3"}`:                             `kvport.digest`,
		`{"digest": "xxh3", "tenant_secret_file": "/x"}`: "leave out one of them",
	} {
		_, err := ParseConfig(`{"kv_connector": "X", "kv_role": "kv_both", "kvport": ` + settings + `}`)
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorContains(t, err, want)
	}
	c, err := ParseConfig(`{"kv_connector": "X", "kv_role": "kv_both"}`)
	require.NoError(t, err)
	require.Equal(t, DigestKeyed, c.Settings.Digest)
	_, err = ParseConfig(`{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [
		{"kv_connector": "X", "kv_role": "kv_both", "kvport": {"digest": "xxh3"}}]}}`)
	require.ErrorContains(t, err, "digest and peers are the engine's")
}

// An engine that makes the key of this user's engines says once that it can load nothing that a store has from before.
func TestFreshKeyIsNamed(t *testing.T) {
	const text = "the key of this user's engines was made just now"
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	for _, c := range []struct {
		scope string
		lines int
	}{{"engine", 0}, {"node", 1}, {"node", 0}} {
		var log testkit.Log
		o := rigOptions{log: slog.New(slog.NewTextHandler(&log, nil)), extra: map[string]any{"scope": c.scope}}
		if c.lines > 0 { // the first engine of another user
			t.Setenv("XDG_STATE_HOME", t.TempDir())
			t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
		}
		newRig(t, o)
		require.Equal(t, c.lines, strings.Count(log.String(), text))
	}
}

// A key of its own is for an engine that no other one needs: else the engine does not start, and Inspect says the same.
func TestOwnKeyIsForOneEngine(t *testing.T) {
	t.Setenv("HOME", "")
	t.Setenv("XDG_STATE_HOME", "")
	t.Setenv("XDG_RUNTIME_DIR", filepath.Join(os.DevNull, "x"))
	const warning = "this engine has a key of its own"
	for _, c := range []struct {
		scope, role, digest string
		starts              bool
	}{{"engine", "kv_both", "keyed", true}, {"engine", "kv_producer", "keyed", false}, {"engine", "kv_consumer", "keyed", false}, {"node", "kv_both", "keyed", false}, {"node", "kv_both", "xxh3", true}} {
		var log testkit.Log
		o := rigOptions{log: slog.New(slog.NewTextHandler(&log, nil)), role: c.role, extra: map[string]any{"scope": c.scope}, settings: map[string]any{"digest": c.digest}}
		cfg, eng, opts := o.build(t)
		h, err := Open(t.Context(), cfg, eng, opts)
		_, asked := Inspect(t.Context(), cfg, opts)
		if !c.starts {
			for _, err := range []error{err, asked} {
				require.ErrorIs(t, err, ErrConfig)
				require.ErrorContains(t, err, "kvport.ticket_key_file: no folder for the key that this user's engines share", "%+v", c)
			}
			require.NotContains(t, log.String(), warning)
			continue
		}
		require.NoError(t, err)
		require.NoError(t, h.Close(t.Context()))
		require.NoError(t, asked)
		require.Equal(t, 2, strings.Count(log.String(), warning), "one for each of Open and Inspect")
		require.NotContains(t, log.String(), "was made just now")
	}
}
