// Kvport-sharedstorage serves the SharedStorageConnector.
package main

import (
	"github.com/kvport/kvport/connectors/sharedstorage"
	"github.com/kvport/kvport/sdk"
)

var version = "dev" // set by the linker

func main() {
	// The alias is its name since vLLM 0.12.
	d := sdk.Definition{
		Name: "SharedStorageConnector", Aliases: []string{"ExampleConnector"}, Version: version, Scope: sharedstorage.Scope, Groups: true,
		Environment: sharedstorage.Environment(), Needs: sharedstorage.Needs(), Capabilities: sharedstorage.Capabilities, Stats: sharedstorage.StatInfos(), Medium: sharedstorage.Medium,
	}
	sdk.Serve(sdk.FromStore(d, sharedstorage.Open))
}
