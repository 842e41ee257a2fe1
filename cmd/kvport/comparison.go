package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/kvport/kvport/verify/bench"
	"github.com/kvport/kvport/verify/bench/report"
	"github.com/kvport/kvport/verify/bench/serve"
)

// comparison shows what kvport bench serve or kvport sim serve has found, at one rate of requests or several.
type comparison struct {
	out    io.Writer
	asJSON bool
	plot   string // file for a plot; empty: none
	rows   []bench.Row
}

// offered is a rate of requests at which everything is measured.
type offered struct {
	number int     // from 0 on, in the order in which they are measured
	rate   float64 // 0: that of the workload
	name   string  // what is before the names of rows; empty: the rate is that of the workload
}

// at shows what measure finds at each rate, or at that of the workload if none is given. measure gets no emit if nothing needs rows.
func (c *comparison) at(rates []float64, measure func(l offered, emit bench.Emit) ([]*serve.Result, error)) error {
	if len(rates) == 0 {
		rates = []float64{0}
	}
	write := bench.JSON(c.out)
	for n, rate := range rates {
		l := offered{number: n, rate: rate}
		if rate > 0 {
			l.name = fmt.Sprintf("at %g/s, ", rate)
		}
		var emit bench.Emit
		if c.asJSON || c.plot != "" {
			emit = func(r bench.Row) error {
				r.Name = l.name + r.Name
				c.rows = append(c.rows, r)
				if c.asJSON {
					return write(r)
				}
				return nil
			}
		}
		results, err := measure(l, emit)
		if err == nil && !c.asJSON {
			err = c.table(rate, l.name != "", results)
		}
		if err != nil {
			return fmt.Errorf("%s%w", l.name, err)
		}
	}
	if c.plot == "" {
		return nil
	}
	return os.WriteFile(c.plot, report.Intervals(c.rows), 0o644) //nolint:gosec // a picture for everybody
}

// checkRates refuses a rate that is given twice: its rows would have the same names.
func checkRates(rates []float64) error {
	for i, rate := range rates {
		if slices.Contains(rates[:i], rate) {
			return fmt.Errorf("--rate has %g twice", rate)
		}
	}
	return nil
}

func (c *comparison) table(rate float64, named bool, results []*serve.Result) error {
	var err error
	if named {
		_, err = fmt.Fprintf(c.out, "\nAt %g requests a second:\n\n", rate)
	}
	return errors.Join(err, serve.Table(c.out, results))
}

// slos are all pairs of the times of two flags.
func slos(ttft, itl []time.Duration) (list []serve.SLO) {
	for _, first := range ttft {
		for _, each := range itl {
			if slo := (serve.SLO{TTFT: first, ITL: each}); !slices.Contains(list, slo) {
				list = append(list, slo)
			}
		}
	}
	return list
}
