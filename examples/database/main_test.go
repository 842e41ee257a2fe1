package main

import (
	"encoding/json"
	"testing"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/lookupbuffer"
	"github.com/kvport/kvport/lookupbuffer/lookupbuffertest"
	"github.com/kvport/kvport/sdk"
)

func plugin() connector.Plugin {
	return sdk.FromBuffer(sdk.Definition{Name: "DatabaseExample", Version: "1", Scope: connector.ScopeShared}, open)
}

// With keep it is a store, too.
func TestInProcess(t *testing.T) {
	conformance.Run(t, conformance.InProcess(plugin(), json.RawMessage(`{"dir": "@TMP@/kv"}`)), conformance.Buffer)
	conformance.Run(t, conformance.InProcess(plugin(), json.RawMessage(`{"dir": "@TMP@/kv", "keep": true}`)), conformance.Store, conformance.MultiRank)
}

func TestBuffer(t *testing.T) {
	for _, c := range lookupbuffertest.Cases() {
		if c.Name == "full" {
			continue // a disk is full when it is
		}
		t.Run(c.Name, func(t *testing.T) {
			dir := t.TempDir()
			c.Run(t, lookupbuffertest.Harness{Capacity: 1 << 20, Shared: true, Open: func(lookupbuffertest.T) lookupbuffertest.Ends {
				b := lookupbuffer.NewDatabase(database{dir}, lookupbuffer.DatabaseOptions{})
				return lookupbuffertest.Ends{Insert: b, Select: b}
			}})
		})
	}
}
