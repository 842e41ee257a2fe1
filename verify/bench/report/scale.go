package report

import "math"

// scale puts ratios on an axis of a plot, logarithmic from least to most. Pixels grow from where least is; a negative length goes up.
type scale struct{ least, most, from, length float64 }

// at is where a ratio is; what is beyond the scale is at its end.
func (s scale) at(ratio float64) float64 {
	ratio = min(max(ratio, s.least), s.most)
	return s.from + s.length*math.Log(ratio/s.least)/math.Log(s.most/s.least)
}
