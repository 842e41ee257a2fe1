// Package report makes tables and plots of what kvport bench measured: docs/benchmarks.md and what is in
// docs/benchmarks.
package report

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvport/kvport/verify/bench"
)

//go:generate go run ./write ../../../docs

// Kinds are the benchmarks of a report: the arguments of kvport bench.
func Kinds() []string { return []string{"engine", "transfer", "store", "placed"} }

// Servings are the outputs of kvport bench serve and kvport sim serve, which have tables and plots of their own.
func Servings() []string { return []string{"serve", "serve-turns", "serve-policies", "simulated"} }

// measuredSteps is an output of kvport sim serve, too, which has a table and no plot.
const measuredSteps = "simulated-measured-steps"

// Files gives what the files of a docs folder should hold, by path below it: the page with its tables
// written again, and a plot for each kind. They are made of benchmarks/KIND.jsonl, as kvport bench
// --format json wrote it, and benchmarks/reasons.txt.
func Files(docs string) (map[string][]byte, error) {
	page, err := os.ReadFile(filepath.Join(docs, "benchmarks.md"))
	if err != nil {
		return nil, err
	}
	why, err := readReasons(filepath.Join(docs, "benchmarks", "reasons.txt"))
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{}
	for _, kind := range Kinds() {
		rows, err := readRows(filepath.Join(docs, "benchmarks", kind+".jsonl"))
		if err != nil {
			return nil, err
		}
		table, err := Table(rows, why)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", kind, err)
		}
		if page, err = replace(page, kind, table); err != nil {
			return nil, err
		}
		files["benchmarks/"+kind+".svg"] = Plot(drawn(kind, rows))
	}
	for kind, draw := range map[string]func([]bench.Row) []byte{"layerwise": Timeline, "overlap": OverlapTimeline} {
		rows, err := readRows(filepath.Join(docs, "benchmarks", kind+".jsonl"))
		if err != nil {
			return nil, err
		}
		files["benchmarks/"+kind+".svg"] = draw(rows)
	}
	for _, kind := range append(Servings(), measuredSteps) {
		rows, err := readRows(filepath.Join(docs, "benchmarks", kind+".jsonl"))
		if err != nil {
			return nil, err
		}
		if page, err = replace(page, kind, ServingTable(rows)); err != nil {
			return nil, err
		}
		if kind != measuredSteps {
			files["benchmarks/"+kind+".svg"] = Intervals(rows)
		}
	}
	files["benchmarks.md"] = page
	return files, nil
}

// drawn are the rows of a kind that have a bar. Those of placed blocks are many, so only what is beside the first limit is drawn.
func drawn(kind string, rows []bench.Row) []bench.Row {
	if kind != "placed" {
		return rows
	}
	return slices.DeleteFunc(slices.Clone(rows), func(r bench.Row) bool { return strings.Contains(r.Name, " : ") })
}

func readRows(name string) (_ []bench.Row, err error) {
	f, err := os.Open(filepath.Clean(name))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	rows, err := bench.Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return rows, nil
}

// reason says why rows are out of budget; pattern matches their names as in path.Match.
type reason struct{ pattern, text string }

// readReasons reads lines "PATTERN: REASON".
func readReasons(name string) ([]reason, error) {
	data, err := os.ReadFile(filepath.Clean(name))
	if err != nil {
		return nil, err
	}
	var all []reason
	for s := bufio.NewScanner(bytes.NewReader(data)); s.Scan(); {
		pattern, text, ok := strings.Cut(s.Text(), ": ")
		if _, err := path.Match(pattern, ""); !ok || err != nil {
			return nil, fmt.Errorf("%s: %q is not PATTERN: REASON", name, s.Text())
		}
		all = append(all, reason{pattern, text})
	}
	return all, nil
}

// Table is a Markdown table of rows; reasons for those out of budget follow it. A row that is out of
// budget without a reason is an error. Behind a ratio is its interval.
func Table(rows []bench.Row, why []reason) (string, error) {
	var b, notes strings.Builder
	b.WriteString("| what | value | limit | ratio | budget | within |\n|---|---:|---:|---:|---|---|\n")
	told := map[string]bool{}
	bounds := boundsOf(rows)
	for _, r := range rows {
		if isBound(r.Name) {
			continue
		}
		fmt.Fprintf(&b, "| %s | %s %s | %s | %s%s | %s | %s |\n", r.Name, bench.Number(r.Value), r.Unit,
			bench.Number(r.Limit), bench.Number(r.Ratio), bounds[r.Name], dash(r.Budget), r.Verdict())
		if r.OK == nil || *r.OK {
			continue
		}
		text, err := find(why, r.Name)
		if err != nil {
			return "", err
		}
		if !told[text] {
			told[text] = true
			fmt.Fprintf(&notes, "- %s\n", text)
		}
	}
	if notes.Len() > 0 {
		b.WriteString("\nOut of budget, and why:\n\n" + notes.String())
	}
	return b.String(), nil
}

func isBound(name string) bool {
	return strings.HasSuffix(name, bench.LowBound) || strings.HasSuffix(name, bench.HighBound)
}

// boundsOf are the intervals of ratios, by the names of their rows.
func boundsOf(rows []bench.Row) map[string]string {
	out := map[string]string{}
	for _, r := range rows {
		if name, is := strings.CutSuffix(r.Name, bench.LowBound); is {
			out[name] = " (" + bound(r.Value) + " to "
		} else if name, is := strings.CutSuffix(r.Name, bench.HighBound); is {
			out[name] += bound(r.Value) + ")"
		}
	}
	return out
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func find(why []reason, name string) (string, error) {
	for _, r := range why {
		if ok, err := path.Match(r.pattern, name); ok && err == nil {
			return r.text, nil
		}
	}
	return "", fmt.Errorf("row %q is out of budget and benchmarks/reasons.txt says nothing about it", name)
}

// replace puts text between the page's two marks of a kind.
func replace(page []byte, kind, text string) ([]byte, error) {
	begin, end := []byte("<!-- "+kind+" begins -->\n"), []byte("<!-- "+kind+" ends -->\n")
	before, rest, hasBegin := bytes.Cut(page, begin)
	_, after, hasEnd := bytes.Cut(rest, end)
	if !hasBegin || !hasEnd {
		return nil, fmt.Errorf("benchmarks.md has no %q and %q", bytes.TrimSpace(begin), bytes.TrimSpace(end))
	}
	return bytes.Join([][]byte{before, begin, []byte("\n" + text + "\n"), end, after}, nil), nil
}
