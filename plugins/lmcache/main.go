// Kvport-lmcache serves the LMCacheConnectorV1.
package main

import (
	"github.com/kvport/kvport/connectors/lmcache"
	"github.com/kvport/kvport/sdk"
)

var version = "dev" // set by the linker

func main() {
	d := sdk.Definition{
		Name: "LMCacheConnectorV1", Version: version, Environment: lmcache.Environment(), Needs: lmcache.Needs(), Scope: lmcache.Scope, Groups: true,
		Capabilities: lmcache.Capabilities, Stats: lmcache.StatInfos(),
	}
	sdk.Serve(sdk.FromStore(d, lmcache.Open))
}
