package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// pairProbes are for clients that name two engines in the id of a request, where an engine believes ids that nobody has signed.
func pairProbes() []probe {
	return []probe{
		{id: "pair/client", group: "outgoing", does: "names engines in the id of a request, in many spellings, with the key of a client that is no router, where an engine believes the ids of its proxy", door: "router in its line", cost: 10, run: pairsOfClient},
		{id: "pair/unlisted", group: "outgoing", does: "names an address that the config does not list in the id of a request, in many spellings, where an engine believes the ids of its proxy", door: "its address in peers", cost: 10, run: unlistedPairs},
	}
}

// behindProxy is a decode engine that believes ids which nobody has signed if they name engines at an address.
func (r *rig) behindProxy(ctx context.Context, peers string, args ...string) (*cluster.Process, error) {
	for _, f := range r.fixed {
		if len(f.Proxy) == 0 || !r.ready(f) {
			continue
		}
		own, err := fixture.Fill(f.Proxy[0].Config, fixture.Values{"PORT": 1, "HTTP_PORT": 1})
		if err != nil {
			return nil, err
		}
		own = strings.Replace(own, "127.0.0.1:*", peers, 1)
		return r.serve(ctx, sim, configOf(f.Connector, "kv_consumer", own, `{}`), append(args, "--enable-prefix-caching=false")...)
	}
	return nil, &skipped{"no connector here works with a proxy that signs nothing"}
}

// namesAll sends a prompt with each of some ids. Every answer has to be right, since an engine that gets no blocks computes.
func (r *rig) namesAll(ctx context.Context, p *cluster.Process, key string, labels []string) error {
	for _, label := range labels {
		header := map[string]string{"Content-Type": "application/json", "Authorization": bearer(key), "X-Request-Id": label}
		if status, answer, err := r.send(ctx, http.MethodPost, p.URL+"/v1/completions", completion(prompt(1)), header); err != nil || status != http.StatusOK {
			return fmt.Errorf("the id %q: status %d, %q, %w", label, status, cut(answer), err)
		}
	}
	return nil
}

// called waits a little for somebody to be called.
func called(ctx context.Context, hits func() int) int {
	for range 20 {
		if hits() > 0 {
			break
		}
		pause(ctx, 25*time.Millisecond)
	}
	return hits()
}

// spelled are ids that name one address twice: as vLLM's proxy writes them, and in ways that a check might take for something else.
func spelled(address string) (labels []string) {
	add := func(format string) {
		unique := fmt.Sprintf("%032x", len(labels)+1)
		label := strings.NewReplacer("PAIR", "___prefill_addr_"+address+"___decode_addr_"+address+"_"+unique, "HEX", unique).Replace(format)
		labels = append(labels, label)
	}
	for _, format := range []string{
		"PAIR", "PAIR-0", "PAIR-HEX-0", "PAIR_HEX", "PAIR_HEX_HEX", "PAIR-HEX_HEX", "PAIR-_HEX_HEX", "PAIR-0_HEX", "PAIR_HEX-HEX", "PAIR__HEX", "PAIRHEX", "PAIR_", "PAIR%5fHEX", "PAIR,HEX_HEX", "PAIR;_HEX_HEX",
		"PAIR/HEX_HEX", "PAIR?x=HEX_HEX", "PAIR#HEX_HEX", "cmpl-PAIR", "cmpl-PAIR-0-HEX_HEX", "chatcmpl-PAIR_HEX_HEX", "HEX_HEX-PAIR", "HEX-0-PAIR", "xPAIR", "_PAIR_HEX_HEX", "PAIRPAIR", "PAIR-PAIR_HEX", "PAIR_HEXPAIR",
	} {
		add(format)
	}
	for _, change := range []func(string) string{
		strings.ToUpper,
		func(s string) string { return s[:len(s)-1] + "F" },
		func(s string) string { return s + "_" + strings.Repeat("F", 32) },
		func(s string) string { return s + "_" + strings.Repeat("0123456789ABCDEF", 2) },
		func(s string) string { return strings.ReplaceAll(s, "_", "%5F") },
		func(s string) string { return strings.ReplaceAll(s, ":", "%3a") },
		func(s string) string { return s[:len(s)-1] },
		func(s string) string { return s + "0" },
	} {
		unique := fmt.Sprintf("%032x", len(labels)+1)
		labels = append(labels, change("___prefill_addr_"+address+"___decode_addr_"+address+"_"+unique))
	}
	return labels
}

func pairsOfClient(ctx context.Context, r *rig, open bool) (string, error) {
	port, hits, err := r.trap(ctx)
	if err != nil {
		return "", err
	}
	var flags []string
	if open {
		flags = []string{"--router"}
	}
	file, _, key, err := r.clients(ctx, flags...)
	if err != nil {
		return "", err
	}
	d, err := r.behindProxy(ctx, "127.0.0.1:*", "--api-key-file", file)
	if err != nil {
		return "", err
	}
	labels := spelled("127.0.0.1:" + port)
	if err := r.namesAll(ctx, d, key, labels); err != nil {
		return "", err
	}
	if n := called(ctx, hits); n > 0 {
		return "", holef("the engine has connected %d times to where a client sent it", n)
	}
	return fmt.Sprintf("%d ids, no connection", len(labels)), nil
}

func unlistedPairs(ctx context.Context, r *rig, open bool) (string, error) {
	port, hits, err := r.trap(ctx)
	if err != nil {
		return "", err
	}
	peers := "127.0.0.2:*"
	if open {
		peers = "127.0.0.1:*"
	}
	d, err := r.behindProxy(ctx, peers)
	if err != nil {
		return "", err
	}
	n := 0
	for _, host := range []string{
		"127.0.0.1", "localhost", "LOCALHOST", "localhost.", "0.0.0.0", "0", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "127.0.0.01", "127.000.000.001",
		"[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::FFFF:127.0.0.1]", "[0:0:0:0:0:ffff:7f00:1]", "[::127.0.0.1]", "[::1]", "[::]", "[::ffff:0.0.0.0]", "127.0.0.2.", "127.0.0.2%2f127.0.0.1", "127.0.0.2@127.0.0.1", "127.0.0.2___decode_addr_127.0.0.1",
	} {
		labels := spelled(host + ":" + port)[:1]
		if err := r.namesAll(ctx, d, "", labels); err != nil {
			return "", err
		}
		n++
	}
	if times := called(ctx, hits); times > 0 {
		return "", holef("the engine has connected %d times to where a client sent it", times)
	}
	return fmt.Sprintf("%d ids, no connection", n), nil
}
