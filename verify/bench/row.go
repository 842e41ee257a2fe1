// Package bench measures kvport beside what limits it.
//
// A ratio compares two medians that were taken in one run, the two sides taking turns, so that whatever
// disturbs the machine disturbs both. Absolute times are shown, but no test depends on them.
package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
)

// Row is one result: a line of the output.
type Row struct {
	Name   string   `json:"name"`
	Bytes  int64    `json:"bytes"`  // moved or read by one operation; 0 if that means nothing
	Value  *float64 `json:"value"`  // the median, in Unit; nil: not measured
	Unit   string   `json:"unit"`   // of Value and Limit; "absent" for a peer that is not there
	Limit  *float64 `json:"limit"`  // what Value is compared with, measured in the same run; nil: nothing
	Ratio  *float64 `json:"ratio"`  // how near to the limit Value comes: 1 is the limit, less is worse
	Budget string   `json:"budget"` // "ratio >= 0.9" or "value <= 20"; empty: none, only reported
	OK     *bool    `json:"ok"`     // within budget; nil without a budget or a value
}

// budget is what a row should keep to. The zero budget is none.
type budget struct {
	ratio float64 // at least
	value float64 // at most
}

// atLeast is a budget for a ratio, atMost one for a value.
func atLeast(ratio float64) budget { return budget{ratio: ratio} }

func atMost(value float64) budget { return budget{value: value} }

// judge fills in Ratio, Budget and OK. better is the ratio.
func (r *Row) judge(ratio float64, b budget) {
	if !math.IsNaN(ratio) && !math.IsInf(ratio, 0) && r.Limit != nil {
		r.Ratio = round(ratio)
	}
	switch {
	case b.ratio > 0:
		r.Budget = fmt.Sprintf("ratio >= %v", b.ratio)
		if r.Ratio != nil {
			ok := ratio >= b.ratio
			r.OK = &ok
		}
	case b.value > 0:
		r.Budget = fmt.Sprintf("value <= %v", b.value)
		if r.Value != nil {
			ok := *r.Value <= b.value
			r.OK = &ok
		}
	}
}

// faster is a row whose value is a speed: more is better. limit may be NaN.
func faster(name string, bytes int64, value, limit float64, unit string) func(budget) Row {
	return func(b budget) Row {
		r := Row{Name: name, Bytes: bytes, Value: round(value), Unit: unit, Limit: round(limit)}
		r.judge(value/limit, b)
		return r
	}
}

// shorter is a row whose value is a time or another cost: less is better. limit may be NaN.
func shorter(name string, bytes int64, value, limit float64, unit string) func(budget) Row {
	return func(b budget) Row {
		r := Row{Name: name, Bytes: bytes, Value: round(value), Unit: unit, Limit: round(limit)}
		r.judge(limit/value, b)
		return r
	}
}

// Beside is a row without a budget, with a ratio that is given. Numbers that are NaN or infinite are left out.
func Beside(name, unit string, value, limit, ratio float64) Row {
	return Row{Name: name, Value: round(value), Unit: unit, Limit: round(limit), Ratio: round(ratio)}
}

// The rows that say between what a ratio is said to be have the name of its row and one of these.
const (
	LowBound  = ", 95 % from"
	HighBound = ", 95 % to"
)

// Between is the row with a ratio that is given, and behind it the two rows between which that is said to be.
func (r Row) Between(ratio, low, high float64) []Row {
	r.Ratio = round(ratio)
	return []Row{r, {Name: r.Name + LowBound, Value: round(low), Unit: "ratio"}, {Name: r.Name + HighBound, Value: round(high), Unit: "ratio"}}
}

// absent names what could not be measured, and why.
func absent(name, why string) Row { return Row{Name: name + " (" + why + ")", Unit: "absent"} }

// round keeps four digits: more would be noise. NaN is nil.
func round(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	if v != 0 {
		scale := math.Pow(10, 3-math.Floor(math.Log10(math.Abs(v))))
		v = math.Round(v*scale) / scale
	}
	return &v
}

// Emit is what gets rows as they are measured.
type Emit func(Row) error

// all emits rows until one fails.
func (e Emit) all(rows []Row) error {
	for _, r := range rows {
		if err := e(r); err != nil {
			return err
		}
	}
	return nil
}

// JSON writes rows as JSON Lines.
func JSON(w io.Writer) Emit {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return func(r Row) error { return e.Encode(r) }
}

// Text writes rows as a table, a line as soon as it is known.
func Text(w io.Writer) Emit {
	first := true
	return func(r Row) error {
		if first {
			first = false
			fmt.Fprintf(w, "%-44s %10s %-10s %10s %7s  %-16s %s\n", "name", "value", "unit", "limit", "ratio", "budget", "ok")
		}
		_, err := fmt.Fprintf(w, "%-44s %10s %-10s %10s %7s  %-16s %s\n", r.Name, Number(r.Value), r.Unit, Number(r.Limit), Number(r.Ratio), r.Budget, r.Verdict())
		return err
	}
}

// Number is a value of a row for people; "-" if there is none.
func Number(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.4g", *v)
}

// Verdict is "yes", "NO" or, without a budget, "-".
func (r Row) Verdict() string {
	switch {
	case r.OK == nil:
		return "-"
	case *r.OK:
		return "yes"
	}
	return "NO"
}

// Read reads rows from JSON Lines.
func Read(r io.Reader) ([]Row, error) {
	var rows []Row
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	for {
		var row Row
		switch err := d.Decode(&row); err {
		case nil:
			rows = append(rows, row)
		case io.EOF:
			return rows, nil
		default:
			return nil, fmt.Errorf("row %d: %w", len(rows)+1, err)
		}
	}
}
