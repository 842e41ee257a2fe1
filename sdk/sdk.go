// Package sdk is what a connector author needs in addition to package connector.
//
//	func main() {
//		sdk.Serve(sdk.FromStore(sdk.Definition{Name: "MyConnector", Version: "1.0.0", Scope: connector.ScopeShared}, open))
//	}
//
// [FromStore] makes both sides of a connector from a plain key-value store, [DecodeConfig] reads its
// config, and [Serve] is the whole main function of its plugin process. Package sdk/tier puts memory before a Store. Authors who decide for themselves
// what is loaded and saved use [FromSides], or fill a connector.Plugin by hand, and call Serve.
package sdk

import "github.com/kvport/kvport/internal/wire"

// ErrPanic is what a call returns if the connector's code panicked in it.
var ErrPanic = wire.ErrPanic
