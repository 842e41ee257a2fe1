package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/bench"
)

func runServing(args ...string) (code int, stdout, stderr string) {
	return runSim(append([]string{"serve", "--requests", "30", "--rounds", "2"}, args...)...)
}

// TestSimServe: every setup's numbers are there, they are those of a model in which prompts delay answers unless prefill and decode are apart, and what is
// overloaded has no ratios.
func TestSimServe(t *testing.T) {
	code, text, stderr := runServing("--rate", "2,4")
	require.Equal(t, exitOK, code, stderr+text)
	for _, part := range []string{"At 2 requests a second:", "At 4 requests a second:", "one-512 beside two-512", "TTFT of later turns", "good within 500ms and 75ms"} {
		require.Contains(t, text, part)
	}
	_, again, _ := runServing("--rate", "2,4")
	require.Equal(t, text, again)

	plot := filepath.Join(t.TempDir(), "plot.svg")
	code, text, stderr = runServing("--rate", "2,4", "--format", "json", "--plot", plot)
	require.Equal(t, exitOK, code, stderr+text)
	rows, err := bench.Read(strings.NewReader(text))
	require.NoError(t, err)
	value := map[string]float64{}
	for _, r := range rows {
		if r.Value != nil {
			value[r.Name] = *r.Value
		}
	}
	require.Contains(t, value, "at 4/s, pd : two-512, ITL p99, 95 % to")
	require.EqualValues(t, 60, value["at 4/s, pd: requests"])
	require.Greater(t, value["at 4/s, pd: later turns"], 20.0, "the warm-up has first turns")
	require.Less(t, value["at 4/s, pd : two-512, ITL p99"], value["at 4/s, two-256 : two-512, ITL p99"])
	require.Less(t, value["at 4/s, two-256 : two-512, ITL p99"], value["at 4/s, two-512: ITL p99"])
	require.Less(t, value["at 4/s, two-512: ITL p99"], value["at 4/s, two-2048 : two-512, ITL p99"])
	require.Less(t, value["at 4/s, two-512: TTFT p50"], value["at 4/s, pd : two-512, TTFT p50"])
	require.Less(t, value["at 4/s, pd-turns : two-512, TTFT of later turns p50"], value["at 4/s, pd : two-512, TTFT of later turns p50"])
	drawn, err := os.ReadFile(plot)
	require.NoError(t, err)
	require.Contains(t, string(drawn), "4/s")

	code, text, _ = runServing("--rate", "40")
	require.Equal(t, exitOK, code)
	require.Contains(t, text, "pd: overloaded: its queue grew by ")
	require.NotContains(t, text, "pd beside two-512")

	_, measured, _ := runServing("--rate", "2", "--format", "json", "--measured-short-steps")
	code, text, _ = runServing("--rate", "2", "--format", "json")
	require.Equal(t, exitOK, code)
	require.NotEqual(t, measured, text)
	var first bench.Row
	line, _, _ := strings.Cut(text, "\n")
	require.NoError(t, json.Unmarshal([]byte(line), &first))
	require.Equal(t, "at 2/s, two-512: TTFT p50", first.Name, "one rate is in names, too")
}

func TestSimServeUsage(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.json")
	require.NoError(t, os.WriteFile(bad, []byte(`{"requsts": 1}`), 0o644))
	for want, args := range map[string][]string{
		"--rounds is 0":                {"--rounds", "0"},
		"--slo-ttft and --slo-itl":     {"--slo-itl", "-1s"},
		"rate is 0, want more than 0":  {"--rate", "2,0"},
		"--rate has 2 twice":           {"--rate", "2,4,2"},
		`--format is "xml"`:            {"--format", "xml"},
		"--workload: ":                 {"--workload", bad},
		"requests is 0, want at least": {"--requests", "0"},
	} {
		code, text, stderr := runServing(args...)
		require.Equal(t, exitUsage, code, want)
		require.Contains(t, stderr, want)
		require.Empty(t, text)
	}
}
