package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/model/sim"
	"github.com/kvport/kvport/engine/router"
	"github.com/kvport/kvport/engine/server"
	"github.com/kvport/kvport/engine/tokenizer"
	"github.com/kvport/kvport/host"
)

// go test ./cmd/kvport -run TestMetricsPage -update writes docs/metrics.md.
var update = flag.Bool("update", false, "write generated pages again")

// metric is what a registry was told.
type metric struct {
	name, kind, help string
	labels           []string
}

// catalogue is a registry that notes what it is given, also what no scrape would show yet.
type catalogue struct {
	prometheus.Registerer
	metrics []metric
}

var description = regexp.MustCompile(`^Desc{fqName: "(\w+)", help: ("(?:[^"\\]|\\.)*"),.* constLabels: {(.*)}, variableLabels: {(.*)}}$`)

// Register implements prometheus.Registerer.
func (c *catalogue) Register(collector prometheus.Collector) error {
	descs := make(chan *prometheus.Desc, 8)
	collector.Describe(descs)
	close(descs)
	for d := range descs {
		m := description.FindStringSubmatch(d.String())
		if m == nil {
			return fmt.Errorf("a description of an unknown form: %s", d)
		}
		one := metric{name: m[1], kind: kind(collector)}
		if err := json.Unmarshal([]byte(m[2]), &one.help); err != nil {
			return err
		}
		for _, list := range []string{m[3], m[4]} {
			for label := range strings.SplitSeq(list, ",") {
				if name, _, _ := strings.Cut(label, "="); name != "" {
					one.labels = append(one.labels, name)
				}
			}
		}
		c.metrics = append(c.metrics, one)
	}
	return nil
}

// Unregister implements prometheus.Registerer.
func (c *catalogue) Unregister(prometheus.Collector) bool { return true }

func kind(c prometheus.Collector) string {
	switch c.(type) {
	case *prometheus.CounterVec:
		return "counter"
	case *prometheus.GaugeVec, prometheus.Gauge: // every Gauge is a Counter for the compiler
		return "gauge"
	case *prometheus.HistogramVec, prometheus.Histogram:
		return "histogram"
	case prometheus.Counter:
		return "counter"
	}
	return "unknown"
}

// section is a part of kvport and its metrics.
type section struct {
	title   string
	metrics []metric
}

// sections starts every part of kvport that has metrics.
func sections(t *testing.T) []section {
	t.Helper()
	start := func(transfer *host.Config) []metric {
		t.Helper()
		m, err := sim.New(sim.Options{})
		require.NoError(t, err)
		defer m.Close()
		plugin, err := exec.LookPath("kvport-demo")
		require.NoError(t, err)
		c := &catalogue{}
		e, err := engine.New(t.Context(), engine.Config{
			Model: m, Tokenizer: tokenizer.Bytes(), NumBlocks: 64, Connector: transfer, PluginPath: []string{filepath.Dir(plugin)},
			Log: slog.New(slog.DiscardHandler), Metrics: c,
		})
		require.NoError(t, err)
		defer func() { require.NoError(t, e.Close(t.Context())) }()
		if transfer == nil {
			return c.metrics
		}
		own := len(c.metrics)
		_, err = server.New(server.Config{Engine: e, Tokenizer: tokenizer.Bytes(), ModelName: "sim", Metrics: c})
		require.NoError(t, err)
		require.Greater(t, len(c.metrics), own)
		require.NoError(t, c.Register(newStrangers().refused))
		return c.metrics
	}
	alone := start(nil)
	config, err := host.ParseConfig(config("kv_both", t.TempDir()))
	require.NoError(t, err)
	list := []section{{title: "The engine (`kvport serve`)", metrics: alone}, {title: "Its connector"}, {title: "Its HTTP front"}, {title: "The router (`kvport route`)"}}
	for _, m := range start(config) {
		switch {
		case slices.ContainsFunc(alone, func(a metric) bool { return a.name == m.name }):
		case strings.HasPrefix(m.name, "kvport_http_"):
			list[2].metrics = append(list[2].metrics, m)
		default:
			list[1].metrics = append(list[1].metrics, m)
		}
	}
	c := &catalogue{}
	require.NoError(t, c.Register(newBuildInfo()))
	list = append(list, section{title: "All commands that have metrics, and the agent", metrics: c.metrics})
	c = &catalogue{}
	_, err = router.New(router.Config{Decode: []string{"http://127.0.0.1:1"}, Metrics: c})
	require.NoError(t, err)
	list[3].metrics = c.metrics
	c = &catalogue{}
	events, err := kvevents.NewPublisher(kvevents.Config{}, slog.New(slog.DiscardHandler), c)
	require.NoError(t, err)
	require.NoError(t, events.Close())
	list[0].metrics = append(list[0].metrics, c.metrics...)
	return list
}

// docs/metrics.md has every metric that the code registers, and no other.
func TestMetricsPage(t *testing.T) {
	t.Parallel()
	const begin, end = "<!-- written by a test: go test ./cmd/kvport -run TestMetricsPage -update -->\n", "<!-- end -->\n"
	var table strings.Builder
	for _, s := range sections(t) {
		require.NotEmpty(t, s.metrics, s.title)
		fmt.Fprintf(&table, "\n## %s\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n", s.title)
		slices.SortFunc(s.metrics, func(a, b metric) int { return strings.Compare(a.name, b.name) })
		for _, m := range s.metrics {
			require.NotEqual(t, "unknown", m.kind, m.name)
			require.True(t, strings.HasPrefix(m.name, "kvport_"), m.name)
			require.True(t, m.help != "" && strings.HasSuffix(m.help, "."), "help of %s", m.name)
			fmt.Fprintf(&table, "| `%s` | %s | %s | %s |\n", m.name, m.kind, strings.Join(m.labels, ", "), m.help)
		}
	}
	path := filepath.Join("..", "..", "docs", "metrics.md")
	page, err := os.ReadFile(path)
	require.NoError(t, err)
	before, rest, found := strings.Cut(string(page), begin)
	require.True(t, found, "%s lost the mark %s", path, begin)
	old, after, found := strings.Cut(rest, end)
	require.True(t, found, "%s lost the mark %s", path, end)
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(before+begin+table.String()+"\n"+end+after), 0o644))
		return
	}
	require.Equal(t, table.String()+"\n", old, "%s is not what the code has: run go test ./cmd/kvport -run TestMetricsPage -update", path)
}

// dashboard is what the test reads of a Grafana dashboard.
type dashboard struct {
	UID           string `json:"uid"`
	Title         string
	SchemaVersion int
	Inputs        []struct{ Name, Type, PluginID string } `json:"__inputs"`
	Panels        []struct {
		ID         int
		Type       string
		Title      string
		Datasource struct{ UID string }
		GridPos    struct{ H, W, X, Y int }
		Targets    []struct{ Expr, RefID string }
	}
}

var (
	queried = regexp.MustCompile(`(kvport_\w+)(?:{([^}]*)})?`)
	byList  = regexp.MustCompile(`by \(([^)]*)\)`)
	matcher = regexp.MustCompile(`(\w+)(?:=~|!~|!=|=)"`)
)

// The dashboard asks only for metrics and labels that exist, and shows every metric.
func TestDashboard(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile(filepath.Join("..", "..", "docs", "grafana", "kvport.json"))
	require.NoError(t, err)
	var d dashboard
	require.NoError(t, json.Unmarshal(data, &d))
	require.Equal(t, "DS_PROMETHEUS", d.Inputs[0].Name, "the import asks for a data source")
	require.Positive(t, d.SchemaVersion)
	known, shown := map[string]metric{}, map[string]bool{}
	for _, s := range sections(t) {
		for _, m := range s.metrics {
			known[m.name] = m
		}
	}
	ids := map[int]bool{}
	for _, p := range d.Panels {
		require.False(t, ids[p.ID], "panel id %d", p.ID)
		ids[p.ID] = true
		require.True(t, p.GridPos.H > 0 && p.GridPos.W > 0 && p.GridPos.X+p.GridPos.W <= 24, p.Title)
		if p.Type == "row" {
			continue
		}
		require.NotEmpty(t, p.Title)
		require.NotEmpty(t, p.Targets, p.Title)
		require.Equal(t, "${DS_PROMETHEUS}", p.Datasource.UID, p.Title)
		for _, target := range p.Targets {
			for _, name := range checkQuery(t, target.Expr, known) {
				shown[name] = true
			}
		}
	}
	for name := range known {
		require.True(t, shown[name], "no panel shows %s", name)
	}
	t.Logf("%d panels show %d metrics", len(d.Panels), len(shown))
}

// checkQuery gives the metrics of a query. Their labels must be theirs, or those that Prometheus adds.
func checkQuery(t *testing.T, expr string, known map[string]metric) (names []string) {
	t.Helper()
	labels := []string{"job", "instance", "le"}
	uses := queried.FindAllStringSubmatch(expr, -1)
	require.NotEmpty(t, uses, expr)
	for _, use := range uses {
		name := use[1]
		for _, part := range []string{"_bucket", "_sum", "_count"} {
			if base, cut := strings.CutSuffix(name, part); cut && known[base].kind == "histogram" {
				name = base
			}
		}
		m, exists := known[name]
		require.True(t, exists, "%s in %s", name, expr)
		require.Equal(t, m.kind == "histogram", name != use[1], "%s is a %s: %s", name, m.kind, expr)
		if m.kind != "gauge" {
			require.Regexp(t, `(rate|increase)\(`+regexp.QuoteMeta(use[0])+`\[`, expr, "counters are read as rates")
		}
		names = append(names, name)
		labels = append(labels, m.labels...)
		for _, l := range matcher.FindAllStringSubmatch(use[2], -1) {
			require.Contains(t, append([]string{"job", "instance"}, m.labels...), l[1], expr)
		}
	}
	for _, list := range byList.FindAllStringSubmatch(expr, -1) {
		for label := range strings.SplitSeq(list[1], ",") {
			// Prometheus renames a label of ours that it adds itself.
			require.Contains(t, labels, strings.TrimPrefix(strings.TrimSpace(label), "exported_"), expr)
		}
	}
	return names
}
