package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/kvport/kvport/verify/cluster"
)

// accessProbes are for API keys and what is open without them.
func accessProbes() []probe {
	return []probe{
		{id: "access/wrong-keys", group: "other", does: "uses no key, parts of the key, the key in other places and forms, and paths that look open", door: "no --api-key-file", run: wrongKeys},
		{id: "access/health", group: "api-keys", does: "reads what an engine and a router tell about themselves without a key", door: "no --api-key-file", run: openHealth},
		{id: "access/beyond-loopback", group: "listeners", does: "has an engine and a router listen beyond loopback without keys", door: "--allow-unauthenticated", run: beyondLoopback},
		{id: "access/reload", group: "api-keys", does: "goes on with a key that the operator has replaced, and sends SIGHUP with a broken file of keys", run: reloadKeys},
		{id: "access/router-in-front", group: "api-keys", does: "goes through a router with keys to an engine with keys, without a key, and with that of the engine", run: keyedRouter},
		{id: "access/open-key-file", group: "api-keys", does: "makes the file of API keys readable by others, at the start and before SIGHUP", run: openKeyFile},
		{id: "access/odd-key-files", group: "other", does: "puts a FIFO, a folder, an endless device, an empty file and a huge one where a file of API keys or of ticket keys belongs", run: oddKeyFiles},
		{id: "access/open-ticket-key", group: "other", does: "makes the file of ticket keys readable by others, at the start and while the engine runs", run: openTicketKey},
		{id: "access/squatted-folder", group: "squatters", does: "makes the folders in the folder for temporary files that an engine would use, as another user", run: squatted},
		{id: "access/salts", group: "tenants", does: "asks for a prompt of another client under another salt, and reads how much of it was cached", door: "the same salt", run: otherSalts},
		{id: "access/other-tenant", group: "tenants", does: "names the salt of another tenant, and reads how much of its prompt was cached", door: "the other's salt= in its line", run: otherTenant},
		{id: "access/own-powers", group: "tenants", does: "reads with the key of a tenant what is about all of them, and empties their cache", door: "admin in its line", run: ownPowers},
		{id: "access/cache-query", group: "other", does: "asks with another key what prompts of others are in the cache", door: "--cache-query-unsalted", run: cacheQuery},
	}
}

// keyed are the flags of an engine with a key.
func (r *rig) keyed() []string { return []string{"--api-key-file", r.apiKey} }

func wrongKeys(ctx context.Context, r *rig, open bool) (string, error) {
	args := r.keyed()
	if open {
		args = nil
	}
	p, err := r.serve(ctx, sim, "", args...)
	if err != nil {
		return "", err
	}
	headers := []map[string]string{
		{},
		{"Authorization": "Bearer"},
		{"Authorization": "Bearer "},
		{"Authorization": r.key},
		{"Authorization": "Basic " + r.key},
		{"Authorization": "Bearer " + r.key[:len(r.key)-1]},
		{"Authorization": "Bearer " + r.key + "x"},
		{"Authorization": "Bearer " + strings.ToUpper(r.key)},
		{"X-Api-Key": r.key},
		{"Proxy-Authorization": "Bearer " + r.key},
		{"Cookie": "Authorization=Bearer " + r.key},
		{"Authorization": "Bearer " + strings.Repeat("k", 50_000)},
		{"Authorization": "Bearer \\n" + r.key},
	}
	n := 0
	for _, header := range headers {
		header["Content-Type"] = "application/json"
		for _, path := range []string{"/v1/completions", "/reset_prefix_cache", "/v1/completions?api_key=" + r.key, "/health/../v1/completions", "//v1/completions", "/livez/..%2fv1/completions"} {
			status, answer, err := r.send(ctx, "POST", p.URL+path, completion("a"), header)
			if err != nil || status < 300 {
				return "", holef("%v at %s: status %d, %q, %v", header, path, status, cut(answer), err)
			}
			n++
		}
		for _, path := range []string{"/metrics", "/v1/models", "/readyz/../metrics"} {
			status, answer, err := r.send(ctx, "GET", p.URL+path, "", header)
			if err != nil || status < 300 {
				return "", holef("%v at %s: status %d, %q, %v", header, path, status, cut(answer), err)
			}
			n++
		}
	}
	status, answer, err := r.post(ctx, p.URL+"/v1/completions", r.key, completion("a"))
	if err != nil || status != http.StatusOK {
		return "", fmt.Errorf("the right key: status %d, %q, %w", status, cut(answer), err)
	}
	return fmt.Sprintf("%d calls refused, that with the key served", n), nil
}

func openHealth(ctx context.Context, r *rig, open bool) (string, error) {
	args := r.keyed()
	if open {
		args = nil
	}
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	p, err := r.serve(ctx, sim, r.storeConfig("kv_both", folder, `{}`), args...)
	if err != nil {
		return "", err
	}
	router, err := r.route(ctx, "", p.URL, append(args, "--upstream-api-key-file", r.apiKey)...)
	if err != nil {
		return "", err
	}
	seen := 0
	for _, url := range []string{p.URL, router.URL} {
		_, answer, err := r.send(ctx, "GET", url+"/health", "", nil)
		if err != nil {
			return "", err
		}
		for _, word := range []string{"connector", "kv\"", "instances", "http://", "ticket_keys", "in_flight\":0,", "pid", folder} {
			if strings.Contains(answer, word) {
				return "", holef("/health says %q to anybody: %s", word, cut(answer))
			}
		}
		seen += len(answer)
	}
	return fmt.Sprintf("the status, %d bytes together", seen), nil
}

func beyondLoopback(ctx context.Context, r *rig, open bool) (string, error) {
	if open {
		p, err := r.serve(ctx, sim, "", "--host", "0.0.0.0", "--allow-unauthenticated")
		if err != nil {
			return "", err
		}
		if err := r.same(ctx, sim, strings.Replace(p.URL, "[::]", "127.0.0.1", 1), prompt(1)); err != nil {
			return "", err
		}
		return "", holef("it listens at %s and serves everybody", p.URL)
	}
	for _, host := range []string{"0.0.0.0", "::", ""} {
		if err := r.refused(ctx, "--allow-unauthenticated", "serve", "--model", sim, "--port", "0", "--host", host); err != nil {
			return "", err
		}
		if err := r.refused(ctx, "--allow-unauthenticated", "route", "--decode", "http://127.0.0.1:1", "--port", "0", "--host", host); err != nil {
			return "", err
		}
	}
	return "engine and router refuse to start", nil
}

// Keys of clients, as long as they must be.
const (
	oldKey = "the-old-key-of-somebody-1"
	newKey = "the-new-key-of-somebody-2"
)

func reloadKeys(ctx context.Context, r *rig, _ bool) (string, error) {
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	file := filepath.Join(folder, "keys")
	write := func(text string) error { return os.WriteFile(file, []byte(text), 0o600) }
	if err := write(oldKey + "\n"); err != nil {
		return "", err
	}
	p, err := r.serve(ctx, sim, "", "--api-key-file", file)
	if err != nil {
		return "", err
	}
	status := func(key string) int {
		s, _, _ := r.post(ctx, p.URL+"/v1/completions", key, completion("a"))
		return s
	}
	if err := write(newKey + "\n"); err != nil {
		return "", err
	}
	if err := p.Signal(syscall.SIGHUP); err != nil {
		return "", err
	}
	if !wait(ctx, time.Minute, func() bool { return status(newKey) == 200 }) {
		return "", holef("the new key does not work: %d", status(newKey))
	}
	if s := status(oldKey); s != http.StatusUnauthorized {
		return "", holef("the old key still works: %d", s)
	}
	const refused = "the API keys stay as they are"
	for n, text := range []string{"", "\n\n"} {
		if err := write(text); err != nil {
			return "", err
		}
		if err := p.Signal(syscall.SIGHUP); err != nil {
			return "", err
		}
		if !wait(ctx, time.Minute, func() bool { return strings.Count(p.Logs(), refused) > n }) {
			return "", holef("a broken file is not refused: %q", cut(p.Logs()))
		}
		if s := status(""); s != http.StatusUnauthorized {
			return "", holef("a broken file lets everybody in: %d", s)
		}
	}
	if s := status(newKey); s != 200 {
		return "", holef("a broken file locks everybody out: %d", s)
	}
	return "the old key is refused, a broken file changes nothing", r.alive(ctx, p)
}

func keyedRouter(ctx context.Context, r *rig, _ bool) (string, error) {
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	clients := filepath.Join(folder, "clients")
	if err := os.WriteFile(clients, []byte(newKey+"\n"), 0o600); err != nil {
		return "", err
	}
	p, err := r.serve(ctx, sim, "", r.keyed()...)
	if err != nil {
		return "", err
	}
	router, err := r.route(ctx, "", p.URL, "--api-key-file", clients, "--upstream-api-key-file", r.apiKey)
	if err != nil {
		return "", err
	}
	for key, want := range map[string]int{"": 401, r.key: 401, newKey: 200} {
		if status, answer, err := r.post(ctx, router.URL+"/v1/completions", key, completion("a")); err != nil || status != want {
			return "", holef("key %q: status %d, want %d, %q, %v", key, status, want, cut(answer), err)
		}
	}
	if status, _, err := r.post(ctx, p.URL+"/v1/completions", newKey, completion("a")); err != nil || status != 401 {
		return "", holef("the engine takes the router's clients' key: %d, %v", status, err)
	}
	return "clients need the router's key, and do not have the engine's", nil
}

func openKeyFile(ctx context.Context, r *rig, _ bool) (string, error) {
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	file := filepath.Join(folder, "keys")
	if err := writeFile(file, oldKey+"\n"); err != nil {
		return "", err
	}
	p, err := r.serve(ctx, sim, "", "--api-key-file", file)
	if err != nil {
		return "", err
	}
	if err := errors.Join(os.WriteFile(file, []byte(newKey+"\n"), 0o600), os.Chmod(file, 0o644), p.Signal(syscall.SIGHUP)); err != nil { //nolint:gosec // that is the probe
		return "", err
	}
	if err := p.Logged(ctx, "the API keys stay as they are"); err != nil {
		return "", holef("an engine that runs takes it: %v", err)
	}
	for key, want := range map[string]int{oldKey: 200, newKey: 401} {
		if status, answer, err := r.post(ctx, p.URL+"/v1/completions", key, completion("a")); err != nil || status != want {
			return "", holef("status %d, want %d, %q, %v", status, want, cut(answer), err)
		}
	}
	if err := r.refused(ctx, "lets others read it", "serve", "--model", sim, "--port", "0", "--api-key-file", file); err != nil {
		return "", err
	}
	err = r.refused(ctx, "lets others read it", "route", "--decode", p.URL, "--port", "0", "--api-key-file", file)
	return "refused at the start; an engine that runs keeps its keys", err
}

func oddKeyFiles(ctx context.Context, r *rig, _ bool) (string, error) {
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	at := func(name string) string { return filepath.Join(folder, name) }
	err = syscall.Mkfifo(at("fifo"), 0o600)
	if err == nil {
		err = os.Mkdir(at("folder"), 0o700)
	}
	if err == nil {
		err = os.WriteFile(at("empty"), nil, 0o600)
	}
	if err == nil {
		err = os.WriteFile(at("huge"), make([]byte, 64<<20), 0o600)
	}
	if err == nil {
		err = os.Symlink("/dev/zero", at("link"))
	}
	if err != nil {
		return "", err
	}
	n := 0
	for _, file := range []string{at("fifo"), at("folder"), at("empty"), at("huge"), at("link"), "/dev/zero", at("absent")} {
		if err := r.refused(ctx, "", "serve", "--model", sim, "--port", "0", "--api-key-file", file); err != nil {
			return "", err
		}
		config := r.storeConfig("kv_both", folder, fmt.Sprintf(`{"ticket_key_file":%q}`, file))
		if err := r.refused(ctx, "", "serve", "--model", sim, "--port", "0", "--kv-transfer-config", config); err != nil {
			return "", err
		}
		n += 2
	}
	return fmt.Sprintf("%d starts are refused, none hangs", n), nil
}

func openTicketKey(ctx context.Context, r *rig, _ bool) (string, error) {
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	ring := filepath.Join(folder, "ring")
	if _, _, err := r.ends(ctx, "keys", "init", "--file", ring); err != nil {
		return "", err
	}
	config := r.storeConfig("kv_both", filepath.Join(folder, "kv"), fmt.Sprintf(`{"ticket_key_file":%q}`, ring))
	p, err := r.serve(ctx, sim, config)
	if err != nil {
		return "", err
	}
	if err := os.Chmod(ring, 0o644); err != nil { //nolint:gosec // that is the probe
		return "", err
	}
	stale := func() bool {
		m, err := r.client.Metrics(ctx, p.URL)
		return err == nil && m.Sum("kvport_key_file_stale") == 1
	}
	if !wait(ctx, time.Minute, stale) {
		return "", holef("an engine that runs does not notice")
	}
	if err := r.refused(ctx, "ticket_key_file", "serve", "--model", sim, "--port", "0", "--kv-transfer-config", config); err != nil {
		return "", err
	}
	return "refused at the start; kvport_key_file_stale is 1 while it runs", r.same(ctx, sim, p.URL, prompt(1))
}

// squatted gives another user the names of the folders that an engine of this user would make.
func squatted(ctx context.Context, r *rig, _ bool) (string, error) {
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	if err := os.Chmod(folder, 0o777|os.ModeSticky); err != nil { //nolint:gosec // as /tmp is
		return "", err
	}
	names := []string{fmt.Sprintf("kvport-%d", os.Getuid()), "kvport", fmt.Sprintf("kvport-minimal-%d", os.Getuid())}
	if _, err := r.stranger(ctx, "squat", aim{Folder: folder, Names: names}); err != nil {
		return "", err
	}
	p, err := r.startShell(ctx, fmt.Sprintf("unset XDG_RUNTIME_DIR XDG_STATE_HOME; export TMPDIR=%q HOME=%q", folder, filepath.Join(r.dir, "secrets")), r.serveArgs(sim, r.storeConfig("kv_both", filepath.Join(r.dir, "secrets", "kv"), `{}`))...)
	if err != nil {
		return "", unservedf("an engine does not start: %v", err)
	}
	if err := r.same(ctx, sim, p.URL, prompt(1), prompt(1)); err != nil {
		return "", err
	}
	for _, name := range names {
		entries, err := os.ReadDir(filepath.Join(folder, name))
		if err != nil || len(entries) > 0 {
			return "", holef("the engine uses %s of another user: %v, %v", name, entries, err)
		}
	}
	return "the engine starts and uses none of them", nil
}

// cachedWord is how a usage says that a prompt was in the cache.
const cachedWord = `"cached_tokens":`

func otherSalts(ctx context.Context, r *rig, open bool) (string, error) {
	p, err := r.serve(ctx, sim, "", r.keyed()...)
	if err != nil {
		return "", err
	}
	salted := func(salt string) string {
		return strings.Replace(completion(prompt(1)), "{", fmt.Sprintf(`{"cache_salt":%q,`, salt), 1)
	}
	if status, answer, err := r.post(ctx, p.URL+"/v1/completions", r.key, salted("victim")); err != nil || status != 200 {
		return "", fmt.Errorf("the victim: status %d, %q, %w", status, cut(answer), err)
	}
	salts := []string{"", "Victim", "victim ", "victi", "victim\x00"}
	if open {
		salts = []string{"victim"}
	}
	for _, salt := range salts {
		_, answer, err := r.post(ctx, p.URL+"/v1/completions", r.key, salted(salt))
		if err != nil {
			return "", err
		}
		if _, n, found := strings.Cut(answer, cachedWord); found && !strings.HasPrefix(n, "0") {
			return "", holef("salt %q: %s%.4s", salt, cachedWord, n)
		}
	}
	return fmt.Sprintf("%d other salts, nothing is cached", len(salts)), nil
}

// tenants starts an engine for two tenants, the second with further flags of kvport keys api add.
func (r *rig) tenants(ctx context.Context, flags ...string) (p *cluster.Process, victim, curious string, err error) {
	file, victim, curious, err := r.clients(ctx, flags...)
	if err != nil {
		return nil, "", "", err
	}
	p, err = r.serve(ctx, sim, "", "--api-key-file", file)
	return p, victim, curious, err
}

// clients makes the keys of two clients; flags are for the second.
func (r *rig) clients(ctx context.Context, flags ...string) (file, victim, curious string, err error) {
	folder, err := r.folder()
	if err != nil {
		return "", "", "", err
	}
	file = filepath.Join(folder, "keys")
	add := func(name string, flags ...string) (key string, err error) {
		out, code, err := r.ends(ctx, append([]string{"keys", "api", "add", "--file", file, name}, flags...)...)
		if err == nil && code != 0 {
			err = fmt.Errorf("kvport keys api add: exit code %d, %q", code, cut(out))
		}
		return strings.TrimSpace(out), err
	}
	if victim, err = add("victim"); err == nil {
		curious, err = add("curious", flags...)
	}
	return file, victim, curious, err
}

func otherTenant(ctx context.Context, r *rig, open bool) (string, error) {
	var flags []string
	if open {
		flags = []string{"--salt", "victim"}
	}
	p, victim, curious, err := r.tenants(ctx, flags...)
	if err != nil {
		return "", err
	}
	ask := func(key, salt string) (string, error) {
		status, answer, err := r.post(ctx, p.URL+"/v1/completions", key, strings.Replace(completion(prompt(1)), "{", fmt.Sprintf(`{"cache_salt":%q,`, salt), 1))
		if err != nil || status != 200 {
			return "", fmt.Errorf("salt %q: status %d, %q, %w", salt, status, cut(answer), err)
		}
		return answer, nil
	}
	if _, err := ask(victim, ""); err != nil {
		return "", err
	}
	salts := []string{"", "victim", "kvport-tenant:victim:", "kvport-tenant:victim:victim"}
	for _, salt := range salts {
		answer, err := ask(curious, salt)
		if err != nil {
			return "", err
		}
		if _, n, found := strings.Cut(answer, cachedWord); !found || !strings.HasPrefix(n, "0") {
			return "", holef("salt %q: %s%.4s", salt, cachedWord, n)
		}
	}
	return fmt.Sprintf("%d salts, nothing is cached", len(salts)), nil
}

func ownPowers(ctx context.Context, r *rig, open bool) (string, error) {
	var flags []string
	if open {
		flags = []string{"--admin"}
	}
	p, _, curious, err := r.tenants(ctx, flags...)
	if err != nil {
		return "", err
	}
	header := map[string]string{"Authorization": bearer(curious)}
	for path, method := range map[string]string{"/metrics": http.MethodGet, "/reset_prefix_cache": http.MethodPost} {
		if status, answer, err := r.send(ctx, method, p.URL+path, "", header); err != nil || status != http.StatusForbidden {
			return "", holef("%s: status %d, %q, %v", path, status, cut(answer), err)
		}
	}
	if _, answer, err := r.send(ctx, http.MethodGet, p.URL+"/health", "", header); err != nil || strings.Contains(answer, `"model"`) {
		return "", holef("/health says %s, %v", cut(answer), err)
	}
	return "metrics and resets are refused, /health has the status", nil
}

func cacheQuery(ctx context.Context, r *rig, open bool) (string, error) {
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	keys := filepath.Join(folder, "keys")
	if err := writeFile(keys, oldKey+"\n"+newKey+"\n"); err != nil {
		return "", err
	}
	args := []string{"--api-key-file", keys}
	if open {
		args = append(args, "--cache-query-unsalted")
	}
	p, err := r.serve(ctx, sim, "", args...)
	if err != nil {
		return "", err
	}
	if status, answer, err := r.post(ctx, p.URL+"/v1/completions", oldKey, completion(prompt(1))); err != nil || status != 200 {
		return "", fmt.Errorf("the victim: status %d, %q, %w", status, cut(answer), err)
	}
	status, answer, err := r.post(ctx, p.URL+"/v1/completions", newKey, strings.Replace(completion(prompt(1)), "{", `{"kv_transfer_params":{"cache_query":true},`, 1))
	if err != nil {
		return "", err
	}
	if status == 200 {
		return "", holef("it is told: %s", cut(answer))
	}
	return fmt.Sprintf("refused with %d", status), nil
}
