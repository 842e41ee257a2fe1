package report

import (
	"bytes"
	"fmt"

	"github.com/kvport/kvport/verify/bench"
)

// OverlapTimeline draws what kvport bench overlap measured: for each layer a grey bar while the model waits for it, and a bar from
// when its attention begins to when the next layer is asked for, in another colour when the load was over. A line says when that
// was. The result is SVG, the same for the same rows.
func OverlapTimeline(rows []bench.Row) []byte {
	var asked, read []float64
	over, first := 0.0, 1.0
	for _, r := range rows {
		if r.Unit != "ms" || r.Value == nil {
			continue
		}
		var layer int
		var what string
		n, _ := fmt.Sscanf(r.Name, "layer %d %s", &layer, &what)
		switch {
		case n == 2 && what == "asked" && layer == len(asked):
			asked = append(asked, *r.Value)
		case n == 2 && what == "verified" && layer == len(read):
			read = append(read, *r.Value)
		case r.Name == "the load is over":
			over = *r.Value
		case r.Name == "the first token is there":
			first = *r.Value
		}
	}
	most := max(over, first)
	x := func(ms float64) float64 { return labelWidth/3 + ms/most*(plotWidth+labelWidth/2) }
	width, height := labelWidth+plotWidth+60, 2*margin+len(read)*rowHeight
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n", width, height)
	fmt.Fprintf(&out, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", width, height)
	bar := func(y int, from, to float64, colour string) {
		fmt.Fprintf(&out, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n", x(from), y+4, max(1, x(to)-x(from)), rowHeight-8, colour)
	}
	for i := range min(len(asked), len(read)) {
		y, next := margin+i*rowHeight, first
		if i+1 < len(asked) {
			next = asked[i+1]
		}
		colour := "#2e8b57"
		if read[i] > over {
			colour = "#c0623a" // all was there
		}
		fmt.Fprintf(&out, `<text x="%d" y="%d" text-anchor="end">layer %d</text>`+"\n", labelWidth/3-8, y+14, i)
		bar(y, asked[i], read[i], "#bbb")
		bar(y, read[i], next, colour)
		fmt.Fprintf(&out, `<text x="%.1f" y="%d" fill="#555">%.1f ms</text>`+"\n", x(next)+5, y+14, read[i])
	}
	fmt.Fprintf(&out, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#000" stroke-width="2"/>`+"\n", x(over), x(over), margin-6, height-margin)
	fmt.Fprintf(&out, `<text x="%.1f" y="%d" text-anchor="middle">the load is over at %.1f ms, the first token is there at %.1f ms</text>`+"\n", x(most/2), margin-10, over, first)
	fmt.Fprintf(&out, "</svg>\n")
	return out.Bytes()
}
