package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvport/kvport/verify/cluster"
)

// ticketProbes are for clients that have got hold of a ticket.
func ticketProbes() []probe {
	return []probe{
		{id: "ticket/tampered", group: "tickets", does: "changes bits and lengths of tickets, and sends them with a prompt", cost: 10, run: tampered},
		{id: "ticket/replayed", group: "tickets", does: "uses a ticket three times, and one with another prompt", cost: 10, run: replayed},
		{id: "ticket/other-deployment", group: "tickets", does: "uses a ticket that another deployment has signed", cost: 10, run: otherDeployment},
		{id: "ticket/stolen", group: "tickets", does: "shows a stolen ticket to an engine that runs with other weights", cost: 10, run: stolen},
		{id: "ticket/odd", group: "other", does: "sends tickets that are empty, endless or no base64", run: oddTickets},
	}
}

// answer is the part of a completion that tickets are in.
type answer struct {
	Choices []struct {
		Tokens []int32 `json:"token_ids"`
	} `json:"choices"`
	Transfer struct {
		Ticket []byte `json:"kvport_ticket"`
	} `json:"kv_transfer_params"`
}

// ask sends a request with transfer parameters.
func (r *rig) ask(ctx context.Context, url, text, params string, tokens int) (*answer, error) {
	quoted, err := json.Marshal(text)
	if err != nil {
		return nil, err
	}
	body := fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"temperature":0,"ignore_eos":true,"return_token_ids":true,"kv_transfer_params":%s}`, quoted, tokens, params)
	status, got, err := r.post(ctx, url+"/v1/completions", "", body)
	if err != nil || status != http.StatusOK {
		return nil, holef("status %d, %q, %v", status, cut(got), err)
	}
	a := &answer{}
	return a, json.Unmarshal([]byte(got), a)
}

// ticket is one for a prompt.
func (r *rig) ticket(ctx context.Context, p *cluster.Process, text string) ([]byte, error) {
	a, err := r.ask(ctx, p.URL, text, `{"do_remote_decode":true,"do_remote_prefill":false}`, 1)
	if err != nil {
		return nil, err
	}
	if len(a.Transfer.Ticket) == 0 {
		return nil, fmt.Errorf("the answer has no ticket")
	}
	return a.Transfer.Ticket, nil
}

// use shows a ticket and compares the tokens.
func (r *rig) use(ctx context.Context, d *cluster.Process, model, text string, ticket []byte) error {
	want, err := r.expected(ctx, model, text)
	if err != nil {
		return err
	}
	a, err := r.ask(ctx, d.URL, text, fmt.Sprintf(`{"do_remote_prefill":true,"do_remote_decode":false,"kvport_ticket":%q}`, base64.StdEncoding.EncodeToString(ticket)), answerTokens)
	if err != nil {
		return err
	}
	if len(a.Choices) != 1 || !slices.Equal(a.Choices[0].Tokens, want[0]) {
		return holef("wrong tokens: %v instead of %v", a.Choices, want[0])
	}
	return nil
}

// ticketed starts a prefill and a decode engine that exchange tickets.
func (r *rig) ticketed(ctx context.Context) (p, d *cluster.Process, err error) {
	if _, err := r.expected(ctx, sim, prompt(1), prompt(2)); err != nil {
		return nil, nil, err
	}
	if p, err = r.serve(ctx, sim, r.peersConfig("kv_producer", `{}`)); err != nil {
		return nil, nil, err
	}
	d, err = r.serve(ctx, sim, r.peersConfig("kv_consumer", `{}`), "--enable-prefix-caching=false")
	return p, d, err
}

// took is what an engine has loaded, and what tickets it has refused.
func (r *rig) took(ctx context.Context, d *cluster.Process) (external, refused float64, err error) {
	m, err := r.client.Metrics(ctx, d.URL)
	return m.Sum("kvport_prompt_tokens_total", `source="external"`), m.Sum("kvport_tickets_refused_total"), err
}

func tampered(ctx context.Context, r *rig, _ bool) (string, error) {
	p, d, err := r.ticketed(ctx)
	if err != nil {
		return "", err
	}
	const tries = 40
	for n := range tries {
		fresh, err := r.ticket(ctx, p, prompt(1))
		if err != nil {
			return "", err
		}
		bad := slices.Clone(fresh)
		switch n % 4 {
		case 0, 1:
			bad[r.rng.IntN(len(bad))] ^= 1 << r.rng.IntN(8)
		case 2:
			bad = bad[:r.rng.IntN(len(bad))]
		case 3:
			bad = append(bad, byte(n))
		}
		if err := r.use(ctx, d, sim, prompt(1), bad); err != nil {
			return "", err
		}
	}
	loaded, refused, err := r.took(ctx, d)
	if err != nil {
		return "", err
	}
	if loaded > 0 || refused != tries {
		return "", holef("%.0f tokens were loaded by %d tickets that are not right, of which %.0f are counted as refused", loaded, tries, refused)
	}
	// A right one comes last: from then on the engine follows what the producer has, and loads it without a ticket, too.
	good, err := r.ticket(ctx, p, prompt(1))
	if err != nil {
		return "", err
	}
	if err := r.use(ctx, d, sim, prompt(1), good); err != nil {
		return "", err
	}
	if loaded, _, err = r.took(ctx, d); err == nil && loaded == 0 {
		err = errors.New("nothing is loaded by a right ticket")
	}
	return fmt.Sprintf("%d tickets are refused, 0 wrong tokens, nothing loaded until a right one comes", tries), err
}

func replayed(ctx context.Context, r *rig, _ bool) (string, error) {
	p, d, err := r.ticketed(ctx)
	if err != nil {
		return "", err
	}
	good, err := r.ticket(ctx, p, prompt(1))
	if err != nil {
		return "", err
	}
	for _, text := range []string{prompt(1), prompt(1), prompt(2), prompt(1)} {
		if err := r.use(ctx, d, sim, text, good); err != nil {
			return "", err
		}
	}
	again, err := r.ticket(ctx, p, prompt(2))
	if err != nil {
		return "", err
	}
	if err := r.use(ctx, d, sim, prompt(1), again); err != nil {
		return "", err
	}
	external, refused, err := r.took(ctx, d)
	if err == nil && external == 0 {
		err = errors.New("nothing is loaded by a right ticket")
	}
	return fmt.Sprintf("right tokens five times, %.0f of them loaded, %.0f tickets refused", external, refused), err
}

func otherDeployment(ctx context.Context, r *rig, _ bool) (string, error) {
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	ring := filepath.Join(folder, "ring")
	if _, _, err := r.ends(ctx, "keys", "init", "--file", ring); err != nil {
		return "", err
	}
	p, err := r.serve(ctx, sim, r.peersConfig("kv_producer", fmt.Sprintf(`{"ticket_key_file":%q}`, ring)))
	if err != nil {
		return "", err
	}
	_, d, err := r.ticketed(ctx)
	if err != nil {
		return "", err
	}
	foreign, err := r.ticket(ctx, p, prompt(1))
	if err != nil {
		return "", err
	}
	if err := r.use(ctx, d, sim, prompt(1), foreign); err != nil {
		return "", err
	}
	external, refused, err := r.took(ctx, d)
	if err != nil {
		return "", err
	}
	if external > 0 || refused != 1 {
		return "", holef("%.0f tokens are loaded by it, %.0f tickets are refused", external, refused)
	}
	return "refused, and counted", nil
}

func stolen(ctx context.Context, r *rig, _ bool) (string, error) {
	p, err := r.serve(ctx, sim, r.peersConfig("kv_producer", `{}`))
	if err != nil {
		return "", err
	}
	const other = "sim:seed=7"
	if _, err := r.expected(ctx, other, prompt(1)); err != nil {
		return "", err
	}
	d, err := r.serve(ctx, other, r.peersConfig("kv_consumer", `{}`), "--enable-prefix-caching=false")
	if err != nil {
		return "", err
	}
	t, err := r.ticket(ctx, p, prompt(1))
	if err != nil {
		return "", err
	}
	if err := r.use(ctx, d, other, prompt(1), t); err != nil {
		return "", err
	}
	external, refused, err := r.took(ctx, d)
	if err != nil {
		return "", err
	}
	if external > 0 {
		return "", holef("%.0f tokens of other weights are loaded", external)
	}
	return fmt.Sprintf("right tokens, %.0f refused", refused), nil
}

func oddTickets(ctx context.Context, r *rig, _ bool) (string, error) {
	_, d, err := r.ticketed(ctx)
	if err != nil {
		return "", err
	}
	odd := []string{`""`, `"!!!"`, `"` + strings.Repeat("A", 1<<20) + `"`, `null`, `[]`, `{"a":1}`, `-1`, `"` + strings.Repeat("QUJD", 100) + `="`}
	for _, text := range odd {
		body := strings.Replace(completion(prompt(1)), "{", `{"kv_transfer_params":{"do_remote_prefill":true,"kvport_ticket":`+text+"},", 1)
		status, got, err := r.post(ctx, d.URL+"/v1/completions", "", body)
		if err != nil || status >= 500 {
			return "", holef("%.30s: status %d, %q, %v", text, status, cut(got), err)
		}
	}
	if err := r.same(ctx, sim, d.URL, prompt(1)); err != nil {
		return "", err
	}
	return fmt.Sprintf("%d tickets, refused or ignored", len(odd)), r.alive(ctx, d)
}
