package main

import (
	"encoding/json"
	"testing"

	"github.com/kvport/kvport/conformance"
)

func TestInProcess(t *testing.T) {
	conformance.Run(t, conformance.InProcess(plugin(), json.RawMessage(`{"dir": "@TMP@/kv"}`)), conformance.Store, conformance.MultiRank)
}
