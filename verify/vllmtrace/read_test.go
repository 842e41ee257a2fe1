package vllmtrace

import (
	"compress/gzip"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// traces are the recordings under testdata.
func traces() []string { return []string{"async", "serve"} }

func readSide(t *testing.T, name string, side Side) []Call {
	t.Helper()
	suffix := map[Side]string{SchedulerSide: "sched", WorkerSide: "worker"}[side]
	f, err := os.Open("../../python/tests/testdata/" + name + "_" + suffix + ".jsonl.gz")
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	calls, err := Read(z, side)
	require.NoError(t, err)
	return calls
}

func readTrace(t *testing.T, name string) *Log {
	t.Helper()
	log, err := Merge(readSide(t, name, SchedulerSide), readSide(t, name, WorkerSide))
	require.NoError(t, err)
	return log
}

func TestReadCountsEveryCall(t *testing.T) {
	for name, want := range map[string]map[Kind]int{
		"async": {Lookup: 86, Alloc: 18, NewRequest: 16, BuildMeta: 346, GetFinished: 346, RequestFinished: 16, WaitLayer: 338},
		"serve": {Lookup: 93, Alloc: 31, NewRequest: 19, BuildMeta: 417, GetFinished: 417, RequestFinished: 19, LoadErrors: 6},
	} {
		log := readTrace(t, name)
		got := log.Count()
		for kind, n := range want {
			require.Equal(t, n, got[kind], "%s %s", name, kind)
		}
		require.Len(t, log.Calls, map[string]int{"async": 832 + 2758 + 1, "serve": 999 + 3301 + 1}[name])
		for _, k := range slices.Sorted(maps.Keys(got)) {
			t.Logf("%s: %4d %s", name, got[k], k)
		}
		chains, err := ChainsOf(log)
		require.NoError(t, err)
		blocks := 0
		for _, c := range chains {
			blocks += len(c)
		}
		t.Logf("%s: %d requests, %d full blocks, all with a hash", name, len(chains), blocks)
	}
}

func TestReadIsStrict(t *testing.T) {
	for name, c := range map[string]struct {
		side       Side
		line, want string
	}{
		"unknown call":     {WorkerSide, `{"t_us":1,"call":"finish_backward","step":0}`, "unknown call"},
		"wrong side":       {WorkerSide, `{"t_us":1,"call":"on_new_request","step":0}`, "unknown call"},
		"unknown field":    {WorkerSide, `{"t_us":1,"call":"shutdown","step":0,"x":1}`, `unknown field "x"`},
		"unknown argument": {WorkerSide, `{"t_us":1,"call":"handle_preemptions","step":0,"args":{"step":1,"y":2}}`, `unknown field "y"`},
		"no arguments":     {WorkerSide, `{"t_us":1,"call":"handle_preemptions","step":0}`, "missing"},
		"no result":        {SchedulerSide, `{"t_us":1,"call":"get_num_new_matched_tokens","step":0,"args":{"req":{"id":"a"},"num_computed_tokens":0}}`, "missing"},
		"short result":     {SchedulerSide, `{"t_us":1,"call":"get_num_new_matched_tokens","step":0,"args":{"req":{"id":"a"},"num_computed_tokens":0},"ret":[1]}`, "1 elements, want 2"},
		"surprise result":  {WorkerSide, `{"t_us":1,"call":"shutdown","step":0,"ret":1}`, "none are known"},
		"load":             {WorkerSide, `{"t_us":1,"call":"bind_connector_metadata","step":0,"args":{"loads":[["a",[1,2],["h"]]],"saves":0}}`, "2 blocks and 1 hashes"},
		"no JSON":          {WorkerSide, `nonsense`, "line 1"},
		"two values":       {WorkerSide, `{"t_us":1,"call":"shutdown","step":0} {}`, "text follows"},
		"negative step":    {WorkerSide, `{"t_us":1,"call":"shutdown","step":-1}`, "negative"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Read(strings.NewReader(c.line), c.side)
			require.ErrorIs(t, err, ErrTrace)
			require.ErrorContains(t, err, c.want)
		})
	}
}

// None, the three results of get_transfer_results and empty answers, which these traces do not have.
func TestReadOtherShapes(t *testing.T) {
	calls, err := Read(strings.NewReader(`{"t_us":1,"call":"get_num_new_matched_tokens","step":0,"args":{"req":{"id":"a"},"num_computed_tokens":0},"ret":[null,false]}`), SchedulerSide)
	require.NoError(t, err)
	require.True(t, calls[0].Body.(*LookupCall).Later)
	calls, err = Read(strings.NewReader(`{"t_us":1,"call":"get_transfer_results","step":0,"args":{"finished_req_ids":[]},"ret":[null,["a"],["a"]]}`), WorkerSide)
	require.NoError(t, err)
	require.Equal(t, &ResultsCall{FinishedRequests: []string{}, Recving: []string{"a"}, Failed: []string{"a"}}, calls[0].Body)
}

func TestMergeRefuses(t *testing.T) {
	s, w := readSide(t, "async", SchedulerSide), readSide(t, "async", WorkerSide)
	_, err := Merge(s, w[:len(w)-20])
	require.ErrorIs(t, err, ErrTrace)
	_, err = Merge(s[:len(s)-20], w)
	require.ErrorIs(t, err, ErrTrace)
	_, err = Merge(s, append(slices.Clone(w), w...))
	require.ErrorIs(t, err, ErrTrace)
}

func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"t_us":1,"call":"get_finished","step":0,"args":{"finished_req_ids":[]},"ret":[null,["a"]]}`), true)
	f.Add([]byte(`{"t_us":1,"call":"build_connector_meta","step":1,"args":{"new":[],"cached":[],"scheduled":{},"finished":[],"preempted":[],"sync_loads":false},"ret":{"loads":[],"saves":[["a",1,"h"]]}}`), false)
	f.Fuzz(func(t *testing.T, data []byte, worker bool) {
		side := SchedulerSide
		if worker {
			side = WorkerSide
		}
		calls, err := Read(strings.NewReader(string(data)), side)
		if err != nil {
			require.ErrorIs(t, err, ErrTrace)
			return
		}
		for _, c := range calls {
			require.Equal(t, side, c.Side)
		}
	})
}
