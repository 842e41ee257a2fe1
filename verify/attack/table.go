package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// probe is one attack.
type probe struct {
	id    string
	group string // what it is against, as groupNames has it
	does  string // what it does, in a sentence
	door  string // a config that permits it, with which it must not hold; empty: none is tried
	waits string // what kvport does not do yet, for which the probe waits; empty: it is run
	cost  int    // seconds that it takes on two busy cores, with its door; 0: a few
	// run makes the attack, against the open door if that is wanted. seen says what was measured. The error is a *hole if
	// kvport does not hold, a *skipped if the machine lacks what the probe needs, and anything else if the probe does not work.
	run func(ctx context.Context, r *rig, open bool) (seen string, err error)
}

// takes is a generous guess.
func (p *probe) takes() time.Duration { return time.Duration(max(p.cost, 4)) * time.Second }

// hole is what an attacker has achieved.
type hole struct {
	seen string
	// unserved: all that was seen is that somebody is not served or something does not end. A machine that is busy
	// looks the same, so that it proves nothing of an open door.
	unserved bool
}

// Error implements error.
func (h *hole) Error() string { return h.seen }

func holef(format string, args ...any) error { return &hole{seen: fmt.Sprintf(format, args...)} }

func unservedf(format string, args ...any) error {
	return &hole{seen: fmt.Sprintf(format, args...), unserved: true}
}

// skipped says why a probe cannot run on this machine.
type skipped struct{ why string }

// Error implements error.
func (s *skipped) Error() string { return s.why }

// table is every probe.
func table() []probe {
	return slices.Concat(httpProbes(), accessProbes(), loadProbes(), routerProbes(), pairProbes(), ticketProbes(), strangerProbes(), storeProbes(), serverProbes(),
		modelProbes(), faultProbes(), pluginProbes(), hostProbes())
}

// shuffled is an order that a seed picks.
func shuffled(probes []probe, seed uint64) []probe {
	out := slices.Clone(probes)
	rng := rand.New(rand.NewPCG(seed, 0))
	rng.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}
