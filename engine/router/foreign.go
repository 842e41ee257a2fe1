package router

import (
	"strings"

	"github.com/kvport/kvport/internal/pairid"
)

// noteForeign counts a request whose client's id names two engines, as other routers make them: whoever puts one in front of this router means
// its choice of engines to count, and it does not. The log says so once, since any client can write any number of such ids.
func (r *Router) noteForeign(id string) {
	if !strings.HasPrefix(id, pairid.Prefix) {
		return
	}
	r.metrics.foreignIDs.Inc()
	r.foreign.Do(func() {
		met := []any{"problem", pairid.Problem(id)}
		if p, ok := pairid.Parse(id); ok {
			met = []any{"prefill", p.Prefill, "decode", p.Decode}
		}
		r.config.Log.Warn("a request's id names two engines, as another router makes them, and is replaced, since this router chooses engines itself: "+
			"let that router send to the engines, or to this one without such ids; more are only counted", met...)
	})
}
