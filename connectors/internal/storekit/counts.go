package storekit

import "github.com/kvport/kvport/connector"

// Count is one number of what a store counts, which is an S.
type Count[S any] struct {
	Name, Help string
	Of         func(S) uint64
	Gauge      bool
}

// Infos declares numbers whose names begin with a prefix.
func Infos[S any](prefix string, counts []Count[S]) (infos []connector.StatInfo) {
	for _, c := range counts {
		kind := connector.Counter
		if c.Gauge {
			kind = connector.Gauge
		}
		infos = append(infos, connector.StatInfo{Name: prefix + c.Name, Help: c.Help, Kind: kind})
	}
	return infos
}

// Stats are the numbers that Infos declares.
func Stats[S any](prefix string, counts []Count[S], of S) (stats []connector.Stat) {
	for _, c := range counts {
		stats = append(stats, connector.Stat{Name: prefix + c.Name, Value: float64(c.Of(of))})
	}
	return stats
}
