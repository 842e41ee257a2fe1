// Kvport-offload serves the OffloadingConnector.
package main

import (
	"github.com/kvport/kvport/connectors/offload"
	"github.com/kvport/kvport/sdk"
)

var version = "dev" // set by the linker

func main() {
	d := sdk.Definition{
		Name: "OffloadingConnector", Version: version, Scope: offload.Scope, Groups: true, Needs: offload.Needs(),
		Capabilities: offload.Capabilities, Stats: offload.StatInfos(), Medium: offload.Medium,
	}
	sdk.Serve(sdk.FromStore(d, offload.Open))
}
