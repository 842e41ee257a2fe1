package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
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
	require.Len(t, files, 2+len(Kinds())+len(Servings())) // the page, and the time line
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join(docs, name))
		require.NoError(t, err)
		require.Equal(t, string(want), string(got), "docs/%s is stale, run go generate ./verify/bench/report", name)
	}
	for _, kind := range append(Kinds(), Servings()...) {
		require.Contains(t, string(files["benchmarks.md"]), "](benchmarks/"+kind+".svg)")
	}
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

func TestPlot(t *testing.T) {
	plot := Plot(rows())
	require.Equal(t, plot, Plot(rows()))
	require.Contains(t, string(plot), "fast &lt;1&gt;")
	require.NotContains(t, string(plot), "peer")
	for d := xml.NewDecoder(bytes.NewReader(plot)); ; {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
	}
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
