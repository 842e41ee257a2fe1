package server

import (
	"bytes"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/tokenizer"
)

// A field that nobody knows is named: as a warning, then for a minute only at the level debug.
func TestUnknownFieldIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		s, err := New(Config{
			Engine: &script{}, Tokenizer: tokenizer.Bytes(), ModelName: "x",
			Log: slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})),
		})
		require.NoError(t, err)
		told := func(path, body string) string {
			out.Reset()
			r := httptest.NewRequestWithContext(t.Context(), "POST", path, strings.NewReader(body))
			r.Header.Set("Content-Type", "application/json")
			s.ServeHTTP(httptest.NewRecorder(), r)
			for line := range strings.Lines(out.String()) {
				if strings.Contains(line, "a field that is not known") {
					return line
				}
			}
			return ""
		}
		const typo = `{"prompt":"secret words","tempature":1,"zz":"more secrets"}`
		require.Empty(t, told("/v1/completions", `{"prompt":"x","temperature":1}`))
		line := told("/v1/completions", typo)
		require.Contains(t, line, "level=WARN")
		require.Contains(t, line, "field=tempature unknown_fields=2")
		require.NotContains(t, line, "secret")
		require.Contains(t, told("/v1/completions", typo), "level=DEBUG")
		<-time.After(time.Minute)
		const chat = `{"messages":[{"role":"user","content":"x"}],"max_completion_tokens":3,`
		line = told("/v1/chat/completions", chat+`"`+strings.Repeat("n", 1<<20)+`":1}`)
		require.Contains(t, line, "level=WARN")
		require.Contains(t, line, "field="+strings.Repeat("n", 40)+" ")
		require.Contains(t, told("/v1/completions", typo), "level=DEBUG")
	})
}
