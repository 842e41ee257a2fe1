// Kvport-p2pnccl is the plugin of P2pNcclConnector.
package main

import (
	"slices"

	"github.com/kvport/kvport/connectors/p2pnccl"
	"github.com/kvport/kvport/sdk"
)

var version = "dev" // set by the linker

func main() {
	sdk.Serve(sdk.FromPipe(sdk.Definition{
		Name: "P2pNcclConnector", Version: version, Groups: true, LayerWise: true, Stats: slices.Concat(sdk.PeerStats(), sdk.LayerStats(), p2pnccl.Stats()), Environment: p2pnccl.Environment(), Needs: p2pnccl.Needs(),
	}, p2pnccl.Open))
}
