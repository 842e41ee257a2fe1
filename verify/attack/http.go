package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/kvport/kvport/verify/cluster"
)

// httpProbes are a client's: what it sends is malformed, large or ambiguous.
func httpProbes() []probe {
	return []probe{
		{id: "http/malformed", group: "requests", does: "sends bodies that are no requests, among them 100,000 nested brackets, broken UTF-8 and impossible numbers", run: malformed},
		{id: "http/big-body", group: "requests", does: "sends bodies of 100 MB", run: bigBody},
		{id: "http/big-header", group: "requests", does: "sends 2 MB of headers", run: bigHeader},
		{id: "http/smuggling", group: "requests", does: "hides a second request in one whose length is ambiguous, through a router", run: smuggling},
		{id: "http/tokens", group: "other", does: "asks with token ids that the model does not have", run: oddTokens},
		{id: "http/methods", group: "other", does: "calls paths with methods that they do not have, and asks for profiles of the process", run: oddMethods},
		{id: "http/upgrade", group: "other", does: "asks for other protocols: HTTP/2 without a word, WebSocket, TLS, SSH, random bytes", run: upgrades},
		{id: "http/log-lines", group: "other", does: "sends control characters and forged log lines in every field that might be logged", run: logLines},
		{id: "http/metric-labels", group: "other", does: "uses 2,000 models, paths and methods that do not exist, to make the page of metrics grow", run: metricLabels},
		{id: "http/salts", group: "other", does: "sends salts of a megabyte and of odd characters", run: oddSalts},
		{id: "http/same-id", group: "other", does: "sends eight requests at once under one request id", run: sameID},
		{id: "http/rebinding", group: "web-pages", does: "is a web page that has taken a name for this machine (DNS rebinding)", door: "--allowed-host", run: rebinding},
		{id: "http/cross-site", group: "web-pages", does: "is a web page of another origin that posts a form", run: crossSite},
	}
}

// simple starts a sim engine without a connector, and checks in the end that it serves as before.
func simple(ctx context.Context, r *rig, attack func(p *cluster.Process) (string, error), args ...string) (string, error) {
	p, err := r.serve(ctx, sim, "", args...)
	if err != nil {
		return "", err
	}
	seen, err := attack(p)
	if err != nil {
		return "", err
	}
	if err := r.alive(ctx, p); err != nil {
		return "", err
	}
	return seen, r.same(ctx, sim, p.URL, prompt(1))
}

// malformedBodies are no requests.
func malformedBodies() []string {
	deep := strings.Repeat("[", 100_000)
	bodies := []string{
		"", "{", "}", "null", "[]", `"text"`, "1", "{}", "\x00", "\xff\xfe", `{"prompt":}`, `{"prompt":"a"`, `{"prompt":"a"}{"prompt":"b"}`, `{"prompt":"a"} x`,
		`{"prompt":` + deep, `{"prompt":` + deep + strings.Repeat("]", 100_000) + `}`, strings.Repeat(`{"a":`, 100_000),
		`{"prompt":{"a":1}}`, `{"prompt":[]}`, `{"prompt":[[[1]]]}`, `{"prompt":[1,"a"]}`, `{"prompt":true}`,
	}
	for _, field := range []string{
		`"max_tokens":-1`, `"max_tokens":1e99`, `"max_tokens":9223372036854775808`, `"max_tokens":1.5`, `"max_tokens":"many"`, `"n":1000000000`, `"n":-1`, `"n":0`,
		`"logprobs":1000000000`, `"logprobs":-5`, `"temperature":-1`, `"temperature":"NaN"`, `"temperature":NaN`, `"temperature":1e999`, `"top_p":7`, `"top_p":-0.1`,
		`"stop":[` + strings.Repeat(`"x",`, 50_000) + `"x"]`, `"stop":{"a":1}`, `"stop":[1]`, `"stream":"yes"`, `"seed":"x"`, `"kv_transfer_params":[]`, `"kv_transfer_params":"x"`,
		`"kv_transfer_params":{"kvport_ticket":7}`, `"kv_transfer_params":{"do_remote_decode":"maybe"}`,
	} {
		bodies = append(bodies, `{"prompt":"a",`+field+`}`)
	}
	return bodies
}

func malformed(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		before, bodies := resident(p.PID()), malformedBodies()
		for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
			for _, body := range bodies {
				status, answer, err := r.post(ctx, p.URL+path, "", body)
				if err != nil || status < 400 || status > 499 {
					return "", holef("%s %.80q: status %d, %q, %v", path, body, status, cut(answer), err)
				}
			}
			// JSON's readers replace broken UTF-8, so this may be answered.
			if status, answer, err := r.post(ctx, p.URL+path, "", "{\"prompt\":\"\xff\xc0\x80\"}"); err != nil || status > 499 {
				return "", holef("%s, broken UTF-8: status %d, %q, %v", path, status, cut(answer), err)
			}
		}
		grown := resident(p.PID()) - before
		if grown > 150 {
			return "", holef("it grew by %d MB", grown)
		}
		return fmt.Sprintf("%d bodies, each refused with a 4xx, %d MB more", 2*len(bodies), grown), nil
	})
}

// zeros is a body of many bytes.
func zeros(n int64) io.Reader { return io.LimitReader(endless('0'), n) }

type endless byte

// Read implements io.Reader.
func (e endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(e)
	}
	return len(p), nil
}

func bigBody(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		before, most := resident(p.PID()), 0
		for _, known := range []bool{true, false} {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.URL+"/v1/completions", io.MultiReader(strings.NewReader(`{"prompt":"`), zeros(100<<20)))
			if err != nil {
				return "", err
			}
			req.Header.Set("Content-Type", "application/json")
			if known {
				req.ContentLength = 100<<20 + 11
			}
			resp, err := http.DefaultClient.Do(req)
			if err == nil {
				status := resp.StatusCode
				_ = resp.Body.Close()
				if status < 400 || status > 499 {
					return "", holef("status %d", status)
				}
			}
			most = max(most, resident(p.PID())-before)
		}
		if most > 150 {
			return "", holef("it grew by %d MB", most)
		}
		return fmt.Sprintf("refused, %d MB more", most), nil
	})
}

func bigHeader(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		before := resident(p.PID())
		answer, err := r.raw(ctx, hostOf(p.URL), "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: "+strings.Repeat("h", 2<<20)+"\r\n\r\n", 15*time.Second)
		if err != nil {
			return "", err
		}
		if strings.Contains(answer, " 200 ") {
			return "", holef("it was served: %q", cut(answer))
		}
		if grown := resident(p.PID()) - before; grown > 50 {
			return "", holef("it grew by %d MB", grown)
		}
		return "refused: " + firstLine(answer), nil
	})
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\r\n")
	return line
}

// smuggling looks at what a router sends to its instance.
func smuggling(ctx context.Context, r *rig, _ bool) (string, error) {
	u, err := r.fakeInstance(ctx, nil)
	if err != nil {
		return "", err
	}
	router, err := r.route(ctx, "", u.url)
	if err != nil {
		return "", err
	}
	const hidden = "GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"
	body := completion("a")
	head := "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
	chunked := fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(body), body)
	length := fmt.Sprintf("Content-Length: %d\r\n", len(body))
	texts := []string{
		head + length + "Transfer-Encoding: chunked\r\n\r\n" + chunked + hidden,
		head + "Transfer-Encoding: chunked\r\n" + length + "\r\n" + chunked + hidden,
		head + length + fmt.Sprintf("Content-Length: %d\r\n\r\n", len(body)+len(hidden)) + body + hidden,
		head + "Transfer-Encoding: xchunked\r\n" + length + "\r\n" + body + hidden,
		head + "Transfer-Encoding : chunked\r\n" + length + "\r\n" + chunked + hidden,
		head + "Transfer-Encoding:\x0bchunked\r\n" + length + "\r\n" + body + hidden,
		head + "Transfer-Encoding: identity, chunked\r\n" + length + "\r\n" + body + hidden,
		head + "X: a\r\n Transfer-Encoding: chunked\r\n" + length + "\r\n" + body + hidden,
		head + fmt.Sprintf("Content-Length: +%d\r\n\r\n", len(body)) + body + hidden,
		head + fmt.Sprintf("X: a\rContent-Length: %d\r\n\r\n", len(body)+len(hidden)) + body + hidden,
		head + "Transfer-Encoding: chunked\r\n\r\n" + fmt.Sprintf("%x;a\n%s\r\n0\r\n\r\n", len(body), body) + hidden,
	}
	for _, text := range texts {
		if _, err := r.raw(ctx, hostOf(router.URL), text, 1500*time.Millisecond); err != nil {
			return "", err
		}
	}
	for _, line := range u.requests() {
		if strings.Contains(line, "hidden") {
			return "", holef("the instance got the hidden request: %s", line)
		}
	}
	return fmt.Sprintf("%d ambiguous requests, the instance never saw the hidden one", len(texts)), r.alive(ctx, router)
}

func oddTokens(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		odd := []string{"-1", "1e12", "2147483648", "9223372036854775807", "9223372036854775808", "0.5", "null", `"1"`, "[1]"}
		for _, id := range odd {
			status, answer, err := r.post(ctx, p.URL+"/v1/completions", "", `{"prompt":[1,`+id+`],"max_tokens":1}`)
			if err != nil || status < 400 || status > 499 {
				return "", holef("%s: status %d, %q, %v", id, status, cut(answer), err)
			}
		}
		return fmt.Sprintf("%d kinds of ids are refused", len(odd)), nil
	})
}

func oddMethods(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		paths := []string{"/v1/completions", "/v1/chat/completions", "/reset_prefix_cache", "/metrics", "/health", "/v1/models", "/debug/pprof/", "/debug/vars", "/debug/pprof/heap"}
		n := 0
		for _, path := range paths {
			for _, method := range []string{"GET", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "PROPFIND"} {
				status, answer, err := r.send(ctx, method, p.URL+path, "", map[string]string{"X-HTTP-Method-Override": "POST"})
				reads := method == "GET" && (path == "/metrics" || path == "/health" || path == "/v1/models")
				if err != nil || (status < 400 || status > 499) && !reads {
					return "", holef("%s %s: status %d, %q, %v", method, path, status, cut(answer), err)
				}
				n++
			}
		}
		return fmt.Sprintf("%d calls, none served that is not meant to be", n), nil
	})
}

func upgrades(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		noise := make([]byte, 4096)
		for i := range noise {
			noise[i] = byte(r.rng.IntN(256))
		}
		texts := []string{
			"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
			"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
			"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + strings.Repeat("\x00", 512), "SSH-2.0-OpenSSH_9.6\r\n", string(noise), "GET / HTTP/9.9\r\n\r\n", "GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
		}
		for _, text := range texts {
			answer, err := r.raw(ctx, hostOf(p.URL), text, 500*time.Millisecond)
			if err != nil || strings.Contains(answer, " 101 ") {
				return "", holef("%.30q: %q, %v", text, cut(answer), err)
			}
		}
		return fmt.Sprintf("%d beginnings, no protocol is changed", len(texts)), nil
	})
}

// forgedLine would be a line of the log by itself.
const forgedLine = "x\r\n\x1b[2Jtime=2026-01-01T00:00:00Z level=ERROR msg=forged-by-a-client"

func logLines(ctx context.Context, r *rig, _ bool) (string, error) {
	p, err := r.serve(ctx, sim, "", "--log-level", "debug")
	if err != nil {
		return "", err
	}
	quoted := strings.ReplaceAll(strings.ReplaceAll(strings.ReplaceAll(forgedLine, "\x1b", `\u001b`), "\r", `\r`), "\n", `\n`)
	for _, body := range []string{
		`{"prompt":"` + quoted + `","max_tokens":1}`, `{"model":"` + quoted + `","prompt":"a"}`, `{"prompt":"a","` + quoted + `":1}`, `{"prompt":"a","cache_salt":"` + quoted + `"}`,
		`{"prompt":"a","user":"` + quoted + `"}`, `{"prompt":"a","max_tokens":"` + quoted + `"}`, `{"prompt":"a","kv_transfer_params":{"remote_engine_id":"` + quoted + `","kvport_ticket":"` + quoted + `"}}`,
	} {
		if _, _, err := r.post(ctx, p.URL+"/v1/completions", "", body); err != nil {
			return "", err
		}
	}
	if _, _, err := r.send(ctx, "GET", p.URL+"/%0d%0a%1b%5b2Jforged-by-a-client", "", map[string]string{"X-Request-Id": "a\tforged-by-a-client", "User-Agent": "\tforged-by-a-client"}); err != nil {
		return "", err
	}
	if _, err := r.raw(ctx, hostOf(p.URL), "GET / HTTP/1.1\r\nHost: \x1b[2Jforged-by-a-client\r\n\r\n", time.Second); err != nil {
		return "", err
	}
	if err := r.alive(ctx, p); err != nil {
		return "", err
	}
	for line := range strings.Lines(p.Logs()) {
		if strings.ContainsRune(line, '\x1b') || strings.HasPrefix(line, "time=2026-01-01T00:00:00Z") {
			return "", holef("a line of the log is a client's: %q", cut(line))
		}
	}
	return "no line of the log is a client's", nil
}

func metricLabels(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		size := func() (int, error) {
			data, err := r.client.Get(ctx, p.URL+"/metrics")
			return len(data), err
		}
		before, err := size()
		if err != nil {
			return "", err
		}
		for i := range 1000 {
			_, _ = r.client.Get(ctx, fmt.Sprintf("%s/v1/unknown/%d", p.URL, i)) // it is a 404
			req, err := http.NewRequestWithContext(ctx, fmt.Sprintf("M%d", i), p.URL+"/v1/completions", strings.NewReader(fmt.Sprintf(`{"model":"m%d","prompt":"a"}`, i)))
			if err != nil {
				return "", err
			}
			resp, err := r.client.HTTP.Do(req)
			if err != nil {
				return "", err
			}
			_ = resp.Body.Close()
		}
		after, err := size()
		if err != nil {
			return "", err
		}
		if after-before > 5000 {
			return "", holef("the page grew from %d to %d bytes", before, after)
		}
		return fmt.Sprintf("%d bytes before, %d after", before, after), nil
	})
}

func oddSalts(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		for _, salt := range []string{strings.Repeat("s", 1<<20), "../../x", `\u0000`, `\ud800`, `\u202e`} {
			status, answer, err := r.post(ctx, p.URL+"/v1/completions", "", `{"prompt":"a","max_tokens":1,"cache_salt":"`+salt+`"}`)
			if err != nil || status >= 500 {
				return "", holef("%.20q: status %d, %q, %v", salt, status, cut(answer), err)
			}
		}
		return "answered or refused", nil
	})
}

func sameID(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		var prompts []string
		for n := range 8 {
			prompts = append(prompts, prompt(n))
		}
		want, err := r.expected(ctx, sim, prompts...)
		if err != nil {
			return "", err
		}
		type answer struct {
			n    int
			text string
			err  error
		}
		answers := make(chan answer, len(prompts))
		for n, text := range prompts {
			go func() {
				body := strings.Replace(completion(text), "{", `{"return_token_ids":true,`, 1)
				_, got, err := r.send(ctx, "POST", p.URL+"/v1/completions", body, map[string]string{"Content-Type": "application/json", "X-Request-Id": "one"})
				answers <- answer{n, got, err}
			}()
		}
		for range prompts {
			a := <-answers
			ids := strings.ReplaceAll(fmt.Sprint(want[a.n]), " ", ",")
			if a.err != nil || !strings.Contains(a.text, ids) {
				return "", holef("an answer is not that of its prompt: %q, want %s, %v", cut(a.text), ids, a.err)
			}
		}
		return "each prompt got its own answer", nil
	})
}

func rebinding(ctx context.Context, r *rig, open bool) (string, error) {
	var args []string
	if open {
		args = []string{"--allowed-host", "evil.example"}
	}
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		for _, host := range []string{"evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "EVIL.example."} {
			for _, path := range []string{"/v1/completions", "/reset_prefix_cache"} {
				status, _, err := r.send(ctx, "POST", p.URL+path, completion("a"), map[string]string{"Content-Type": "application/json", "Host": host})
				if err != nil || status != http.StatusForbidden {
					return "", holef("Host %s: status %d, %v", host, status, err)
				}
			}
		}
		answer, err := r.raw(ctx, hostOf(p.URL), "GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", time.Second)
		if err != nil || strings.Contains(answer, " 200 ") {
			return "", holef("a URL with another host: %q, %v", firstLine(answer), err)
		}
		return "other names get a 403", nil
	}, args...)
}

func crossSite(ctx context.Context, r *rig, _ bool) (string, error) {
	return simple(ctx, r, func(p *cluster.Process) (string, error) {
		for name, header := range map[string]map[string]string{
			"Origin":         {"Origin": "https://evil.example", "Content-Type": "application/json"},
			"Origin null":    {"Origin": "null", "Content-Type": "application/json"},
			"Sec-Fetch-Site": {"Sec-Fetch-Site": "cross-site", "Content-Type": "application/json"},
			"same-site":      {"Sec-Fetch-Site": "same-site", "Content-Type": "application/json"},
			"form":           {"Content-Type": "application/x-www-form-urlencoded"},
			"text":           {"Content-Type": "text/plain"},
			"multipart":      {"Content-Type": "multipart/form-data; boundary=x"},
			"text as JSON":   {"Content-Type": "text/plain; application/json"},
		} {
			for _, path := range []string{"/v1/completions", "/v1/chat/completions", "/reset_prefix_cache"} {
				status, _, err := r.send(ctx, "POST", p.URL+path, completion("a"), header)
				if err != nil || status != http.StatusForbidden && status != http.StatusUnsupportedMediaType {
					return "", holef("%s at %s: status %d, %v", name, path, status, err)
				}
			}
			status, _, err := r.send(ctx, "OPTIONS", p.URL+"/v1/completions", "", map[string]string{"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"})
			if err != nil || status < 400 {
				return "", holef("a page may ask: status %d, %v", status, err)
			}
		}
		return "8 kinds of requests that a page can send, each refused", nil
	})
}
