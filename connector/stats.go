package connector

import (
	"context"
	"fmt"
	"math"
	"regexp"
	"strings"
)

// A StatsSource shows numbers of its own among the host's metrics (capability CanStat).
type StatsSource interface {
	// Stats gives the present values of what Info.Stats declares, at most MaxSamples. It is asked
	// about once a second, at the same time as other calls, and returns soon (rule STAT-03). What
	// is left out keeps its last value. The caller owns the slice.
	Stats(ctx context.Context) ([]Stat, error)
}

// The limits of what a StatsSource may show.
const (
	MaxStats      = 64  // of Info.Stats
	MaxStatName   = 64  // bytes of a name
	MaxStatLabels = 4   // of one of them
	MaxLabelValue = 128 // bytes
	MaxSamples    = 512 // of one answer, and of all that a host shows for one connector
)

// StatKind says how a number moves.
type StatKind uint8

// The kinds. The numbers are part of the wire protocol and never reused.
const (
	Counter StatKind = 1 + iota // only grows, from 0 when the side opens (rule STAT-02)
	Gauge                       // goes up and down
)

// String is the kind's name.
func (k StatKind) String() string {
	switch k {
	case Counter:
		return "counter"
	case Gauge:
		return "gauge"
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// StatInfo declares one number. The host shows it as kvport_connector_NAME with a label for the
// connector before its own.
type StatInfo struct {
	Name   string // such as evictions_total; a counter's ends in _total
	Help   string // what it counts, one sentence
	Kind   StatKind
	Labels []string // their names; few, each with few values
}

// Stat is the present value of one number.
type Stat struct {
	Name   string
	Labels []string // values, in the order of StatInfo.Labels
	Value  float64
}

var statName = regexp.MustCompile(`^[a-z][a-z0-9_]*$`)

// Validate reports what cannot be a metric. Errors name the stat and wrap ErrIncompatible (rule
// STAT-01).
func (s *StatInfo) Validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("stat %q %s: %w", s.Name, fmt.Sprintf(format, args...), ErrIncompatible)
	}
	counts := strings.HasSuffix(s.Name, "_total")
	switch {
	case len(s.Name) > MaxStatName || !statName.MatchString(s.Name):
		return bad("must be of a-z, 0-9 and _, at most %d", MaxStatName)
	case s.Name == "info":
		return bad("is a metric of the host")
	case s.Kind != Counter && s.Kind != Gauge:
		return bad("is of %v", s.Kind)
	case counts != (s.Kind == Counter):
		return bad("is a %v: names of counters, and no others, end in _total", s.Kind)
	case len(s.Labels) > MaxStatLabels:
		return bad("has %d labels, limit %d", len(s.Labels), MaxStatLabels)
	}
	seen := map[string]bool{"connector": true}
	for _, l := range s.Labels {
		if len(l) > MaxStatName || !statName.MatchString(l) || seen[l] {
			return bad("has a label %q that is no name, taken, or there twice", l)
		}
		seen[l] = true
	}
	return nil
}

// ValidateStats reports the first of an Info's stats that cannot be a metric, or is there twice.
func ValidateStats(stats []StatInfo) error {
	if len(stats) > MaxStats {
		return fmt.Errorf("%d stats, limit %d: %w", len(stats), MaxStats, ErrIncompatible)
	}
	seen := map[string]bool{}
	for i := range stats {
		if err := stats[i].Validate(); err != nil {
			return err
		}
		if seen[stats[i].Name] {
			return fmt.Errorf("stat %q is there twice: %w", stats[i].Name, ErrIncompatible)
		}
		seen[stats[i].Name] = true
	}
	return nil
}

// Check reports a value that s, which is valid, does not declare. Errors name the stat and wrap
// ErrIncompatible.
func (s *StatInfo) Check(v *Stat) error {
	bad := math.IsNaN(v.Value) || math.IsInf(v.Value, 0) || s.Kind == Counter && v.Value < 0
	switch {
	case v.Name != s.Name || len(v.Labels) != len(s.Labels):
		return fmt.Errorf("stat %q with %d labels, %q has %d: %w", v.Name, len(v.Labels), s.Name, len(s.Labels), ErrIncompatible)
	case bad:
		return fmt.Errorf("stat %q, a %v, is %v: %w", v.Name, s.Kind, v.Value, ErrIncompatible)
	}
	for _, l := range v.Labels {
		if len(l) > MaxLabelValue {
			return fmt.Errorf("stat %q: a label of %d bytes, limit %d: %w", v.Name, len(l), MaxLabelValue, ErrIncompatible)
		}
	}
	return nil
}
