package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
)

// TestForgedValues: values in a server that somebody without the key has made, moved or downgraded are never used, and are
// counted by reason.
func TestForgedValues(t *testing.T) {
	r := rig.New(t)
	r.Tokens = 4
	prompts, want := r.Forgeable(*rig.Seed + 4300)
	r.Forgeries(values(t), prompts, want)
}

// TestRefreshedValues: prefill and decode with a server between them go on after a key was lost, and after an upgrade: the
// producer, which never loads, replaces what it has to compute.
func TestRefreshedValues(t *testing.T) { rig.New(t).Refreshed(values(t)) }

// values are a Medium of values in a server; the keys of each place have a prefix of their own.
func values(t *testing.T) *rig.Medium {
	srv, _ := rig.RemoteServer(t)
	client := srv.Client()
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	return &rig.Medium{
		Head: rig.ValueHead,
		Config: func(role, place, settings string) string {
			extra, err := json.Marshal(map[string]string{"url": "redis://" + srv.Address, "key_prefix": place + ":"})
			require.NoError(t, err)
			return fmt.Sprintf(`{"kv_connector":"RemoteStoreConnector","kv_role":%q,"kv_connector_extra_config":%s,"kvport":%s}`, role, extra, settings)
		},
		Keys: func(place string) []string {
			keys, err := client.Keys(t.Context(), place+":*").Result()
			require.NoError(t, err)
			slices.Sort(keys)
			for i := range keys {
				keys[i] = keys[i][len(place)+1:]
			}
			return keys
		},
		Get: func(place, key string) []byte {
			value, err := client.Get(t.Context(), place+":"+key).Bytes()
			require.NoError(t, err)
			return value
		},
		Set: func(place, key string, value []byte) {
			require.NoError(t, client.Set(t.Context(), place+":"+key, value, 0).Err())
		},
		Whole: rig.WholeValue,
	}
}

// TestServerBeyondThisMachine: an engine whose blocks are on a server that other machines reach does not start without a file of
// keys, says which field and what to do, and starts with one or with digests that have no key.
func TestServerBeyondThisMachine(t *testing.T) {
	r := rig.New(t)
	const url = "rediss://192.0.2.1:6379" // nobody is there (RFC 5737)
	config := func(settings string) string {
		return fmt.Sprintf(`{"kv_connector":"RemoteStoreConnector","kv_role":"kv_both","kv_connector_extra_config":{"url":%q,"timeout_ms":10},"kvport":%s}`, url, settings)
	}
	out := refused(t, config(`{}`))
	for _, text := range []string{"kvport.ticket_key_file is not set", "url has the address 192.0.2.1:6379", "kvport keys init --file FILE", `kvport.digest to "xxh3"`} {
		require.Contains(t, out, text)
	}
	out = refused(t, fmt.Sprintf(`{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":[%s]}}`, config(`{}`)))
	require.Contains(t, out, "connectors[0]")
	require.Contains(t, out, "192.0.2.1:6379")
	ring, _ := r.Ring()
	for _, settings := range []string{fmt.Sprintf(`{"ticket_key_file":%q}`, ring), `{"digest":"xxh3"}`} {
		r.Stop(r.ServeModel("sim", "engine", config(settings)))
	}
}

// refused is what an engine says that ends with exit code 2.
func refused(t *testing.T, config string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), rig.Binary(t), "serve", "--model", "sim", "--port", "0", "--kv-transfer-config", config).CombinedOutput()
	exit, is := errors.AsType[*exec.ExitError](err)
	require.True(t, is, "%v: %s", err, out)
	require.Equal(t, 2, exit.ExitCode(), "%s", out)
	return string(out)
}
