package serve

import (
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/kvport/kvport/verify/bench"
)

// Rows emits the rows of all results, if there is something that takes them. Those of the first have no limit; those of the others have its values as limits, and their ratios are above
// 1 where the other setup is better. What a variant of a setup (pd-turns of pd) is for, the first token of later turns, is also compared with that setup.
func Rows(results []*Result, emit bench.Emit) error {
	if emit == nil {
		return nil
	}
	for i, r := range results {
		var base *Result
		if i > 0 {
			base = results[0]
		}
		for _, row := range r.rows(base) {
			if err := emit(row); err != nil {
				return err
			}
		}
		if of := variantOf(results, i); of != nil {
			for _, row := range r.beside(of, LaterTTFT) {
				if err := emit(row); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// variantOf is the setup of which another one is a variant by its name, if that is not the first, with which all are compared; nil: none.
func variantOf(results []*Result, i int) *Result {
	for _, of := range results[min(1, len(results)):] {
		if strings.HasPrefix(results[i].Setup, of.Setup+"-") {
			return of
		}
	}
	return nil
}

// beside compares one metric with that of another setup.
func (r *Result) beside(base *Result, m Metric) (rows []bench.Row) {
	for _, q := range Quantiles() {
		row := bench.Beside(string(m)+" "+percent(q), "ms", r.Quantile(m, q), base.Quantile(m, q), math.NaN())
		rows = append(rows, r.compared(base, row, func() Interval { return r.Quicker(base, m, q) })...)
	}
	return rows
}

// compared are the rows of a value beside that of another setup, and of the interval of their ratio.
func (r *Result) compared(base *Result, row bench.Row, interval func() Interval) []bench.Row {
	row.Name = r.Setup + " : " + base.Setup + ", " + row.Name
	if r.Overloaded() || base.Overloaded() {
		return []bench.Row{row}
	}
	of := interval()
	return row.Between(of.Value, of.Low, of.High)
}

// within names an SLO, if there are several.
func (r *Result) within(slo SLO) string {
	if len(r.SLOs) == 1 {
		return ""
	}
	return " within " + slo.String()
}

// percent is the name of a quantile.
func percent(q float64) string { return fmt.Sprintf("p%g", q*100) }

func (r *Result) rows(base *Result) (rows []bench.Row) {
	compared := func(name, unit string, value float64, limit func(*Result) float64, interval func() Interval) {
		if base == nil {
			rows = append(rows, bench.Beside(r.Setup+": "+name, unit, value, math.NaN(), math.NaN()))
			return
		}
		rows = append(rows, r.compared(base, bench.Beside(name, unit, value, limit(base), math.NaN()), interval)...)
	}
	for _, m := range Metrics() {
		for _, q := range Quantiles() {
			compared(string(m)+" "+percent(q), "ms", r.Quantile(m, q), func(b *Result) float64 { return b.Quantile(m, q) },
				func() Interval { return r.Quicker(base, m, q) })
		}
	}
	for _, slo := range r.SLOs {
		compared("good requests"+r.within(slo), "share", r.Attainment(slo), func(b *Result) float64 { return b.Attainment(slo) },
			func() Interval { return r.Better(base, slo) })
	}
	plain := func(name, unit string, value float64) {
		rows = append(rows, bench.Beside(r.Setup+": "+name, unit, value, math.NaN(), math.NaN()))
	}
	for _, slo := range r.SLOs {
		plain("goodput"+r.within(slo), "request/s", r.Goodput(slo))
	}
	plain("answers", "token/s", r.Throughput())
	c := r.Counts()
	plain("requests", "requests", float64(c.Requests))
	plain("later turns", "requests", float64(r.later()))
	plain("answered", "requests", float64(c.Answered))
	plain("sent late", "requests", float64(c.Late))
	plain("sent late at most", "ms", msOf(c.MostLate))
	if growth := r.Growth(); !math.IsNaN(growth) {
		plain("queue growth", "share", growth)
	}
	if r.Overloaded() {
		plain("overloaded", "share", r.Growth())
	}
	for _, source := range slices.Sorted(maps.Keys(r.Sources)) {
		plain("prompt tokens, "+source, "tokens", r.Sources[source])
	}
	for _, kind := range c.Kinds() {
		plain("failed, "+kind, "requests", float64(c.Failed[kind]))
	}
	return rows
}

// number is a time for people; a quantile that is among the requests that failed has none.
func number(v float64) string {
	switch {
	case math.IsInf(v, 1):
		return "failed"
	case math.IsNaN(v):
		return "-"
	}
	return fmt.Sprintf("%.4g", v)
}

// Table writes results for people: what each setup did, and how many times as quick as the first the others are.
func Table(w io.Writer, results []*Result) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "times in ms\t")
	for _, m := range Metrics() {
		for _, q := range Quantiles() {
			fmt.Fprintf(t, "%s %s\t", m, percent(q))
		}
	}
	for _, slo := range results[0].SLOs {
		fmt.Fprintf(t, "good%s\tgoodput/s\t", results[0].within(slo))
	}
	fmt.Fprint(t, "token/s\trequests\tlate\tfailed\t\n")
	for _, r := range results {
		fmt.Fprintf(t, "%s\t", r.Setup)
		for _, m := range Metrics() {
			for _, q := range Quantiles() {
				fmt.Fprintf(t, "%s\t", number(r.Quantile(m, q)))
			}
		}
		c := r.Counts()
		for _, slo := range r.SLOs {
			fmt.Fprintf(t, "%.1f %%\t%s\t", 100*r.Attainment(slo), number(r.Goodput(slo)))
		}
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t\n", number(r.Throughput()), c.Requests, c.Late, c.Requests-c.Answered)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	return tail(w, results)
}

// tail writes the ratios, and how requests failed.
func tail(w io.Writer, results []*Result) error {
	var b strings.Builder
	for _, r := range results[1:] {
		if r.Overloaded() || results[0].Overloaded() {
			continue
		}
		fmt.Fprintf(&b, "\n%s beside %s, above 1 is better, with what 95 %% of bootstrap replicates lie between:\n", r.Setup, results[0].Setup)
		for _, m := range Metrics() {
			fmt.Fprintf(&b, "  %s", m)
			for _, q := range Quantiles() {
				i := r.Quicker(results[0], m, q)
				fmt.Fprintf(&b, "   %s %s (%s to %s)", percent(q), number(i.Value), number(i.Low), number(i.High))
			}
			b.WriteByte('\n')
		}
		for _, slo := range r.SLOs {
			i := r.Better(results[0], slo)
			fmt.Fprintf(&b, "  good requests%s   %s (%s to %s)\n", r.within(slo), number(i.Value), number(i.Low), number(i.High))
		}
	}
	b.WriteByte('\n')
	for _, r := range results {
		if r.Sources != nil {
			fmt.Fprintf(&b, "%s: prompt tokens of its engines: %.0f computed, %.0f from their own caches, %.0f from connectors\n", r.Setup,
				r.Sources["local_compute"], r.Sources["local_cache"], r.Sources["external"])
		}
		if r.Overloaded() {
			fmt.Fprintf(&b, "%s: overloaded: its queue grew by %.0f %% of what came, so that its times depend on how long the load lasts; there are no ratios\n", r.Setup, 100*r.Growth())
		}
		c := r.Counts()
		for _, kind := range c.Kinds() {
			fmt.Fprintf(&b, "%s: %d of %d requests failed: %s", r.Setup, c.Failed[kind], c.Requests, kind)
			if err := r.example(kind); err != nil {
				fmt.Fprintf(&b, ", such as %v", err)
			}
			b.WriteByte('\n')
		}
		if c.Late > 0 {
			fmt.Fprintf(&b, "%s: %d of %d requests left late, by %.0f ms at most; their times begin when they were to leave\n", r.Setup, c.Late, c.Requests, msOf(c.MostLate))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// example is why a request failed.
func (r *Result) example(kind string) error {
	for _, run := range r.Runs {
		for i := range run {
			if run[i].Kind == kind {
				return run[i].Err
			}
		}
	}
	return nil
}
