package host

import (
	"context"
	"encoding/hex"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/ticket"
)

// A plugin is given the link key of its connector, alone and wherever it is in a composite.
func TestLinkKeys(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(file, []byte(strings.Repeat("k", 32)), 0o600))
	ring, err := keyring.Open(file)
	require.NoError(t, err)
	var env connector.Env
	require.NoError(t, (&pluginKeys{ring: ring}).give(&env, "TestConnector", &connector.Info{Scope: connector.ScopeNode}))
	require.Nil(t, env.RouterKey)
	want := hex.EncodeToString(env.LinkKey) + " "

	dir, settings := dirs(t, 3), map[string]any{"ticket_key_file": file}
	for _, d := range dir {
		require.NoError(t, os.WriteFile(filepath.Join(d, "tell-keys"), nil, 0o600))
	}
	newRig(t, rigOptions{dir: dir[0], settings: settings})
	multiRig(t, 1, settings, kid(map[string]any{"dir": dir[1]}, nil, nil), kid(map[string]any{"dir": dir[2]}, nil, nil))
	for _, d := range dir {
		told, err := os.ReadFile(filepath.Join(d, "tell-keys"))
		require.NoError(t, err)
		require.Equal(t, want, string(told))
	}
}

// The router's keys go to connectors that hand blocks over by tickets, and no connector has another's key. Each has those of
// the whole ring, in its order, as it is when a side opens.
func TestWhoGetsWhichKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ring")
	require.NoError(t, keyring.Create(path, keyring.New(time.Unix(1e9, 0))))
	two, err := keyring.Change(path, func(r *keyring.Ring) (*keyring.Ring, error) { return r.Rotate(time.Unix(1e9, 0)) })
	require.NoError(t, err)
	all := &pluginKeys{ring: keyring.Fixed(two)}
	holds := &connector.Info{Scope: connector.ScopeEngine, Capabilities: connector.CanHold}
	var a, b, env connector.Env
	require.NoError(t, all.give(&a, "A", holds))
	require.Len(t, a.LinkKeys(), 2)
	require.Len(t, a.RouterKeys(), 2)
	for i, key := range two.Keys {
		root, err := ticket.LinkRoot(key.Secret)
		require.NoError(t, err)
		link, err := ticket.LinkKey(root, "A")
		require.NoError(t, err)
		router, err := ticket.RouterKey(key.Secret)
		require.NoError(t, err)
		require.Equal(t, []connector.Secret{link, router}, []connector.Secret{a.LinkKeys()[i], a.RouterKeys()[i]})
	}
	require.NoError(t, all.give(&b, "B", &connector.Info{Scope: connector.ScopeShared, Capabilities: connector.CanHold}))
	require.Nil(t, b.RouterKeys())
	require.NotEqual(t, []byte(a.LinkKey), []byte(b.LinkKey))
	require.NoError(t, all.give(&env, "A", &connector.Info{Scope: connector.ScopeEngine}))
	require.Nil(t, env.RouterKeys())
	below := &pluginKeys{links: a.LinkKeys(), routers: a.RouterKeys()}
	require.NoError(t, below.give(&env, "C", holds))
	require.Len(t, env.LinkKeys(), 2)
	require.Equal(t, a.RouterKeys(), env.RouterKeys())
	require.NoError(t, new(pluginKeys).give(&env, "A", holds))
	require.Nil(t, env.LinkKeys())
	require.Nil(t, env.RouterKeys(), "a composite whose host gave it nothing has nothing to give")
}

// A ring that changes while the host runs is what its next tickets are signed and verified with, and what the plugin has
// after its next start.
func TestKeysChangeMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "ring")
		require.NoError(t, keyring.Create(path, keyring.New(time.Now())))
		keys, err := (&Settings{TicketKeyFile: path}).keys(nil)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stale := make(chan bool, 1)
		go keys.Watch(ctx, slog.New(slog.DiscardHandler), func(is bool) { stale <- is })
		eng := Engine{ID: "e", Model: connector.NewFingerprint("m")}
		signer := newTicketSigner(&Settings{}, eng, 1, keys)
		first, err := signer.seal(&ticket.Envelope{Consumers: 9})
		require.NoError(t, err)
		open := func(data []byte) string {
			_, reason, err := signer.verify(data, "r")
			require.Equal(t, reason == "", err == nil)
			return reason
		}
		var was string
		steps := []func(*keyring.Ring) (*keyring.Ring, error){
			func(r *keyring.Ring) (*keyring.Ring, error) { was = r.First().ID; return r.Rotate(time.Now()) },
			func(r *keyring.Ring) (*keyring.Ring, error) { return r.Promote(r.Keys[1].ID) },
			func(r *keyring.Ring) (*keyring.Ring, error) { return r.Drop(r.Keys[1].ID) },
		}
		for i, step := range steps {
			ring, err := keyring.Change(path, step)
			require.NoError(t, err)
			<-time.After(2 * keyring.Every)
			require.Equal(t, ring.IDs(), keys.Ring().IDs())
			again, err := signer.seal(&ticket.Envelope{Consumers: 9})
			require.NoError(t, err)
			require.Empty(t, open(again))
			require.Equal(t, i == 2, open(first) == "foreign_key")
		}
		_, _, err = signer.verify(first, "r")
		require.ErrorContains(t, err, was)
		require.Equal(t, "foreign_key; key="+was, new(Host).mismatch(nil, "foreign_key", err))

		require.NoError(t, os.Chmod(path, 0o644))
		require.True(t, <-stale)
		require.True(t, keys.Stale())
		require.NoError(t, os.Chmod(path, 0o600))
		require.False(t, <-stale)
	})
}
