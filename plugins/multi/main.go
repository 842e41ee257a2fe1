// Kvport-multi serves the MultiConnector for hosts that do not compose it themselves.
package main

import (
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/sdk"
)

var version = "dev" // set by the linker

func main() {
	sdk.Serve(host.MultiPlugin(version))
}
