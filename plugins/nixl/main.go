// Kvport-nixl serves the NixlConnector.
package main

import (
	"github.com/kvport/kvport/connectors/nixl"
	"github.com/kvport/kvport/sdk"
)

var version = "dev" // set by the linker

func main() {
	sdk.Serve(sdk.FromNode(sdk.Definition{
		Name: "NixlConnector", Version: version, Groups: true, Scope: nixl.Scope,
		Capabilities: nixl.Capabilities, Stats: nixl.StatInfos(), Environment: nixl.Environment(), Needs: nixl.Needs(),
	}, nixl.Open))
}
