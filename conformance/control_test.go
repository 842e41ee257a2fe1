package conformance

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// A control program gets a case's name, words and values as they are.
func TestControl(t *testing.T) {
	program := filepath.Join(t.TempDir(), "control")
	require.NoError(t, os.WriteFile(program, []byte(`#!/bin/sh
cd "$(dirname "$0")" || exit 1
mkdir -p "$KVPORT_UNIQUE"
case $1 in
list) ls "$KVPORT_UNIQUE" ;;
get) cat "$KVPORT_UNIQUE/$2" ;;
put) cat > "$KVPORT_UNIQUE/$2" ;;
remove) rm "$KVPORT_UNIQUE/$2" ;;
*) exit 2 ;;
esac
`), 0o700))
	newHarness := Controlled(InProcess(connector.Plugin{}, json.RawMessage(`{"url": "@PROXY:127.0.0.1:1@", "bucket": "@UNIQUE@"}`)), program)
	var folders []string
	for range 2 {
		h, err := newHarness()
		require.NoError(t, err)
		c := h.(*inProcess).remoteServer().control
		var config struct{ Bucket string }
		require.NoError(t, json.Unmarshal(h.Config(), &config))
		require.Equal(t, config.Bucket, c.unique)
		folders = append(folders, c.unique)

		names, err := c.names(t.Context())
		require.NoError(t, err)
		require.Empty(t, names)
		value := []byte("\x00\nvalue\n\n")
		require.NoError(t, c.put(t.Context(), "a name", value))
		require.NoError(t, c.put(t.Context(), "b", nil))
		names, err = c.names(t.Context())
		require.NoError(t, err)
		require.Equal(t, []string{"a name", "b"}, names)
		have, err := c.get(t.Context(), "a name")
		require.NoError(t, err)
		require.Equal(t, value, have)
		require.NoError(t, c.remove(t.Context(), "a name"))
		_, err = c.get(t.Context(), "a name")
		require.ErrorContains(t, err, "the control program of the server failed at get a name: exit status 1: ")
		_, err = c.run(t.Context(), nil, "restart")
		require.ErrorIs(t, err, errCannot)
		require.NoError(t, h.Close())
	}
	require.NotEqual(t, folders[0], folders[1])
}

// A control program without a server that it could change is a mistake in the config.
func TestControlNeedsAServer(t *testing.T) {
	_, err := Controlled(InProcess(connector.Plugin{}, json.RawMessage(`{"url": "127.0.0.1:1"}`)), "control")()
	require.ErrorContains(t, err, "@PROXY:HOST:PORT@")
}
