package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func runSim(args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = run(append([]string{"sim"}, args...), &out, &errs)
	return code, out.String(), errs.String()
}

func TestSim(t *testing.T) {
	code, text, stderr := runSim("--seeds", "250", "--steps", "200")
	require.Equal(t, exitOK, code, stderr+text)
	require.Contains(t, text, "250 seeds")
	require.Contains(t, text, "0 violations")
	_, again, _ := runSim("--seeds", "250", "--steps", "200")
	require.Equal(t, text, again)

	code, text, stderr = runSim("--seeds", "10", "--seed", "7", "--steps", "200", "--format", "json")
	require.Equal(t, exitOK, code, stderr+text)
	var row simRow
	require.NoError(t, json.Unmarshal([]byte(text), &row))
	require.Equal(t, "total", row.Name)
	require.Equal(t, uint64(7), row.Seed)
	require.Equal(t, 10, row.Seeds)
	require.True(t, row.OK)
	require.Positive(t, row.Seen["requests"])
}

func TestSimTranscript(t *testing.T) {
	code, text, stderr := runSim("--transcript", "--seed", "3", "--steps", "50")
	require.Equal(t, exitOK, code, stderr)
	require.Contains(t, text, "no more faults")
}

func TestSimMutants(t *testing.T) {
	code, text, stderr := runSim("--mutants", "--seeds", "1", "--steps", "5", "--format", "json")
	require.Equal(t, exitFailure, code, "one seed of five steps cannot notice them all")
	require.Contains(t, stderr, "mutants survived")
	for line := range strings.Lines(text) {
		var row simRow
		require.NoError(t, json.Unmarshal([]byte(line), &row))
		require.Equal(t, row.Violations > 0, row.OK, row.Name)
	}
	_, text, _ = runSim("--mutants", "--seeds", "1", "--steps", "5")
	require.Contains(t, text, "SURVIVED")
}

func TestSimUsage(t *testing.T) {
	for _, args := range [][]string{{"--seeds", "0"}, {"--steps", "-1"}, {"--format", "xml"}, {"extra"}} {
		code, _, stderr := runSim(args...)
		require.Equal(t, exitUsage, code, args)
		require.NotEmpty(t, stderr)
	}
}
