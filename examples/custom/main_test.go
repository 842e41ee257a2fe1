package main

import (
	"encoding/json"
	"testing"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

func TestInProcess(t *testing.T) {
	plugin := sdk.FromSides(sdk.Definition{Name: "CustomExample", Version: "1", Scope: connector.ScopeShared}, open, open)
	conformance.Run(t, conformance.InProcess(plugin, json.RawMessage(`{"dir": "@TMP@/kv"}`)), conformance.Store, conformance.MultiRank)
}
