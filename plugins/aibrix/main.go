// Kvport-aibrix serves the AIBrixOffloadingConnectorV1Type1.
package main

import (
	"github.com/kvport/kvport/connectors/aibrix"
	"github.com/kvport/kvport/sdk"
)

var version = "dev" // set by the linker

func main() {
	d := sdk.Definition{
		Name: "AIBrixOffloadingConnectorV1Type1", Version: version, Environment: aibrix.Environment(), Needs: aibrix.Needs(), Scope: aibrix.Scope, Groups: true,
		Capabilities: aibrix.Capabilities, Stats: aibrix.StatInfos(),
	}
	sdk.Serve(sdk.FromStore(d, aibrix.Open))
}
