package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/engine/tokenizer"
)

// A signal while a plugin is asked for its manifest, or opens, ends the process: nothing was wrong.
func TestEndedWhileStarting(t *testing.T) {
	for _, stage := range []string{"manifest", "open"} {
		t.Run(stage, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			fifo := filepath.Join(dir, "go")
			require.NoError(t, syscall.Mkfifo(fifo, 0o600))
			name := "SlowConnector"
			if stage == "manifest" {
				name = "StuckConnector"
				stuck := fmt.Sprintf("#!/bin/sh\nread -r line <%q\n", fifo)
				require.NoError(t, os.WriteFile(filepath.Join(dir, "kvport-stuck"), []byte(stuck), 0o700)) //nolint:gosec // a plugin is run
			}
			cmd, lines := launch(t, "serve", "--model", "sim", "--port", "0", "--plugin-path", dir, "--kv-transfer-config",
				fmt.Sprintf(`{"kv_connector":%q,"kv_role":"kv_both","kv_connector_extra_config":{"dir":%q},"kvport":{"deadlines":{"handshake":"1m"}}}`, name, dir))
			w, err := os.OpenFile(fifo, os.O_WRONLY, 0) // waits for the plugin
			require.NoError(t, err)
			defer w.Close()
			require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
			var log strings.Builder
			for line := range lines {
				log.WriteString(line + "\n")
			}
			require.NoError(t, cmd.Wait(), log.String())
			require.Contains(t, log.String(), "ended while starting")
			require.NotContains(t, log.String(), "context canceled")
		})
	}
}

// An engine whose end was asked for while it started does not serve.
func TestEndedIsNotReady(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 { // a start that is over at once learns about both at the same time
		cmd := newServe()
		var out bytes.Buffer
		cmd.SetOut(&out)
		cmd.SetErr(&out)
		cmd.SetArgs([]string{"--model", "sim", "--port", "0", "--num-blocks", "64"})
		require.NoError(t, cmd.ExecuteContext(ctx))
		require.Contains(t, out.String(), "ended while starting")
		require.NotContains(t, out.String(), "kvport: ready")
		require.NotContains(t, out.String(), `"serving"`)
	}
}

// A model that is still loading is not waited for.
func TestLoadingIsNotWaitedFor(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	stay := make(chan struct{})
	defer close(stay)
	_, _, err := load(ctx, func() (model.Model, tokenizer.Tokenizer, error) {
		<-stay
		return nil, nil, nil
	})
	require.ErrorIs(t, err, context.DeadlineExceeded)
}
