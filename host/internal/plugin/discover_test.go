package plugin

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A plugin that prints without end takes no more memory than the limit.
func TestLimitedBuffer(t *testing.T) {
	var why error
	b := limitedBuffer{full: func(err error) { why = err }}
	n, err := io.Copy(&b, io.LimitReader(zeros{}, 64<<20))
	require.ErrorIs(t, err, errFlood)
	require.ErrorIs(t, why, errFlood)
	require.EqualValues(t, maxManifest, n)
	require.Equal(t, maxManifest, b.kept.Len())
}

// A manifest has a few seconds, and as long as the config gives a start if that is more. A plugin that could run and
// says nothing has no more than that.
func TestManifestDeadline(t *testing.T) {
	require.Equal(t, manifestWait, (&Wanted{Handshake: time.Second}).wait())
	require.Equal(t, time.Minute, (&Wanted{Handshake: time.Minute}).wait())
	path := filepath.Join(t.TempDir(), "kvport-mute")
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\nexec sleep 3600\n"), 0o755))
	_, err := (&Program{Path: path}).Manifest(t.Context(), 200*time.Millisecond, nil)
	require.EqualError(t, err, path+" --manifest gave no answer within 200ms")
}

// zeros is a reader without an end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// TestExposed: a program is exposed where every user may write it or its folder, unless it is pinned or the folder is sticky.
func TestExposed(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "bin")
	path := filepath.Join(folder, "kvport-x")
	require.NoError(t, os.Mkdir(folder, 0o700))
	require.NoError(t, os.WriteFile(path, []byte("x"), 0o700)) //nolint:gosec // a program
	set := func(of string, mode os.FileMode) { require.NoError(t, os.Chmod(of, mode)) }
	p := &Program{Path: path}
	require.Empty(t, p.Exposed())
	set(folder, 0o777)
	require.Equal(t, folder, p.Exposed())
	set(folder, 0o777|os.ModeSticky)
	require.Empty(t, p.Exposed())
	set(path, 0o702)
	require.Equal(t, path, p.Exposed())
	sum := sha256.Sum256([]byte("x"))
	pinned, err := OpenProgram(path, hex.EncodeToString(sum[:]))
	require.NoError(t, err)
	require.Empty(t, pinned.Exposed())
	require.NoError(t, pinned.Close())
}
