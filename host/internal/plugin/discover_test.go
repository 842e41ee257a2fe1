package plugin

import (
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
