package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/lookupbuffer"
	"github.com/kvport/kvport/sdk"
)

// values is a database in memory.
type values struct {
	mu   sync.Mutex
	kept map[string][]byte
	get  func(ctx context.Context) error // before each Get
	put  error
}

// Exists implements lookupbuffer.KV.
func (v *values) Exists(_ context.Context, keys []string) ([]bool, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := make([]bool, len(keys))
	for n, k := range keys {
		_, out[n] = v.kept[k]
	}
	return out, nil
}

// Get implements lookupbuffer.KV.
func (v *values) Get(ctx context.Context, key string) ([]byte, error) {
	if v.get != nil {
		if err := v.get(ctx); err != nil {
			return nil, err
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	value, kept := v.kept[key]
	if !kept {
		return nil, connector.ErrGone
	}
	return append([]byte{}, value...), nil
}

// Put implements lookupbuffer.KV.
func (v *values) Put(_ context.Context, key string, value []byte) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.put == nil {
		v.kept[key] = append([]byte{}, value...)
	}
	return v.put
}

// Delete implements lookupbuffer.KV.
func (v *values) Delete(_ context.Context, key string) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.kept, key)
	return nil
}

// keeper is a connector of values, which keeps what was loaded or not.
func keeper(v *values, keep bool) connector.Plugin {
	v.kept = map[string][]byte{}
	return sdk.FromBuffer(sdk.Definition{Name: "Keeper", Version: "1", Scope: connector.ScopeShared},
		func(context.Context, connector.Env, struct {
			Address string `json:"address"`
		},
		) (lookupbuffer.Buffer, error) {
			return lookupbuffer.NewDatabase(v, lookupbuffer.DatabaseOptions{Keep: keep}), nil
		})
}

// accepting listens and says one byte on every connection, until the test ends.
func accepting(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte{1})
			_ = c.Close()
		}
	}()
	return l.Addr().String()
}

// Profiles that a connector need not pass are never suggested: a buffer, which gives each block once, is no store and has no lifecycle.
func TestSuggest(t *testing.T) {
	store := []Profile{Store, Lifecycle, MultiRank, Fault}
	for name, c := range map[string]struct {
		plugin connector.Plugin
		want   []Profile
		says   string
	}{
		"store":   {keeper(&values{}, true), store, ""},
		"buffer":  {keeper(&values{}, false), []Profile{Buffer}, ""},
		"full":    {keeper(&values{put: connector.ErrIncompatible}, true), nil, "save: "},
		"gone":    {keeper(&values{get: func(context.Context) error { return connector.ErrGone }}, true), nil, "load of 2 blocks that were offered"},
		"no load": {keeper(&values{get: func(context.Context) error { return errors.New("no such table") }}, true), nil, "no such table"},
	} {
		t.Run(name, func(t *testing.T) {
			got, notes, err := Suggest(t.Context(), InProcess(c.plugin, nil), Options{})
			require.Equal(t, c.want, got)
			require.Empty(t, notes)
			if c.says != "" {
				require.ErrorContains(t, err, c.says)
				return
			}
			require.NoError(t, err)
		})
	}
}

// A connector that loads without its server is not one of profile remote, whose cases require that it fails then. Several addresses are
// cut off together.
func TestSuggestRemote(t *testing.T) {
	one, two := accepting(t), accepting(t)
	config := json.RawMessage(`{"address": "@PROXY:` + one + `@,@PROXY:` + two + `@"}`)
	got, notes, err := Suggest(t.Context(), InProcess(keeper(&values{}, true), config), Options{})
	require.NoError(t, err)
	require.NotContains(t, got, Remote)
	require.Len(t, notes, 1)
	require.Contains(t, notes[0], "remote is left out")

	v := &values{}
	plugin := keeper(v, true)
	newHarness := InProcess(plugin, config)
	got, notes, err = Suggest(t.Context(), func() (Harness, error) {
		h, err := newHarness()
		if err != nil {
			return nil, err
		}
		ways := h.(*inProcess).proxies
		if len(ways) != 2 {
			err = fmt.Errorf("the config has %d relays", len(ways))
		}
		v.get = func(ctx context.Context) (err error) { // it goes on while one of them answers
			for _, way := range ways {
				conn, dialed := new(net.Dialer).DialContext(ctx, "tcp", way.Address())
				if dialed != nil {
					err = dialed
					continue
				}
				_, err = conn.Read(make([]byte, 1))
				if closed := conn.Close(); err == nil {
					return closed
				}
			}
			return errors.Join(connector.ErrBusy, err)
		}
		return h, err
	}, Options{})
	require.NoError(t, err)
	require.Empty(t, notes)
	require.Contains(t, got, Remote)
}

// hooked is a worker whose loads begin with a call of the test's own.
type hooked struct {
	connector.Worker
	load func(ctx context.Context) error
}

// Load implements connector.Worker.
func (h hooked) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	if err := h.load(ctx); err != nil {
		return err
	}
	return h.Worker.Load(ctx, t, kv)
}

// Only a connector that loads nothing in all of its time needs the server, and a busy machine takes time.
func TestNeedsServer(t *testing.T) {
	var watched *load
	calls := 0
	switching := func(err error) func(context.Context) error { // to what it keeps elsewhere, after some calls
		return func(context.Context) error {
			if calls++; calls < 5 {
				return err
			}
			return nil
		}
	}
	for name, c := range map[string]struct {
		load  func(ctx context.Context) error
		needs bool
		want  Status
	}{
		"server":    {func(context.Context) error { return connector.ErrGone }, true, Pass},
		"tier":      {func(context.Context) error { return nil }, false, Pass},
		"busy tier": {switching(connector.ErrBusy), false, Pass},
		"late tier": {switching(connector.ErrGone), false, Pass},
		"part": {func(context.Context) error {
			return &connector.BlockError{Blocks: []connector.BlockID{2}, Err: connector.ErrGone}
		}, false, Pass},
		"no part": {func(context.Context) error {
			return &connector.BlockError{Blocks: []connector.BlockID{2, 3}, Err: connector.ErrGone}
		}, true, Pass},
		"busy machine": {func(ctx context.Context) error {
			<-ctx.Done()
			watched.mu.Lock()
			defer watched.mu.Unlock()
			watched.marks = append(watched.marks, mark{time.Now(), watched.marks[len(watched.marks)-1].lost + soon})
			return ctx.Err()
		}, false, Inconclusive},
	} {
		t.Run(name, func(t *testing.T) {
			needs := false
			plugin := keeper(&values{}, true)
			open := plugin.Worker
			plugin.Worker = func(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Worker, error) {
				w, err := open(ctx, env, config)
				return hooked{w, c.load}, err
			}
			calls = 0
			r := checkCase(t.Context(), Case{ID: "case", Run: rigged(0, false, func(r *rig) {
				watched = r.watched()
				e := r.engine(setup{})
				keys := e.stored(2)
				needs = e.needs(&server{}, blocks(2, keys...))
			})}, InProcess(plugin, nil), settings{deadline: time.Minute})
			require.Equal(t, c.want, r.Status, r.Log)
			require.Equal(t, c.needs, needs)
		})
	}
}

// A trial that stays without a verdict says so.
func TestSuggestOnABusyMachine(t *testing.T) {
	plugin := keeper(&values{}, true)
	newHarness := InProcess(plugin, nil)
	_, _, err := Suggest(t.Context(), func() (Harness, error) {
		h, err := newHarness()
		return busyHarness{h}, err
	}, Options{})
	require.ErrorIs(t, err, ErrInconclusive)
	require.ErrorContains(t, err, "start: ")
}

// busyHarness is a harness on a machine that is too busy to start anything.
type busyHarness struct{ Harness }

// Start implements Harness.
func (busyHarness) Start(context.Context, int, int64) (*Instance, error) {
	return nil, busyError{context.DeadlineExceeded}
}
