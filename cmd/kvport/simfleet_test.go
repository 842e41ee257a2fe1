package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// smallFleet is a fleet that is played in a moment.
func smallFleet() []string {
	return []string{"fleet", "--instances", "10", "--blocks", "6000", "--requests", "300", "--sizes", "4,8"}
}

func runFleet(args ...string) (code int, stdout, stderr string) {
	return runSim(append(smallFleet(), args...)...)
}

func TestSimFleet(t *testing.T) {
	code, text, stderr := runFleet("--measure=false", "--tables", "policies,faults")
	require.Equal(t, exitOK, code, stderr+text)
	for _, row := range []string{"round_robin", "prefix_aware, by an oracle", "pd_aware", "racks fail", "two routers"} {
		require.Contains(t, text, row)
	}
	require.NotContains(t, text, "decisions a second")
	_, again, _ := runFleet("--measure=false", "--tables", "policies,faults")
	require.Equal(t, text, again)

	code, text, stderr = runFleet("--tables", "fleet", "--policy", "session")
	require.Equal(t, exitOK, code, stderr+text)
	require.Contains(t, text, "decisions a second")
	require.Contains(t, text, "session")
}

func TestSimFleetGrowth(t *testing.T) {
	args := []string{"fleet", "--instances", "4", "--blocks", "24000", "--requests", "800", "--sizes", "4,8", "--tables", "growth"}
	code, text, stderr := runSim(args...)
	require.Equal(t, exitOK, code, stderr+text)
	require.Contains(t, text, "8 instances")
	require.Contains(t, text, "registrations")

	one := slices.Clone(args)
	one[slices.Index(one, "4,8")] = "4"
	code, text, stderr = runSim(one...)
	require.Equal(t, exitOK, code, stderr+text)
	require.Regexp(t, `decisions +[0-9.]+ +-\n`, text)

	code, text, stderr = runSim(append(args, "--format", "json")...)
	require.Equal(t, exitOK, code, stderr+text)
	require.Equal(t, 2, strings.Count(text, "\n"))
	for line := range strings.Lines(text) {
		var row struct {
			Table, Name string
			Requests    int
			Violations  []string
		}
		require.NoError(t, json.Unmarshal([]byte(line), &row))
		require.Equal(t, "growth", row.Table)
		require.Positive(t, row.Requests)
		require.Empty(t, row.Violations)
	}
}

// TestSimFleetSizes: what is wrong with a size is said before anything is played.
func TestSimFleetSizes(t *testing.T) {
	for want, args := range map[string][]string{
		"size 4: blocks is 240 for 4 instances, want at least 512 for each": {},
		"size 5000: instances is 5000":                                      {"--blocks", "60000", "--sizes", "5000"},
		"size 10 appears twice":                                             {"--blocks", "60000", "--sizes", "10,10"},
	} {
		code, text, stderr := runFleet(args...)
		require.Equal(t, exitUsage, code, want)
		require.Contains(t, stderr, want)
		require.Empty(t, text)
	}
}

func TestSimFleetUsage(t *testing.T) {
	for _, args := range [][]string{{"--format", "xml"}, {"--tables", "x"}, {"--policy", "x"}, {"--instances", "1"}, {"--blocks", "10"}, {"--requests", "0"}, {"extra"}} {
		code, _, stderr := runFleet(args...)
		require.Equal(t, exitUsage, code, args)
		require.NotEmpty(t, stderr)
	}
}
