// Kvport-remote serves the RemoteStoreConnector.
package main

import (
	"github.com/kvport/kvport/connectors/remote"
	"github.com/kvport/kvport/sdk"
)

var version = "dev" // set by the linker

func main() {
	d := sdk.Definition{
		Name: "RemoteStoreConnector", Aliases: []string{"RedisConnector", "ValkeyConnector"}, Version: version,
		Environment: remote.Environment(), Needs: remote.Needs(), Scope: remote.Scope, Groups: true,
		Capabilities: remote.Capabilities, Stats: remote.StatInfos(),
	}
	sdk.Serve(sdk.FromStore(d, remote.Open))
}
