package connector

import (
	"fmt"
	"math/bits"
	"reflect"
	"slices"
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
	CanOverlap                        // LayerLoader
	CanPlace                          // Placer
)

// Power is one optional interface.
type Power struct {
	Bit       Capability
	Name      string       // as in manifests and configs; the proto value's in lower case
	Interface reflect.Type // of one or two methods
	Worker    bool         // it is of the worker side; else of the scheduler side
}

// optional is the one table that ties an interface to its bit, in order of the bits. What every part
// of kvport does with each is in docs/powers.md.
var optional = []Power{
	{CanPlan, "plan", reflect.TypeFor[Planner](), false},
	{CanHold, "hold", reflect.TypeFor[Holder](), false},
	{CanReset, "reset", reflect.TypeFor[Resetter](), false},
	{CanStat, "stat", reflect.TypeFor[StatsSource](), false},
	{CanEvents, "events", reflect.TypeFor[EventSource](), false},
	{CanLayers, "layers", reflect.TypeFor[LayerWorker](), true},
	{CanLease, "lease", reflect.TypeFor[Leaser](), false},
	{CanReshape, "reshape", reflect.TypeFor[Reshaper](), true},
	{CanOverlap, "overlap", reflect.TypeFor[LayerLoader](), true},
	{CanPlace, "place", reflect.TypeFor[Placer](), true},
}

// Powers lists every optional interface, in order of the bits. The caller owns the slice.
func Powers() []Power { return slices.Clone(optional) }

// Number is the power's value of the proto enum Capability.
func (p *Power) Number() int { return bits.TrailingZeros64(uint64(p.Bit)) + 1 }

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
		if v != nil && reflect.TypeOf(v).Implements(o.Interface) {
			c |= o.Bit
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
			if o.Interface == reflect.TypeFor[T]() && p.Capabilities()&o.Bit == 0 {
				var none T
				return none, false
			}
		}
	}
	return t, ok
}

// Names lists the bits by name, and an unknown bit by its number. The list is never nil.
func (c Capability) Names() []string {
	names := []string{}
	for _, o := range optional {
		if c&o.Bit != 0 {
			names, c = append(names, o.Name), c&^o.Bit
		}
	}
	for c != 0 {
		n := bits.TrailingZeros64(uint64(c))
		names, c = append(names, fmt.Sprintf("bit%d", n)), c&^(1<<n)
	}
	return names
}

// String names the bits, comma-separated.
func (c Capability) String() string { return strings.Join(c.Names(), ",") }
