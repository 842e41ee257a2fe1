package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

// hideFence makes a plugin whose folder has a file "hide" send its fence to the socket that the file names,
// and end: nobody's table of descriptors has the fence then, and it never comes back.
func hideFence(dir string) {
	socket, err := os.ReadFile(filepath.Join(dir, "hide"))
	if err != nil || os.Remove(filepath.Join(dir, "hide")) != nil {
		return
	}
	first, _, _ := strings.Cut(os.Getenv("KVPORT_FENCE"), ",")
	fence, err := strconv.Atoi(first)
	if err != nil {
		panic(err)
	}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: string(socket), Net: "unix"})
	if err != nil {
		panic(err)
	}
	if _, _, err := c.WriteMsgUnix([]byte{1}, syscall.UnixRights(fence), nil); err != nil {
		panic(err)
	}
	os.Exit(3)
}

// hider is an engine whose plugin will hide its fence at its next load. wait is kvport.deadlines.fence.
func hider(t *testing.T, wait string) (p *cluster.Process, hide func()) {
	t.Helper()
	dir, err := os.MkdirTemp("", "h") //nolint:usetesting // the name of a socket must be short
	require.NoError(t, err)
	socket := filepath.Join(dir, "s")
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		require.NoError(t, os.RemoveAll(dir))
	})
	p = start(t, "serve", "--model", "sim", "--port", "0", "--enable-prefix-caching=false", "--kv-transfer-config", fmt.Sprintf(
		`{"kv_connector":"Demo","kv_role":"kv_both","kvport":{"deadlines":{"fence":%q}},"kv_connector_extra_config":{"dir":%q}}`, wait, dir))
	return p, func() { require.NoError(t, os.WriteFile(filepath.Join(dir, "hide"), []byte(socket), 0o600)) }
}

// health is what an operator sees of the connector.
func health(t *testing.T, url string) (status, state string, lost int) {
	t.Helper()
	_, body := do(t, http.MethodGet, url+"/health", "")
	var h struct {
		Status    string
		Connector struct {
			State string
			Lost  int `json:"blocks_lost"`
		}
	}
	require.NoError(t, json.Unmarshal([]byte(body), &h), body)
	return h.Status, h.Connector.State, h.Connector.Lost
}

// A plugin whose fence never comes back costs its memory, not the service: requests have their tokens, the
// next plugin serves, and /health says what is lost.
func TestHiddenFence(t *testing.T) {
	p, hide := hider(t, "1s")
	var client cluster.Client
	request := cluster.Request{Prompt: strings.Repeat("hidden ", 30), MaxTokens: 16, IgnoreEOS: true}
	want, err := client.Complete(t.Context(), p.URL, request)
	require.NoError(t, err)
	saved := func() bool {
		again, err := client.Complete(t.Context(), p.URL, request)
		return err == nil && want.Equal(again) && again.Cached > 0
	}
	require.Eventually(t, saved, time.Minute, 10*time.Millisecond)
	hide()
	got, err := client.Complete(t.Context(), p.URL, request)
	require.NoError(t, err)
	require.True(t, want.Equal(got), "%v, want %v", got.Tokens, want.Tokens)
	require.Zero(t, got.Cached, "it was computed")
	require.Eventually(t, saved, time.Minute, 10*time.Millisecond, "the next plugin serves")
	status, state, lost := health(t, p.URL)
	require.Equal(t, "degraded", status)
	require.Equal(t, "degraded", state)
	require.Positive(t, lost)
	require.NoError(t, p.Logged(t.Context(), "that memory is lost until the engine is started again"))
}

// An engine that is told to end does not wait for a fence.
func TestEndWhileWaitingForFence(t *testing.T) {
	p, hide := hider(t, "10m")
	var client cluster.Client
	request := cluster.Request{Prompt: strings.Repeat("hidden ", 30), MaxTokens: 16, IgnoreEOS: true}
	require.Eventually(t, func() bool {
		got, err := client.Complete(t.Context(), p.URL, request)
		return err == nil && got.Cached > 0
	}, time.Minute, 10*time.Millisecond)
	hide()
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := client.Complete(ctx, p.URL, request)
		left <- err
	}()
	require.Eventually(t, func() bool {
		_, state, _ := health(t, p.URL)
		return state == "waiting_for_fence"
	}, time.Minute, 5*time.Millisecond)
	leave()
	require.ErrorIs(t, <-left, context.Canceled)
	stop, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.NoError(t, p.Stop(stop))
}
