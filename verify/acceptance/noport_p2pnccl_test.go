package acceptance

import (
	"fmt"
	"testing"
)

// TestNoPort: engines with P2pNcclConnector's default have no port that its page does not name.
func TestNoPort2(t *testing.T) {
	need(t, "nixl")
	for name, tcp := range map[string]string{"default": "", "trusted network": `,"ucx_tcp":"trusted-network"`} {
		t.Run(name, func(t *testing.T) {
			config := fmt.Sprintf(`{"kv_connector":"P2pNcclConnector","kv_role":"@ROLE@","kv_connector_extra_config":{"kv_buffer_size":67108864%s}}`, tcp)
			noPort(t, func(string) string { return config }, tcp != "")
		})
	}
}
