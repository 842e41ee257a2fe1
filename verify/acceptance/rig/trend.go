package rig

import (
	"fmt"
	"slices"
)

// Trend is how fast a quantity grows, each minute, and between what its growth is. It is the median of the slopes between all pairs of
// windows of time (Theil and Sen), of each of which the median counts. Low and High leave a tenth of the slopes out at either end.
//
// Of noise half of the pairs rise. That nine of ten do is 6.2 standard deviations from that (Kendall) if the windows have nothing
// to do with each other, which leaves room for windows that have. One or two steps, as when an allocator takes its next piece of
// memory, are not enough either: the pairs on the same step are noise. Six are.
type Trend struct {
	Slope, Low, High float64
	Level            float64 // the median of all windows
	Minutes          float64 // it was looked at
}

const (
	trendWindows = 30
	trendOutside = 10 // one slope in ten is left out at either end
	// trendShare of the level is what the memory of a process may gain in all and count as the same: its allocator keeps pages that it
	// has once had, and takes the next one when it happens to have no hole of that size.
	trendShare = 0.01
)

// TrendOf gives the trend of values that were taken at equal distances over a number of minutes, at least one for each of 30 windows.
func TrendOf(values []float64, minutes float64) (t Trend, err error) {
	if len(values) < trendWindows {
		return t, fmt.Errorf("a trend needs %d values, these are %d", trendWindows, len(values))
	}
	windows := make([]float64, trendWindows)
	for i := range windows {
		windows[i] = median(values[i*len(values)/trendWindows : (i+1)*len(values)/trendWindows])
	}
	apart := minutes / trendWindows
	var slopes []float64
	for i, from := range windows {
		for j, to := range windows[i+1:] {
			slopes = append(slopes, (to-from)/(apart*float64(j+1)))
		}
	}
	slices.Sort(slopes)
	at := len(slopes) / trendOutside
	return Trend{Slope: median(slopes), Low: slopes[at], High: slopes[len(slopes)-1-at], Level: median(windows), Minutes: minutes}, nil
}

// median leaves the values in their order.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

// Grows says whether the growth cannot be noise: what was gained for sure is more than a hundredth of the level.
func (t Trend) Grows() bool { return t.Low*t.Minutes > trendShare*t.Level }

// String tells the level, the slope and the interval.
func (t Trend) String() string {
	return fmt.Sprintf("%.0f, %+.3g a minute (%+.3g to %+.3g)", t.Level, t.Slope, t.Low, t.High)
}
