package cluster

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Metrics is one scrape: counters and gauges by name and labels, histograms by their _sum and
// _count.
type Metrics map[string]float64

// Metrics scrapes the engine or router at url.
func (c *Client) Metrics(ctx context.Context, url string) (Metrics, error) {
	data, err := c.Get(ctx, url+"/metrics")
	if err != nil {
		return nil, err
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(data))
	if err != nil {
		return nil, fmt.Errorf("metrics of %s: %w", url, err)
	}
	out := Metrics{}
	for name, family := range families {
		for _, m := range family.GetMetric() {
			out.add(name, m)
		}
	}
	return out, nil
}

func (m Metrics) add(name string, x *dto.Metric) {
	var labels []string
	for _, l := range x.GetLabel() {
		labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
	}
	slices.Sort(labels)
	suffix := "{" + strings.Join(labels, ",") + "}"
	switch {
	case x.Counter != nil:
		m[name+suffix] = x.Counter.GetValue()
	case x.Gauge != nil:
		m[name+suffix] = x.Gauge.GetValue()
	case x.Histogram != nil:
		m[name+"_sum"+suffix] = x.Histogram.GetSampleSum()
		m[name+"_count"+suffix] = float64(x.Histogram.GetSampleCount())
	case x.Untyped != nil:
		m[name+suffix] = x.Untyped.GetValue()
	}
}

// Sum adds up all series of a metric whose labels contain every given label, each spelled
// name="value".
func (m Metrics) Sum(name string, labels ...string) float64 {
	total := 0.0
	for _, series := range slices.Sorted(maps.Keys(m)) {
		base, rest, _ := strings.Cut(series, "{")
		if base != name {
			continue
		}
		if !slices.ContainsFunc(labels, func(l string) bool { return !strings.Contains(rest, l) }) {
			total += m[series]
		}
	}
	return total
}
