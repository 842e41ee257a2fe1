package simulate

import (
	"fmt"
	"strings"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/tracker"
)

// eventName says what an event is about.
func eventName(k tracker.EventKind) string {
	return [...]string{"", "loaded", "saved", "finished", "released", "answered", "stored", "arriving"}[k]
}

func describeEvent(e *tracker.Event) string {
	s := eventName(e.Kind) + " " + string(e.Request)
	switch {
	case e.Kind == tracker.Released:
		return s + ": " + e.Reason
	case len(e.Failed) > 0:
		return fmt.Sprintf("%s: blocks %v failed: %v", s, e.Failed, e.Err)
	case e.Kind == tracker.Arriving:
		return fmt.Sprintf("%s: %d layers", s, e.Layers)
	case e.Held:
		return fmt.Sprintf("%s: held for %v", s, e.Hold.TTL)
	}
	return s
}

func describeMatch(m connector.Match) string {
	switch {
	case m.Later:
		return "later"
	case m.Tokens == 0:
		return "nothing"
	}
	return fmt.Sprintf("%d more tokens", m.Tokens)
}

func describeOutcome(o *tracker.Outcome) string {
	switch {
	case o.Err != nil && len(o.Corrupt) > 0:
		return fmt.Sprintf("%v, and blocks %v are damaged", o.Err, o.Corrupt)
	case o.Err != nil:
		return o.Err.Error()
	case len(o.Corrupt) > 0:
		return fmt.Sprintf("done, but blocks %v are damaged", o.Corrupt)
	}
	return "done"
}

func describeStep(s *connector.Step) string {
	var parts []string
	for _, q := range s.Arrived {
		parts = append(parts, fmt.Sprintf("%s arrived", q.Request))
	}
	for _, id := range s.Preempted {
		parts = append(parts, fmt.Sprintf("%s preempted", id))
	}
	for i := range s.Admitted {
		parts = append(parts, "load "+describeTransfer(&s.Admitted[i]))
	}
	for i := range s.Computed {
		parts = append(parts, "save "+describeTransfer(&s.Computed[i]))
	}
	for i := range s.Computing {
		parts = append(parts, "save while computing "+describeTransfer(&s.Computing[i]))
	}
	for i := range s.Ended {
		e := &s.Ended[i]
		parts = append(parts, fmt.Sprintf("%s ended (%s) with %d tokens in blocks %v", e.Request, reasonName(e.Reason), e.Tokens, blockIDs(e.Blocks)))
	}
	return strings.Join(parts, "; ")
}

func describeTransfer(t *connector.Transfer) string {
	return fmt.Sprintf("%s[%d:%d] blocks %v", t.Request, t.From, t.From+t.Tokens, blockIDs(t.Blocks))
}

func blockIDs(blocks []connector.Block) []connector.BlockID {
	list := make([]connector.BlockID, len(blocks))
	for i, b := range blocks {
		list[i] = b.ID
	}
	return list
}
