package peerkey

import (
	"crypto/tls"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// A ring's keys are all accepted, and a file of another form is the key that it was: white space around it is ignored.
func TestTLS(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	load := func(text string) (*tls.Config, error) {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return TLS(path, nil)
	}
	old := strings.Repeat("k", 32)
	keyed, err := load(" " + old + "\n")
	require.NoError(t, err)
	want, err := pipe.KeyTLS([]byte(old))
	require.NoError(t, err)
	require.Equal(t, want.ServerName, keyed.ServerName)

	const one = "e1fbdbbc48b69e95 0102030405060708090a0b0c0d0e0f10\n"
	_, err = load("# kvport key ring v1\n" + one)
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "key_file: line 2: ")
	id := err.Error()[strings.LastIndex(err.Error(), "is ")+3:][:16]
	ring := "# kvport key ring v1\n" + id + one[16:]
	keyed, err = load(ring)
	require.NoError(t, err)
	require.Len(t, keyed.Certificates, 1)
	require.NotEqual(t, want.ServerName, keyed.ServerName)
	_, err = load(ring[len("# kvport key ring v1\n"):])
	require.ErrorContains(t, err, "keys of a ring")

	comments := strings.Repeat("# a comment\n", 1000)
	_, err = load("# kvport key ring v1\n" + comments + id + one[16:])
	require.NoError(t, err, "a ring may be as large here as elsewhere")
	_, err = load(strings.Repeat("k", maxKey+1))
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "at most 4096 bytes")
}
