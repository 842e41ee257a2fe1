package report

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"strconv"
	"strings"

	"github.com/kvport/kvport/verify/bench"
)

// Sizes of a plot in pixels.
const (
	rowHeight  = 20
	labelWidth = 300
	plotWidth  = 440
	margin     = 30
)

// The ratios that a plot shows, on a logarithmic scale; what is beyond is drawn at the edge.
const leastRatio, mostRatio = 0.03, 40.0

// Plot draws the ratios of rows as bars from the limit, 1, on a logarithmic scale, each with its number and a
// mark where its budget is. Rows without a ratio are left out. The result is SVG, the same for the same rows.
func Plot(rows []bench.Row) []byte {
	position := scale{leastRatio, mostRatio, labelWidth, plotWidth}.at
	var body bytes.Buffer
	n := 0
	for _, r := range rows {
		if r.Ratio == nil || *r.Ratio <= 0 {
			continue
		}
		y := margin + n*rowHeight
		n++
		from, to := position(1), position(*r.Ratio)
		colour := "#7f8c8d" // no budget
		if r.OK != nil && *r.OK {
			colour = "#2e8b57"
		} else if r.OK != nil {
			colour = "#c0623a"
		}
		fmt.Fprintf(&body, `<text x="%d" y="%d" text-anchor="end">%s</text>`+"\n", labelWidth-8, y+14, html.EscapeString(r.Name))
		fmt.Fprintf(&body, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n", min(from, to), y+4, max(1, math.Abs(to-from)), rowHeight-8, colour)
		fmt.Fprintf(&body, `<text x="%.1f" y="%d">%s</text>`+"\n", max(from, to)+5, y+14, bench.Number(r.Ratio))
		if b, ok := strings.CutPrefix(r.Budget, "ratio >= "); ok {
			if least, err := strconv.ParseFloat(b, 64); err == nil {
				fmt.Fprintf(&body, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#000" stroke-width="2"/>`+"\n", position(least), position(least), y+2, y+rowHeight-2)
			}
		}
	}
	width, height := labelWidth+plotWidth+60, 2*margin+n*rowHeight
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n", width, height)
	fmt.Fprintf(&out, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", width, height)
	for _, tick := range []float64{0.1, 0.25, 0.5, 1, 2, 4, 10, 25} {
		x := position(tick)
		fmt.Fprintf(&out, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#ccc"/>`+"\n", x, x, margin-6, height-margin)
		fmt.Fprintf(&out, `<text x="%.1f" y="%d" text-anchor="middle" fill="#555">%v</text>`+"\n", x, margin-10, tick)
	}
	out.Write(body.Bytes())
	fmt.Fprintf(&out, `<text x="%d" y="%d" fill="#555">ratio to the limit, logarithmic; black marks are budgets</text>`+"\n", labelWidth, height-10)
	out.WriteString("</svg>\n")
	return out.Bytes()
}
