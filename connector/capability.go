package connector

import (
	"fmt"
	"math/bits"
	"reflect"
	"strings"
)

// Capability is a set of optional interfaces. Bit n is value n of the proto enum Capability; bits
// are never reused (rule CAP-01).
type Capability uint64

// The optional interfaces.
const (
	CanPlan    Capability = 1 << iota // Planner
	CanHold                           // Holder
	CanReset                          // Resetter
	CanStat                           // StatsSource
	CanEvents                         // EventSource
	CanLayers                         // LayerWorker
	CanLease                          // Leaser
	CanReshape                        // Reshaper
)

// optional is the one table that ties an interface to its bit.
var optional = []struct {
	bit  Capability
	name string
	typ  reflect.Type
}{
	{CanPlan, "plan", reflect.TypeFor[Planner]()},
	{CanHold, "hold", reflect.TypeFor[Holder]()},
	{CanReset, "reset", reflect.TypeFor[Resetter]()},
	{CanStat, "stat", reflect.TypeFor[StatsSource]()},
	{CanEvents, "events", reflect.TypeFor[EventSource]()},
	{CanLayers, "layers", reflect.TypeFor[LayerWorker]()},
	{CanLease, "lease", reflect.TypeFor[Leaser]()},
	{CanReshape, "reshape", reflect.TypeFor[Reshaper]()},
}

// Partial is a proxy that has every method but supports only some of them, such as the host's end of a
// plugin or a composite whose children differ.
type Partial interface {
	// Capabilities reports which of the proxy's optional methods work.
	Capabilities() Capability
}

// CapabilitiesOf reports which optional interfaces v supports.
func CapabilitiesOf(v any) Capability {
	var c Capability
	for _, o := range optional {
		if v != nil && reflect.TypeOf(v).Implements(o.typ) {
			c |= o.bit
		}
	}
	if p, ok := v.(Partial); ok {
		c &= p.Capabilities()
	}
	return c
}

// As is the type assertion v.(T), except that it also asks a Partial whether it supports T. Use it for
// every optional interface.
func As[T any](v any) (T, bool) {
	t, ok := v.(T)
	if p, partial := v.(Partial); ok && partial {
		for _, o := range optional {
			if o.typ == reflect.TypeFor[T]() && p.Capabilities()&o.bit == 0 {
				var none T
				return none, false
			}
		}
	}
	return t, ok
}

// String names the bits, separated by commas. An unknown bit appears as its number.
func (c Capability) String() string {
	var names []string
	for _, o := range optional {
		if c&o.bit != 0 {
			names, c = append(names, o.name), c&^o.bit
		}
	}
	for c != 0 {
		n := bits.TrailingZeros64(uint64(c))
		names, c = append(names, fmt.Sprintf("bit%d", n)), c&^(1<<n)
	}
	return strings.Join(names, ",")
}
