// Kvport-sharedstorage serves the SharedStorageConnector.
package main

import (
	"github.com/kvport/kvport/connectors/sharedstorage"
	"github.com/kvport/kvport/sdk"
)

var version = "dev" // set by the linker

func main() {
	d := sdk.Definition{Name: sharedstorage.Name, Aliases: []string{sharedstorage.Alias}, Version: version, Scope: sharedstorage.Scope}
	sdk.Serve(sdk.FromStore(d, sharedstorage.Open))
}
