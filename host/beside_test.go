package host

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

// Numbers may be strings, as vLLM's users write them.
func TestParseConfigNumbers(t *testing.T) {
	c, err := ParseConfig(`{"kv_connector":"X","kv_role":"kv_both","kv_rank":"0","kv_parallel_size":"2","kv_buffer_size":"1e1","kv_port":"14579",
		"kvport":{"landing_bytes":"128MiB","arena_limit":1e9,"recompute_threshold":"32","breaker":{"deaths":"3","window":"7"}}}`)
	require.NoError(t, err)
	s := c.Settings
	require.Equal(t, []int{128 << 20, 1e9, 32, 3}, []int{s.LandingBytes, s.ArenaLimit, s.RecomputeThreshold, s.Breaker.Deaths})
	require.InDelta(t, 7, s.Breaker.Window.Seconds(), 0)
}

// A key next to kv_connector goes to a plugin that has a field for it; for others it is a warning.
func TestAdopt(t *testing.T) {
	m := &Manifest{Name: "XConnector", ConfigSchema: json.RawMessage(`{"properties":{"kv_ip":{},"kv_port":{},"kv_buffer_size":{}}}`)}
	c, err := ParseConfig(`{"kv_connector":"X","kv_role":"kv_both","kv_ip":"127.0.0.2","kv_port":"14579","kv_buffer_size":"1e1","kv_rank":1,
		"kv_connector_extra_config":{"kv_buffer_size":2e9,"a":[1]}}`)
	require.NoError(t, err)
	want := []string{
		"kv_buffer_size: has no effect, since kv_connector_extra_config has another one",
		"kv_rank: accepted for compatibility, has no effect on XConnector",
	}
	require.Equal(t, want, c.Adopt(m))
	require.JSONEq(t, `{"kv_ip":"127.0.0.2","kv_port":"14579","kv_buffer_size":2e9,"a":[1]}`, string(c.Extra))
	require.Equal(t, want, c.Adopt(m), "a second time nothing changes")

	c, err = ParseConfig(`{"kv_connector":"X","kv_role":"kv_both","kv_port":1}`)
	require.NoError(t, err)
	require.Equal(t, []string{"kv_port: accepted for compatibility, has no effect on Y"}, c.Adopt(&Manifest{Name: "Y"}))
	require.JSONEq(t, `{}`, string(c.Extra))

	// Two children that differ in nothing but the port are two.
	c, err = ParseConfig(multiConfig("kv_both", `[{"kv_connector":"X","kv_role":"kv_both","kv_port":1},{"kv_connector":"X","kv_role":"kv_both","kv_port":2}]`))
	require.NoError(t, err)
	require.Empty(t, c.Children[1].Adopt(m))
	require.JSONEq(t, `{"kv_port":2}`, string(c.Children[1].Extra))
}

// vLLM's own object is told from the one inside it.
func TestOuterConfig(t *testing.T) {
	_, err := ParseConfig(`{"kv_connector":"KvportConnector","kv_role":"kv_both","kv_connector_module_path":"kvport_vllm","kv_connector_extra_config":{}}`)
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, `"kvport_vllm" is kvport's module for vLLM, so this is the outer object of vLLM's config: give the inner object`)
}
