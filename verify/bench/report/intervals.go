package report

import (
	"bytes"
	"fmt"
	"html"
	"slices"

	"github.com/kvport/kvport/verify/bench"
)

// Sizes of a plot of intervals in pixels.
const (
	panelLeft, panelWidth  = 60, 720
	panelHeight, panelSkip = 120, 50 // what is between two panels has a heading and the names of the loads
	legendLine             = 18
	legendColumns          = 6
)

// The ratios that a panel shows; what is beyond is drawn at its edge.
const leastInterval, mostInterval = 0.2, 5.0

// colours of setups, in their order.
func colours() []string {
	return []string{"#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#333333", "#999933"}
}

// intervals is a plot while it is drawn.
type intervals struct {
	out    bytes.Buffer
	loads  []string
	setups []string
	y      scale // of the panel
	edge   bool  // something is beyond the scale, or has no bound
	over   bool  // something is overloaded
}

// Intervals draws the ratios of kvport bench serve: a panel for each quantity, in it a group for each load, in that a mark for each setup with the interval of
// its ratio. What is above 1 is better than the setup that all are compared with. The result is SVG, the same for the same rows.
func Intervals(rows []bench.Row) []byte {
	list := slices.DeleteFunc(shown(numbers(rows), quantities()...), func(n served) bool { return n.base == "" })
	p := &intervals{loads: distinct(list, func(n served) string { return n.at }), setups: distinct(list, func(n served) string { return n.setup })}
	top := 90 + legendLine*((len(p.setups)+legendColumns-1)/legendColumns)
	var panels bytes.Buffer
	y := top
	for _, quantity := range quantities() {
		if drawn := shown(list, quantity); len(drawn) > 0 {
			p.panel(quantity, y, drawn)
			y += panelHeight + panelSkip
		}
	}
	panels, p.out = p.out, bytes.Buffer{}
	fmt.Fprintf(&p.out, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n", panelLeft+panelWidth+20, y)
	fmt.Fprintf(&p.out, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", panelLeft+panelWidth+20, y)
	base := ""
	for _, n := range list {
		base = n.base
	}
	p.legend(base)
	p.out.Write(panels.Bytes())
	p.out.WriteString("</svg>\n")
	return p.out.Bytes()
}

// legend says what colours and marks mean.
func (p *intervals) legend(base string) {
	p.text(8, 16, "start", fmt.Sprintf("How many times as good as %s: above 1 is better. Logarithmic; a bar is the interval of 95 %%, and if it crosses 1 nothing is decided.", base), "#000")
	marks := "In each group setups have the order of this legend."
	if p.edge {
		marks += fmt.Sprintf(" A triangle at an edge: the value or bound is beyond %g or %g, or there is no bound.", leastInterval, mostInterval)
	}
	p.text(8, 32, "start", marks, "#000")
	if p.over {
		p.text(8, 48, "start", "x: no ratio, since one of the two setups is overloaded or too many of its requests failed.", "#000")
	}
	for i, setup := range p.setups {
		x, y := 16+i%legendColumns*125, 70+i/legendColumns*legendLine
		fmt.Fprintf(&p.out, `<circle cx="%d" cy="%d" r="4" fill="%s"/>`+"\n", x, y-4, p.colour(setup))
		p.text(float64(x+10), float64(y), "start", setup, "#000")
	}
}

func (p *intervals) colour(setup string) string {
	return colours()[slices.Index(p.setups, setup)%len(colours())]
}

func (p *intervals) text(x, y float64, anchor, text, colour string) {
	fmt.Fprintf(&p.out, `<text x="%.1f" y="%.1f" text-anchor="%s" fill="%s">%s</text>`+"\n", x, y, anchor, colour, html.EscapeString(text))
}

// panel draws a quantity.
func (p *intervals) panel(quantity string, top int, drawn []served) {
	bottom := top + panelHeight
	p.y = scale{leastInterval, mostInterval, float64(bottom), -panelHeight}
	fmt.Fprintf(&p.out, `<text x="8" y="%d" font-weight="bold">%s</text>`+"\n", top-12, html.EscapeString(quantity))
	for _, tick := range []float64{0.2, 0.5, 1, 2, 5} {
		colour := "#ccc"
		if tick == 1 {
			colour = "#000"
		}
		y := p.y.at(tick)
		fmt.Fprintf(&p.out, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="%s"/>`+"\n", panelLeft, panelLeft+panelWidth, y, y, colour)
		p.text(panelLeft-6, y+4, "end", fmt.Sprintf("%g", tick), "#555")
	}
	group := float64(panelWidth) / float64(len(p.loads))
	for i, load := range p.loads {
		x := panelLeft + (float64(i)+0.5)*group
		p.text(x, float64(bottom)+18, "middle", load, "#000")
		if i > 0 {
			fmt.Fprintf(&p.out, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#ccc"/>`+"\n", x-group/2, x-group/2, top, bottom)
		}
	}
	step := group / float64(len(p.setups)+1)
	for _, n := range drawn {
		x := panelLeft + float64(slices.Index(p.loads, n.at))*group + float64(slices.Index(p.setups, n.setup)+1)*step
		p.mark(x, n)
	}
}

// mark draws one ratio with its interval.
func (p *intervals) mark(x float64, n served) {
	colour := p.colour(n.setup)
	if n.row.Ratio == nil {
		p.over = true
		p.text(x, p.y.from-3, "middle", "x", colour)
		return
	}
	ratio := *n.row.Ratio
	if n.interval {
		low, high := leastInterval/2, mostInterval*2 // no bound
		if n.low != nil {
			low = *n.low
		}
		if n.high != nil {
			high = *n.high
		}
		fmt.Fprintf(&p.out, `<line x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f" stroke="%s" stroke-width="2"/>`+"\n", x, x, p.y.at(low), p.y.at(high), colour)
		p.beyond(x, low, colour)
		p.beyond(x, high, colour)
	}
	if !p.beyond(x, ratio, colour) {
		fmt.Fprintf(&p.out, `<circle cx="%.1f" cy="%.1f" r="4" fill="%s"/>`+"\n", x, p.y.at(ratio), colour)
	}
}

// beyond draws a triangle at the edge if a ratio is beyond the scale.
func (p *intervals) beyond(x, ratio float64, colour string) bool {
	y := p.y.at(ratio)
	var tip float64
	switch {
	case ratio < leastInterval:
		tip = 7
	case ratio > mostInterval:
		tip = -7
	default:
		return false
	}
	p.edge = true
	fmt.Fprintf(&p.out, `<polygon points="%.1f,%.1f %.1f,%.1f %.1f,%.1f" fill="%s"/>`+"\n", x-5, y, x+5, y, x, y+tip, colour)
	return true
}
