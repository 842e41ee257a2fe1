package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/bench"
)

// ratioRows are the three rows of a ratio.
func ratioRows(name string, value, ratio, low, high float64) []bench.Row {
	return []bench.Row{
		{Name: name, Value: &value, Unit: "ms", Limit: new(1.0), Ratio: &ratio},
		{Name: name + ", 95 % from", Value: &low, Unit: "ratio"},
		{Name: name + ", 95 % to", Value: &high, Unit: "ratio"},
	}
}

func servedRows() []bench.Row {
	list := []bench.Row{
		{Name: "at 0.5/s, pd: TTFT p50", Value: new(310.0), Unit: "ms"},
		{Name: "at 0.5/s, pd: TTFT p90", Value: new(400.0), Unit: "ms"},
		{Name: "at 0.5/s, pd: ITL p99", Value: new(40.0), Unit: "ms"},
		{Name: "at 0.5/s, pd: requests", Value: new(52.0), Unit: "requests"},
	}
	list = append(list, ratioRows("at 0.5/s, chunked : pd, TTFT p50", 200, 1.55, 1.2, 1.8)...)
	list = append(list, ratioRows("at 0.5/s, chunked : pd, ITL p99", 120, 0.333, 0.1, 0.5)...)
	list = append(list, bench.Row{Name: "at 1/s, pd: TTFT p50", Value: new(330.0), Unit: "ms"}, bench.Row{Name: "at 1/s, chunked : pd, TTFT p50", Unit: "ms"})
	return append(list, ratioRows("at 1/s, a<b : pd, TTFT p50", 320, 1.03, 0.9, 1.1)...)
}

func TestServingTable(t *testing.T) {
	lines := strings.Split(ServingTable(servedRows()), "\n")
	require.Equal(t, "| load | setup | TTFT p50 | ITL p99 |", lines[0], "what nobody measured has no column")
	require.Equal(t, []string{
		"| 0.5/s | `pd` | 310 | 40 |",
		"| 0.5/s | `chunked` | 200: **1.55** (1.2 to 1.8) | 120: **0.333** (0.1 to 0.5) |",
		"| 1/s | `pd` | 330 | - |",
		"| 1/s | `chunked` | failed | - |",
		"| 1/s | `a<b` | 320: **1.03** (0.9 to 1.1) | - |",
		"",
	}, lines[2:])
}

// What is compared with another setup than the others has a table of its own, and is in no plot.
func TestServingTableOfVariants(t *testing.T) {
	list := append(servedRows(), ratioRows("at 1/s, a<b : chunked, TTFT of later turns p50", 50, 2, 1.5, 2.5)...)
	list = append(list, bench.Row{Name: "at 2/s, a<b : chunked, TTFT of later turns p50", Value: new(9.0), Unit: "ms"})
	text := ServingTable(list)
	require.Contains(t, text, ServingTable(servedRows())+"\n")
	require.Contains(t, text, "| 1/s | `a<b` | `chunked` | TTFT of later turns p50 | 50: **2** (1.5 to 2.5) |\n| 2/s | `a<b` | `chunked` | TTFT of later turns p50 | overloaded |\n")
	require.Equal(t, Intervals(servedRows()), Intervals(list))
}

// A number that is not there is not always one of requests that failed, and a bound that is infinite is not a narrow interval.
func TestServingTableWithoutNumbers(t *testing.T) {
	list := ratioRows("a : b, TTFT p50", 3, 1, 0.5, 0)
	list[2].Value = nil
	list = append(list, bench.Row{Name: "a : b, TTFT of later turns p50", Unit: "ms"}, bench.Row{Name: "a: later turns", Value: new(0.0)})
	require.Contains(t, ServingTable(list), "| - | `a` | 3: **1** (0.5 to no bound) | none |\n")
	list[len(list)-1].Value = new(2.0)
	require.Contains(t, ServingTable(list), "| - | `a` | 3: **1** (0.5 to no bound) | failed |\n")
	list = append(list, bench.Row{Name: "a: overloaded", Value: new(0.2)})
	require.Contains(t, ServingTable(list), "| - | `a` | overloaded | |\n", "its numbers depend on how long the load lasts")
}

// The highest load that a setup bears is below the first one that it does not bear, whatever comes after; an overloaded setup bears none.
func TestBearable(t *testing.T) {
	var list []bench.Row
	for load, shares := range map[string][]float64{"1/s": {1, 0.95, 0.89, 1}, "2/s": {0.9, 0.85, 1, 1}, "4/s": {0.99, 1, 1, 1}} {
		for i, setup := range []string{"a", "b : a", "c : a", "d : a"} {
			sep := ", "
			if setup == "a" {
				sep = ": "
			}
			list = append(list, bench.Row{Name: "at " + load + ", " + setup + sep + "good requests within 1s and 50ms", Value: &shares[i]})
		}
	}
	slices.SortFunc(list, func(a, b bench.Row) int { return strings.Compare(a.Name, b.Name) })
	list = append(list, bench.Row{Name: "at 2/s, d: overloaded", Value: new(0.5)})
	_, table, found := strings.Cut(ServingTable(list), "within\n\n")
	require.True(t, found)
	require.Equal(t, "| setup | 1s and 50ms |\n|---|---:|\n| `a` | 4/s or more |\n| `b` | 1/s |\n| `c` | none |\n| `d` | 1/s |\n", table)
}

func TestIntervals(t *testing.T) {
	svg := Intervals(servedRows())
	require.Equal(t, svg, Intervals(servedRows()))
	text := string(svg)
	marks := func(mark string) int { return strings.Count(text, mark) }
	require.Equal(t, 3+2, marks("<circle"), "three ratios, and two setups in the legend")
	require.Equal(t, 1, marks("<polygon"), "a bound is beyond the scale")
	require.Equal(t, 1, marks(">x<"), "a ratio that is not there is not forgotten")
	require.Contains(t, text, ">1/s<")
	require.Contains(t, text, ">a&lt;b<")
	require.Contains(t, text, "as good as pd:")
	require.Contains(t, text, "A triangle at an edge")
	require.Contains(t, text, "x: no ratio")
	require.NotContains(t, text, "ITL p50", "a quantity without ratios has no panel")
	valid(t, svg)
	require.NotPanics(t, func() { Intervals(nil) })

	// The worst result is drawn, at the edge, and an infinite bound is not a narrow interval.
	list := ratioRows("a : b, good requests", 0, 0, 0, 0)
	list = append(list, ratioRows("a : b, ITL p99", 9, 1.5, 0.8, 0)...)
	list[len(list)-1].Value = nil
	text = string(Intervals(list))
	require.Equal(t, 1+1, marks("<circle"))
	require.Equal(t, 4, marks("<polygon"), "ratio and both bounds of one, the upper bound of the other")
	y := scale{leastInterval, mostInterval, 0, -panelHeight}
	require.InDelta(t, -panelHeight, y.at(1e9), 1e-9)
	require.InDelta(t, -panelHeight/2, y.at(1), 1e-9)
	require.Zero(t, y.at(0))
}

func valid(t *testing.T, svg []byte) {
	t.Helper()
	for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			return
		}
		require.NoError(t, err)
	}
}
