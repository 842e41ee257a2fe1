package report

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"slices"
	"strings"

	"github.com/kvport/kvport/verify/bench"
)

// served is a number of kvport bench serve: one of those that tables and plots show, of all that it measures.
type served struct {
	at       string // the load, such as "0.5/s"; empty: there is one
	setup    string
	base     string // what it is compared with; empty: the others are compared with it
	quantity string
	row      bench.Row
	low      *float64 // of the interval of the ratio; nil: it has none
	high     *float64
}

// quantities are those that tables and plots show.
func quantities() []string {
	return []string{"TTFT p50", "TTFT of later turns p50", "ITL p50", "ITL p99", "good requests"}
}

// numbers finds what is shown among the rows of kvport bench serve, in their order.
func numbers(rows []bench.Row) []served {
	values := map[string]*float64{}
	for _, r := range rows {
		values[r.Name] = r.Value
	}
	var list []served
	for _, r := range rows {
		n := served{row: r, low: values[r.Name+", 95 % from"], high: values[r.Name+", 95 % to"]}
		rest := r.Name
		if at, is := strings.CutPrefix(rest, "at "); is {
			n.at, rest, _ = strings.Cut(at, ", ")
		}
		both, quantity, compared := strings.Cut(rest, ", ")
		if compared {
			n.setup, n.base, _ = strings.Cut(both, " : ")
		} else {
			n.setup, quantity, _ = strings.Cut(rest, ": ")
		}
		n.quantity = quantity
		if slices.Contains(quantities(), quantity) {
			list = append(list, n)
		}
	}
	return list
}

// ServingTable is a Markdown table of what kvport bench serve has measured: a line for each load and setup. Times are in milliseconds, and what is
// compared has its ratio and the interval of that.
func ServingTable(rows []bench.Row) string {
	var b strings.Builder
	b.WriteString("| load | setup | " + strings.Join(quantities(), " | ") + " |\n|---|---|" + strings.Repeat("---:|", len(quantities())) + "\n")
	for list := numbers(rows); len(list) > 0; {
		first, cells := list[0], map[string]string{}
		for len(list) > 0 && list[0].at == first.at && list[0].setup == first.setup {
			cells[list[0].quantity] = list[0].cell()
			list = list[1:]
		}
		fmt.Fprintf(&b, "| %s | `%s` |", dash(first.at), first.setup)
		for _, quantity := range quantities() {
			b.WriteString(" " + dash(cells[quantity]) + " |")
		}
		b.WriteString("\n")
	}
	return b.String()
}

// cell is a number in a table.
func (n *served) cell() string {
	value := bench.Number(n.row.Value)
	if n.row.Value == nil {
		value = "failed"
	}
	if n.base == "" {
		return value
	}
	if n.row.Ratio == nil {
		return value
	}
	return fmt.Sprintf("%s: **%s** (%s to %s)", value, bench.Number(n.row.Ratio), bench.Number(n.low), bench.Number(n.high))
}

// The ratios that a plot of intervals shows, on a logarithmic scale; what is beyond is drawn at the edge.
const leastInterval, mostInterval = 0.1, 10.0

// Intervals draws the ratios of kvport bench serve: for each quantity and load a line for each setup, from the lower to the upper bound of its
// interval, with a dot where the ratio is. What is right of 1 is better than the setup that all are compared with. The result is SVG, the same for the
// same rows.
func Intervals(rows []bench.Row) []byte {
	list := numbers(rows)
	var body bytes.Buffer
	y := margin
	for _, quantity := range quantities() {
		drawn := slices.DeleteFunc(slices.Clone(list), func(n served) bool { return n.quantity != quantity || n.row.Ratio == nil || *n.row.Ratio <= 0 })
		if len(drawn) == 0 {
			continue
		}
		fmt.Fprintf(&body, `<text x="8" y="%d" font-weight="bold">%s</text>`+"\n", y+14, html.EscapeString(quantity))
		y += rowHeight
		for _, n := range drawn {
			n.draw(&body, y)
			y += rowHeight
		}
	}
	width, height := labelWidth+plotWidth+60, y+margin
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n", width, height)
	fmt.Fprintf(&out, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", width, height)
	for _, tick := range []float64{0.1, 0.25, 0.5, 1, 2, 4, 10} {
		x, colour := at(tick), "#ccc"
		if tick == 1 {
			colour = "#000"
		}
		fmt.Fprintf(&out, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="%s"/>`+"\n", x, x, margin-6, height-margin, colour)
		fmt.Fprintf(&out, `<text x="%.1f" y="%d" text-anchor="middle" fill="#555">%v</text>`+"\n", x, margin-10, tick)
	}
	out.Write(body.Bytes())
	base := ""
	for _, n := range list {
		base = max(base, n.base)
	}
	fmt.Fprintf(&out, `<text x="%d" y="%d" fill="#555">ratio to %s, logarithmic, with intervals of 95 %%; right of 1 is better</text>`+"\n", labelWidth, height-10, html.EscapeString(base))
	out.WriteString("</svg>\n")
	return out.Bytes()
}

// draw draws one ratio: green or red if its interval is on one side of 1, else grey.
func (n *served) draw(out *bytes.Buffer, y int) {
	colour, label := "#7f8c8d", n.setup
	if n.at != "" {
		label = n.at + "  " + n.setup
	}
	ratio := at(*n.row.Ratio)
	from, to := ratio, ratio
	if n.low != nil && n.high != nil {
		from, to = at(*n.low), at(*n.high)
		if *n.low > 1 {
			colour = "#2e8b57"
		} else if *n.high < 1 {
			colour = "#c0623a"
		}
	}
	middle := float64(y) + float64(rowHeight)/2
	fmt.Fprintf(out, `<text x="%d" y="%d" text-anchor="end">%s</text>`+"\n", labelWidth-8, y+14, html.EscapeString(label))
	fmt.Fprintf(out, `<line x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f" stroke="%s" stroke-width="3"/>`+"\n", from, to, middle, middle, colour)
	fmt.Fprintf(out, `<circle cx="%.1f" cy="%.1f" r="4" fill="%s"/>`+"\n", ratio, middle, colour)
	fmt.Fprintf(out, `<text x="%.1f" y="%d">%s</text>`+"\n", max(to, ratio)+8, y+14, bench.Number(n.row.Ratio))
}

// at is where a ratio is on the horizontal axis of a plot of intervals.
func at(ratio float64) float64 {
	ratio = min(max(ratio, leastInterval), mostInterval)
	return labelWidth + plotWidth*math.Log(ratio/leastInterval)/math.Log(mostInterval/leastInterval)
}
