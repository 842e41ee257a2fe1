package main

import (
	"io"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A router that starts late learns from the engines' events which of them has a prompt, and sends the next requests
// there. The engine says that it had the tokens.
func TestRouterKnowsBlocks(t *testing.T) {
	const events = `{"enable_kv_cache_events": true}`
	a := start(t, "serve", "--model", "sim", "--port", "0", "--kv-events-config", events)
	b := start(t, "serve", "--model", "sim", "--port", "0", "--kv-events-config", events)
	prompt := func(name string) string {
		return `{"prompt":"` + strings.Repeat(name+" has this ", 20) + `","max_tokens":2}`
	}
	for url, body := range map[string]string{a.URL: prompt("first"), b.URL: prompt("second")} {
		code, text := do(t, "POST", url+"/v1/completions", body)
		require.Equal(t, 200, code, text)
	}
	r := start(t, "route", "--port", "0", "--policy", "prefix_aware", "--decode", a.URL, "--decode", b.URL)
	indexed := regexp.MustCompile(`(?m)^kvport_router_kv_index_blocks [1-9]`)
	events2 := regexp.MustCompile(`(?m)^kvport_router_kv_events_total{what="replayed"} ([2-9]|\d\d)`)
	require.Eventually(t, func() bool {
		_, text := do(t, "GET", r.URL+"/metrics", "")
		return indexed.MatchString(text) && events2.MatchString(text)
	}, time.Minute, 10*time.Millisecond)
	for range 2 {
		for url, body := range map[string]string{a.URL: prompt("first"), b.URL: prompt("second")} {
			code, text := do(t, "POST", r.URL+"/v1/completions", body)
			require.Equal(t, 200, code, text)
			require.Regexp(t, `"cached_tokens":[1-9]`, text, "it went to %s", url)
		}
	}
}

// A config of events that cannot work is refused with one line that names the flag, the field and what to do.
func TestEventsFlags(t *testing.T) {
	for arg, message := range map[string]string{
		`{"enable_kv_cache_event": true}`:                                       `did you mean "enable_kv_cache_events"`,
		`{"enable_kv_cache_events": true, "endpoint": "udp://a:1"}`:             "want ipc://PATH or tcp://HOST:PORT",
		`{"enable_kv_cache_events": true, "endpoint": "ipc:///nowhere/at/all"}`: "endpoint: ",
		"@nowhere": "nowhere",
		"":         "--kv-events-config: ",
	} {
		var errs strings.Builder
		code := run([]string{"serve", "--model", "sim", "--port", "0", "--num-blocks", "64", "--kv-events-config", arg}, io.Discard, &errs)
		require.Equal(t, 2, code, errs.String())
		require.Contains(t, errs.String(), "--kv-events-config: ")
		require.Contains(t, errs.String(), message)
	}
	for _, c := range [][]string{
		{"--kv-events", "http://127.0.0.1:1", "want URL=ENDPOINT"},
		{"--kv-events", "http://127.0.0.1:1=a", "--kv-events: "},
		{"--kv-events", "http://127.0.0.1:1=tcp://a:1,b", `"b" is no endpoint`},
	} {
		var errs strings.Builder
		code := run([]string{"route", "--port", "0", "--policy", "prefix_aware", "--decode", "http://127.0.0.1:1", c[0], c[1]}, io.Discard, &errs)
		require.Equal(t, 2, code, errs.String())
		require.Contains(t, errs.String(), c[2])
	}
}
