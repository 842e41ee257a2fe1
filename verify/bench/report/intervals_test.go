package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
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
	list = append(list, ratioRows("at 0.5/s, chunked : pd, ITL p99", 120, 0.333, 0.2, 0.5)...)
	list = append(list, bench.Row{Name: "at 1/s, pd: TTFT p50", Value: new(330.0), Unit: "ms"}, bench.Row{Name: "at 1/s, chunked : pd, TTFT p50", Unit: "ms"})
	list = append(list, ratioRows("at 1/s, a<b : pd, TTFT p50", 320, 1.03, 0.9, 1.1)...)
	return list
}

func TestServingTable(t *testing.T) {
	lines := strings.Split(ServingTable(servedRows()), "\n")
	require.Equal(t, "| load | setup | TTFT p50 | TTFT of later turns p50 | ITL p50 | ITL p99 | good requests |", lines[0])
	require.Equal(t, []string{
		"| 0.5/s | `pd` | 310 | - | - | 40 | - |",
		"| 0.5/s | `chunked` | 200: **1.55** (1.2 to 1.8) | - | - | 120: **0.333** (0.2 to 0.5) | - |",
		"| 1/s | `pd` | 330 | - | - | - | - |",
		"| 1/s | `chunked` | failed | - | - | - | - |",
		"| 1/s | `a<b` | 320: **1.03** (0.9 to 1.1) | - | - | - | - |",
		"",
	}, lines[2:])
}

func TestIntervals(t *testing.T) {
	svg := Intervals(servedRows())
	require.Equal(t, svg, Intervals(servedRows()))
	text := string(svg)
	require.Equal(t, 3, strings.Count(text, "<circle"), "what has no ratio is left out")
	require.Equal(t, 1, strings.Count(text, `r="4" fill="#2e8b57"`), "better for sure")
	require.Equal(t, 1, strings.Count(text, `r="4" fill="#c0623a"`), "worse for sure")
	require.Equal(t, 1, strings.Count(text, `r="4" fill="#7f8c8d"`), "neither")
	require.Contains(t, text, ">0.5/s  chunked<")
	require.Contains(t, text, ">1/s  a&lt;b<")
	require.Contains(t, text, "ratio to pd,")
	require.NotContains(t, text, "ITL p50", "a quantity without ratios has no heading")
	for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
	}
	require.NotPanics(t, func() { Intervals(nil) })
}
