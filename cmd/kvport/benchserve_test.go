package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/bench"
)

// caching is a server that keeps all prompts, and says how often one began with another that it had.
type caching struct {
	mu      sync.Mutex
	prompts []string
	first   int // requests whose prompt begins with nothing that is there
}

func (c *caching) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Prompt []int32 `json:"prompt"`
		Max    int     `json:"max_tokens"`
	}
	data, _ := io.ReadAll(r.Body)
	_ = json.Unmarshal(data, &body)
	const begins = 16 // tokens of a system prompt, all of them
	c.mu.Lock()
	prompt := fmt.Sprint(body.Prompt[:begins])
	known := false
	for _, p := range c.prompts {
		known = known || p == prompt
	}
	if !known {
		c.first++
	}
	c.prompts = append(c.prompts, prompt)
	c.mu.Unlock()
	for i := range body.Max {
		reason := "null"
		if i == body.Max-1 {
			reason = `"length"`
		}
		_, _ = fmt.Fprintf(w, `data: {"choices":[{"text":"a","finish_reason":%s}]}`+"\n\n", reason)
	}
	_, _ = fmt.Fprintf(w, `data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}`+"\n\ndata: [DONE]\n\n", len(body.Prompt), body.Max)
}

// At each rate a server that caches computes as many system prompts as at the first one: nothing of a load is there from the load before.
func TestBenchServeRatesShareNothing(t *testing.T) {
	workload := filepath.Join(t.TempDir(), "workload.json")
	require.NoError(t, os.WriteFile(workload, []byte(`{"requests": 10, "system_prompts": 1, "system_tokens": {"min": 16, "max": 16}, "answer_tokens": {"min": 1, "max": 3}}`), 0o600))
	computed := func(rates string) (int, string, string) {
		c := &caching{}
		s := httptest.NewServer(c)
		defer s.Close()
		var out, errs bytes.Buffer
		code := run([]string{"bench", "serve", "--url", "stub=" + s.URL, "--served-model-name", "m", "--workload", workload, "--rounds", "2", "--rate", rates, "--format", "json"}, &out, &errs)
		require.Equal(t, exitOK, code, errs.String())
		return c.first, out.String(), errs.String()
	}
	one, _, _ := computed("500")
	require.Equal(t, 2, one, "each seed has one")
	three, text, said := computed("500,1000,2000")
	require.Equal(t, 6, three)
	rows, err := bench.Read(strings.NewReader(text))
	require.NoError(t, err)
	names := map[string]bool{}
	for _, r := range rows {
		require.False(t, names[r.Name], r.Name)
		names[r.Name] = true
	}
	require.True(t, names["at 1000/s, stub: TTFT p50"])
	require.Contains(t, said, "at 1000/s, stub, seed 3 (1 of 2)", "progress names the load and the seed")
}

func TestBenchServeUsage(t *testing.T) {
	for want, args := range map[string][]string{
		"--rate has 2 twice":        {"--rate", "2,1,2"},
		"--slo-ttft and --slo-itl ": {"--slo-itl", "50ms,-1s"},
	} {
		var out, errs bytes.Buffer
		code := run(append([]string{"bench", "serve", "--model", "sim"}, args...), &out, &errs)
		require.Equal(t, exitUsage, code, want)
		require.Contains(t, errs.String(), want)
	}
}
