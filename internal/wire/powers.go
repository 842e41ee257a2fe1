package wire

import (
	"fmt"

	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

func statInfoToProto(s *connector.StatInfo) *kvportv1.StatInfo {
	return &kvportv1.StatInfo{Name: s.Name, Help: s.Help, Kind: kvportv1.StatKind(s.Kind), Labels: s.Labels}
}

func statInfoFromProto(m *kvportv1.StatInfo) (connector.StatInfo, error) {
	s := connector.StatInfo{Name: m.GetName(), Help: m.GetHelp(), Kind: connector.StatKind(m.GetKind())}
	if m.GetKind() < 0 || m.GetKind() > kvportv1.StatKind_STAT_KIND_GAUGE {
		return s, malformed("kind is %d", m.GetKind())
	}
	if err := short("help", m.GetHelp(), MaxName); err != nil {
		return s, err
	}
	var err error
	s.Labels, err = list("labels", m.GetLabels(), connector.MaxStatLabels, nameFromProto)
	return s, err
}

// statsFromProto reads what a Describe declares.
func statsFromProto(m []*kvportv1.StatInfo) ([]connector.StatInfo, error) {
	stats, err := list("describe: stats", m, connector.MaxStats, statInfoFromProto)
	if err != nil {
		return nil, err
	}
	if err := connector.ValidateStats(stats); err != nil {
		return nil, fmt.Errorf("describe: %w: %w", err, ErrMalformed)
	}
	return stats, nil
}

// StatsToProto converts the answer of Stats.
func StatsToProto(stats []connector.Stat) *kvportv1.StatsResponse {
	return &kvportv1.StatsResponse{Stats: each(stats, func(s *connector.Stat) *kvportv1.Stat {
		return &kvportv1.Stat{Name: s.Name, Labels: s.Labels, Value: s.Value}
	})}
}

// StatsFromProto converts the answer of Stats. That the stats were declared is for the host to check.
func StatsFromProto(m *kvportv1.StatsResponse) ([]connector.Stat, error) {
	return list("stats", m.GetStats(), connector.MaxSamples, func(m *kvportv1.Stat) (connector.Stat, error) {
		s := connector.Stat{Name: m.GetName(), Value: m.GetValue()}
		if err := short("name", m.GetName(), connector.MaxStatName); err != nil {
			return s, err
		}
		var err error
		s.Labels, err = list("labels", m.GetLabels(), connector.MaxStatLabels, nameFromProto)
		return s, err
	})
}

// BlockEventsToProto converts events.
func BlockEventsToProto(events []connector.BlockEvent) []*kvportv1.BlockEvent {
	return each(events, func(e *connector.BlockEvent) *kvportv1.BlockEvent {
		return &kvportv1.BlockEvent{
			Seq: e.Seq, Kind: kvportv1.BlockEventKind(e.Kind), Keys: keysToProto(e.Keys), Medium: e.Medium, Scope: kvportv1.Scope(e.Scope),
		}
	})
}

// EventsToProto converts the answer of Events.
func EventsToProto(events []connector.BlockEvent) *kvportv1.EventsResponse {
	return &kvportv1.EventsResponse{Events: BlockEventsToProto(events)}
}

// EventsFromProto converts the answer of Events. That Seq grows is for the host to check.
func EventsFromProto(m *kvportv1.EventsResponse) ([]connector.BlockEvent, error) {
	return list("events", m.GetEvents(), connector.MaxEvents, blockEventFromProto)
}

func blockEventFromProto(m *kvportv1.BlockEvent) (connector.BlockEvent, error) {
	e := connector.BlockEvent{
		Seq: m.GetSeq(), Kind: connector.BlockEventKind(m.GetKind()), Medium: m.GetMedium(), Scope: connector.Scope(m.GetScope()),
	}
	if k := m.GetKind(); k < kvportv1.BlockEventKind_BLOCK_EVENT_KIND_STORED || k > kvportv1.BlockEventKind_BLOCK_EVENT_KIND_CLEARED {
		return e, malformed("kind is %d", k)
	}
	if s := m.GetScope(); s < kvportv1.Scope_SCOPE_ENGINE || s > kvportv1.Scope_SCOPE_SHARED {
		return e, malformed("scope is %d", s)
	}
	if err := short("medium", m.GetMedium(), connector.MaxMedium); err != nil {
		return e, err
	}
	if (len(m.GetKeys()) == 0) != (e.Kind == connector.BlocksCleared) {
		return e, malformed("%v with %d bytes of keys", e.Kind, len(m.GetKeys()))
	}
	var err error
	e.Keys, err = keysFromProto(m.GetKeys())
	return e, err
}
