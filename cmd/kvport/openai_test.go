package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The official Python client works against the server, errors included.
func TestOpenAIClient(t *testing.T) {
	t.Parallel()
	python := filepath.Join("..", "..", ".deps", "venv", "bin", "python")
	require.FileExists(t, python, "the packages of tools/python/requirements.txt are missing: run make deps first")
	key := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(key, []byte("sk-of-the-test-0123456789\n"), 0o600))
	p := start(t, "serve", "--model", "sim", "--port", "0", "--api-key-file", key)
	cmd := exec.CommandContext(t.Context(), python, filepath.Join("testdata", "openai_smoke.py"), p.URL+"/v1", key)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	require.NoError(t, cmd.Run(), "%s%s", errs.String(), p.Logs())
	var said struct {
		OpenAI string
		Steps  []string
	}
	require.NoError(t, json.Unmarshal(out.Bytes(), &said))
	require.Equal(t, []string{"models", "completions", "chat", "errors", "together"}, said.Steps)
	t.Logf("openai %s: %v", said.OpenAI, said.Steps)
}
