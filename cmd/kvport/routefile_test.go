package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router"
	"github.com/kvport/kvport/engine/router/admission"
	"github.com/kvport/kvport/engine/router/policy"
)

// A config file says which instances there are and what clients may use.
func TestRouteFile(t *testing.T) {
	hash := router.KeyID("k")
	s, err := decodeRoute([]byte(`{
  "instances": [
    {"url": "http://10.0.0.1:8000", "role": "prefill"},
    {"url": "https://d.example/base", "role": "decode", "group": "a", "drain": true},
    {"url": "dns+srv://_http._tcp.decode", "role": "decode"}
  ],
  "limits": {"max_in_flight": 4},
  "keys": [{"name": "team", "key_sha256": "`+strings.ToUpper(hash)+`", "tokens_per_minute": "1e5"}]
}`), admission.Limits{RequestsPerMinute: 9}, true)
	require.NoError(t, err)
	require.Equal(t, []router.Instance{
		{URL: "http://10.0.0.1:8000", Role: "prefill"},
		{URL: "https://d.example/base", Role: "decode", Group: "a", Drain: true},
		{URL: "dns+srv://_http._tcp.decode", Role: "decode"},
	}, s.Instances)
	require.Equal(t, router.Limits{Each: admission.Limits{InFlight: 4}, Keys: map[string]admission.Limits{hash: {TokensPerMinute: 100_000}}}, s.Limits)
	s, err = decodeRoute([]byte(`{}`), admission.Limits{RequestsPerMinute: 9}, true)
	require.NoError(t, err)
	require.Equal(t, admission.Limits{RequestsPerMinute: 9}, s.Limits.Each, "the flags'")
	require.Empty(t, s.Policy)
	require.Nil(t, s.Weights)
	require.Empty(t, s.SessionKey)
	s, err = decodeRoute([]byte(`{"policy": "prefix_aware", "policy_weights": {"prefix": 2.5, "session": 0}, "session_key": "field:user"}`), admission.Limits{}, true)
	require.NoError(t, err)
	require.Equal(t, policy.PrefixAware, s.Policy)
	require.Equal(t, map[string]float64{"prefix": 2.5, "session": 0}, s.Weights)
	require.Equal(t, "field:user", s.SessionKey)
	s, err = decodeRoute([]byte(`{"policy_weights": {"load": 2}}`), admission.Limits{}, true)
	require.NoError(t, err)
	require.Empty(t, s.Policy)
	require.Equal(t, map[string]float64{"load": 2}, s.Weights)
}

// Whatever is wrong with a config file is said in one line, with its place.
func TestRouteFileNamesWhatIsWrong(t *testing.T) {
	key := func(k string) string { return `{"keys":[` + k + `]}` }
	for text, want := range map[string]string{
		``:                                     "",
		`{"instance":[]}`:                      `did you mean "instances"`,
		`{"instances":[{}]}`:                   `is missing`,
		`{"instances":[{"url":"http://x:1"}]}`: `role`,
		`{"instances":[{"url":5,"role":"decode"}]}`:                                                                      `url`,
		`{"instances":[{"url":"http://x:1","role":"decoder"}]}`:                                                          `"prefill" or "decode"`,
		`{"instances":[{"url":"x:1","role":"decode"}]}`:                                                                  `line 1, column 22: instances[0].url: "x:1" is no URL, want http://x:1`,
		"{\"instances\":[{\"url\":\"http://x:1\",\"role\":\"decode\"},\n{\"url\":\"http://X:1/\",\"role\":\"decode\"}]}": `line 2, column 8: instances[1].url: "http://X:1/" appears twice as decode`,
		`{"instances":[{"url":"http://x:1","role":"decode","drian":true}]}`:                                              `did you mean "drain"`,
		`{"limits":{"tokens_per_minute":-1}}`:                                                                            `must be at least 0`,
		`{"policy":"prefix_awre"}`:                                                                                       `line 1, column 11: policy: unknown policy "prefix_awre", did you mean "prefix_aware"?`,
		`{"policy":5}`:                                                                                                   `policy`,
		`{"policy":"round_robin","policy_weights":{"load":1}}`:                                                           `policy_weights: policy round_robin has no weights`,
		`{"policy":"session","policy_weights":{"lod":1}}`:                                                                `policy_weights: unknown scorer "lod", did you mean "load"?`,
		`{"policy_weights":{"load":"much"}}`:                                                                             `policy_weights: must have a number for each scorer, such as {"prefix": 1, "load": 1}`,
		`{"policy_weights":["load"]}`:                                                                                    `policy_weights`,
		`{"session_key":"user"}`:                                                                                         `session_key: is "user", want header:NAME, cookie:NAME or field:NAME`,
		key(`{"key_sha256":"abc"}`):                                                                                      `is no SHA-256`,
		key(`{"name":"x"}`):                                                                                              `is missing`,
		key(`{"key_sha256":"` + router.KeyID("k") + `"},{"key_sha256":"` + router.KeyID("k") + `"}`):                     `appears twice`,
	} {
		_, err := decodeRoute([]byte(text), admission.Limits{}, true)
		require.ErrorContains(t, err, want, text)
		require.NotContains(t, err.Error(), "\n")
	}
}

// Without --mode replica a group would have no meaning.
func TestRouteFileGroups(t *testing.T) {
	text := `{"instances":[{"url":"http://x:1","role":"decode","group":"a"}]}`
	_, err := decodeRoute([]byte(text), admission.Limits{}, false)
	require.EqualError(t, err, "line 1, column 59: instances[0].group: groups are for --mode replica")
	_, err = decodeRoute([]byte(text), admission.Limits{}, true)
	require.NoError(t, err)
	for group, want := range map[string]string{`"a b"`: "without spaces or quotes", `5`: "group"} {
		_, err = decodeRoute([]byte(strings.Replace(text, `"a"`, group, 1)), admission.Limits{}, true)
		require.ErrorContains(t, err, want)
	}
}

func FuzzRouteFile(f *testing.F) {
	f.Add([]byte(`{"policy":"session","policy_weights":{"load":2},"session_key":"cookie:x"}`))
	f.Add([]byte(`{"instances":[{"url":"dns://x:1","role":"decode","drain":true}],"limits":{"max_in_flight":1},"keys":[{"key_sha256":"00"}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := decodeRoute(text, admission.Limits{}, true)
		if err != nil {
			require.NotContains(t, err.Error(), "\n")
			return
		}
		for _, in := range s.Instances {
			_, err := router.CheckInstance(in)
			require.NoError(t, err)
		}
	})
}

// The schema that is printed accepts what the command accepts.
func TestRouteSchema(t *testing.T) {
	var out, errs bytes.Buffer
	require.Zero(t, run([]string{"schema", "--route"}, &out, &errs), errs.String())
	doc, err := jsonschema.UnmarshalJSON(&out)
	require.NoError(t, err)
	c := jsonschema.NewCompiler()
	require.NoError(t, c.AddResource("route.json", doc))
	schema, err := c.Compile("route.json")
	require.NoError(t, err)
	check := func(text string) error {
		var v any
		require.NoError(t, json.Unmarshal([]byte(text), &v))
		return schema.Validate(v)
	}
	require.NoError(t, check(`{"policy":"session","policy_weights":{"load":2},"session_key":"cookie:x"}`))
	require.Error(t, check(`{"policy_weights":"load=2"}`))
	require.NoError(t, check(`{"instances":[{"url":"http://x","role":"decode","group":"a","drain":true}],"limits":{"max_in_flight":"4"},"keys":[{"name":"a","key_sha256":"ab","requests_per_minute":2}]}`))
	require.Error(t, check(`{"instances":[{"role":"decode"}]}`))
	require.Error(t, check(`{"instances":[{"url":"http://x","role":"both"}]}`))
	require.Equal(t, 2, run([]string{"schema", "--route", "X"}, io.Discard, &errs))
}

// The table of docs/router.md has every flag of kvport route with its default, once, and no other.
func TestRouterPageHasTheFlags(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "router.md"))
	require.NoError(t, err)
	row := regexp.MustCompile("(?m)^\\| `--([a-z-]+)` \\| ([^|]*) \\|")
	said := map[string]string{}
	for _, m := range row.FindAllStringSubmatch(string(page), -1) {
		require.NotContains(t, said, m[1], "docs/router.md has --%s twice", m[1])
		said[m[1]] = m[2]
	}
	all := newRoute().Flags()
	all.VisitAll(func(flag *pflag.Flag) {
		got, is := said[flag.Name]
		require.True(t, is, "docs/router.md lacks --%s", flag.Name)
		want := flag.DefValue
		if want == "" || want == "[]" {
			want = "none"
		}
		require.Equal(t, want, got, "--%s", flag.Name)
	})
	for name := range said {
		require.NotNil(t, all.Lookup(name), "docs/router.md has --%s, which is no flag of kvport route", name)
	}
}

// The examples of docs/router.md are accepted as they stand: each command of the router gets as far as its port, and the config file
// is used.
func TestRouterPageExamples(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "router.md"))
	require.NoError(t, err)
	commands, files := 0, 0
	for _, block := range regexp.MustCompile("(?ms)^```(sh|json)\n(.*?)^```").FindAllStringSubmatch(string(page), -1) {
		switch text := block[2]; {
		case strings.HasPrefix(text, "kvport route "):
			commands++
			out, err := exec.CommandContext(t.Context(), "sh", "-c", "kvport() { printf '%s\\0' \"$@\"; }\n"+text).Output()
			require.NoError(t, err)
			args := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
			var errs strings.Builder
			require.Equal(t, 2, run(append(args, "--host", "192.0.2.1", "--allow-unauthenticated"), io.Discard, &errs), text) // which nobody has
			require.Contains(t, errs.String(), "this machine has no address 192.0.2.1", text)
		case strings.HasPrefix(text, "{\n  \"instances\""):
			files++
			s, err := decodeRoute([]byte(text), admission.Limits{}, true)
			require.NoError(t, err)
			require.NotEmpty(t, s.Instances)
			r, err := router.New(router.Config{File: router.File{
				Path: "-", Read: func(string) ([]byte, error) { return []byte(text), nil },
				Decode: func([]byte) (*router.Settings, error) { return s, nil },
			}})
			require.NoError(t, err)
			r.Close()
		}
	}
	require.Equal(t, 4, commands)
	require.Equal(t, 1, files)
}

// Flags that cannot work are refused with what to give.
func TestRouteFrontFlags(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none.json")
	bad := filepath.Join(t.TempDir(), "bad.json")
	require.NoError(t, os.WriteFile(bad, []byte(`{"instances":[{"url":"x","role":"decode"}]}`), 0o600))
	for args, want := range map[string]string{
		"--max-in-flight 0":           "--max-in-flight is 0, want at least 1",
		"--instance-max-in-flight -1": "--instance-max-in-flight is -1, want at least 0",
		"--queue-size -1":             "--queue-size is -1, want at least 0",
		"--queue-timeout 0s":          "--queue-timeout is 0s, want a positive time",
		"--key-tokens-per-minute -2":  "--key-tokens-per-minute is -2",
		"--retry-budget 1.5":          "--retry-budget is 1.5",
		"--retry-budget NaN":          "--retry-budget is NaN",
		"--cache-query-timeout -1s":   "--cache-query-timeout is -1s, want a time such as 200ms, or 0",
		"--dns-server 10.0.0.1":       `--dns-server is "10.0.0.1", want HOST:PORT`,
		"--decode dns://x":            `--decode: "dns://x" has no name and port, want dns://NAME:PORT`,
		"--config " + missing:         "no such file",
		"--config " + bad:             bad + `: line 1, column 22: instances[0].url: "x" is no URL, want http://x`,
	} {
		all := append([]string{"route", "--port", "0"}, strings.Fields(args)...)
		if !strings.Contains(args, "--decode") && !strings.Contains(args, "--config") {
			all = append(all, "--decode", "http://127.0.0.1:1")
		}
		var errs strings.Builder
		require.Equal(t, 2, run(all, io.Discard, &errs), "%s", fmt.Sprint(all))
		require.Contains(t, errs.String(), want)
		require.Equal(t, 1, strings.Count(errs.String(), "\n"), errs.String())
	}
}
