package main

import (
	"fmt"
	"testing"

	"github.com/kvport/kvport/verify/acceptance/rig"
)

// TestNoPort: engines with NixlConnector's default have no port that its page does not name.
func TestNoPort(t *testing.T) {
	rig.Need(t, "nixl")
	config := func(mode, tcp string) func(port string) string {
		return func(port string) string {
			return fmt.Sprintf(`{"kv_connector":"NixlConnector","kv_role":"@ROLE@","kv_connector_extra_config":{"mode":%q,"side_channel_port":%s%s}}`, mode, port, tcp)
		}
	}
	const trusted = `,"ucx_tcp":"trusted-network"`
	for name, c := range map[string]struct {
		config func(port string) string
		open   bool
	}{
		"pull": {config("pull", ""), false}, "push": {config("push", ""), false}, "trusted network": {config("pull", trusted), true},
	} {
		t.Run(name, func(t *testing.T) { rig.NoPort(t, c.config, c.open) })
	}
}
