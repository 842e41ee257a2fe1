package plugin

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/host/internal/config"
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

// answering makes a plugin that has a manifest and nothing else, and says whether it was run.
func answering(t *testing.T, path, name string) (ran func() bool) {
	t.Helper()
	script := fmt.Sprintf("#!/bin/sh\n: > '%s.ran'\necho '{\"name\":%q,\"protocol_versions\":[1]}'\n", path, name)
	require.NoError(t, os.WriteFile(path, []byte(script), 0o755))
	return func() bool {
		_, err := os.Stat(path + ".ran")
		return err == nil
	}
}

// An engine runs no file for a name that is nowhere in it, and says what there is all the same.
func TestUnknownNameRunsNothing(t *testing.T) {
	dir := t.TempDir()
	one := answering(t, filepath.Join(dir, "kvport-one"), "FirstConnector")
	two := answering(t, filepath.Join(dir, "kvport-two"), "SecondConnector")
	w := &Wanted{Connector: "MooncakeConnector", Paths: []string{dir}, Composed: []string{"MultiConnector"}}
	_, _, err := Resolve(t.Context(), w)
	require.ErrorIs(t, err, config.Err)
	require.EqualError(t, err, config.Err.Error()+`: kv_connector: no plugin is called "MooncakeConnector"; there are MultiConnector (looked in `+dir+
		"); not asked, since the name is nowhere in them: kvport-one, kvport-two (if one of them is meant, set kv_connector_module_path; `kvport plugins list` asks all)")
	for name, meant := range map[string]string{"OnneConnector": "the connector of kvport-one?", "TwoConector": "the connector of kvport-two?", "MultiConector": `"MultiConnector"?`} {
		w.Connector = name
		_, _, err = Resolve(t.Context(), w)
		require.ErrorContains(t, err, "did you mean "+meant)
	}
	require.False(t, one() || two(), "a plugin was run for a name that it does not have")

	w.Connector = "SecondConnector"
	p, m, err := Resolve(t.Context(), w)
	require.NoError(t, err)
	require.Equal(t, filepath.Join(dir, "kvport-two"), p.Path)
	require.Equal(t, "SecondConnector", m.Name)
	require.NoError(t, p.Close())
	require.False(t, one())
	require.True(t, two())
}

// A file that is called like the connector is the one that is meant: what is wrong with it is the whole error.
func TestBrokenFileOfThatName(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "kvport-disk")
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\nexit 3\n"), 0o755))
	other := answering(t, filepath.Join(dir, "kvport-other"), "OtherConnector")
	w := &Wanted{Connector: "DiskConnector", Paths: []string{dir}}
	_, _, err := Resolve(t.Context(), w)
	require.ErrorIs(t, err, config.Err)
	require.EqualError(t, err, config.Err.Error()+": "+path+" --manifest: it is no kvport plugin, or a broken one: exit status 3")
	require.False(t, other())

	answering(t, filepath.Join(dir, "kvport-spare"), "DiskConnector")
	p, _, err := Resolve(t.Context(), w)
	require.NoError(t, err, "another file answers to the name")
	require.NoError(t, p.Close())
}

// A file is called like a connector whatever comes behind the word.
func TestNamedAfter(t *testing.T) {
	for name, file := range map[string]string{
		"DiskConnector": "kvport-disk", "diskconnector": "kvport-diskconnector", "DiskConnectorV1": "kvport-disk", "Disk": "kvport-disk",
	} {
		require.True(t, namedAfter("/x/"+file, name), name)
	}
	for name, file := range map[string]string{"DiskConnector": "kvport-disks", "Connector": "kvport-", "DiskConnectorV1": "kvport-diskconnector"} {
		require.False(t, namedAfter("/x/"+file, name), name)
	}
}

// A file that cannot be read, as programs need not be, is asked; and so is one whose folder does not answer.
func TestUnreadableIsAsked(t *testing.T) {
	dir := t.TempDir()
	missing, lacks := filepath.Join(dir, "kvport-missing"), filepath.Join(dir, "kvport-lacks")
	require.NoError(t, os.WriteFile(lacks, []byte("Other"), 0o755))
	require.Equal(t, []string{missing}, having(t.Context(), []string{missing, lacks}, "SomeConnector", time.Minute, hasText))
	synctest.Test(t, func(t *testing.T) {
		hung := make(chan struct{})
		defer close(hung)
		has := func(_ context.Context, path, _ string) bool {
			if path == "hangs" {
				<-hung
			}
			return path == "has"
		}
		began := time.Now()
		require.Equal(t, []string{"hangs", "has"}, having(t.Context(), []string{"hangs", "lacks", "has"}, "SomeConnector", 5*time.Second, has))
		require.Equal(t, 5*time.Second, time.Since(began))
	})
}

// A text is found wherever it is in a file.
func TestHasText(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kvport-large")
	const name = "SomeConnector"
	for _, at := range []int{0, 1, 1<<20 - 1, 1 << 20, 1<<20 + 5, 1<<20 + len(name), 2<<20 - 3, 3<<20 - len(name)} {
		data := bytes.Repeat([]byte("S"), 3<<20)
		copy(data[at:], name)
		require.NoError(t, os.WriteFile(path, data, 0o600))
		require.True(t, hasText(t.Context(), path, name), "at %d", at)
		require.False(t, hasText(t.Context(), path, name+"!"), "at %d", at)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.True(t, hasText(ended, path, name+"!"), "nobody knows")
}
