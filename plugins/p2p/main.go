// Kvport-p2p is the plugin of PipeConnector.
package main

import (
	"context"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/p2p"
	"github.com/kvport/kvport/sdk"
)

func main() {
	d := sdk.Definition{Name: "PipeConnector", Version: "1.0.0", Groups: true}
	sdk.Serve(sdk.FromPipe(d, func(_ context.Context, _ connector.Env, c p2p.Config) (sdk.Peers, error) {
		network, err := c.Network()
		return sdk.Peers{Network: network, Addresses: c.Peers, Bytes: c.Bytes}, err
	}))
}
