package multiconnector

import (
	"context"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
)

// LoadLayers implements connector.LayerLoader. A layer of the load is there when every child that is asked has brought its part of
// it; one without the power brings all layers when its part is over. Once a layer was announced, no other child is asked for
// what fails: it would write what the engine may be reading.
func (w *worker) LoadLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, arrived connector.Arrivals) error {
	return w.load(ctx, t, kv, &arrivals{out: arrived})
}

// arrivals joins what several children say about the layers of one load. Nil means that nobody uses layers before its end.
type arrivals struct {
	out connector.Arrivals

	mu    sync.Mutex
	there []int // by child that is asked: how many layers
	told  int
	over  bool // a part has failed, so no further layer is announced (rule OVERLAP-01)
}

// of are the arrivals of a round with a number of children, whose parts are the whole load.
func (a *arrivals) of(children int) *arrivals {
	return &arrivals{out: a.out, there: make([]int, children)}
}

// fail says that a part of the load has failed.
func (a *arrivals) fail() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.over = true
}

// begun reports whether a layer was announced.
func (a *arrivals) begun() bool {
	if a == nil {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.told > 0
}

// from are the Arrivals of one child.
func (a *arrivals) from(child int) connector.Arrivals { return &childArrivals{a, child} }

type childArrivals struct {
	all   *arrivals
	child int
}

// Advance implements connector.Arrivals.
func (c *childArrivals) Advance(n int) {
	a := c.all
	a.mu.Lock()
	defer a.mu.Unlock()
	a.there[c.child] = max(a.there[c.child], n)
	if least := slices.Min(a.there); least > a.told && !a.over {
		a.told = least
		a.out.Advance(least)
	}
}

// oneByLayer loads the parts of one child, one after the other, and says which layers of the last one are there.
func (l *loading) oneByLayer(ctx context.Context, a *ask, arrived connector.Arrivals) (bad map[connector.Block]bool, err error) {
	last, whole := &a.parts[len(a.parts)-1], true
	loader, ok := connector.As[connector.LayerLoader](l.sides[a.child])
	ok = ok && l.children[a.child].Info.Capabilities&connector.CanOverlap != 0
	bad, err = eachPart(a.parts, func(part *connector.Transfer) error {
		part.Ticket = l.ticketOf(a.child, l.t.Ticket)
		var err error
		if ok && whole && part == last {
			err = loader.LoadLayers(ctx, part, l.kv, arrived)
		} else {
			err = l.sides[a.child].Load(ctx, part, l.kv)
		}
		whole = whole && err == nil
		return err
	})
	if whole {
		arrived.Advance(l.kv.Layout().Layers())
	} else {
		l.arrived.fail()
	}
	return bad, err
}
