package offload

import (
	"context"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/tier"
)

// Capabilities are the optional powers of a Store.
const Capabilities = connector.CanReset | connector.CanStat | connector.CanEvents

// Medium is where the blocks are, for whoever is told that they come and go.
const Medium = "cpu"

// StatInfos declares what Stats gives.
func StatInfos() []connector.StatInfo { return append(tier.Infos(), tier.DiskInfos()...) }

// Stats implements connector.StatsSource.
func (s *Store) Stats(context.Context) ([]connector.Stat, error) {
	stats := s.Values()
	if s.disk != nil {
		stats = append(stats, s.disk.Values()...)
	}
	return stats, nil
}

// Watch implements sdk.Watchable: removed is called for every block that neither tier has any longer.
func (s *Store) Watch(removed func(keys []connector.StoreKey)) { s.removed.Store(&removed) }

// changed is called for every change of one tier; other asks the other tier whether it has a block.
func (s *Store) changed(k connector.StoreKey, stored bool, other func(connector.StoreKey) bool) {
	if removed := s.removed.Load(); !stored && removed != nil && !other(k) {
		(*removed)([]connector.StoreKey{k})
	}
}
