package offload_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance/storetest"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/offload"
	"github.com/kvport/kvport/sdk"
	"github.com/kvport/kvport/sdk/tier"
)

func TestStoreKeys(t *testing.T) {
	const block, slots = 4 << 10, 2 << 10
	all := connector.Group{BlockTokens: 16, Policy: connector.PolicyAll}
	layout := connector.Layout{ // of two groups, so that blocks of all sizes are taken
		Groups: []connector.Group{all, all}, Segments: []connector.Segment{{Bytes: block}, {Group: 1, Bytes: block / 2}}, Blocks: 1,
	}
	config, err := sdk.DecodeConfig[offload.Config](json.RawMessage(fmt.Sprintf(`{"num_cpu_blocks": %d}`, slots)))
	require.NoError(t, err)
	storetest.Run(t, storetest.Harness{Block: block, Open: func(st storetest.T) connector.Store {
		env := connector.Env{World: 1, Layout: layout, Arena: make([]byte, tier.ArenaBytes(slots, block)), Log: slog.New(slog.DiscardHandler)}
		s, err := offload.Open(st.Context(), env, config)
		require.NoError(st, err)
		return s
	}})
}
