// Kvport-nixl is the plugin of NixlConnector.
package main

import (
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/nixl"
	"github.com/kvport/kvport/sdk"
)

func main() {
	sdk.Serve(sdk.FromNode(sdk.Definition{
		Name: "NixlConnector", Version: "1.0.0", Groups: true, Scope: connector.ScopeEngine,
		Capabilities: nixl.Capabilities, Environment: nixl.Environment(),
	}, nixl.Open))
}
