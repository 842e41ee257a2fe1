package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/verify/cluster"
)

// loadProbes are for clients who want others not to be served.
func loadProbes() []probe {
	return []probe{
		{id: "load/slow-headers", group: "slow-clients", does: "opens 1,000 connections that begin a header and do not end it", cost: 10, run: slowHeaders},
		{id: "load/slow-bodies", group: "overload", does: "opens 600 connections that send headers and the first byte of a body", cost: 10, run: slowBodies},
		{id: "load/slow-bodies-router", group: "overload", does: "does the same to a router, with 1,400 connections", cost: 10, run: slowBodiesRouter},
		{id: "load/idle", group: "overload", does: "opens 400 idle connections to an engine that may open 256 files", cost: 10, run: idleConnections},
		{id: "load/leavers", group: "slow-clients", does: "starts 200 requests and leaves in the middle of each", cost: 15, run: leavers},
		{id: "load/unread", group: "slow-clients", does: "asks for a long stream and never reads it", cost: 60, run: unread},
		{id: "load/hoarding", group: "holds", does: "asks 60 times for a prefill whose blocks are to be held, and never fetches them", cost: 15, run: hoarding},
		{id: "load/one-client", group: "overload", does: "sends a router, whose engine serves few at a time, 60 long requests under one key, and asks with another key", cost: 30, run: oneClient},
		{id: "load/resets", group: "other", does: "resets the prefix cache again and again while others are served", run: resets},
	}
}

// crowded is how an engine serves others while many connections do something.
func (r *rig) crowded(ctx context.Context, p *cluster.Process, n int, begin string) (string, error) {
	for range n {
		conn, err := r.dial(ctx, hostOf(p.URL))
		if err != nil {
			return "", err
		}
		_, _ = io.WriteString(conn, begin)
	}
	began := time.Now()
	if err := r.same(ctx, sim, p.URL, prompt(1), prompt(2), prompt(3)); err != nil {
		return "", err
	}
	return fmt.Sprintf("%d connections; others are served in %d ms", n, time.Since(began).Milliseconds()), nil
}

func slowHeaders(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		return r.crowded(ctx, p, 1000, "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX")
	})
}

// halfBody begins a request and does not end it.
const halfBody = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"

func slowBodies(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) { return r.crowded(ctx, p, 600, halfBody) })
}

func slowBodiesRouter(ctx context.Context, r *rig, _ bool) (string, error) {
	p, err := r.serve(ctx, sim, "")
	if err != nil {
		return "", err
	}
	router, err := r.route(ctx, "", p.URL)
	if err != nil {
		return "", err
	}
	return r.crowded(ctx, router, 1400, halfBody)
}

func idleConnections(ctx context.Context, r *rig, _ bool) (string, error) {
	if _, err := r.expected(ctx, sim, prompt(1), prompt(2), prompt(3)); err != nil {
		return "", err
	}
	p, err := r.startShell(ctx, "ulimit -n 256", r.serveArgs(sim, "")...)
	if err != nil {
		return "", err
	}
	return r.crowded(ctx, p, 400, "")
}

// idle waits until an engine runs nothing and holds nothing for others.
func (r *rig) idle(ctx context.Context, p *cluster.Process, limit time.Duration) error {
	var m cluster.Metrics
	is := func() bool {
		var err error
		m, err = r.client.Metrics(ctx, p.URL)
		return err == nil && m.Sum("kvport_blocks", `state="used"`)+m.Sum("kvport_blocks", `state="pinned"`)+m.Sum("kvport_blocks", `state="held"`) == 0
	}
	if !wait(ctx, limit, is) {
		return holef("blocks stay used %.0f, pinned %.0f, held %.0f", m.Sum("kvport_blocks", `state="used"`), m.Sum("kvport_blocks", `state="pinned"`), m.Sum("kvport_blocks", `state="held"`))
	}
	return nil
}

func leavers(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		files := openFiles(p.PID())
		var all sync.WaitGroup
		limit := make(chan struct{}, 16)
		for n := range 200 {
			limit <- struct{}{}
			after := time.Duration(r.rng.IntN(40)) * time.Millisecond
			all.Go(func() {
				defer func() { <-limit }()
				short, cancel := context.WithTimeout(ctx, after)
				defer cancel()
				_, _ = r.client.Complete(short, p.URL, cluster.Request{Prompt: prompt(n), MaxTokens: 2000, IgnoreEOS: true})
			})
		}
		all.Wait()
		r.client.HTTP.CloseIdleConnections()
		http.DefaultClient.CloseIdleConnections()
		if err := r.idle(ctx, p, time.Minute); err != nil {
			return "", err
		}
		if !wait(ctx, time.Minute, func() bool { return openFiles(p.PID()) <= files+8 }) {
			return "", holef("%d descriptors before, %d after", files, openFiles(p.PID()))
		}
		return "no block and no descriptor is left", nil
	})
}

func unread(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		body := fmt.Sprintf(`{"prompt":%q,"max_tokens":7000,"stream":true,"ignore_eos":true,"return_token_ids":true}`, prompt(1))
		conn, err := r.dial(ctx, hostOf(p.URL))
		if err != nil {
			return "", err
		}
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetReadBuffer(1024)
		}
		head := fmt.Sprintf("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		if _, err := io.WriteString(conn, head); err != nil {
			return "", err
		}
		began := time.Now()
		_ = conn.SetReadDeadline(began.Add(time.Minute))
		start := make([]byte, 200)
		if n, err := io.ReadFull(conn, start); err != nil || !strings.HasPrefix(string(start), "HTTP/1.1 200") {
			return "", fmt.Errorf("the stream does not begin: %q, %w", start[:n], err)
		}
		var m cluster.Metrics
		if !wait(ctx, 2*time.Minute, func() bool {
			m, err = r.client.Metrics(ctx, p.URL)
			return err == nil && m.Sum("kvport_http_requests_in_flight") == 0
		}) {
			return "", holef("%.0f requests are still served", m.Sum("kvport_http_requests_in_flight"))
		}
		if err := r.idle(ctx, p, time.Minute); err != nil {
			return "", err
		}
		return fmt.Sprintf("given up after %.0f s", time.Since(began).Seconds()), nil
	}, "--num-blocks", "4096")
}

func hoarding(ctx context.Context, r *rig, _ bool) (string, error) {
	if _, err := r.expected(ctx, sim, prompt(1), prompt(2), prompt(3)); err != nil {
		return "", err
	}
	p, err := r.serve(ctx, sim, r.peersConfig("kv_producer", `{}`), "--num-blocks", "400")
	if err != nil {
		return "", err
	}
	refused := 0
	for n := range 60 {
		status, answer, err := r.post(ctx, p.URL+"/v1/completions", "", fmt.Sprintf(`{"prompt":%q,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true}}`, prompt(100+n)))
		if err != nil || status >= 500 && status != http.StatusServiceUnavailable {
			return "", holef("status %d, %q, %v", status, cut(answer), err)
		}
		if status != http.StatusOK {
			refused++
		}
	}
	began := time.Now()
	if err := r.same(ctx, sim, p.URL, prompt(1), prompt(2), prompt(3)); err != nil {
		return "", err
	}
	return fmt.Sprintf("60 prefills, %d of them refused; others are served after %d ms", refused, time.Since(began).Milliseconds()), nil
}

func oneClient(ctx context.Context, r *rig, _ bool) (string, error) {
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	keys := folder + "/keys"
	if err := writeFile(keys, oldKey+"\n"+newKey+"\n"); err != nil {
		return "", err
	}
	p, err := r.serve(ctx, tiny, "", "--max-num-seqs", "2", "--num-blocks", "512")
	if err != nil {
		return "", err
	}
	router, err := r.route(ctx, "", p.URL, "--api-key-file", keys, "--max-in-flight", "4")
	if err != nil {
		return "", err
	}
	greedy, cancel := context.WithCancel(ctx)
	defer cancel()
	long := fmt.Sprintf(`{"prompt":%q,"max_tokens":300,"ignore_eos":true}`, prompt(1))
	const many = 60
	var all sync.WaitGroup
	var ended atomic.Int64
	for range many {
		all.Go(func() {
			_, _, _ = r.post(greedy, router.URL+"/v1/completions", oldKey, long)
			ended.Add(1)
		})
	}
	if !wait(ctx, 20*time.Second, func() bool {
		m, err := r.client.Metrics(ctx, p.URL)
		return err == nil && m.Sum("kvport_blocks", `state="used"`) > 0
	}) {
		return "", fmt.Errorf("the greedy client's requests do not run")
	}
	began := time.Now()
	other, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()
	status, answer, err := r.post(other, router.URL+"/v1/completions", newKey, `{"prompt":"a","max_tokens":1}`)
	took := time.Since(began)
	before := ended.Load()
	cancel()
	all.Wait()
	if err != nil || status != http.StatusOK {
		return "", holef("the other client: status %d, %q, %v", status, cut(answer), err)
	}
	if before > many/2 {
		return "", holef("%d of %d requests of the greedy client came before the other's", before, many)
	}
	return fmt.Sprintf("the other client is served after %d ms and %d of the greedy one's requests", took.Milliseconds(), before), nil
}

func resets(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		if _, err := r.expected(ctx, sim, prompt(1), prompt(2)); err != nil {
			return "", err
		}
		flood, cancel := context.WithCancel(ctx)
		done := make(chan int)
		go func() {
			n := 0
			for flood.Err() == nil {
				_, _, _ = r.post(flood, p.URL+"/reset_prefix_cache", "", "")
				n++
			}
			done <- n
		}()
		var err error
		for i := 0; i < 20 && err == nil; i++ {
			err = r.same(ctx, sim, p.URL, prompt(1), prompt(2))
		}
		cancel()
		return fmt.Sprintf("%d resets, 40 right answers", <-done), err
	})
}

// large is a text of about n bytes.
func large(unit string, n int) string { return strings.Repeat(unit, n/len(unit)+1) }
