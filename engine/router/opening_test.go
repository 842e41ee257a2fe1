package router

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Only whole events are held back or end an attempt, and never many of them.
func TestOpeningOf(t *testing.T) {
	chunk := func(delta, more string) string {
		return `data: {"choices":[{"index":0,"delta":` + delta + more + "}]}\n\n"
	}
	const failed = `data: {"error":{"code":500}}` + "\n\n"
	role := chunk(`{"role":"assistant","content":""}`, "")
	for text, want := range map[string]opening{
		role:        greeting,
		role + role: greeting,
		chunk(`{"role":"assistant","content":null,"tool_calls":[]}`, `,"finish_reason":null`): greeting,
		strings.ReplaceAll(role, "\n", "\r\n"):                                                greeting,
		role + failed:                                                                         failure,
		failed + role:                                                                         failure,
		failed[:9]:                                                                            content,
		failed[:len(failed)-2]:                                                                content,
		role + failed[:9]:                                                                     content,
		"event: error\n" + failed:                                                             content,
		`data: {"error":{"code":"draining"}}` + "\n":                                          failure,
		`data: {"error":{"code":404}}` + "\n":                                                 content,
		chunk(`{"role":"assistant","content":"a"}`, ""):                                       content,
		chunk(`{"role":"assistant"}`, `,"finish_reason":"stop"`):                              content,
		chunk(`{"content":""}`, ""):                                                           content,
		`data: {"choices":[]}` + "\n\n":                                                       content,
		"data: [DONE]\n\n":                                                                    content,
		strings.Repeat(role, maxTail/len(role)+1):                                             content,
	} {
		require.Equal(t, want, openingOf([]byte(text)), "%q", text)
	}
}
