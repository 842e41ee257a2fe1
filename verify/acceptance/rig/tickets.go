package rig

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/cluster"
)

// Answer is the part of a completion without streaming that tickets are in.
type Answer struct {
	Choices []struct {
		Tokens []int32 `json:"token_ids"`
	} `json:"choices"`
	Transfer map[string]json.RawMessage `json:"kv_transfer_params"`
}

// Ticket runs a prefill as a router does and gives the ticket.
func (r *Rig) Ticket(p *cluster.Process, prompt string) []byte {
	r.Helper()
	a := r.Post(p, prompt, 1, map[string]json.RawMessage{"do_remote_decode": []byte("true"), "do_remote_prefill": []byte("false")})
	var ticket []byte
	require.NoError(r, json.Unmarshal(a.Transfer["kvport_ticket"], &ticket))
	require.NotEmpty(r, ticket)
	return ticket
}

// UseTicket runs a decode with a ticket and compares the tokens.
func (r *Rig) UseTicket(d *cluster.Process, prompt string, ticket []byte, want *cluster.Completion) {
	r.Helper()
	quoted, err := json.Marshal(ticket)
	require.NoError(r, err)
	a := r.Post(d, prompt, r.Tokens, map[string]json.RawMessage{"do_remote_prefill": []byte("true"), "do_remote_decode": []byte("false"), "kvport_ticket": quoted})
	require.Len(r, a.Choices, 1)
	require.Equal(r, want.Tokens, a.Choices[0].Tokens)
}

// Post sends a request without streaming, with transfer parameters as a router gives them.
func (r *Rig) Post(to *cluster.Process, prompt string, tokens int, params map[string]json.RawMessage) *Answer {
	r.Helper()
	body, err := json.Marshal(struct {
		Prompt    string                     `json:"prompt"`
		MaxTokens int                        `json:"max_tokens"`
		Greedy    float64                    `json:"temperature"`
		IgnoreEOS bool                       `json:"ignore_eos"`
		TokenIDs  bool                       `json:"return_token_ids"`
		Params    map[string]json.RawMessage `json:"kv_transfer_params"`
	}{prompt, tokens, 0, true, true, params})
	require.NoError(r, err)
	ctx, cancel := context.WithTimeout(r.Context(), 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to.URL+"/v1/completions", strings.NewReader(string(body)))
	require.NoError(r, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := r.Client.HTTP.Do(req)
	require.NoError(r, err)
	defer func() { require.NoError(r, resp.Body.Close()) }()
	data, err := io.ReadAll(resp.Body)
	require.NoError(r, errors.Join(err, ctx.Err()))
	require.Equal(r, http.StatusOK, resp.StatusCode, "%s", data)
	a := &Answer{}
	require.NoError(r, json.Unmarshal(data, a))
	return a
}
