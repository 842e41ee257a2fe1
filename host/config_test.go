package host

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

func TestParseConfig(t *testing.T) {
	c, err := ParseConfig(`{
		"kv_connector": "StoreConnector", "kv_role": "kv_both", "engine_id": "e1", "kv_buffer_device": "cpu",
		"kv_load_failure_policy": "fail", "kv_connector_module_path": "/x/kvport-y", "kv_ip": "127.0.0.1", "kv_port": 14579, "kv_rank": null, "kv_buffer_size": 1e9,
		"lmcache.mp.host": "h", "kv_connector_extra_config": {"shared_storage_path": "/tmp/x", "Any": [1, null]},
		"kvport": {"ticket_key_file": "k", "peers": ["a", "b"], "trust": "in-place", "tenant_secret_file": "s",
			"plugin_sha256": "` + strings.Repeat("AB", 32) + `", "allow_lossy": true, "allow_weak_hashes": true, "unverified": true,
			"deadlines": {"transfer": "7s", "save": 1.5}, "heartbeat": {"interval": "1s", "limit": "3s"}, "breaker": {"deaths": 9}}
	}`)
	require.NoError(t, err)
	require.Equal(t, "StoreConnector", c.Connector)
	require.Equal(t, connector.RoleBoth, c.Role)
	require.Equal(t, PolicyFail, c.FailurePolicy)
	require.JSONEq(t, `{"shared_storage_path": "/tmp/x", "Any": [1, null]}`, string(c.Extra))
	require.Len(t, c.Warnings, 2)
	require.Len(t, c.beside, 3)
	want := DefaultSettings()
	want.TicketKeyFile, want.Peers, want.TenantSecretFile, want.AllowLossy, want.Unverified = "k", []string{"a", "b"}, "s", true, true
	want.AllowWeakHashes = true
	want.PluginSHA256 = strings.Repeat("ab", 32)
	want.Deadlines.Transfer, want.Deadlines.Save = 7*time.Second, 1500*time.Millisecond
	want.Heartbeat, want.Breaker.Deaths = Heartbeat{time.Second, 3 * time.Second}, 9
	require.Equal(t, want, c.Settings)

	c, err = ParseConfig(`{"kv_connector":"X","kv_role":"kv_producer"}`)
	require.NoError(t, err)
	require.Equal(t, PolicyRecompute, c.FailurePolicy)
	require.Equal(t, DefaultSettings(), c.Settings)
	require.Equal(t, "{}", string(c.Extra))
}

func TestParseConfigErrors(t *testing.T) {
	const ok = `{"kv_connector":"X","kv_role":"kv_both"`
	for arg, want := range map[string]string{
		``:                                      "is empty",
		`  `:                                    "is empty",
		`null`:                                  "line 1, column 1: must be an object, not null",
		`[]`:                                    "line 1, column 1: must be an object, not an array",
		`{"kv_connector":"X"}`:                  "kv_role: is missing",
		`{"kv_role":"kv_both"}`:                 "kv_connector: is missing",
		`{"kv_connector":"X","kv_role":"both"}`: `line 1, column 31: kv_role: is "both", must be "kv_producer", "kv_consumer" or "kv_both"`,
		`{"kv_connector":"X","kv_role":7}`:      "kv_role: must be a string, not a number",
		`{"kv_connector":null,"kv_role":"kv_both"}`:        "kv_connector: must be a string, not null",
		ok + `,"kv_conector":"Y"}`:                         `unknown field "kv_conector", did you mean "kv_connector"?`,
		ok + `,"KV_ROLE":"kv_both"}`:                       `unknown field "KV_ROLE"`,
		ok + `,"zzzzzzzzzzzz":1}`:                          `unknown field "zzzzzzzzzzzz"`,
		ok + `,"kv_role":"kv_both"}`:                       `field "kv_role" is given twice`,
		ok + `,"kv_connector_extra_config":{"a":1,"a":2}}`: `field "a" is given twice`,
		ok + `,"kv_connector_extra_config":[]}`:            "kv_connector_extra_config: must be an object, not an array",
		ok + `,"kv_load_failure_policy":"retry"}`:          `is "retry", must be "recompute" or "fail"`,
		ok + `,"kv_buffer_device":"tpu"}`:                  `kv_buffer_device: is "tpu", must be`,
		ok + `,"kv_buffer_device":"cuda"}`:                 `kv_buffer_device: is "cuda", but caches are in host memory here`,
		ok + `,"kv_ip":1}`:                                 "kv_ip: must be a string, not a number",
		ok + `,"kv_port":[]}`:                              "kv_port: must be a whole number, not an array",
		ok + `,"kv_rank":"zero"}`:                          `kv_rank: must be a whole number: "zero" is no whole number`,
		ok + `,"kv_parallel_size":{}}`:                     "kv_parallel_size: must be a whole number, not an object",
		ok + `,"kv_buffer_size":true}`:                     "kv_buffer_size: must be a number of bytes, not a boolean",
		ok + `,"kv_buffer_size":"10 apples"}`:              `kv_buffer_size: must be a number of bytes: "10 apples" is no whole number and no size such as "10GiB"`,
		ok + `,"kvport":{"landing_bytes":"1e99"}}`:         `kvport.landing_bytes: must be a number of bytes: "1e99" is too large`,
		"\xef\xbb\xbf" + ok + "}":                          "byte order mark",
		ok + `,"kvport":{"trust":"read-only"}}`:            `kvport.trust: is "read-only", must be "in-place" or "staged"`,
		ok + `,"kvport":{"trust":"full"}}`:                 `kvport.trust: is "full", must be "in-place" or "staged"`,
		ok + `,"kvport":{"deadlines":{"tranfer":"1s"}}}`:   `kvport.deadlines: unknown field "tranfer", did you mean "transfer"?`,
		ok + `,"kvport":{"deadlines":{"save":"soon"}}}`:    `kvport.deadlines.save: must be a duration such as "250ms", or a number of seconds: "soon" is none`,
		ok + `,"kvport":{"deadlines":{"save":-1}}}`:        "kvport.deadlines.save: is -1, must be more than 0",
		ok + `,"kvport":{"deadlines":{"save":true}}}`:      "not a boolean",
		ok + `,"kvport":{"breaker":{"deaths":0}}}`:         "kvport.breaker.deaths: is 0, must be at least 1",
		ok + `,"kvport":{"breaker":{"deaths":1.5}}}`:       "must be a whole number",
		ok + `,"kvport":{"peers":["a",1]}}`:                "kvport.peers[1]: must be a string",
		ok + `,"kvport":{"plugin_sha256":"abc"}}`:          "kvport.plugin_sha256",
		ok + `,"kvport":null}`:                             "kvport: must be an object, not null",
		ok + "\n,,}":                                       "line 2, column 2",
		ok + `} {}`:                                        "line 1, column 42",
		ok:                                                 "unexpected end of JSON input",
		`@/does/not/exist`:                                 "no such file",
		`@/dev/null`:                                       "not a regular file",
		ok + `,"` + strings.Repeat("x", 1000) + `":1}`:     `xxx"...`,
		strings.Repeat("[", 20000):                         "exceeded max depth",
	} {
		_, err := ParseConfig(arg)
		require.ErrorIs(t, err, ErrConfig, "%.80s", arg)
		require.ErrorContains(t, err, want, "%.80s", arg)
		require.LessOrEqual(t, strings.Count(err.Error(), "\n"), 1)
		require.Less(t, len(err.Error()), 400)
	}
}

func TestParseConfigFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.json")
	big := `{"kv_connector":"X","kv_role":"kv_both","kv_connector_extra_config":{"pad":"` + strings.Repeat("x", 1<<20) + `"}}`
	require.NoError(t, os.WriteFile(path, []byte(big), 0o600))
	c, err := ParseConfig("@" + path)
	require.NoError(t, err)
	require.Greater(t, len(c.Extra), 1<<20)
	require.NoError(t, os.WriteFile(path, []byte(strings.Repeat(" ", maxConfigBytes+1)), 0o600))
	_, err = ParseConfig("@" + path)
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "larger than")
}

func FuzzParseConfig(f *testing.F) {
	for _, s := range []string{
		`{"kv_connector":"X","kv_role":"kv_both","kvport":{"deadlines":{"save":"1s"},"peers":["a"]}}`, `{"a":{"b":[1,{"c":null}]}}`, `"x"`, `{`,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, arg string) {
		if strings.HasPrefix(arg, "@") {
			return
		}
		c, err := ParseConfig(arg)
		if err != nil {
			require.ErrorIs(t, err, ErrConfig)
			require.Nil(t, c)
			require.NotContains(t, err.Error(), "\n", "a message is a line")
			require.Less(t, len(err.Error()), 2048)
			return
		}
		require.NotEmpty(t, c.Connector)
		require.NotZero(t, c.Role)
		for _, d := range []time.Duration{c.Settings.Deadlines.Save, c.Settings.Heartbeat.Interval, c.Settings.Breaker.Window} {
			require.True(t, d > 0 && d <= 24*time.Hour)
		}
		require.Positive(t, c.Settings.LandingBytes)
		require.Contains(t, []FailurePolicy{PolicyRecompute, PolicyFail}, c.FailurePolicy)
		require.True(t, json.Valid(c.Extra) && bytes.HasPrefix(bytes.TrimSpace(c.Extra), []byte("{")))
	})
}

// TestSettingsPage: the page of settings shows the defaults, and names every setting.
func TestSettingsPage(t *testing.T) {
	page, err := os.ReadFile("../docs/transfer-config.md")
	require.NoError(t, err)
	_, example, found := strings.Cut(string(page), "```json\n")
	require.True(t, found)
	example, _, _ = strings.Cut(example, "```")
	c, err := ParseConfig(example)
	require.NoError(t, err)
	require.Equal(t, DefaultSettings(), c.Settings)
	for f := range reflect.TypeFor[Settings]().Fields() {
		require.Contains(t, string(page), "| `"+f.Tag.Get("json")+"` |")
	}
	for f := range reflect.TypeFor[Deadlines]().Fields() {
		require.Contains(t, example, `"`+f.Tag.Get("json")+`"`)
	}
}
