// Kvport-p2pnccl is the plugin of P2pNcclConnector.
package main

import (
	"github.com/kvport/kvport/connectors/p2pnccl"
	"github.com/kvport/kvport/sdk"
)

var version = "dev" // set by the linker

func main() {
	sdk.Serve(sdk.FromPipe(sdk.Definition{
		Name: "P2pNcclConnector", Version: version, Groups: true, Stats: append(sdk.PeerStats(), p2pnccl.Stats()...), Environment: p2pnccl.Environment(), Needs: p2pnccl.Needs(),
	}, p2pnccl.Open))
}
