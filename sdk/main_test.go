package sdk

import (
	"context"
	"log/slog"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
)

// asPlugin makes the test binary a plugin process, so that Serve is tested as it is used.
const asPlugin = "KVPORT_SDK_TEST_AS_PLUGIN"

func TestMain(m *testing.M) {
	if os.Getenv(asPlugin) != "" {
		Serve(servedPlugin())
	}
	goleak.VerifyTestMain(m)
}

// servedPlugin logs at three levels when it opens.
func servedPlugin() connector.Plugin {
	return FromStore(Definition{Name: "Served", Aliases: []string{"S"}, Version: "1.2.3", Environment: []string{"HOME"}, Scope: connector.ScopeShared},
		func(_ context.Context, env connector.Env, c noConfig) (connector.Store, error) {
			env.Log.Debug("opened", "size", c.Size)
			slog.Warn("by the default logger")
			env.Log.With("@level", "x").WithGroup("g").Error("grouped", "msg", "inner")
			return newMemory(), nil
		})
}
