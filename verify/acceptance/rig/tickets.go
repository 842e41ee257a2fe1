package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
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
	ticket, err := r.TakeTicket(p, prompt)
	require.NoError(r, err)
	require.NotEmpty(r, ticket)
	return ticket
}

// TakeTicket is Ticket for goroutines that are not the test's. It gives none where there is none.
func (r *Rig) TakeTicket(p *cluster.Process, prompt string) (ticket []byte, err error) {
	a, err := r.Send(p, prompt, 1, map[string]json.RawMessage{"do_remote_decode": []byte("true"), "do_remote_prefill": []byte("false")})
	if err != nil || a.Transfer["kvport_ticket"] == nil {
		return nil, err
	}
	err = json.Unmarshal(a.Transfer["kvport_ticket"], &ticket)
	return ticket, err
}

// UseTicket runs a decode with a ticket and compares the tokens.
func (r *Rig) UseTicket(d *cluster.Process, prompt string, ticket []byte, want *cluster.Completion) {
	r.Helper()
	got, err := r.ShowTicket(d, prompt, ticket)
	require.NoError(r, err)
	require.Equal(r, want.Tokens, got)
}

// ShowTicket runs a decode with a ticket and gives its tokens. Goroutines that are not the test's may call it.
func (r *Rig) ShowTicket(d *cluster.Process, prompt string, ticket []byte) ([]int32, error) {
	quoted, err := json.Marshal(ticket)
	if err != nil {
		return nil, err
	}
	a, err := r.Send(d, prompt, r.Tokens, map[string]json.RawMessage{"do_remote_prefill": []byte("true"), "do_remote_decode": []byte("false"), "kvport_ticket": quoted})
	if err != nil {
		return nil, err
	}
	if len(a.Choices) != 1 {
		return nil, fmt.Errorf("%s answers with %d choices", d.Name, len(a.Choices))
	}
	return a.Choices[0].Tokens, nil
}

// Post sends a request without streaming, with transfer parameters as a router gives them.
func (r *Rig) Post(to *cluster.Process, prompt string, tokens int, params map[string]json.RawMessage) *Answer {
	r.Helper()
	a, err := r.Send(to, prompt, tokens, params)
	require.NoError(r, err)
	return a
}

// sendTimeout is how long a request of Send may take.
const sendTimeout = time.Minute

// Send is Post for goroutines that are not the test's.
func (r *Rig) Send(to *cluster.Process, prompt string, tokens int, params map[string]json.RawMessage) (_ *Answer, err error) {
	body, err := json.Marshal(struct {
		Prompt    string                     `json:"prompt"`
		MaxTokens int                        `json:"max_tokens"`
		Greedy    float64                    `json:"temperature"`
		IgnoreEOS bool                       `json:"ignore_eos"`
		TokenIDs  bool                       `json:"return_token_ids"`
		Params    map[string]json.RawMessage `json:"kv_transfer_params"`
	}{prompt, tokens, 0, true, true, params})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(r.Context(), sendTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to.URL+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := r.Client.HTTP.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	data, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", to.Name, resp.Status, data)
	}
	if err != nil {
		return nil, err
	}
	a := &Answer{}
	return a, json.Unmarshal(data, a)
}
