package main

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/lmtest"
	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/testkit"
)

// TestForgedChunks: values in LMCache's cache server that somebody without the key has made, moved or downgraded are never used,
// and are counted by reason. Without LMCache the server is another one that speaks its protocol.
func TestForgedChunks(t *testing.T) {
	r := rig.New(t)
	r.Tokens = 4
	prompts, want := r.Forgeable(*rig.Seed + 4500)
	r.Forgeries(chunks(t), prompts, want)
}

// chunks are a Medium of values in servers; each place has one of its own, and LMCache's is the one that is attacked.
func chunks(t *testing.T) *rig.Medium {
	servers := map[string]*place{}
	at := func(name string) *place {
		if servers[name] == nil {
			servers[name] = newPlace(t, name == "victim")
		}
		return servers[name]
	}
	return &rig.Medium{
		Head: rig.ValueHead,
		Config: func(role, place, settings string) string {
			url := at(place).seen.Address
			if role == "kv_consumer" {
				url = at(place).address
			}
			return fmt.Sprintf(`{"kv_connector":"LMCacheConnectorV1","kv_role":%q,"kv_connector_extra_config":{"lmcache.chunk_size":16,"lmcache.local_cpu":false,"lmcache.remote_url":"lm://%s"},"kvport":%s}`,
				role, url, settings)
		},
		Keys: func(place string) []string { return at(place).seen.Keys() },
		Get: func(place, key string) []byte {
			value, err := at(place).client.Get(key)
			require.NoError(t, err)
			return value
		},
		Set:   func(place, key string, value []byte) { require.NoError(t, at(place).client.Put(key, value)) },
		Whole: rig.WholeValue,
	}
}

// place is a server: LMCache's own, behind one that sees which keys are stored, or that one alone.
type place struct {
	address string
	seen    *lmtest.Server
	client  *lmtest.Client
}

func newPlace(t *testing.T, victim bool) *place {
	t.Helper()
	p := &place{}
	var err error
	if victim {
		p.address = realServer(t)
	}
	p.seen, err = lmtest.Start(t.Context(), p.address)
	require.NoError(t, err)
	if p.address == "" {
		p.address = p.seen.Address
	}
	p.client, err = lmtest.Dial(t.Context(), p.address)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, errors.Join(p.client.Close(), p.seen.Close())) })
	return p
}

// realServer starts LMCache's own server, and is empty where this machine has none.
func realServer(t *testing.T) (address string) {
	t.Helper()
	server, err := lmtest.StartReal(t.Context(), testkit.Root(t))
	if errors.Is(err, lmtest.ErrNoLMCache) {
		t.Logf("not LMCache's own server: %v", err)
		return ""
	}
	require.NoError(t, err)
	t.Cleanup(func() { server.Close() })
	return server.Address
}
