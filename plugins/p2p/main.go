// Kvport-p2p is the plugin of PipeConnector.
package main

import (
	"github.com/kvport/kvport/connectors/p2p"
	"github.com/kvport/kvport/sdk"
)

func main() {
	sdk.Serve(sdk.FromPipe(sdk.Definition{
		Name: "PipeConnector", Version: "1.0.0", Groups: true, LayerWise: true, Needs: p2p.Needs(), Stats: append(sdk.PeerStats(), sdk.LayerStats()...),
	}, p2p.Open))
}
