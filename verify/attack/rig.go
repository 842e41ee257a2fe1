package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// rig is what the probes attack: the built binaries, in folders of their own.
type rig struct {
	root   string // of the source tree
	dir    string // of this run
	binary string // kvport
	plugin string // the malicious one
	log    io.Writer
	rng    *mathrand.Rand
	client cluster.Client
	fixed  fixture.List
	canary string // what nobody may read
	apiKey string // a file with one key
	key    string

	running  []*cluster.Process
	closers  []func()
	baseline map[string][]int32 // tokens of a node without a connector, by model and prompt
	folders  int
}

// newRig finds the binaries, builds the malicious plugin and plants what nobody may read.
func newRig(ctx context.Context, log io.Writer, seed uint64) (*rig, error) {
	root, err := findRoot()
	if err != nil {
		return nil, err
	}
	r := &rig{root: root, binary: filepath.Join(root, "bin", "kvport"), log: log, rng: mathrand.New(mathrand.NewPCG(seed, 1)), baseline: map[string][]int32{}}
	if _, err := os.Stat(r.binary); err != nil {
		return nil, fmt.Errorf("%w: run make deps build first", err)
	}
	if r.fixed, err = fixture.Tree(os.DirFS(root)); err != nil {
		return nil, err
	}
	if r.dir, err = os.MkdirTemp("", "kva"); err != nil {
		return nil, err
	}
	if err := r.furnish(ctx); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// findRoot is the folder with go.mod.
func findRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("there is no go.mod here or above: run it in kvport's tree")
		}
		dir = filepath.Dir(dir)
	}
}

// furnish makes the folders and the secrets. Others may pass the folder of the run and those in which engines keep their state, so that
// strangers reach whatever an engine leaves open.
func (r *rig) furnish(ctx context.Context) error {
	random := make([]byte, 16)
	_, _ = rand.Read(random) // never fails
	r.canary = fmt.Sprintf("CANARY-%x", random)
	r.key = "key-of-a-client-" + r.canary
	r.apiKey = filepath.Join(r.dir, "secrets", "api.keys")
	for name, mode := range map[string]os.FileMode{"": 0o755, "secrets": 0o700, "state": 0o755, "run": 0o755, "bin": 0o755, "tmp": 0o1777} {
		path := filepath.Join(r.dir, name)
		if err := errors.Join(os.MkdirAll(path, 0o700), os.Chmod(path, mode)); err != nil {
			return err
		}
	}
	if err := os.Chmod(filepath.Join(r.dir, "tmp"), 0o777|os.ModeSticky); err != nil {
		return err
	}
	for name, value := range map[string]string{
		"XDG_STATE_HOME": filepath.Join(r.dir, "state"), "XDG_RUNTIME_DIR": filepath.Join(r.dir, "run"), "TMPDIR": filepath.Join(r.dir, "tmp"),
		"HF_TOKEN": r.canary, "ATTACK_SECRET": r.canary,
	} {
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	err := errors.Join(os.WriteFile(r.apiKey, []byte(r.key+"\n"), 0o600), os.WriteFile(r.secret(), []byte(r.canary), 0o600))
	if err != nil {
		return err
	}
	return r.build(ctx)
}

// secret is a file that only this user may read.
func (r *rig) secret() string { return filepath.Join(r.dir, "secrets", "secret") }

// build makes the malicious plugin, and copies what strangers run to where they can.
func (r *rig) build(ctx context.Context) error {
	r.plugin = filepath.Join(r.dir, "bin", "kvport-attack")
	cmd := exec.CommandContext(ctx, "go", "build", "-o", r.plugin, "./verify/attack/plugin")
	cmd.Dir = r.root
	cmd.Env = append(os.Environ(), "TMPDIR="+os.TempDir())
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the malicious plugin: %w: %s", err, bytes.TrimSpace(out))
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	return os.WriteFile(r.strangerBinary(), self, 0o755) //nolint:gosec // another user runs it
}

func (r *rig) strangerBinary() string { return filepath.Join(r.dir, "bin", "stranger") }

// close ends everything and removes the folder.
func (r *rig) close() {
	r.stopAll()
	_ = os.RemoveAll(r.dir)
}

// stopAll ends what a probe has started.
func (r *rig) stopAll() {
	for _, c := range slices.Backward(r.closers) {
		c()
	}
	r.closers = nil
	for _, p := range slices.Backward(r.running) {
		plugins := cluster.Children(p.PID())
		p.Kill()
		for _, child := range plugins { // they write to folders until they are gone
			for deadline := time.Now().Add(10 * time.Second); cluster.Alive(child) && time.Now().Before(deadline); {
				pause(context.Background(), 5*time.Millisecond)
			}
		}
	}
	r.running = nil
}

// later has stopAll call something.
func (r *rig) later(f func()) { r.closers = append(r.closers, f) }

// folder is a new one.
func (r *rig) folder() (string, error) {
	r.folders++
	path := filepath.Join(r.dir, fmt.Sprintf("f%d", r.folders))
	return path, os.Mkdir(path, 0o700)
}

// Models.
const (
	sim  = "sim"
	tiny = "tiny-random"
)

// real is the file of the real model.
func (r *rig) real() string {
	return filepath.Join(r.root, ".deps", "model", "SmolLM2-135M-Instruct.Q4_1.gguf")
}

// serve starts an engine. config may be empty.
func (r *rig) serve(ctx context.Context, model, config string, args ...string) (*cluster.Process, error) {
	return r.start(ctx, r.serveArgs(model, config, args...)...)
}

func (r *rig) serveArgs(model, config string, args ...string) []string {
	all := []string{"serve", "--model", model, "--port", "0"}
	if strings.HasSuffix(model, ".gguf") {
		all = append(all, "--num-blocks", "256")
	}
	if config != "" {
		all = append(all, "--kv-transfer-config", config)
	}
	return append(all, args...)
}

// route starts a router.
func (r *rig) route(ctx context.Context, prefill, decode string, args ...string) (*cluster.Process, error) {
	all := []string{"route", "--port", "0", "--decode", decode}
	if prefill != "" {
		all = append(all, "--prefill", prefill)
	}
	return r.start(ctx, append(all, args...)...)
}

// start runs kvport until the probe is over.
func (r *rig) start(ctx context.Context, args ...string) (*cluster.Process, error) {
	return r.startAs(ctx, r.binary, args...)
}

// startShell runs kvport behind a shell command, such as a limit.
func (r *rig) startShell(ctx context.Context, command string, args ...string) (*cluster.Process, error) {
	return r.startAs(ctx, "/bin/sh", append([]string{"-c", command + `; exec "$0" "$@"`, r.binary}, args...)...)
}

func (r *rig) startAs(ctx context.Context, program string, args ...string) (*cluster.Process, error) {
	p, err := cluster.Start(ctx, r.log, args[0], program, args...)
	if err == nil {
		r.running = append(r.running, p)
	}
	return p, err
}

// stop ends a process as an operator does.
func (r *rig) stop(ctx context.Context, p *cluster.Process) error {
	r.running = slices.DeleteFunc(r.running, func(o *cluster.Process) bool { return o == p })
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return p.Stop(ctx)
}

// refused runs kvport, which must end by itself with exit code 2 and say something. The error is a hole if it does not.
func (r *rig) refused(ctx context.Context, says string, args ...string) error {
	out, code, err := r.ends(ctx, args...)
	switch {
	case err != nil:
		return err
	case code != 2 || !strings.Contains(out, says) || strings.Contains(out, "goroutine "):
		return holef("kvport %s: exit code %d, %q", strings.Join(args, " "), code, cut(out))
	}
	return nil
}

// ends runs kvport, which must end by itself.
func (r *rig) ends(ctx context.Context, args ...string) (out string, code int, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, r.binary, args...)
	cmd.WaitDelay = time.Second
	all, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return string(all), -1, unservedf("kvport %s did not end: %q", cut(strings.Join(args, " ")), cut(string(all)))
	case errors.As(err, &exit):
		return string(all), exit.ExitCode(), nil
	}
	return string(all), 0, err
}

// cut shortens what is printed.
func cut(text string) string {
	text = strings.TrimSpace(text)
	if len(text) > 300 {
		text = text[:300] + "..."
	}
	return text
}

// prompt is one of a few texts that fill several blocks.
func prompt(n int) string {
	return fmt.Sprintf("prompt %d: %s", n, strings.Repeat("somebody who attacks a machine looks for what it does not expect; ", 5))
}

// answerTokens is how many tokens are compared.
const answerTokens = 8

// expected gives the tokens of a node without a connector, which it starts if it has to.
func (r *rig) expected(ctx context.Context, model string, prompts ...string) ([][]int32, error) {
	var node *cluster.Process
	out := make([][]int32, len(prompts))
	for i, text := range prompts {
		key := model + "\x00" + text
		if r.baseline[key] == nil {
			if node == nil {
				var err error
				if node, err = r.serve(ctx, model, ""); err != nil {
					return nil, err
				}
			}
			tokens, err := r.tokens(ctx, node.URL, text)
			if err != nil {
				return nil, err
			}
			r.baseline[key] = tokens
		}
		out[i] = r.baseline[key]
	}
	if node != nil {
		return out, r.stop(ctx, node)
	}
	return out, nil
}

// tokens are the greedy answer to a prompt.
func (r *rig) tokens(ctx context.Context, url, text string) ([]int32, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	c, err := r.client.Complete(ctx, url, cluster.Request{Prompt: text, MaxTokens: answerTokens, IgnoreEOS: true})
	if err != nil {
		return nil, err
	}
	return c.Tokens, nil
}

// same asks for prompts and compares the answers: a wrong token, or none, is a hole.
func (r *rig) same(ctx context.Context, model, url string, prompts ...string) error {
	want, err := r.expected(ctx, model, prompts...)
	if err != nil {
		return err
	}
	for i, text := range prompts {
		got, err := r.tokens(ctx, url, text)
		if err != nil {
			return unservedf("no answer to a right request: %v", err)
		}
		if !slices.Equal(got, want[i]) {
			return holef("wrong tokens: %v instead of %v", got, want[i])
		}
	}
	return nil
}

// post sends a body to a path; key may be empty.
func (r *rig) post(ctx context.Context, url, key, body string) (status int, answer string, err error) {
	return r.send(ctx, http.MethodPost, url, body, map[string]string{"Content-Type": "application/json", "Authorization": bearer(key)})
}

func bearer(key string) string {
	if key == "" {
		return ""
	}
	return "Bearer " + key
}

// send makes one request, and does not follow redirects.
func (r *rig) send(ctx context.Context, method, url, body string, header map[string]string) (status int, answer string, err error) {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	for name, value := range header {
		switch {
		case value == "":
		case name == "Host":
			req.Host = value
		default:
			req.Header.Set(name, value)
		}
	}
	client := http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, string(data), err
}

// completion is the body of a simple request.
func completion(text string) string {
	quoted, err := json.Marshal(text)
	if err != nil {
		return ""
	}
	return fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"temperature":0,"ignore_eos":true}`, quoted, answerTokens)
}

// hostOf is HOST:PORT of a URL.
func hostOf(base string) string {
	u, err := url.Parse(base)
	if err != nil {
		return base
	}
	return u.Host
}

// dial connects to a server's port until the probe is over.
func (r *rig) dial(ctx context.Context, address string) (net.Conn, error) {
	dialer := net.Dialer{Timeout: 5 * time.Second}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err == nil {
		r.later(func() { _ = conn.Close() })
	}
	return conn, err
}

// raw sends bytes to a server and gives what it answers within some time.
func (r *rig) raw(ctx context.Context, address, text string, wait time.Duration) (string, error) {
	conn, err := r.dial(ctx, address)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(wait))
	_, _ = io.WriteString(conn, text) // it may hang up before the end
	data, _ := io.ReadAll(io.LimitReader(conn, 1<<20))
	return string(data), nil
}

// listen takes a port until the probe is over, and hands connections to serve.
func (r *rig) listen(ctx context.Context, serve func(net.Conn)) (address string, err error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	r.later(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				serve(conn)
			}()
		}
	}()
	return l.Addr().String(), nil
}

// wait polls until something is so.
func wait(ctx context.Context, limit time.Duration, is func() bool) bool {
	deadline := time.Now().Add(limit)
	for !is() {
		if ctx.Err() != nil || time.Now().After(deadline) {
			return false
		}
		pause(ctx, 10*time.Millisecond)
	}
	return true
}

// pause waits, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// resident is the memory of a process, in MB.
func resident(pid int) int {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(data)) {
		var kb int
		if n, _ := fmt.Sscanf(line, "VmRSS: %d", &kb); n == 1 {
			return kb >> 10
		}
	}
	return 0
}

// openFiles counts descriptors.
func openFiles(pid int) int {
	fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return len(fds)
}

// alive says whether a process runs, and its API answers.
func (r *rig) alive(ctx context.Context, p *cluster.Process) error {
	select {
	case <-p.Done():
		return holef("%s has ended: %s", p.Name, cut(p.Logs()))
	default:
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if _, err := r.client.Get(ctx, p.URL+"/livez"); err != nil {
		return unservedf("%s does not answer: %v", p.Name, err)
	}
	return nil
}

// writeFile makes a file that only this user may read.
func writeFile(path, text string) error { return os.WriteFile(path, []byte(text), 0o600) }

// ready says whether what a connector needs is there.
func (r *rig) ready(f *fixture.Fixture) bool {
	if f.Needs == "" {
		return true
	}
	_, err := os.Stat(filepath.Join(r.root, ".deps", f.Needs, "lock.sha256"))
	return err == nil
}

// storeConfig is the config of the typical store in a folder; settings are the object kvport.
func (r *rig) storeConfig(role, folder, settings string) string {
	return r.typicalConfig(fixture.Store, role, folder, settings)
}

// peersConfig is the config of the typical connector between engines.
func (r *rig) peersConfig(role, settings string) string {
	return r.typicalConfig(fixture.Peers, role, r.dir, settings)
}

func (r *rig) typicalConfig(kind fixture.Kind, role, folder, settings string) string {
	f, err := r.fixed.Typical(kind)
	if err != nil {
		return err.Error() // which no engine takes for a config
	}
	return r.filled(f, role, folder, settings)
}

// fixtureConfig is the first setup of a connector.
func (r *rig) fixtureConfig(f *fixture.Fixture, role, settings string) string {
	return r.filled(f, role, r.dir, settings)
}

func (r *rig) filled(f *fixture.Fixture, role, folder, settings string) string {
	own, err := fixture.Fill(f.Setups[0].Config, fixture.Values{"TMP": folder, "ROLE": role})
	if err != nil {
		return err.Error()
	}
	return configOf(f.Connector, role, own, settings)
}

// configOf is a transfer config.
func configOf(connector, role, extra, settings string) string {
	return fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"kv_connector_extra_config":%s,"kvport":%s}`, connector, role, extra, settings)
}

// bombOf compresses zeros.
func bombOf(n int64) ([]byte, error) {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := io.Copy(w, zeros(n)); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
