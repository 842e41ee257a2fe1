package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"strings"

	"github.com/kvport/kvport/connector"
)

// Suggest gives the profiles that fit a connector, by its config, by what it says about itself, and by what becomes of a block that is saved and
// loaded. It cannot know what a connector is meant to do: one that loses each block is taken for one that keeps none. It never gives
// Power, Bidirectional and Offload, which only the author can know.
func Suggest(ctx context.Context, newHarness Maker, o Options) ([]Profile, error) {
	var found []Profile
	s := o.prepare(ctx, newHarness)
	r := checkCase(ctx, Case{ID: "suggest", Run: rigged(0, false, func(r *rig) { found = r.suggest() })}, newHarness, s)
	if r.Status != Pass {
		return nil, errors.New(strings.Join(r.Log, "; "))
	}
	return found, nil
}

// suggest gives the profiles that fit the connector of the case.
func (r *rig) suggest() []Profile {
	r.Helper()
	can := func(c connector.Capability) bool { return r.info.Capabilities&c != 0 }
	fit := map[Profile]bool{Lifecycle: true}
	e := r.engine(setup{})
	keys := e.keys(2)
	from, to := blocks(0, keys...), blocks(2, keys...)
	e.fill(from...)
	stored := e.saveOnly(r.Context(), transfer(from)) == nil && e.tryMatch(keys) == len(keys)
	again := stored && e.load(to...) == nil && e.tryMatch(keys) == len(keys)
	fit[Store], fit[MultiRank], fit[Fault], fit[Groups] = again, again, again, again && r.info.Groups
	fit[Bounded] = again && len(r.bounding().fields) > 0
	fit[Buffer] = stored && !again
	config := map[string]json.RawMessage{}
	_ = json.Unmarshal(r.config, &config) // of a config that is no object Describe has complained
	fit[MultiChildren] = config["connectors"] != nil
	if h, ok := r.harness().(interface{ remoteServer() *server }); ok {
		fit[Remote] = h.remoteServer() != nil && again
	}
	byTicket := can(connector.CanHold) && !fit[MultiChildren]
	fit[PDProducer], fit[PDConsumer], fit[Pipe] = byTicket, byTicket, byTicket && again
	fit[LayerWise], fit[Reshape] = byTicket && can(connector.CanLayers), can(connector.CanReshape)
	var out []Profile
	for _, p := range Profiles() {
		if fit[p] {
			out = append(out, p)
		}
	}
	return out
}
