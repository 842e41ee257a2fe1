package storekit

import (
	"reflect"
	"strings"
	"sync"

	"github.com/kvport/kvport/connector"
)

// Counts counts in the fields of S, a struct of uint64. The tags of a field make a metric of it: stat is its name, which
// ends in _total if it is a counter and not a gauge, and help explains it.
type Counts[S any] struct {
	mu  sync.Mutex
	now S
}

// Count lets add change the numbers.
func (c *Counts[S]) Count(add func(now *S)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	add(&c.now)
}

// Now are the numbers so far.
func (c *Counts[S]) Now() S {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// Infos declares the metrics of S, with a prefix before their names.
func Infos[S any](prefix string) (infos []connector.StatInfo) {
	for f := range reflect.TypeFor[S]().Fields() {
		kind := connector.Gauge
		if strings.HasSuffix(f.Tag.Get("stat"), "_total") {
			kind = connector.Counter
		}
		if name := f.Tag.Get("stat"); name != "" {
			infos = append(infos, connector.StatInfo{Name: prefix + name, Help: f.Tag.Get("help"), Kind: kind})
		}
	}
	return infos
}

// Stats are the values of the metrics that Infos declares.
func Stats[S any](prefix string, of S) (stats []connector.Stat) {
	for f, v := range reflect.ValueOf(of).Fields() {
		if name := f.Tag.Get("stat"); name != "" {
			stats = append(stats, connector.Stat{Name: prefix + name, Value: float64(v.Uint())})
		}
	}
	return stats
}
