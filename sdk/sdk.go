// Package sdk is what a connector author needs in addition to package connector.
//
//	func main() {
//		sdk.Serve(sdk.FromStore(sdk.Definition{Name: "MyConnector", Version: "1.0.0", Scope: connector.ScopeShared}, open))
//	}
//
// [FromStore] makes both sides of a connector from a plain key-value store, [DecodeConfig] reads its
// config, and [Serve] is the whole main function of its plugin process. Authors who decide for themselves
// what is loaded and saved use [FromSides], or fill a connector.Plugin by hand, and call Serve.
package sdk

import (
	"fmt"
	"log/slog"
	"runtime/debug"

	"github.com/kvport/kvport/internal/wire"
)

// ErrPanic is what a call returns if the connector's code panicked in it.
var ErrPanic = wire.ErrPanic

// guard runs call and turns a panic in it into an error, so that one bad request does not take the
// process and everybody's cache with it.
func guard(log *slog.Logger, what string, call func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			log.Error("connector panicked", "call", what, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = fmt.Errorf("%s: %v: %w", what, p, ErrPanic)
		}
	}()
	return call()
}
