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

// at shows what measure finds at each rate. With several rates the rows of each are named after it; with none measure gets 0.
func (c *comparison) at(rates []float64, measure func(rate float64, emit bench.Emit) ([]*serve.Result, error)) error {
	if len(rates) == 0 {
		rates = []float64{0}
	}
	write := bench.JSON(c.out)
	for _, rate := range rates {
		name := ""
		if len(rates) > 1 {
			name = fmt.Sprintf("at %g/s, ", rate)
		}
		results, err := measure(rate, func(r bench.Row) error {
			r.Name = name + r.Name
			c.rows = append(c.rows, r)
			if c.asJSON {
				return write(r)
			}
			return nil
		})
		if err == nil && !c.asJSON {
			err = c.table(rate, name != "", results)
		}
		if err != nil {
			return fmt.Errorf("%s%w", name, err)
		}
	}
	if c.plot == "" {
		return nil
	}
	return os.WriteFile(c.plot, report.Intervals(c.rows), 0o644) //nolint:gosec // a picture for everybody
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
