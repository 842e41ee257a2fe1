package report

import (
	"bytes"
	"fmt"
	"html"

	"github.com/kvport/kvport/verify/bench"
)

// Timeline draws what kvport bench layerwise measured: a bar for each layer, from when its KV was computed
// to when the consumer had confirmed it, and a line where the last layer's compute ends. The result is SVG,
// the same for the same rows.
func Timeline(rows []bench.Row) []byte {
	type span struct{ from, to float64 }
	var layers []span
	end, most := 0.0, 1.0
	for _, r := range rows {
		if r.Unit != "ms" || r.Value == nil {
			continue
		}
		var layer int
		var what string
		if n, _ := fmt.Sscanf(r.Name, "layer %d %s", &layer, &what); n == 2 && layer >= 0 && layer <= len(layers) {
			if layer == len(layers) {
				layers = append(layers, span{})
			}
			if what == "computed" {
				layers[layer].from = *r.Value
			} else {
				layers[layer].to = *r.Value
			}
			most = max(most, *r.Value)
		}
		if r.Name == "last layer's compute ends" {
			end, most = *r.Value, max(most, *r.Value)
		}
	}
	x := func(ms float64) float64 { return labelWidth/3 + ms/most*(plotWidth+labelWidth/2) }
	width, height := labelWidth+plotWidth+60, 2*margin+len(layers)*rowHeight
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n", width, height)
	fmt.Fprintf(&out, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", width, height)
	for i, l := range layers {
		y := margin + i*rowHeight
		colour := "#2e8b57"
		if l.to > end {
			colour = "#c0623a" // confirmed when all was computed
		}
		fmt.Fprintf(&out, `<text x="%d" y="%d" text-anchor="end">layer %d</text>`+"\n", labelWidth/3-8, y+14, i)
		fmt.Fprintf(&out, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n", x(l.from), y+4, max(2, x(l.to)-x(l.from)), rowHeight-8, colour)
		fmt.Fprintf(&out, `<text x="%.1f" y="%d" fill="#555">%.1f ms</text>`+"\n", max(x(l.to), x(l.from)+2)+5, y+14, l.to-l.from)
	}
	fmt.Fprintf(&out, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#000" stroke-width="2"/>`+"\n", x(end), x(end), margin-6, height-margin)
	fmt.Fprintf(&out, `<text x="%.1f" y="%d" text-anchor="end">%s</text>`+"\n", x(end), margin-10, html.EscapeString(fmt.Sprintf("last layer's compute ends at %.0f ms", end)))
	fmt.Fprintf(&out, "</svg>\n")
	return out.Bytes()
}
