package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// serverProbes are for servers that lie.
func serverProbes() []probe {
	out := []probe{
		{id: "server/lmcache-elsewhere", group: "squatters", does: "has an engine use an lm:// server on another machine without a shared key, and over plain text that nobody permits", door: withoutKey, run: elsewhere},
		{id: "server/tls-client", group: "other", does: "is a server whose certificate nobody knows, and one that speaks plain text where TLS is asked for", run: badTLS},
	}
	for _, lie := range redisLies() {
		out = append(out, probe{id: "server/redis-" + lie.name, group: "servers", does: "is a Redis server that " + lie.does, cost: 10, run: func(ctx context.Context, r *rig, _ bool) (string, error) {
			return lyingServer(ctx, r, "remote", lie)
		}})
	}
	for _, lie := range lmLies() {
		out = append(out, probe{id: "server/lm-" + lie.name, group: "servers", does: "is an lm:// server that " + lie.does, cost: 10, run: func(ctx context.Context, r *rig, _ bool) (string, error) {
			return lyingServer(ctx, r, "lmcache", lie)
		}})
	}
	return out
}

// lie is what a server does with a connection.
type lie struct {
	name, does string
	serve      func(conn net.Conn)
}

// always answers whatever comes with one text.
func always(text string) func(net.Conn) {
	return func(conn net.Conn) {
		_ = conn.SetDeadline(time.Now().Add(time.Minute))
		buf := make([]byte, 64<<10)
		for {
			if _, err := conn.Read(buf); err != nil {
				return
			}
			if _, err := io.WriteString(conn, text); err != nil {
				return
			}
		}
	}
}

// redisLies are answers by which clients were brought down.
func redisLies() []lie {
	return []lie{
		{"huge-length", "announces values of 2^62 bytes", always("$4611686018427387904\r\nx")},
		{"negative", "announces negative lengths", always("$-999\r\n*-7\r\n")},
		{"nested", "answers with arrays in arrays without an end", always(strings.Repeat("*1\r\n", 200_000))},
		{"wrong-type", "answers everything with a number", always(":1\r\n")},
		{"many", "answers with a million small strings", always("*1000000\r\n" + strings.Repeat("$1\r\nx\r\n", 1_000_000))},
		{"silent", "accepts connections and says nothing", func(conn net.Conn) {
			_ = conn.SetDeadline(time.Now().Add(time.Minute))
			_, _ = io.Copy(io.Discard, conn)
		}},
		{"garbage", "answers with bytes that are no protocol", always("\x00\xff\x16\x03garbage without an end of line")},
		{"junk-values", "has every key, with junk of the right form", junkRedis},
	}
}

// junkRedis answers each command as a server does that has every key.
func junkRedis(conn net.Conn) {
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	in := bufio.NewReader(conn)
	for {
		words, err := redisCommand(in)
		if err != nil {
			return
		}
		answer := "+OK\r\n"
		switch strings.ToUpper(words[0]) {
		case "HELLO":
			answer = "%1\r\n$5\r\nproto\r\n:3\r\n"
		case "PING":
			answer = "+PONG\r\n"
		case "EXISTS":
			answer = fmt.Sprintf(":%d\r\n", len(words)-1)
		case "STRLEN":
			answer = ":4096\r\n"
		case "GET", "GETRANGE":
			answer = fmt.Sprintf("$%d\r\n%s\r\n", 4096, strings.Repeat("junk", 1024))
		case "MGET":
			answer = fmt.Sprintf("*%d\r\n", len(words)-1) + strings.Repeat(fmt.Sprintf("$%d\r\n%s\r\n", 4096, strings.Repeat("junk", 1024)), len(words)-1)
		}
		if _, err := io.WriteString(conn, answer); err != nil {
			return
		}
	}
}

// redisCommand reads one command.
func redisCommand(in *bufio.Reader) (words []string, err error) {
	var n int
	if _, err := fmt.Fscanf(in, "*%d\r\n", &n); err != nil || n < 1 || n > 100_000 {
		return nil, fmt.Errorf("no command: %w", err)
	}
	for range n {
		var size int
		if _, err := fmt.Fscanf(in, "$%d\r\n", &size); err != nil || size < 0 || size > 64<<20 {
			return nil, fmt.Errorf("no word: %w", err)
		}
		word := make([]byte, size+2)
		if _, err := io.ReadFull(in, word); err != nil {
			return nil, err
		}
		words = append(words, string(word[:size]))
	}
	return words, nil
}

// lmLies are answers of a server of LMCache.
func lmLies() []lie {
	return []lie{
		{"huge", "announces values of 2^31 bytes", always("\x00\x00\x00\xc8\x7f\xff\xff\xff" + strings.Repeat("\x7f", 200))},
		{"negative", "announces negative lengths", always(strings.Repeat("\xff", 4096))},
		{"zeros", "answers with zeros", always(strings.Repeat("\x00", 4096))},
		{"short", "answers with a byte at a time and hangs up", func(conn net.Conn) {
			_, _ = conn.Read(make([]byte, 64))
			_, _ = conn.Write([]byte{200})
		}},
		{"garbage", "answers with text", always("HTTP/1.1 200 OK\r\n\r\n")},
		{"silent", "says nothing", func(conn net.Conn) {
			_ = conn.SetDeadline(time.Now().Add(time.Minute))
			_, _ = io.Copy(io.Discard, conn)
		}},
	}
}

// of is the fixture of a plugin's folder.
func (r *rig) of(folder string) (*fixture.Fixture, error) {
	for _, f := range r.fixed {
		if f.Folder == "plugins/"+folder {
			return f, nil
		}
	}
	return nil, fmt.Errorf("there is no plugins/%s", folder)
}

// counted counts the connections that a server gets.
func counted(serve func(net.Conn)) (counting func(net.Conn), n *atomic.Int64) {
	n = &atomic.Int64{}
	return func(conn net.Conn) { n.Add(1); serve(conn) }, n
}

// lyingServer has an engine use a server that lies: right tokens, in time, with little memory.
func lyingServer(ctx context.Context, r *rig, folder string, l lie) (string, error) {
	serve, connections := counted(l.serve)
	address, err := r.listen(ctx, serve)
	if err != nil {
		return "", err
	}
	f, err := r.of(folder)
	if err != nil {
		return "", err
	}
	extra := `{"lmcache.chunk_size":16,"lmcache.local_cpu":"false","lmcache.blocking_timeout_secs":2,"lmcache.remote_url":"lm://` + address + `"}`
	if folder == "remote" {
		if extra, err = fixture.Fill(f.Setups[0].Config, fixture.Values{"SERVER": address, "NAME": "attack"}); err != nil {
			return "", err
		}
	}
	if _, err := r.expected(ctx, sim, prompt(1), prompt(2)); err != nil {
		return "", err
	}
	p, err := r.serve(ctx, sim, configOf(f.Connector, "kv_both", extra, `{"deadlines":{"transfer":"3s"},"breaker":{"deaths":1000}}`), "--enable-prefix-caching=false")
	if err != nil {
		return "", unservedf("the engine does not start: %v", err)
	}
	before, most := r.tree(p), 0
	done := make(chan error, 1)
	go func() { done <- r.same(ctx, sim, p.URL, prompt(1), prompt(2), prompt(1)) }()
	for running := true; running; {
		select {
		case err = <-done:
			running = false
		case <-time.After(20 * time.Millisecond):
		}
		most = max(most, r.tree(p)-before)
	}
	if err != nil {
		return "", err
	}
	if most > 500 {
		return "", holef("engine and plugin grew by %d MB", most)
	}
	if connections.Load() == 0 {
		return "", errors.New("the engine never asks the server")
	}
	m, err := r.client.Metrics(ctx, p.URL)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("right tokens, %d MB more, %.0f restarts of the plugin", most, m.Sum("kvport_plugin_restarts_total")), r.alive(ctx, p)
}

// tree is the memory of an engine and its plugins, in MB.
func (r *rig) tree(p *cluster.Process) int {
	sum := resident(p.PID())
	for _, pid := range cluster.Children(p.PID()) {
		sum += resident(pid)
	}
	return sum
}

func elsewhere(ctx context.Context, r *rig, open bool) (string, error) {
	f, err := r.of("lmcache")
	if err != nil {
		return "", err
	}
	const extra = `{"lmcache.chunk_size":16,"lmcache.local_cpu":"false","allow_plaintext":true,"lmcache.remote_url":"lm://192.0.2.1:65432"}`
	if open {
		if _, err := r.serve(ctx, sim, configOf(f.Connector, "kv_both", extra, "{"+withoutKey+"}")); err != nil {
			return "", err
		}
		return "", holef("it starts, and whoever can write that server can forge its blocks")
	}
	for _, url := range []string{"lm://192.0.2.1:65432", "redis://192.0.2.1:6379", "lm://kvport.invalid:1"} {
		there := strings.Replace(extra, "lm://192.0.2.1:65432", url, 1)
		for says, extra := range map[string]string{"ticket_key_file": there, "allow_plaintext": strings.Replace(there, `"allow_plaintext":true,`, "", 1)} {
			if err := r.refused(ctx, says, "serve", "--model", sim, "--port", "0", "--kv-transfer-config", configOf(f.Connector, "kv_both", extra, `{}`)); err != nil {
				return "", err
			}
		}
	}
	return "refused, ticket_key_file and allow_plaintext are named", nil
}

func badTLS(ctx context.Context, r *rig, _ bool) (string, error) {
	f, err := r.of("remote")
	if err != nil {
		return "", err
	}
	for _, serve := range []func(net.Conn){always("+OK\r\n"), func(conn net.Conn) {
		_, _ = conn.Write([]byte("\x16\x03\x03\x00\x05garbage"))
	}} {
		serve, connections := counted(serve)
		address, err := r.listen(ctx, serve)
		if err != nil {
			return "", err
		}
		p, err := r.serve(ctx, sim, configOf(f.Connector, "kv_both", `{"url":"rediss://`+address+`"}`, `{"deadlines":{"transfer":"3s"}}`))
		if err != nil {
			return "", unservedf("the engine does not start: %v", err)
		}
		if err := r.same(ctx, sim, p.URL, prompt(1), prompt(1)); err != nil {
			return "", err
		}
		external, _, err := r.took(ctx, p)
		if err != nil {
			return "", err
		}
		if connections.Load() == 0 {
			return "", errors.New("the engine never asks the server")
		}
		if external > 0 {
			return "", holef("%.0f tokens come from there", external)
		}
	}
	return "right tokens, no block comes from there", nil
}

// demandsCertificate says whether what listens at an address speaks TLS, and refuses whoever has no certificate.
func demandsCertificate(ctx context.Context, address string) bool {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return false
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(3 * time.Second))
	client := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}) //nolint:gosec // a stranger has no certificate to compare with
	if client.HandshakeContext(ctx) != nil {
		return false
	}
	_, err = client.Read(make([]byte, 1))
	return err != nil && strings.Contains(err.Error(), "certificate required")
}
