package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvport/kvport/connector"
)

// ErrInconclusive says that there is no verdict on a connector.
var ErrInconclusive = errors.New("inconclusive, since the machine was too busy: run it again on a machine that does less")

// Suggest gives the profiles that fit a connector, by its config, by what it says about itself, and by what becomes of two blocks that are
// saved and loaded; and notes for people on what it has left out. It cannot know what a connector is meant to do: one that loses blocks
// when they are loaded is taken for one that gives each out once. It never gives Power, Bidirectional or Offload, which only the author can
// know about. An error says why there is no answer, such as a save that fails; it wraps ErrInconclusive if the machine was too busy.
func Suggest(ctx context.Context, newHarness Maker, o Options) (profiles []Profile, notes []string, err error) {
	s := o.prepare(ctx, newHarness)
	for range 1 + repeats {
		c := Case{ID: "suggest", Run: rigged(0, false, func(r *rig) { profiles, notes = r.suggest() })}
		r := checkCase(ctx, c, newHarness, s)
		switch {
		case ctx.Err() != nil:
			return nil, nil, context.Cause(ctx)
		case r.Status == Pass:
			return profiles, notes, nil
		case r.Status != Inconclusive:
			return nil, nil, errors.New(strings.Join(r.Log, "; "))
		}
		err = fmt.Errorf("%w: %s", ErrInconclusive, strings.Join(r.Log, "; "))
		s = s.patient()
	}
	return nil, nil, err
}

// suggest gives the profiles that fit the connector of the case.
func (r *rig) suggest() (profiles []Profile, notes []string) {
	r.Helper()
	can := func(c connector.Capability) bool { return r.info.Capabilities&c != 0 }
	e := r.engine(setup{})
	keys := e.keys(2)
	from, to := blocks(0, keys...), blocks(2, keys...)
	e.save(from...)
	stored, again := e.match(keys...) == len(keys), false
	if stored { // what was offered can be loaded, also from those that offer each block once
		r.must(e.load(to...), "load of %d blocks that were offered", len(to))
		again = e.match(keys...) == len(keys)
	}
	fit := map[Profile]bool{Store: again, Lifecycle: again, MultiRank: again, Fault: again, Groups: again && r.info.Groups, Buffer: stored && !again}
	fit[Bounded] = again && len(r.bounding().fields) > 0
	config := map[string]json.RawMessage{}
	_ = json.Unmarshal(r.config, &config) // of a config that is no object Describe has complained
	fit[MultiChildren] = config["connectors"] != nil
	if s := r.server(); s != nil && again {
		fit[Remote] = e.needs(s, to)
		if !fit[Remote] {
			notes = append(notes, "remote is left out: the connector loads blocks while its server is away, so it keeps them elsewhere too")
		}
	}
	byTicket := can(connector.CanHold) && !fit[MultiChildren]
	fit[PDProducer], fit[PDConsumer], fit[Pipe] = byTicket, byTicket, byTicket && again
	fit[LayerWise], fit[Reshape] = byTicket && can(connector.CanLayers), can(connector.CanReshape)
	fit[Place] = again && can(connector.CanPlace)
	if !stored && !byTicket {
		notes = append(notes, "the connector keeps nothing that can be found: two blocks were saved, and not offered")
	}
	profiles = slices.DeleteFunc(Profiles(), func(p Profile) bool { return !fit[p] })
	if len(profiles) == 0 {
		r.Errorf("no profile fits: %s", strings.Join(notes, "; "))
	}
	return profiles, notes
}

// needs reports whether blocks cannot be loaded, not even some of them, while the server is away. A connector that keeps them elsewhere too
// may need a moment, or several calls, to notice where it has to look.
func (e *engine) needs(s *server, to []connector.Block) bool {
	e.Helper()
	s.relays.Refuse(true)
	defer s.relays.Refuse(false)
	for w := e.patience(soon); ; e.pause(askAgain) {
		began := time.Now()
		err := e.tryMove(transfer(to), false)
		part, some := errors.AsType[*connector.BlockError](err)
		if err == nil || some && len(part.Blocks) < len(to) {
			return false
		}
		if busy, is := errors.AsType[busyError](e.timed(began, err)); is {
			e.inconclusive("load without the server: %v; the machine was busy", busy)
		}
		if w.over() {
			return true
		}
	}
}
