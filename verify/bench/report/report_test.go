package report

import (
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/bench"
)

const docs = "../../../docs"

// TestDocs: the page and its plots are what the measurements beside them say.
func TestDocs(t *testing.T) {
	files, err := Files(docs)
	require.NoError(t, err)
	require.Len(t, files, 3+len(Kinds())+len(Servings())) // the page, and the time lines
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join(docs, name))
		require.NoError(t, err)
		require.Equal(t, string(want), string(got), "docs/%s is stale, run go generate ./verify/bench/report", name)
	}
	for _, kind := range append(Kinds(), Servings()...) {
		require.Contains(t, string(files["benchmarks.md"]), "](benchmarks/"+kind+".svg)")
	}
}

// TestSentences: times that sentences about serving give are numbers of the tables, rounded as far as the sentence has them. So that a measurement
// does not leave behind what was true before it.
func TestSentences(t *testing.T) {
	var known []float64
	for _, kind := range append(Servings(), measuredSteps) {
		rows, err := readRows(filepath.Join(docs, "benchmarks", kind+".jsonl"))
		require.NoError(t, err)
		for _, n := range shown(numbers(rows), quantities()...) {
			if n.row.Value != nil {
				known = append(known, *n.row.Value)
			}
		}
	}
	page, err := os.ReadFile(filepath.Join(docs, "benchmarks.md"))
	require.NoError(t, err)
	_, serving, found := strings.Cut(string(page), "<!-- serve ends -->")
	require.True(t, found)
	serving, _, found = strings.Cut(serving, "\n## ")
	require.True(t, found)
	readme, err := os.ReadFile(filepath.Join(docs, "..", "README.md"))
	require.NoError(t, err)
	_, sentence, found := strings.Cut(string(readme), "In a run of 130 requests a setup")
	require.True(t, found)
	sentence, _, _ = strings.Cut(sentence, "\n\n")

	checked := 0
	for line := range strings.Lines(serving + "\n- " + strings.ReplaceAll(sentence, "\n", " ")) {
		if !strings.HasPrefix(line, "- **") && !strings.HasPrefix(line, "  ") && !strings.Contains(line, "two quiet cores") {
			continue
		}
		for _, match := range regexp.MustCompile(`([0-9][0-9,]*(?:\.[0-9]+)?) ms`).FindAllStringSubmatch(line, -1) {
			text := strings.ReplaceAll(match[1], ",", "")
			said, err := strconv.ParseFloat(text, 64)
			require.NoError(t, err)
			_, decimals, _ := strings.Cut(text, ".")
			half := 0.5001 * math.Pow(10, -float64(len(decimals)))
			require.True(t, slices.ContainsFunc(known, func(v float64) bool { return math.Abs(v-said) <= half }), "%q is not in the tables: %s", match[0], line)
			checked++
		}
	}
	require.Greater(t, checked, 30)
}

func rows() []bench.Row {
	return []bench.Row{
		{Name: "fast <1>", Value: new(9.0), Unit: "GB/s", Limit: new(10.0), Ratio: new(0.9), Budget: "ratio >= 0.9", OK: new(true)},
		{Name: "slow 1", Value: new(1.0), Unit: "GB/s", Limit: new(10.0), Ratio: new(0.1), Budget: "ratio >= 0.9", OK: new(false)},
		{Name: "slow 2", Value: new(1.0), Unit: "GB/s", Limit: new(1e6), Ratio: new(1e-6), Budget: "ratio >= 0.9", OK: new(false)},
		{Name: "peer (none)", Unit: "absent"},
	}
}

func TestTable(t *testing.T) {
	table, err := Table(rows(), []reason{{"slow *", "tired."}})
	require.NoError(t, err)
	require.Contains(t, table, "| slow 1 | 1 GB/s | 10 | 0.1 | ratio >= 0.9 | NO |\n")
	require.Contains(t, table, "| peer (none) | - absent | - | - | - | - |\n")
	require.Equal(t, 1, strings.Count(table, "tired."))
	_, err = Table(rows(), []reason{{"slow 1", "tired."}})
	require.ErrorContains(t, err, `"slow 2"`)
}

// An interval is in the line of its ratio.
func TestTableIntervals(t *testing.T) {
	number := func(v float64) *float64 { return &v }
	table, err := Table([]bench.Row{
		{Name: "load", Value: number(2), Unit: "us", Limit: number(1), Ratio: number(0.5)},
		{Name: "load, 95 % from", Value: number(0.4), Unit: "ratio"},
		{Name: "load, 95 % to", Value: number(0.6), Unit: "ratio"},
	}, nil)
	require.NoError(t, err)
	require.Contains(t, table, "| load | 2 us | 1 | 0.5 (0.4 to 0.6) | - | - |\n")
	require.Equal(t, 3, strings.Count(table, "\n"))
}

func TestPlot(t *testing.T) {
	plot := Plot(rows())
	require.Equal(t, plot, Plot(rows()))
	require.Contains(t, string(plot), "fast &lt;1&gt;")
	require.NotContains(t, string(plot), "peer")
	valid(t, plot)
}

func TestFilesErrors(t *testing.T) {
	dir := t.TempDir()
	_, err := Files(dir)
	require.ErrorContains(t, err, "benchmarks.md")
	write := func(name, content string) {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "benchmarks"), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644))
	}
	write("benchmarks.md", "# Benchmarks\n")
	write("benchmarks/reasons.txt", "no colon\n")
	_, err = Files(dir)
	require.ErrorContains(t, err, "is not PATTERN: REASON")
	write("benchmarks/reasons.txt", "a: b\n")
	write("benchmarks/engine.jsonl", `{"name":1}`)
	_, err = Files(dir)
	require.ErrorContains(t, err, "engine.jsonl: row 1")
	write("benchmarks/engine.jsonl", `{"name":"x"}`)
	_, err = Files(dir)
	require.ErrorContains(t, err, "engine begins")
}
