package connector

import (
	"context"
	"fmt"
	"math"
	"regexp"
	"strings"
)

// A StatsSource adds numbers of its own to the host's metrics (capability CanStat).
type StatsSource interface {
	// Stats returns the present values of what Info.Stats declares, at most MaxSamples. The host calls it
	// about once a second, concurrently with other calls, and it must return soon (rule STAT-03). A number
	// that is left out keeps its last value. The caller owns the slice.
	Stats(ctx context.Context) ([]Stat, error)
}

// The limits of what a StatsSource may report.
const (
	MaxStats      = 64  // of Info.Stats
	MaxStatName   = 64  // bytes of a name
	MaxStatLabels = 4   // of one StatInfo
	MaxLabelValue = 128 // bytes
	MaxSamples    = 512 // of one answer, and of all that a host shows for one connector
)

// StatKind says how a number changes.
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

// StatInfo declares one number. The host shows it as kvport_connector_NAME, with a label for the connector
// before the stat's own labels.
type StatInfo struct {
	Name   string // such as evictions_total; the name of a counter ends in _total
	Help   string // what it counts, in one sentence
	Kind   StatKind
	Labels []string // label names; a few, each with a few values
}

// Stat is the present value of one number.
type Stat struct {
	Name   string
	Labels []string // values, in the order of StatInfo.Labels
	Value  float64
}

var statName = regexp.MustCompile(`^[a-z][a-z0-9_]*$`)

// Validate returns an error if the stat cannot be a metric. Errors name the stat and wrap ErrIncompatible
// (rule STAT-01).
func (s *StatInfo) Validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("stat %q %s: %w", s.Name, fmt.Sprintf(format, args...), ErrIncompatible)
	}
	counts := strings.HasSuffix(s.Name, "_total")
	switch {
	case len(s.Name) > MaxStatName || !statName.MatchString(s.Name):
		return bad("must consist of a-z, 0-9 and _ and have at most %d bytes", MaxStatName)
	case s.Name == "info":
		return bad("is a metric of the host")
	case s.Kind != Counter && s.Kind != Gauge:
		return bad("has the unknown %v", s.Kind)
	case counts != (s.Kind == Counter):
		return bad("is a %v: names of counters, and no others, end in _total", s.Kind)
	case len(s.Labels) > MaxStatLabels:
		return bad("has %d labels, limit %d", len(s.Labels), MaxStatLabels)
	}
	seen := map[string]bool{"connector": true}
	for _, l := range s.Labels {
		if len(l) > MaxStatName || !statName.MatchString(l) || seen[l] {
			return bad("has a label %q that is not a name, is reserved or appears twice", l)
		}
		seen[l] = true
	}
	return nil
}

// ValidateStats returns an error for the first of an Info's stats that cannot be a metric or that repeats a
// name.
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
			return fmt.Errorf("stat %q appears twice: %w", stats[i].Name, ErrIncompatible)
		}
		seen[stats[i].Name] = true
	}
	return nil
}

// Check returns an error if v is not a value that s, which must be valid, declares. Errors name the stat
// and wrap ErrIncompatible.
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
