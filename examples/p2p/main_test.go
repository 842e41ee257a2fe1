package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/pipe/pipetest"
	"github.com/kvport/kvport/sdk"
)

func TestInProcess(t *testing.T) {
	plugin := sdk.FromPipe(sdk.Definition{Name: "PeerExample", Version: "1", Groups: true}, open)
	conformance.Run(t, conformance.InProcess(plugin, json.RawMessage(`{"dir": "@TMP@"}`)), conformance.Pipe, conformance.Store, conformance.MultiRank, conformance.Groups)
}

// The cases that a pipe without acknowledgements of its own can pass: what it loses with its connection, the
// sdk asks for again or lets the engine compute.
func TestPipe(t *testing.T) {
	h := pipetest.Harness{Open: func(t pipetest.T) pipetest.Ends {
		n := network{shortDir(t)}
		l, err := n.Listen(t.Context())
		require.NoError(t, err)
		dialed, err := n.Dial(t.Context(), l.Address())
		require.NoError(t, err)
		accepted, err := l.Accept(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { _ = l.Close() })
		return pipetest.Ends{Out: dialed.Out, In: accepted.In}
	}}
	for _, c := range pipetest.Cases() {
		switch c.Name {
		case "bytes", "order", "large", "spans-returned", "in-place", "refused-frame", "wrong-room", "many-senders", "back-pressure":
			t.Run(c.Name, func(t *testing.T) { c.Run(t, h) })
		}
	}
}

// shortDir is a folder whose name leaves room for a socket's.
func shortDir(t pipetest.T) string {
	tb, ok := t.(*testing.T)
	require.True(t, ok)
	return tb.TempDir()
}
