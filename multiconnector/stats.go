package multiconnector

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/kvport/kvport/connector"
)

// childLabel tells the numbers of one child from another's.
const childLabel = "child"

// foldStats joins what children count. A number has the label child before its own; numbers of one
// name have the labels of all who count it. What does not fit the limits is not shown.
func foldStats(children []Child) []connector.StatInfo {
	var out []connector.StatInfo
	for i := range children {
		for _, s := range children[i].Info.Stats {
			if children[i].Info.Capabilities&connector.CanStat == 0 || s.Validate() != nil {
				continue
			}
			at := slices.IndexFunc(out, func(o connector.StatInfo) bool { return o.Name == s.Name })
			if at < 0 {
				if len(out) == connector.MaxStats {
					continue
				}
				at = len(out)
				out = append(out, connector.StatInfo{Name: s.Name, Help: s.Help, Kind: s.Kind, Labels: []string{childLabel}})
			}
			labels := slices.Clone(out[at].Labels)
			for _, l := range s.Labels {
				if !slices.Contains(labels, l) {
					labels = append(labels, l)
				}
			}
			if len(labels) <= connector.MaxStatLabels {
				out[at].Labels = labels
			}
		}
	}
	return slices.DeleteFunc(out, func(s connector.StatInfo) bool { return s.Validate() != nil })
}

// statsPoller asks one child for its numbers. A child that does not answer is not asked again until it has.
type statsPoller struct {
	child  *Child
	place  int
	source connector.StatsSource
	busy   chan struct{} // full while it is asked
}

// Stats implements connector.StatsSource. A child that is slow or fails is left out.
func (s *scheduler) Stats(ctx context.Context) ([]connector.Stat, error) {
	answers := make([][]connector.Stat, len(s.pollers))
	s.together(len(s.pollers), func(i int) { answers[i] = s.ask(ctx, s.pollers[i]) })
	var out []connector.Stat
	for i, t := range s.pollers {
		for k := range answers[i] {
			if v, ok := s.labelled(t, &answers[i][k]); ok && len(out) < connector.MaxSamples {
				out = append(out, v)
			}
		}
	}
	return out, nil
}

// ask gives a child's numbers, or none if it takes longer than its patience.
func (s *scheduler) ask(ctx context.Context, t *statsPoller) []connector.Stat {
	select {
	case t.busy <- struct{}{}:
	default:
		return nil // it has not answered the last time
	}
	ctx, cancel := context.WithTimeout(ctx, t.child.Patience)
	defer cancel()
	got := make(chan []connector.Stat, 1)
	s.work.Go(func() { // it may take as long as a child that stands alone: only nobody waits
		stats, err := t.source.Stats(s.life)
		<-t.busy // before anybody has the answer, and asks again
		if err != nil {
			stats = nil
		}
		got <- stats
	})
	select {
	case stats := <-got:
		return stats
	case <-ctx.Done():
		return nil
	}
}

// labelled is a child's number as the composite declares it; ok is false if it declares none such.
func (s *scheduler) labelled(t *statsPoller, v *connector.Stat) (out connector.Stat, ok bool) {
	named := func(list []connector.StatInfo) *connector.StatInfo {
		i := slices.IndexFunc(list, func(o connector.StatInfo) bool { return o.Name == v.Name })
		if i < 0 {
			return nil
		}
		return &list[i]
	}
	own, joint := named(t.child.Info.Stats), named(s.info.Stats)
	if own == nil || joint == nil || own.Check(v) != nil {
		return out, false
	}
	out = connector.Stat{Name: v.Name, Value: v.Value, Labels: make([]string, len(joint.Labels))}
	out.Labels[0] = t.child.place(t.place)
	for i, l := range own.Labels {
		at := slices.Index(joint.Labels, l)
		switch {
		case at < 0:
			return out, false // there was no room for it
		case at == 0: // a composite's
			out.Labels[0] = fmt.Sprintf("%d/%s", t.place, v.Labels[i])
		default:
			out.Labels[at] = v.Labels[i]
		}
	}
	return out, joint.Check(&out) == nil
}

// place is where a child stands among its siblings, and its name: the value of the label child.
func (c *Child) place(i int) string {
	return fmt.Sprintf("%d/%s", i, cmp.Or(c.Label, c.Name))
}
