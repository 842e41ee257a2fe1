package main

import (
	"fmt"
	"testing"

	"github.com/kvport/kvport/verify/acceptance/rig"
)

// TestNoPort: engines with P2pNcclConnector's default have no port that its page does not name.
func TestNoPort(t *testing.T) {
	rig.Need(t, "nixl")
	for name, tcp := range map[string]string{"default": "", "trusted network": `,"ucx_tcp":"trusted-network"`} {
		t.Run(name, func(t *testing.T) {
			config := fmt.Sprintf(`{"kv_connector":"P2pNcclConnector","kv_role":"@ROLE@","kv_connector_extra_config":{"kv_buffer_size":67108864%s}}`, tcp)
			rig.NoPort(t, func(string) string { return config }, tcp != "")
		})
	}
}
