package plugin

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
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
	require.EqualError(t, err, config.Err.Error()+`: kv_connector: no plugin is called "MooncakeConnector"; there are MultiConnector, kvport-one, kvport-two (looked in `+dir+
		"); `kvport plugins list` asks the files which connectors they are")
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

	w.Connector, w.AskAll = "MooncakeConnector", true
	_, err = Find(t.Context(), w)
	require.ErrorContains(t, err, "there are FirstConnector, MultiConnector, SecondConnector (looked in "+dir+")")
	require.True(t, one(), "an operator's command asks all")
}

// A text is found wherever it is in a file.
func TestHasText(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kvport-large")
	const name = "SomeConnector"
	for _, at := range []int{0, 1, 1<<20 - 1, 1 << 20, 1<<20 + 5, 1<<20 + len(name), 2<<20 - 3, 3<<20 - len(name)} {
		data := bytes.Repeat([]byte("S"), 3<<20)
		copy(data[at:], name)
		require.NoError(t, os.WriteFile(path, data, 0o600))
		require.True(t, hasText(path, name), "at %d", at)
		require.False(t, hasText(path, name+"!"), "at %d", at)
	}
	require.False(t, hasText(path, ""))
	require.False(t, hasText(filepath.Dir(path), name))
}

// A plugin that others can change is not run unless its content is pinned.
func TestOthersCanChangeThePlugin(t *testing.T) {
	const nobody = 65534
	mode := func(dirMode, fileMode os.FileMode) func(string, string) error {
		return func(dir, file string) error { return errors.Join(os.Chmod(file, fileMode), os.Chmod(dir, dirMode)) }
	}
	type change struct {
		do   func(dir, file string) error
		want string // in the error; empty: it is run
	}
	changes := map[string]change{
		"ours":                    {mode(0o755, 0o755), ""},
		"of our own group":        {mode(0o775, 0o775), ""},
		"in a sticky folder":      {mode(0o777|os.ModeSticky, 0o755), ""},
		"every user, file":        {mode(0o755, 0o757), "can be changed by every user (mode 0757)"},
		"every user, folder":      {mode(0o777, 0o755), "can be changed by every user (mode 0777)"},
		"every user, both rights": {mode(0o777|os.ModeSticky, 0o777), "can be changed by every user (mode 0777)"},
	}
	if os.Getuid() == 0 {
		changes["another owner, file"] = change{func(_, file string) error { return os.Chown(file, nobody, 0) }, "its owner, user 65534"}
		changes["another owner, folder"] = change{func(dir, _ string) error { return os.Chown(dir, nobody, 0) }, "its owner, user 65534"}
		changes["another group"] = change{func(_, file string) error { return errors.Join(os.Chown(file, 0, nobody), os.Chmod(file, 0o775)) }, "group 65534"}
	} else {
		t.Log("other owners are not tried: only the administrator can give a file away")
	}
	for name, c := range changes {
		dir := t.TempDir()
		path := filepath.Join(dir, "kvport-some")
		ran := answering(t, path, "SomeConnector")
		require.NoError(t, c.do(dir, path), name)
		link := filepath.Join(t.TempDir(), "kvport-some")
		require.NoError(t, os.Symlink(path, link))
		w := &Wanted{Connector: "SomeConnector", Paths: []string{dir}}
		for way, w := range map[string]*Wanted{"path": w, "link": {Connector: "SomeConnector", Paths: []string{filepath.Dir(link)}}, "module": {Connector: "SomeConnector", Module: path}} {
			p, _, err := Resolve(t.Context(), w)
			if c.want == "" {
				require.NoError(t, err, "%s by %s", name, way)
				require.NoError(t, p.Close())
				continue
			}
			require.ErrorIs(t, err, config.Err, "%s by %s", name, way)
			require.ErrorContains(t, err, c.want, "%s by %s", name, way)
			require.ErrorContains(t, err, "kvport.plugin_sha256")
			require.False(t, ran(), "%s by %s: it was run", name, way)
		}
		if c.want == "" {
			continue
		}
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		w.SHA256 = fmt.Sprintf("%x", sha256.Sum256(data))
		_, _, err = Resolve(t.Context(), w)
		require.ErrorIs(t, err, config.Err, "a script cannot be pinned")
		require.NotContains(t, err.Error(), "can be changed", "%s, pinned", name)
	}
}
