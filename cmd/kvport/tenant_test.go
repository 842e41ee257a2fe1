package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/apikeys"
)

// clientLines is a file of clients whose keys are their names.
func clientLines(t *testing.T, lines ...string) (path string) {
	t.Helper()
	text := apikeys.Head + "\n"
	for _, l := range lines {
		name, options, _ := strings.Cut(l, " ")
		text += fmt.Sprintf("%s sha256:%x %s\n", name, sha256.Sum256([]byte(name)), options)
	}
	path = filepath.Join(t.TempDir(), "clients")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

var cachedTokens = regexp.MustCompile(`"cached_tokens":(\d+)`)

// cachedFor asks in one of several ways how much of a prompt is cached for a client.
func cachedFor(t *testing.T, url, key, way, salt string) int {
	t.Helper()
	path, body := "/v1/completions", fmt.Sprintf(`"prompt":%q`, strings.Repeat("the quick brown fox ", 10))
	switch way {
	case "chat":
		path, body = "/v1/chat/completions", fmt.Sprintf(`"messages":[{"role":"user","content":%q}]`, strings.Repeat("jumps over the dog ", 10))
	case "stream":
		body += `,"stream":true,"stream_options":{"include_usage":true}`
	case "cache query":
		body += `,"kv_transfer_params":{"cache_query":true}`
	}
	code, text := do(t, "POST", url+path, fmt.Sprintf(`{%s,"max_tokens":2,"cache_salt":%q}`, body, salt), "Authorization", "Bearer "+key)
	require.Equal(t, 200, code, text)
	found := cachedTokens.FindStringSubmatch(text)
	require.NotNil(t, found, text)
	n, err := strconv.Atoi(found[1])
	require.NoError(t, err)
	return n
}

// What is said about the cache is about what the own tenant has left there, on every path, with a router or without.
func TestTenantsSeeTheirOwnCache(t *testing.T) {
	engine := start(t, "serve", "--model", "sim", "--port", "0", "--api-key-file", clientLines(t, "alice", "bob", "friend salt=alice", "front router"))
	upstream := filepath.Join(t.TempDir(), "upstream")
	require.NoError(t, os.WriteFile(upstream, []byte("front\n"), 0o600))
	router := start(t, "route", "--decode", engine.URL, "--port", "0", "--api-key-file", clientLines(t, "alice", "bob", "friend salt=alice"), "--upstream-api-key-file", upstream)
	for _, way := range []string{"completion", "chat", "stream", "cache query"} {
		for _, url := range []string{engine.URL, router.URL} {
			if url == router.URL && way == "cache query" { // it answers none
				continue
			}
			name := way + " " + url
			first := "completion"
			if way == "chat" {
				first = way
			}
			salt := fmt.Sprintf("a conversation: %s", name)
			require.Zero(t, cachedFor(t, url, "alice", first, salt), name)
			require.Zero(t, cachedFor(t, url, "bob", way, connector.TenantSalt("alice", salt)), name)
			require.Zero(t, cachedFor(t, url, "bob", way, salt), name)
			for _, other := range []string{engine.URL, router.URL} {
				if other == router.URL && way == "cache query" {
					continue
				}
				require.Positive(t, cachedFor(t, other, "alice", way, salt), "%s, then %s", name, other)
				require.Positive(t, cachedFor(t, other, "friend", way, salt), "%s, then %s", name, other)
			}
		}
	}
}

// Whoever tries keys is counted and logged, without what was tried; so is who changes the keys or the cache.
func TestStrangersAndAudit(t *testing.T) {
	file := clientLines(t, "alice", "root admin")
	engine := start(t, "serve", "--model", "sim", "--port", "0", "--api-key-file", file)
	router := start(t, "route", "--decode", engine.URL, "--port", "0", "--api-key-file", file)
	for _, url := range []string{engine.URL, router.URL} {
		for range 50 {
			code, _ := do(t, "GET", url+"/v1/models", "", "Authorization", "Bearer tried-key")
			require.Equal(t, 401, code)
			code, _ = do(t, "GET", url+"/health", "", "Authorization", "Bearer tried-key")
			require.Equal(t, 200, code)
			do(t, "GET", url+"/health", "")
			do(t, "GET", url+"/health", "", "Authorization", "Bearer alice")
		}
		code, metrics := do(t, "GET", url+"/metrics", "", "Authorization", "Bearer root")
		require.Equal(t, 200, code)
		require.Contains(t, metrics, "kvport_http_unauthorized_total 100\n")
		code, text := do(t, "GET", url+"/metrics", "", "Authorization", "Bearer alice")
		require.Equal(t, 403, code)
		require.Contains(t, text, "metrics_key_required")
	}
	require.NoError(t, router.Logged(t.Context(), "requests came without a valid API key"))
	require.NoError(t, engine.Logged(t.Context(), "requests came without a valid API key"))
	require.NoError(t, engine.Logged(t.Context(), `"remote":"127.0.0.1:`))
	require.NotContains(t, engine.Logs()+router.Logs(), "tried-key")

	code, _ := do(t, "POST", engine.URL+"/reset_prefix_cache", "", "Authorization", "Bearer alice")
	require.Equal(t, 403, code)
	code, _ = do(t, "POST", engine.URL+"/reset_prefix_cache", "", "Authorization", "Bearer root")
	require.Equal(t, 200, code)
	require.NoError(t, engine.Logged(t.Context(), `"msg":"audit","action":"reset","key":"alice","remote":"127.0.0.1:`))
	require.NoError(t, engine.Logged(t.Context(), `"action":"reset","key":"root"`))

	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.NoError(t, engine.Signal(syscall.SIGHUP))
	require.NoError(t, engine.Logged(t.Context(), `"action":"reload","key":"","remote":"","result":"API key file `+file+`: it has no keys`))
	require.NoError(t, os.Rename(clientLines(t, "alice"), file))
	require.NoError(t, engine.Signal(syscall.SIGHUP))
	require.NoError(t, engine.Logged(t.Context(), `"action":"reload","key":"","remote":"","result":"ok"`))
	require.Eventually(t, func() bool {
		code, _ := do(t, "POST", engine.URL+"/reset_prefix_cache", "", "Authorization", "Bearer root")
		return code == 401
	}, time.Minute, time.Millisecond)
}
