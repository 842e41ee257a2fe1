package host

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/leaktest"
	"github.com/kvport/kvport/internal/strictjson"
)

// kid is the config of one child; change is laid over it.
func kid(extra map[string]any, settings map[string]any, change map[string]any) map[string]any {
	c := map[string]any{"kv_connector": "TestConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
	if settings != nil {
		c["kvport"] = settings
	}
	maps.Copy(c, change)
	return c
}

func dirs(t *testing.T, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = t.TempDir()
	}
	return out
}

// multiRig is a rig of a MultiConnector with the given children.
func multiRig(t *testing.T, ranks int, settings map[string]any, kids ...map[string]any) *rig {
	t.Helper()
	return multiRigWith(t, rigOptions{ranks: ranks, settings: settings}, kids...)
}

// parsed is a JSON text as the decoder of configs has it.
func parsed(t *testing.T, raw []byte) *strictjson.Value {
	t.Helper()
	v, err := strictjson.Parse(raw)
	require.NoError(t, err)
	return v
}

func multiRigWith(t *testing.T, o rigOptions, kids ...map[string]any) *rig {
	t.Helper()
	leaks := leaktest.Watch(t)
	cfg, eng, opts := o.build(t)
	raw, err := json.Marshal(map[string]any{"connectors": kids})
	require.NoError(t, err)
	cfg.Connector, cfg.Extra = MultiName, raw
	cfg.Children, err = parseChildren(parsed(t, raw), cfg, 1)
	require.NoError(t, err)
	h, err := Open(t.Context(), cfg, eng, opts)
	require.NoError(t, err)
	r := &rig{Host: h, t: t, ranks: eng.Ranks, metrics: opts.Metrics.(*prometheus.Registry)}
	for _, m := range eng.Ranks {
		kv, err := connector.NewKV(eng.Layout, [][]byte{m.Bytes()})
		require.NoError(t, err)
		r.kvs = append(r.kvs, kv)
	}
	t.Cleanup(func() {
		require.NoError(t, r.closeNow())
		leaks()
	})
	return r
}

func files(t *testing.T, dir string) int {
	t.Helper()
	list, err := os.ReadDir(dir)
	require.NoError(t, err)
	return len(list)
}

func (r *rig) pids() []int {
	h := r.Health()
	out := make([]int, len(h.Children))
	for i, c := range h.Children {
		out[i] = c.PID
	}
	return out
}

// waitFor waits until the children are in the given states.
func (r *rig) waitFor(states ...string) {
	r.t.Helper()
	require.Eventually(r.t, func() bool {
		h := r.Health()
		for i, c := range h.Children {
			if c.State != states[i] {
				return false
			}
		}
		return true
	}, time.Minute, 5*time.Millisecond, "%+v", r.Health())
}

func TestMultiSavesToAll(t *testing.T) {
	d := dirs(t, 3)
	r := multiRig(t, 2, nil,
		kid(map[string]any{"dir": d[0]}, nil, nil), kid(map[string]any{"dir": d[1]}, nil, map[string]any{"kv_role": "kv_consumer"}),
		kid(map[string]any{"dir": d[2]}, nil, nil))
	ks := keys(1, 4)
	require.Empty(t, r.save("a", ks, 0).Failed)
	require.Equal(t, []int{8, 0, 8}, []int{files(t, d[0]), files(t, d[1]), files(t, d[2])})
	require.Equal(t, 4*blockTokens, r.match(query("b", ks), nil).Tokens)
	require.Empty(t, r.load("b", ks, 10).Failed)
	require.True(t, r.same(blocksOf(ks, 10)))
	require.Equal(t, "ready", r.Health().State)
	require.Equal(t, []string{"0/TestConnector", "1/TestConnector", "2/TestConnector"}, []string{
		r.Health().Children[0].Connector, r.Health().Children[1].Connector, r.Health().Children[2].Connector,
	})
	require.InDelta(t, 8+8+8, r.metric("kvport_child_blocks_total"), 0, "2 ranks x 4 blocks, saved twice, loaded once")
	require.Zero(t, r.metric("kvport_child_failed_blocks_total"))
}

// The first blocks are in one folder, the next in the other.
func TestMultiComposesPrefix(t *testing.T) {
	d := dirs(t, 2)
	ks := keys(1, 6)
	for i, part := range [][]connector.BlockKey{ks[:3], ks[3:]} {
		one := newRig(t, rigOptions{dir: d[i]})
		require.Empty(t, one.save("x", part, 0).Failed)
		require.NoError(t, one.closeNow())
	}
	for _, order := range [][]int{{0, 1}, {1, 0}} {
		r := multiRig(t, 1, nil, kid(map[string]any{"dir": d[order[0]]}, nil, nil), kid(map[string]any{"dir": d[order[1]]}, nil, nil))
		require.Equal(t, 6*blockTokens, r.match(query("b", ks), nil).Tokens)
		require.Empty(t, r.load("b", ks, 10).Failed)
		require.True(t, r.same(blocksOf(ks, 10)))
		require.NoError(t, r.closeNow())
	}
}

// A child that dies in mid-load is restarted alone; its blocks come from the next.
func TestMultiChildDies(t *testing.T) {
	d := dirs(t, 2)
	shared := t.TempDir()
	for _, fault := range []string{"crash_load", "hang_load"} {
		t.Run(fault, func(t *testing.T) {
			settings := map[string]any{"deadlines": map[string]any{"transfer": "300ms", "grace": "50ms"}}
			r := multiRig(t, 1, nil,
				kid(map[string]any{"dir": d[0], "fault": fault, "once": true}, settings, nil), kid(map[string]any{"dir": d[1]}, nil, nil))
			ks := keys(len(fault), 4)
			require.Empty(t, r.save("a", ks, 0).Failed)
			before := r.pids()
			require.Equal(t, 4*blockTokens, r.match(query("b", ks), nil).Tokens)
			e := r.load("b", ks, 10)
			require.Empty(t, e.Failed, "%v", e.Err)
			require.True(t, r.same(blocksOf(ks, 10)))
			r.waitFor("ready", "ready")
			after := r.pids()
			require.NotEqual(t, before[0], after[0])
			require.Equal(t, before[1], after[1])
			require.InDelta(t, 1, r.metric("kvport_child_restarts_total"), 0)
			require.InDelta(t, 1, r.metric("kvport_plugin_restarts_total"), 0)
			require.Equal(t, 1, r.Health().Restarts)
			require.NoError(t, os.Remove(filepath.Join(d[0], "happened")))
		})
	}
	_ = shared
}

// stop stops a process. SIGSTOP reaches one of its threads, and that stops the others when a busy machine runs it.
func stop(t *testing.T, pid int) {
	t.Helper()
	require.Positive(t, pid) // 0 is this process's group
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	require.Eventually(t, func() bool { return stopped(pid) }, time.Minute, time.Millisecond)
}

// stopped reports whether no thread of a process can run.
func stopped(pid int) bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	return err == nil && len(threads) > 0 && !slices.ContainsFunc(threads, func(path string) bool { return stateIn(path) != "T" })
}

// A stopped child does not hold back the others: not their matches, loads or saves.
func TestMultiChildStopped(t *testing.T) {
	d := dirs(t, 2)
	ks := keys(1, 4)
	for _, dir := range d { // both have them, and none of the saves is in a hurry
		one := newRig(t, rigOptions{dir: dir})
		require.Empty(t, one.save("a", ks, 0).Failed)
		require.NoError(t, one.closeNow())
	}
	const never = "1h"
	patient := map[string]any{"deadlines": map[string]any{"match": never, "later": never, "save": never, "transfer": never}}
	short := map[string]any{
		"heartbeat": map[string]any{"limit": never}, "deadlines": map[string]any{"later": never, "save": "200ms", "transfer": "200ms", "grace": "50ms"},
	}
	r := multiRig(t, 1, map[string]any{"deadlines": map[string]any{"later": never}}, kid(map[string]any{"dir": d[0]}, short, nil), kid(map[string]any{"dir": d[1]}, patient, nil))
	before := r.pids()
	stop(t, before[0])
	require.Equal(t, 4*blockTokens, r.match(query("b", ks), nil).Tokens, "the answer of the stopped one would be waited for an hour")
	require.Empty(t, r.load("b", ks, 10).Failed)
	require.True(t, r.same(blocksOf(ks, 10)))
	require.Equal(t, before, r.pids())
	require.True(t, stopped(before[0]), "still")
	require.Zero(t, r.metric("kvport_child_deadline_kills_total"))
	require.Empty(t, r.save("c", keys(2, 4), 20).Failed)
	r.waitFor("ready", "ready")
	after := r.pids()
	require.NotEqual(t, before[0], after[0], "it was killed for its deadline")
	require.Equal(t, before[1], after[1])
	require.Positive(t, r.metric("kvport_child_deadline_kills_total"))
}

// A child that keeps dying is left alone; the others serve.
func TestMultiBreaker(t *testing.T) {
	d := dirs(t, 2)
	settings := map[string]any{"breaker": map[string]any{"deaths": 2, "cooldown": "1h", "backoff_min": "1ms", "backoff_max": "1ms"}}
	r := multiRig(t, 1, nil, kid(map[string]any{"dir": d[0]}, settings, nil), kid(map[string]any{"dir": d[1]}, settings, nil))
	for range 2 {
		r.waitFor("ready", "ready")
		pid := r.pids()[0]
		require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
		require.Eventually(t, func() bool { return r.pids()[0] != pid }, time.Minute, time.Millisecond)
	}
	r.waitFor("broken", "ready")
	require.Equal(t, "degraded", r.Health().State)
	ks := keys(1, 3)
	require.Empty(t, r.save("a", ks, 0).Failed)
	require.Equal(t, 3*blockTokens, r.match(query("b", ks), nil).Tokens)
	require.Empty(t, r.load("b", ks, 10).Failed)
	require.True(t, r.same(blocksOf(ks, 10)))
	emptied, err := r.Reset(t.Context())
	require.ErrorIs(t, err, connector.ErrGone)
	require.False(t, emptied)
}

func TestMultiNested(t *testing.T) {
	d := dirs(t, 3)
	inner := map[string]any{
		"kv_connector": MultiName, "kv_role": "kv_both", "kv_connector_extra_config": map[string]any{"connectors": []any{
			kid(map[string]any{"dir": d[1]}, nil, nil), kid(map[string]any{"dir": d[2]}, nil, nil),
		}},
	}
	r := multiRig(t, 1, nil, kid(map[string]any{"dir": d[0]}, nil, nil), inner)
	ks := keys(1, 4)
	require.Empty(t, r.save("a", ks, 0).Failed)
	require.Equal(t, []int{4, 4, 4}, []int{files(t, d[0]), files(t, d[1]), files(t, d[2])})
	for _, gone := range []string{d[0], d[1]} {
		for _, k := range ks {
			require.NoError(t, os.Remove(filepath.Join(gone, fmt.Sprintf("%s.0", k))))
		}
	}
	require.Equal(t, 4*blockTokens, r.match(query("b", ks), nil).Tokens)
	require.Empty(t, r.load("b", ks, 10).Failed)
	require.True(t, r.same(blocksOf(ks, 10)))
	h := r.Health()
	require.Equal(t, "1/1/TestConnector", h.Children[1].Children[1].Connector)
	require.NoError(t, syscall.Kill(h.Children[1].Children[1].PID, syscall.SIGKILL))
	require.Eventually(t, func() bool { return r.Health().Children[1].Children[1].Restarts == 1 }, time.Minute, time.Millisecond)
}

// Planners, Holders and plain stores side by side.
func TestMultiPowers(t *testing.T) {
	d := dirs(t, 3)
	r := multiRig(t, 1, nil,
		kid(map[string]any{"dir": d[0], "fault": "plan"}, nil, nil), kid(map[string]any{"dir": d[1], "fault": "hold"}, nil, nil),
		kid(map[string]any{"dir": d[2], "fault": "hold"}, nil, nil))
	require.Equal(t, connector.CanPlan|connector.CanHold|connector.CanReset, r.Info().Capabilities)
	ks := keys(1, 4)
	require.Empty(t, r.save("a", ks, 0).Failed)
	require.Equal(t, []int{3, 4, 4}, []int{files(t, d[0]), files(t, d[1]), files(t, d[2])}, "the planner leaves the last block out")
	require.Equal(t, 4*blockTokens, r.match(query("b", ks), nil).Tokens)
	e := r.load("b", ks, 10)
	require.Equal(t, []connector.BlockID{12}, e.Failed, "the planner that loads the first three leaves the last of them out")
	require.True(t, r.same(append(blocksOf(ks[:2], 10), blocksOf(ks[3:], 13)...)))

	held := r.end("fetched", 64, true, blocksOf(ks, 20)...)
	require.True(t, held.Held)
	require.NotEmpty(t, held.Ticket)
	require.Equal(t, connector.RequestID("fetched"), r.next(Released).Request, "both children's holds were fetched")
	waits := r.end("waits", 64, true, blocksOf(ks, 30)...)
	require.True(t, waits.Held)
	require.Equal(t, 1, r.Health().Held)
	for _, i := range []int{1, 2} { // what a dead child kept is over: the hold after the last
		require.Equal(t, 1, r.Health().Held)
		pid := r.pids()[i]
		require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
		require.Eventually(t, func() bool { now := r.pids()[i]; return now != 0 && now != pid }, time.Minute, time.Millisecond)
	}
	require.Equal(t, connector.RequestID("waits"), r.next(Released).Request)
	require.Equal(t, map[string]float64{"consumed": 1, "plugin_died": 1}, r.released())
}

// released are the holds that are over, by why.
func (r *rig) released() map[string]float64 {
	r.t.Helper()
	families, err := r.metrics.Gather()
	require.NoError(r.t, err)
	by := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "kvport_holds_released_total" && m.GetCounter().GetValue() > 0 {
				by[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
			}
		}
	}
	return by
}

// parse makes a transfer config of children given as JSON.
func multiConfig(role, connectors string) string {
	return fmt.Sprintf(`{"kv_connector":"MultiConnector","kv_role":%q,"kv_connector_extra_config":{"connectors":%s}}`, role, connectors)
}

func TestMultiConfig(t *testing.T) {
	deep := `[{"kv_connector":"A","kv_role":"kv_both"}]`
	for range maxNesting {
		deep = fmt.Sprintf(`[{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":%s}}]`, deep)
	}
	many := "["
	for i := range 17 {
		many += fmt.Sprintf(`{"kv_connector":"A%d","kv_role":"kv_both"},`, i)
	}
	many = many[:len(many)-1] + "]"
	for _, c := range []struct{ name, role, connectors, want string }{
		{"engine_id", "kv_both", `[{"kv_connector":"A","kv_role":"kv_both"},{"kv_connector":"B","kv_role":"kv_both","engine_id":"x"}]`, `kv_connector_extra_config.connectors[1].engine_id: belongs to the engine`},
		{"empty", "kv_both", `[]`, `connectors: is empty`},
		{"no array", "kv_both", `{}`, `connectors: must be an array, not an object`},
		{"null", "kv_both", `null`, `connectors: must be an array, not null`},
		{"no object", "kv_both", `["A"]`, `connectors[0]: must be an object, not a string`},
		{"no name", "kv_both", `[{"kv_role":"kv_both"}]`, `connectors[0].kv_connector: is missing`},
		{"no role", "kv_both", `[{"kv_connector":"A"}]`, `connectors[0].kv_role: is missing`},
		{"role", "kv_producer", `[{"kv_connector":"A","kv_role":"kv_both"}]`, `connectors[0].kv_role: kv_both is more than the kv_producer of its MultiConnector`},
		{"twice", "kv_both", `[{"kv_connector":"A","kv_role":"kv_both","kv_connector_extra_config":{"a": 1}},{"kv_connector":"A","kv_role":"kv_consumer","kv_connector_extra_config":{"a":1}}]`, `connectors[1]: is the same as connectors[0]`},
		{"deep", "kv_both", deep, `nested more than 4 deep`},
		{"many", "kv_both", many, `names 17 connectors, at most 16`},
		{"unknown field", "kv_both", `[{"kv_connector":"A","kv_role":"kv_both","kv_rol":1}]`, `connectors[0]: unknown field "kv_rol", did you mean "kv_role"?`},
		{"trust", "kv_both", `[{"kv_connector":"A","kv_role":"kv_both","kvport":{"trust":"staged"}}]`, `connectors[0].kvport: trust and landing_bytes are the same for all children`},
		{"ticket key", "kv_both", `[{"kv_connector":"A","kv_role":"kv_both","kvport":{"ticket_key_file":"k"}}]`, `connectors[0].kvport: ticket_key_file`},
		{"nested path", "kv_both", `[{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":[{"kv_connector":"A","kv_role":"both"}]}}]`, `kv_connector_extra_config.connectors[0].kv_connector_extra_config.connectors[0].kv_role: is "both", must be`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := ParseConfig(multiConfig(c.role, c.connectors))
			require.ErrorIs(t, err, ErrConfig)
			require.ErrorContains(t, err, c.want)
		})
	}
	c, err := ParseConfig(`{"kv_connector":"MultiConnector","kv_role":"kv_both","kvport":{"deadlines":{"save":"3s"}},"kv_connector_extra_config":{"connectors":[
		{"kv_connector":"A","kv_role":"kv_producer","kv_port":"1","kvport":{"deadlines":{"transfer":"7s"}}},{"kv_connector":"A","kv_role":"kv_both","kv_connector_extra_config":{"x":1},"kv_load_failure_policy":"fail"}]}}`)
	require.NoError(t, err)
	require.Len(t, c.Children, 2)
	require.Equal(t, []time.Duration{3 * time.Second, 7 * time.Second}, []time.Duration{c.Children[0].Settings.Deadlines.Save, c.Children[0].Settings.Deadlines.Transfer})
	require.Equal(t, PolicyFail, c.Children[1].FailurePolicy)
	require.Equal(t, []string{"kv_connector_extra_config.connectors[0].kv_port: accepted for compatibility, has no effect on A"}, c.Children[0].Adopt(&Manifest{Name: "A"}))
	_, err = ParseConfig(`{"kv_connector":"MultiConnector","kv_role":"kv_both"}`)
	require.ErrorContains(t, err, "kv_connector_extra_config is required")
}

// A child that does not start ends the opening, says which it was and leaves nothing behind.
func TestMultiChildDoesNotStart(t *testing.T) {
	leaks := leaktest.Watch(t)
	o := rigOptions{}
	cfg, eng, opts := o.build(t)
	raw, err := json.Marshal(map[string]any{"connectors": []any{
		kid(map[string]any{"dir": o.dir}, nil, nil), kid(map[string]any{"dri": "x"}, nil, nil),
	}})
	require.NoError(t, err)
	cfg.Connector = MultiName
	cfg.Children, err = parseChildren(parsed(t, raw), cfg, 1)
	require.NoError(t, err)
	_, err = Open(t.Context(), cfg, eng, opts)
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "config: kv_connector_extra_config.connectors[1]: kv_connector_extra_config: ")
	require.ErrorContains(t, err, `"dri"`)
	leaks()
}

// TestMultiTaint: what a child loaded that may change bytes is saved to no child.
func TestMultiTaint(t *testing.T) {
	d, ks := dirs(t, 2), keys(1, 3)
	r := multiRig(t, 1, nil, kid(map[string]any{"dir": d[0]}, nil, nil),
		kid(map[string]any{"dir": d[1], "lossy": true}, map[string]any{"allow_lossy": true}, nil))
	r.save("a", ks[:2], 0)
	require.Equal(t, []int{2, 2}, []int{files(t, d[0]), files(t, d[1])})
	require.NoError(t, os.RemoveAll(d[0]))
	require.NoError(t, os.Mkdir(d[0], 0o700))
	require.Equal(t, 32, r.match(query("b", ks), nil).Tokens)
	e := r.load("b", ks[:2], 8)
	require.Empty(t, e.Failed)
	require.True(t, e.Unverified)
	require.ErrorIs(t, r.save("b", ks, 8).Err, connector.ErrDeclined)
	require.Equal(t, []int{0, 2}, []int{files(t, d[0]), files(t, d[1])})
}
