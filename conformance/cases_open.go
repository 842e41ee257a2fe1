package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"strings"

	"github.com/kvport/kvport/connector"
)

// storeCase is a case that every Store must pass; so must connectors with more powers.
func storeCase(id, rule, text string, body func(*rig)) Case {
	return Case{ID: id, Rule: rule, Text: text, Profiles: []Profile{Store, Groups, Power}, Run: rigged(0, false, body)}
}

func openCases() []Case {
	return []Case{
		storeCase("describe", "CONF-02", "Describe answers the same twice and claims only what the sides have.", describe),
		storeCase("unknown-field", "CONF-01", "A config with an unknown field is refused, and the error names it.", unknownField),
		storeCase("sides", "OPEN-01", "Sides open in any order and alone.", sides),
		storeCase("close-frees", "OPEN-02", "Opening and closing 40 times does not grow the process.", closeFrees),
		storeCase("engines-at-once", "OPEN-03", "Three engines have their sides open at once with one config, unless Scope is engine, and each works.", enginesAtOnce),
	}
}

func describe(r *rig) {
	e := r.engine(setup{})
	for range 2 {
		again, err := e.inst.Describe(r.Context(), r.h.Config())
		r.must(err, "describe again")
		if !reflect.DeepEqual(r.info, again) {
			r.Errorf("Describe answered %+v, then %+v", r.info, again)
		}
	}
	if r.info.Name == "" {
		r.Errorf("Info.Name is empty")
	}
	if r.info.Scope < connector.ScopeEngine || r.info.Scope > connector.ScopeShared {
		r.Errorf("Info.Scope is %v, want engine, node or shared", r.info.Scope)
	}
	have := connector.CapabilitiesOf(e.scheduler)
	for _, p := range connector.Powers() {
		if p.Worker {
			have |= connector.CapabilitiesOf(e.workers[0]) & p.Bit
		}
	}
	if r.info.Capabilities&^have != 0 {
		r.Errorf("Info claims %v, the sides have %v", r.info.Capabilities, have)
	}
}

func unknownField(r *rig) {
	const name = "kvport_no_such_field"
	var config map[string]json.RawMessage
	r.must(json.Unmarshal(r.h.Config(), &config), "the harness's config")
	if config == nil {
		config = map[string]json.RawMessage{}
	}
	config[name] = json.RawMessage("1")
	bad, err := json.Marshal(config)
	r.must(err, "config")
	e := r.closed(setup{})
	refused := func(what string, err error) {
		switch {
		case err == nil:
			r.Errorf("%s accepts it", what)
		case !errors.Is(err, connector.ErrIncompatible):
			r.Errorf("%s: error %q does not wrap ErrIncompatible", what, err)
		case !strings.Contains(err.Error(), name):
			r.Errorf("%s: error %q does not name the field", what, err)
		}
	}
	_, err = e.inst.Describe(r.Context(), bad)
	refused("Describe", err)
	s, err := e.inst.Scheduler(r.Context(), e.env, bad)
	refused("the scheduler side", err)
	if err == nil {
		e.scheduler = s
		r.must(e.closeScheduler(), "close")
	}
	w, err := e.inst.Worker(r.Context(), e.env, bad)
	refused("the worker side", err)
	if err == nil {
		e.workers[0] = w
		r.must(e.closeWorker(0), "close")
	}
}

func sides(r *rig) {
	alone := r.closed(setup{})
	alone.openScheduler()
	keys := alone.keys(2)
	r.equal(0, alone.match(keys...), "blocks offered by a scheduler side alone")
	alone.closeAll()

	alone = r.closed(setup{})
	alone.openWorker(0)
	alone.save(blocks(0, keys...)...)
	alone.wipe(0, blocks(4, keys...)...)
	r.must(alone.load(blocks(4, keys...)...), "load by a worker side alone")
	alone.holds(blocks(4, keys...)...)
	alone.closeAll()
	for _, workerFirst := range []bool{true, false} {
		e := r.closed(setup{})
		if workerFirst {
			e.openWorker(0)
			e.openScheduler()
		} else {
			e.openScheduler()
			e.openWorker(0)
		}
		fresh := e.keys(2)
		e.save(blocks(0, fresh...)...)
		r.equal(2, e.match(fresh...), "blocks offered when the worker side opened first (%v)", workerFirst)
		e.closeAll()
	}
}

func closeFrees(r *rig) {
	const early, late, tolerance = 10, 40, 3
	e := r.closed(setup{})
	keys := e.keys(2)
	held := func() (fds, goroutines int) {
		if e.inst.PID == 0 {
			goroutines = runtime.NumGoroutine()
		}
		return openFiles(e.inst.PID), goroutines
	}
	var fds, goroutines int
	for n := range late {
		e.openAll()
		e.save(blocks(0, keys...)...)
		e.match(keys...)
		e.match(e.keys(1)...) // absent: a miss must leave nothing open either
		e.closeAll()
		if n == early {
			fds, goroutines = held()
		}
	}
	grown := ""
	for range 100 {
		f, g := held()
		if grown = ""; f > fds+tolerance {
			grown = fmt.Sprintf("from %d to %d file descriptors", fds, f)
		} else if g > goroutines+tolerance {
			grown = fmt.Sprintf("from %d to %d goroutines", goroutines, g)
		}
		if grown == "" {
			return
		}
		e.pause(askAgain)
	}
	r.Errorf("grew %s in %d rounds", grown, late-early)
}

func enginesAtOnce(r *rig) {
	engines := []*engine{r.engine(setup{})}
	for r.info.Scope != connector.ScopeEngine && len(engines) < 3 {
		engines = append(engines, engines[0].peer())
	}
	for _, e := range engines {
		keys := e.keys(2)
		e.save(blocks(0, keys...)...)
		r.equal(2, e.match(keys...), "blocks offered to engine %s, of %d at once", e.env.Engine, len(engines))
		e.whole(keys, 4)
	}
}
