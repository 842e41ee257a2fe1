package wire

import (
	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// SaveLayers is a save with a counter: which one of the board it is, and which use of it.
type SaveLayers struct {
	Transfer *connector.Transfer
	Slot     int
	Call     uint32 // never 0
}

// SaveLayersToProto converts a SaveLayers.
func SaveLayersToProto(s *SaveLayers) *kvportv1.SaveLayers {
	return &kvportv1.SaveLayers{Transfer: TransferToProto(s.Transfer), Slot: count(s.Slot), Call: s.Call}
}

// SaveLayersFromProto converts a SaveLayers.
func SaveLayersFromProto(m *kvportv1.SaveLayers) (*SaveLayers, error) {
	if m.GetCall() == 0 || m.GetSlot() >= MaxCounters {
		return nil, malformed("counter %d of call %d, there are %d", m.GetSlot(), m.GetCall(), MaxCounters)
	}
	t, err := TransferFromProto(m.GetTransfer())
	return &SaveLayers{Transfer: t, Slot: int(m.GetSlot()), Call: m.GetCall()}, err
}
