package router

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/admission"
	"github.com/kvport/kvport/verify/testkit"
)

// jsonFile is a config file of the test's own form: a list of decode instances.
func jsonFile(path string) File {
	return File{Path: path, Read: os.ReadFile, Decode: func(text []byte) (*Settings, error) {
		var list []Instance
		if err := json.Unmarshal(text, &list); err != nil {
			return nil, err
		}
		return &Settings{Instances: list, Limits: Limits{Each: admission.Limits{InFlight: len(list)}}}, nil
	}}
}

// A file counts as it is, whichever way it is written; one that is bad changes nothing and is told once.
func TestConfigFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "route.json")
	write := func(text string) { require.NoError(t, os.WriteFile(path, []byte(text), 0o600)) }
	write(`[{"URL":"http://a:1","Role":"decode"}]`)
	var log testkit.Log
	f := serveRouter(t, Config{File: jsonFile(path), Log: logTo(&log)})
	look := func(times int) (list []string) {
		for range times {
			f.router.look(f.router.file)
		}
		for _, in := range f.router.pool.health().instances {
			list = append(list, in.URL+" "+in.State)
		}
		return list
	}
	require.Equal(t, []string{"http://a:1 up"}, look(0))
	require.Equal(t, 1, f.router.limits.Load().Each.InFlight)

	write(`[{"URL":"http://a:1","Role":"decode","Drain":true},{"URL":"http://b:1","Role":"decode"}]`)
	require.Equal(t, []string{"http://a:1 draining", "http://b:1 up"}, look(1))
	require.Equal(t, 2, f.router.limits.Load().Each.InFlight)
	require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.fileReads.WithLabelValues("ok")))

	before, told := look(0), 0
	for _, bad := range []string{`[{"URL"`, `[{"URL":"b:1","Role":"decode"}]`, `[{"URL":"http://b:1","Role":"x"}]`, `[{"URL":"dns://b","Role":"decode"}]`, `[{"URL":"http://b:1","Role":"decode"},{"URL":"http://B:1/","Role":"decode"}]`} {
		write(bad)
		require.Equal(t, before, look(1))
		require.Equal(t, told, strings.Count(log.String(), `level=ERROR`), "it may not be whole yet")
		require.Equal(t, before, look(4))
		told++
		require.Equal(t, told, strings.Count(log.String(), `level=ERROR`), log.String())
		require.Equal(t, 1.0, testutil.ToFloat64(f.router.metrics.fileBad))
		write(`[{"URL":"http://a:1","Role":"decode","Drain":true},{"URL":"http://b:1","Role":"decode"}]`)
		require.Equal(t, before, look(1))
		require.Zero(t, testutil.ToFloat64(f.router.metrics.fileBad))
	}
	require.Equal(t, 5.0, testutil.ToFloat64(f.router.metrics.fileReads.WithLabelValues("bad")))

	require.NoError(t, os.Remove(path))
	require.Equal(t, before, look(3))
	require.Equal(t, 1, strings.Count(log.String(), "no such file"))
	write(`[]`)
	require.Empty(t, look(1))
	require.Equal(t, "no decode instance is available", f.router.Ready())

	// As Kubernetes mounts a ConfigMap: a link to a folder turns to another one.
	one, two := t.TempDir(), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(one, "c"), []byte(`[]`), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(two, "c"), []byte(`[{"URL":"http://c:1","Role":"decode"}]`), 0o600))
	link := filepath.Join(t.TempDir(), "data")
	require.NoError(t, os.Symlink(one, link))
	f = serveRouter(t, Config{File: jsonFile(filepath.Join(link, "c"))})
	require.Empty(t, look(1))
	require.NoError(t, os.Symlink(two, link+"2"))
	require.NoError(t, os.Rename(link+"2", link))
	require.Equal(t, []string{"http://c:1 up"}, look(1))
}

// A file that is bad at the start is an error.
func TestConfigFileAtTheStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "route.json")
	_, err := New(Config{File: jsonFile(path)})
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.NoError(t, os.WriteFile(path, []byte(`[{"URL":"http://a:1"}]`), 0o600))
	_, err = New(Config{File: jsonFile(path)})
	require.ErrorContains(t, err, `the role of "http://a:1" is "", want prefill or decode`)
	_, err = New(Config{File: File{Path: path, Read: os.ReadFile, Decode: func([]byte) (*Settings, error) { return nil, errors.New("line 3") }}})
	require.ErrorContains(t, err, "line 3")
}
