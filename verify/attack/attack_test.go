package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write docs/attacks.md again")

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == strangerArg {
		os.Exit(beStranger(os.Args[2:], os.Stdin, os.Stdout))
	}
	os.Exit(m.Run())
}

// TestPage: docs/attacks.md lists the probes.
func TestPage(t *testing.T) {
	root, err := findRoot()
	require.NoError(t, err)
	path := filepath.Join(root, "docs", "attacks.md")
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(page(table())), 0o644)) //nolint:gosec // a page
	}
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, page(table()), string(data), "run go test ./verify/attack -run TestPage -update")
}

// TestTable: every group has a probe, and many probes belong to none.
func TestTable(t *testing.T) {
	ids, groups, plugins := map[string]bool{}, map[string]int{}, 0
	for _, p := range table() {
		require.False(t, ids[p.id], "two probes are called %s", p.id)
		require.NotNil(t, p.run, p.id)
		require.NotEmpty(t, p.does, p.id)
		ids[p.id] = true
		groups[p.group]++
		if strings.HasPrefix(p.id, "plugin/") {
			plugins++
		}
	}
	known := 0
	for _, group := range groupNames() {
		require.Positive(t, groups[group[0]], "no probe is for %s", group[0])
		known += groups[group[0]]
	}
	require.Len(t, table(), known, "each group has a name")
	require.GreaterOrEqual(t, groups["other"], 25)
	require.GreaterOrEqual(t, plugins, 20)
}

// TestInPlaceRows: the malicious plugin tries something for every row of what docs/operate.md says a plugin might try.
func TestInPlaceRows(t *testing.T) {
	root, err := findRoot()
	require.NoError(t, err)
	data, err := os.ReadFile(filepath.Join(root, "docs", "operate.md"))
	require.NoError(t, err)
	_, table, found := strings.Cut(string(data), "| what a plugin might try | `in-place` | `staged` |\n|---|---|---|\n")
	require.True(t, found)
	table, _, _ = strings.Cut(table, "\n\n")
	tries, rows := rowsOf(), 0
	for line := range strings.Lines(table) {
		row := strings.TrimSpace(strings.Split(line, "|")[1])
		require.NotEmpty(t, tries[row], "nothing is tried for %q", row)
		rows++
	}
	require.Len(t, tries, rows)
}

// TestVerdicts: what does not hold, a probe that misses an open door, and a run in which nothing held end with exit code 1.
func TestVerdicts(t *testing.T) {
	p := func(id, door string, run func(open bool) error) probe {
		return probe{id: id, door: door, run: func(_ context.Context, _ *rig, open bool) (string, error) { return "seen", run(open) }}
	}
	for want, c := range map[string]probe{
		held:    p("a", "", func(bool) error { return nil }),
		notHeld: p("b", "", func(bool) error { return holef("a hole") }),
		notRun:  p("c", "", func(bool) error { return fmt.Errorf("outside: %w", &skipped{"no machine"}) }),
		broken:  p("d", "", func(bool) error { return errors.New("a mistake") }),
	} {
		r := &rig{}
		res := r.probe(t.Context(), &c, true)
		require.Equal(t, want, res.Verdict)
		var out bytes.Buffer
		bad := want == notHeld || want == broken
		other := result{Verdict: held}
		require.Equal(t, bad, summary([]result{res, other}, 2, &out, false) == 1, out.String())
		require.Equal(t, want != held, summary([]result{res}, 1, &out, false) == 1, out.String())
	}
	late := p("g", "open", func(open bool) error {
		if open {
			return unservedf("no answer")
		}
		return nil
	})
	blind, sees := p("e", "open", func(bool) error { return nil }), p("f", "open", func(open bool) error {
		if open {
			return holef("through the door")
		}
		return nil
	})
	r := &rig{}
	require.Equal(t, broken, r.probe(t.Context(), &blind, true).Verdict)
	require.Equal(t, broken, r.probe(t.Context(), &late, true).Verdict, "a time-out proves no open door")
	require.Equal(t, held, r.probe(t.Context(), &blind, false).Verdict)
	res := r.probe(t.Context(), &sees, true)
	require.Equal(t, held, res.Verdict)
	require.Equal(t, "open: through the door", res.Door)
	require.Equal(t, 1, summary(nil, 1, &bytes.Buffer{}, true), "nothing was run")
}
