package main

import (
	"encoding/json"
	"testing"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

const testConfig = `{"dir": "@TMP@/kv"}`

func plugin() connector.Plugin {
	return sdk.FromStore(sdk.Definition{Name: "MinimalConnector", Version: "1", Scope: connector.ScopeShared}, open)
}

func TestInProcess(t *testing.T) {
	conformance.Run(t, conformance.InProcess(plugin(), json.RawMessage(testConfig)))
}
