package router

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/router/admission"
	"github.com/kvport/kvport/engine/router/policy"
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

// A file may say how instances are chosen; what it does not say the flags do. What is wrong changes nothing, and requests
// that run go on.
func TestConfigFileChooses(t *testing.T) {
	var s Settings
	file := File{Path: "x", Read: func(string) ([]byte, error) { return json.Marshal(s) }, Decode: func(text []byte) (*Settings, error) {
		var read Settings
		return &read, json.Unmarshal(text, &read)
	}}
	let := make(chan struct{})
	d := serveInstance(t, tokens, func(w http.ResponseWriter, r *http.Request) {
		<-let
		tokens(w, r)
	})
	var log testkit.Log
	s.Instances = []Instance{{URL: d.URL, Role: "decode"}}
	f := serveRouter(t, Config{File: file, Policy: policy.LeastLoaded, Weights: map[string]float64{"load": 2}, Log: logTo(&log)})
	route := func() string {
		f.router.look(f.router.file)
		return complete(t, f, completion(strings.Repeat("long ", 200)), "X-Session-Id", "a", "X-Other", "b", routeHeader, "1").Get(routeHeader)
	}
	first := ask(t.Context(), f.URL, "")
	require.Eventually(t, func() bool { return len(d.requests()) == 1 }, waitLimit, waitTick)
	require.Contains(t, route(), "policy=least_loaded")
	require.Contains(t, route(), "load 2: 1 running")
	s.Policy = policy.PrefixAware
	require.Contains(t, route(), "prefix 1: holds 0 of")
	require.Contains(t, route(), "load 1: 1 running", "the flag's weights are of the flag's policy")
	s.Weights = map[string]float64{"prefix": 7}
	require.Contains(t, route(), "prefix 7: holds 223 of 250 tokens")
	s.Policy, s.Weights = policy.Session, nil
	require.Contains(t, route(), "session 10: session")
	s.SessionKey = "header:X-None"
	require.Contains(t, route(), "session 10: no session")
	s.SessionKey = "header:X-Other"
	require.Contains(t, route(), "session 10: session")
	good := s
	for _, bad := range []Settings{
		{Policy: "x"},
		{Policy: policy.RoundRobin, Weights: map[string]float64{"load": 1}},
		{Weights: map[string]float64{"lod": 1}},
		{SessionKey: "x"},
		{Policy: policy.PDAware, Instances: []Instance{{URL: "x", Role: "decode"}}},
	} {
		s = bad
		require.Contains(t, route(), "session 10: session")
		require.Contains(t, route(), "policy=session")
	}
	require.Equal(t, 5, strings.Count(log.String(), "level=ERROR"), log.String())
	s = good
	s.Policy, s.SessionKey = "", ""
	require.Contains(t, route(), "policy=least_loaded", "what the file does not say any more the flags do")
	require.Contains(t, route(), "load 2: 1 running")
	close(let)
	require.Equal(t, 200, (<-first).StatusCode)
	require.Eventually(t, func() bool {
		f.router.pool.mu.Lock()
		defer f.router.pool.mu.Unlock()
		runs, _ := f.router.pool.policy.Busy(0)
		return runs == 0
	}, waitLimit, waitTick)
	idle(t, f.router)
}

// A policy that looks at prompts follows the events of instances from then on, and one that must is not taken away.
func TestConfigFileAndEvents(t *testing.T) {
	in := serveSource(t, true)
	var now atomic.Pointer[Settings]
	now.Store(&Settings{})
	file := File{Path: "x", Read: func(string) ([]byte, error) { return json.Marshal(now.Load()) }, Decode: func(text []byte) (*Settings, error) {
		var s Settings
		return &s, json.Unmarshal(text, &s)
	}, Interval: time.Millisecond}
	f := serveRouter(t, Config{Decode: []string{in.URL}, File: file, HealthInterval: time.Millisecond})
	running(t, f.router)
	in.has("in the beginning")
	now.Store(&Settings{Policy: policy.PrefixAware})
	f.knows(t, 4)
	now.Store(&Settings{})
	f.knows(t, 0)
	now.Store(&Settings{Policy: policy.PDAware})
	f.knows(t, 4)

	now.Store(&Settings{})
	c := Config{Decode: []string{in.URL}, File: file, Events: map[string]kvevents.Place{in.URL: in.events.Place()}}
	_, err := New(c)
	require.ErrorContains(t, err, "--kv-events: policy round_robin does not ask what instances hold")
	now.Store(&Settings{Policy: policy.PrefixAware})
	_, err = New(c)
	require.NoError(t, err)
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
