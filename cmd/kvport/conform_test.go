package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
)

// conform runs the command on the demo plugin and gives what it printed and its exit code.
func conform(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	plugin, err := exec.LookPath("kvport-demo")
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), "kvport", append(append([]string{"conform", "--config", `{"dir":"${TMP}"}`}, args...), plugin)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit)
		require.NotErrorIs(t, err, exec.ErrNotFound)
		code = exit.ExitCode()
	}
	return out.String(), errs.String(), code
}

func TestConformJSON(t *testing.T) {
	t.Parallel()
	out, errs, code := conform(t, "--format", "json")
	require.Zero(t, code, out+errs)
	require.Empty(t, errs)
	count := map[string]int{}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	for _, line := range lines {
		var row struct {
			ID, Rule, Status string
			Log              []string
		}
		d := json.NewDecoder(strings.NewReader(line))
		d.DisallowUnknownFields()
		require.NoError(t, d.Decode(&row), line)
		require.NotEmpty(t, row.ID)
		require.NotEmpty(t, row.Rule)
		count[row.Status]++
	}
	cases := 0
	for _, c := range conformance.Cases() {
		if c.Needs != 0 || c.Groups || c.Arena || slices.Contains(c.Profiles, conformance.Store) {
			cases++
		}
	}
	require.Len(t, lines, cases)
	require.Equal(t, len(lines), count["pass"]+count["skip"])
	require.Greater(t, count["pass"], 20)
}

// A profile whose required cases do not run has failed, and the exit code says so.
func TestConformFails(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("with -short, which the race stage uses, TestConformJSON's process does the same; make test runs it")
	}
	out, errs, code := conform(t, "--profile", "store,groups", "--seed", "7")
	require.Equal(t, 1, code, out)
	require.Empty(t, errs)
	require.Contains(t, out, "profile groups requires this case")
	require.Regexp(t, `\d+ passed, [1-9]\d* failed, \d+ skipped\n$`, out)
}

func TestConformJUnit(t *testing.T) {
	t.Parallel()
	out, _, code := conform(t, "--format", "junit", "--case", "round-trip,visible,hold-order")
	require.Zero(t, code, out)
	var suite struct {
		Name     string     `xml:"name,attr"`
		Tests    int        `xml:"tests,attr"`
		Failures int        `xml:"failures,attr"`
		Cases    []struct{} `xml:"testcase"`
	}
	require.NoError(t, xml.Unmarshal([]byte(out), &suite))
	require.Equal(t, "DemoConnector", suite.Name)
	require.Zero(t, suite.Failures)
	require.Equal(t, 3, suite.Tests)
	require.Len(t, suite.Cases, suite.Tests)
}

// TestConformList: the cases are listed without a plugin, and one of them can be run alone.
func TestConformList(t *testing.T) {
	t.Parallel()
	list := func(args ...string) (string, error) {
		out, err := exec.CommandContext(t.Context(), "kvport", append([]string{"conform", "--list"}, args...)...).Output()
		return string(out), err
	}
	all, err := list()
	require.NoError(t, err)
	require.Equal(t, len(conformance.Cases())+1, strings.Count(all, "\n"))
	require.Regexp(t, `(?m)^PIPE-02 +producer-gone +.+\[pipe\]$`, all)
	require.Contains(t, all, fmt.Sprintf("\n%d cases\n", len(conformance.Cases())))
	few, err := list("--profile", "pipe,buffer")
	require.NoError(t, err)
	require.NotContains(t, few, "STORE-01")
	_, err = list("kvport-demo")
	require.Error(t, err)

	out, _, code := conform(t, "--case", "round-trip")
	require.Zero(t, code, out)
	require.Contains(t, out, "1 passed, 0 failed, 0 skipped")
	_, errs, code := conform(t, "--case", "rond-trip")
	require.NotZero(t, code)
	require.Contains(t, errs, `no case "rond-trip"`)
}
