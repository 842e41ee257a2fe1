package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvport/kvport/internal/sandbox"
	"github.com/kvport/kvport/verify/cluster"
)

// mode is a malicious plugin.
type mode struct {
	name, group, does string
	door              string // settings of the object kvport with which it succeeds; empty: none is tried
	// shows is the metric by which kvport says that it has noticed what the plugin did; empty: it need not notice anything, and takes
	// blocks from the plugin.
	shows string
	kills bool // the engine's stop may take longer than an operator waits, since the plugin is dead or stopped
}

// Metrics that show what became of a plugin's blocks.
const (
	damaged    = "kvport_integrity_failures_total"
	unknown    = "kvport_digest_misses_total"
	restarted  = "kvport_plugin_restarts_total"
	failed     = "kvport_transfer_failed_blocks_total"
	violations = "kvport_plugin_violations_total"
	reported   = "kvport_block_events_total"
)

const (
	withoutSandbox = `"sandbox":"off"`
	withoutKey     = `"digest":"xxh3"`
)

// modes are the malicious plugins.
func modes() []mode {
	return []mode{
		{name: "junk", group: "digests", does: "gives random bytes for every block", shows: damaged},
		{name: "bit", group: "digests", does: "changes the last bit of the last layer of every block", shows: damaged},
		{name: "zero", group: "digests", does: "gives zeros, digests included", shows: damaged},
		{name: "forge", group: "digests", does: "gives random bytes and makes the digests again, without a key", door: withoutKey, shows: unknown},
		{name: "forge-name", group: "digests", does: "does that and writes the name of the key that has made the right digests before them", shows: damaged},
		{name: "header", group: "digests", does: "removes the name of the key from digests", shows: damaged},
		{name: "replay", group: "digests", does: "gives the first block that it was ever given for every other one", shows: damaged},
		{name: "move", group: "digests", does: "gives each block's right bytes for the block before it", shows: damaged},
		{name: "layers", group: "digests", does: "exchanges two layers of every block", shows: damaged},
		{name: "silent", group: "digests", does: "says that it has loaded and writes nothing", shows: damaged},
		{name: "claim", group: "digests", does: "says that it has every block", shows: damaged},
		{name: "many", group: "other", does: "says that it has more blocks than it was asked about", shows: violations},
		{name: "negative", group: "other", does: "says that it has fewer than no blocks", shows: violations},
		{name: "elsewhere", group: "other", does: "names blocks in its answers that it was not asked for", shows: failed},
		{name: "events", group: "other", does: "reports without end that it has blocks, in a new place each time, to an engine that publishes KV events", shows: reported},
		{name: "late", group: "digests", does: "goes on writing into blocks for seconds after it has answered"},
		{name: "everywhere", group: "digests", does: "writes random bytes to all memory that the host shares with it, for seconds"},
		{name: "files", group: "plugins", does: "reads keys and other secrets, directly, through links and through /proc, and writes files of others", door: withoutSandbox},
		{name: "variables", group: "plugins", does: "asks by its manifest for environment variables with credentials", door: withoutSandbox},
		{name: "memory", group: "plugins", does: "writes the KV cache through /proc, reads the engine's memory, environment and descriptors, and traces it", door: withoutSandbox},
		{name: "signals", group: "plugins", does: "sends signals to the engine, lowers its priority and its limits", door: withoutSandbox},
		{name: "programs", group: "plugins", does: "starts a shell, and a program that it has written", door: withoutSandbox},
		{name: "leave", group: "plugins", does: "leaves processes behind in a session of their own", door: withoutSandbox},
		{name: "tcp", group: "plugins", does: "connects and listens over TCP", door: withoutSandbox},
		{name: "mptcp", group: "plugins", does: "connects and listens over MPTCP", door: withoutSandbox},
		{name: "udp", group: "plugins", does: "sends and listens over UDP", door: withoutSandbox},
		{name: "unix", group: "plugins", does: "connects to sockets of others, with a path and without one", door: withoutSandbox},
		{name: "privileges", group: "plugins", does: "uses capabilities, namespaces, io_uring, System V memory and the kernel's key rings", door: withoutSandbox},
		{name: "pages", group: "plugins", does: "takes pages out of memory that it shares with the host, and shortens it", door: withoutSandbox},
		{name: "core", group: "plugins", does: "asks for a core dump", door: withoutSandbox},
		{name: "fence", group: "survivors", does: "hides the fence, by which the host knows that its processes are gone, in a message and in a child, and dies", shows: restarted, kills: true},
		{name: "die", group: "scarcity", does: "dies in every load", shows: restarted, kills: true},
		{name: "hang", group: "scarcity", does: "stops itself in every load", shows: restarted, kills: true},
		{name: "flood", group: "logs", does: "floods the log with control characters and forged lines, some as JSON"},
		{name: "bomb", group: "logs", does: "takes all descriptors, 200 threads and 256 MB"},
	}
}

// pluginProbes are the malicious plugins at trust level staged, with the real model.
func pluginProbes() []probe {
	var out []probe
	for _, m := range modes() {
		p := probe{id: "plugin/" + m.name, group: m.group, does: "is a plugin that " + m.does, cost: 15}
		if m.door != "" {
			p.door, p.cost = m.door, 22
		}
		if m.name == "hang" { // it waits for deadlines
			p.cost = 40
		}
		p.run = func(ctx context.Context, r *rig, open bool) (string, error) { return r.malicious(ctx, &m, open) }
		out = append(out, p)
	}
	return out
}

// malicious runs a plugin behind an engine and looks at what it has done.
func (r *rig) malicious(ctx context.Context, m *mode, open bool) (string, error) {
	s, err := r.scene(ctx, m.name)
	if err != nil {
		return "", err
	}
	settings := `{"trust":"staged","deadlines":{"transfer":"3s","fence":"2s"},"breaker":{"deaths":1000}}`
	if open {
		settings = strings.TrimSuffix(settings, "}") + "," + m.door + "}"
	}
	prompts := []string{prompt(1), prompt(2)}
	model := r.real()
	if _, err := r.expected(ctx, model, prompts...); err != nil {
		return "", err
	}
	p, err := r.serve(ctx, model, s.config(settings), s.flags()...)
	if err != nil {
		return "", err
	}
	if !open {
		if err := r.confined(ctx, p); err != nil {
			return "", err
		}
	}
	for range 3 { // what the first time saves, the others load
		if err := r.same(ctx, model, p.URL, prompts...); err != nil {
			return "", err
		}
	}
	seen, err := s.look(ctx, p)
	if err != nil {
		return "", err
	}
	if !open {
		if err := r.shows(ctx, p, m); err != nil {
			return "", err
		}
	}
	if err := r.stop(ctx, p); err != nil && !m.kills {
		return "", unservedf("the engine does not end as it should: %v", err)
	}
	if left := s.left(ctx); len(left) > 0 {
		return "", holef("processes are left behind: %v", left)
	}
	return seen, nil
}

// flags are those of the engine.
func (s *scene) flags() []string {
	if s.mode == "events" { // it reports what the prefix cache has
		return []string{"--kv-events-config", fmt.Sprintf(`{"enable_kv_cache_events":true,"endpoint":"ipc://%s"}`, s.own+".events")}
	}
	return []string{"--enable-prefix-caching=false"}
}

// shows says whether a plugin has done what it is for: what kvport never saw proves nothing.
func (r *rig) shows(ctx context.Context, p *cluster.Process, m *mode) error {
	metrics, err := r.client.Metrics(ctx, p.URL)
	if err != nil {
		return err
	}
	if m.shows == "" {
		if metrics.Sum("kvport_prompt_tokens_total", `source="external"`)+metrics.Sum(damaged) == 0 { // a plugin that goes on writing may damage all of them
			return errors.New("no block came from the plugin")
		}
		return nil
	}
	if metrics.Sum(m.shows) == 0 {
		return holef("nothing noticed what the plugin did: %s is 0", m.shows)
	}
	return nil
}

// confined is an error unless an engine's plugin is in the whole sandbox: a hole, if this kernel has one.
func (r *rig) confined(ctx context.Context, p *cluster.Process) error {
	kernel := sandbox.Probe()
	if lacks := kernel.Lacks(false); len(lacks) > 0 {
		return &skipped{"this kernel has no whole sandbox, it lacks " + strings.Join(lacks, ", ")}
	}
	h, err := r.client.Health(ctx, p.URL)
	if err == nil && h.Connector.Sandbox != "on" {
		err = holef("the plugin's sandbox is %q", h.Connector.Sandbox)
	}
	return err
}

// scene is what a malicious plugin aims at.
type scene struct {
	*rig
	mode         string
	own, sibling string
	binary       string
	tcp, udp     int
	socket       string
	hits         func() int
	ring         string
	sinks        []net.PacketConn
}

func (r *rig) scene(ctx context.Context, mode string) (*scene, error) {
	folder, err := r.folder()
	if err != nil {
		return nil, err
	}
	s := &scene{rig: r, mode: mode, own: filepath.Join(folder, "own"), sibling: filepath.Join(folder, "sibling"), socket: filepath.Join(folder, "s"), ring: filepath.Join(folder, "ring")}
	s.binary = filepath.Join(folder, "bin", "kvport-attack")
	for _, path := range []string{s.own, s.sibling, filepath.Dir(s.binary)} {
		if err := os.Mkdir(path, 0o700); err != nil {
			return nil, err
		}
	}
	data, err := os.ReadFile(r.plugin)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(s.binary, data, 0o700); err != nil { //nolint:gosec // a program
		return nil, err
	}
	if out, code, err := r.ends(ctx, "keys", "init", "--file", s.ring); err != nil || code != 0 {
		return nil, fmt.Errorf("kvport keys init: %d, %s, %w", code, out, err)
	}
	return s, s.traps(ctx)
}

// traps are what it must not reach.
func (s *scene) traps(ctx context.Context) error {
	port, hits, err := s.trap(ctx)
	if err != nil {
		return err
	}
	if s.tcp, err = strconv.Atoi(port); err != nil {
		return err
	}
	s.hits = hits
	lc := &net.ListenConfig{}
	udp, err := lc.ListenPacket(ctx, "udp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	if at, ok := udp.LocalAddr().(*net.UDPAddr); ok {
		s.udp = at.Port
	}
	messages, err := lc.ListenPacket(ctx, "unixgram", s.socket+".messages")
	if err != nil {
		return err
	}
	s.sinks = []net.PacketConn{udp, messages}
	for _, name := range []string{s.socket, "@" + s.socket} {
		l, err := lc.Listen(ctx, "unix", name)
		if err != nil {
			return err
		}
		s.later(func() { _ = l.Close() })
	}
	s.later(func() { _ = errors.Join(udp.Close(), messages.Close()) })
	return nil
}

// config is the transfer config with which the plugin is told what to aim at.
func (s *scene) config(settings string) string {
	extra, err := json.Marshal(struct {
		Mode    string   `json:"mode"`
		Dir     string   `json:"dir"`
		Secrets []string `json:"secrets"`
		Sibling string   `json:"sibling"`
		TCP     int      `json:"tcp"`
		UDP     int      `json:"udp"`
		Unix    string   `json:"unix"`
	}{s.mode, s.own, []string{s.secret(), s.apiKey, s.ring}, s.sibling, s.tcp, s.udp, s.socket})
	if err != nil {
		return err.Error()
	}
	if !strings.Contains(settings, "xxh3") {
		settings = strings.Replace(strings.Replace(settings, "{", fmt.Sprintf(`{"ticket_key_file":%q,`, s.ring), 1), ",}", "}", 1)
	}
	return fmt.Sprintf(`{"kv_connector":"AttackConnector","kv_connector_module_path":%q,"kv_role":"kv_both","kv_connector_extra_config":%s,"kvport":%s}`, s.binary, extra, settings)
}

// did is what the plugin says has worked.
func (s *scene) did() []string {
	data, _ := os.ReadFile(filepath.Join(s.own, "did"))
	if len(data) == 0 {
		return nil
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	slices.Sort(lines)
	return slices.Compact(lines)
}

// look says what a plugin has done; it is a hole if it has got anything.
func (s *scene) look(ctx context.Context, p *cluster.Process) (string, error) {
	if did := s.did(); len(did) > 0 {
		return "", holef("it %s", strings.Join(did, "; "))
	}
	if n := s.hits(); n > 0 {
		return "", holef("it connected %d times", n)
	}
	for _, sink := range s.sinks {
		_ = sink.SetReadDeadline(time.Now().Add(time.Millisecond))
		if n, _, err := sink.ReadFrom(make([]byte, 16)); err == nil && n > 0 {
			return "", holef("its message arrived at %s", sink.LocalAddr())
		}
	}
	for _, pid := range s.processes() {
		if ports := listening(pid); len(ports) > 0 {
			return "", holef("process %d listens at %v", pid, ports)
		}
	}
	logs := p.Logs()
	if strings.Contains(logs, s.canary) {
		return "", holef("a secret is in the log")
	}
	for line := range strings.Lines(logs) {
		if strings.ContainsRune(line, '\x1b') || strings.HasPrefix(line, "time=2026-01-01T00:00:00Z") || strings.HasPrefix(line, "level=ERROR msg=forged") {
			return "", holef("a line of the log is the plugin's: %q", cut(line))
		}
	}
	if err := s.alive(ctx, p); err != nil {
		return "", err
	}
	m, err := s.client.Metrics(ctx, p.URL)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%d tokens equal, %.0f blocks damaged, %.0f of another edition or key, %.0f restarts, %.0f tokens from the plugin", 6*answerTokens,
		m.Sum("kvport_integrity_failures_total"), m.Sum("kvport_digest_misses_total"), m.Sum("kvport_plugin_restarts_total"), m.Sum("kvport_prompt_tokens_total", `source="external"`)), nil
}

// processes are all that run the plugin, whoever their parent is.
func (s *scene) processes() (pids []int) {
	links, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && strings.TrimSuffix(to, " (deleted)") == s.binary {
			if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(link))); err == nil && cluster.Alive(pid) {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// left are the processes that are there when the engine is gone for a while, which it then kills.
func (s *scene) left(ctx context.Context) (pids []int) {
	wait(ctx, 5*time.Second, func() bool { pids = s.processes(); return len(pids) == 0 })
	for _, pid := range pids {
		if p, err := os.FindProcess(pid); err == nil {
			_ = p.Kill()
		}
	}
	return pids
}

// listening are the ports of TCP and UDP that a process has without a peer.
func listening(pid int) (ports []string) {
	own := map[string]bool{}
	folder := fmt.Sprintf("/proc/%d/fd", pid)
	fds, _ := os.ReadDir(folder)
	for _, fd := range fds {
		if to, err := os.Readlink(folder + "/" + fd.Name()); err == nil {
			own[to] = true
		}
	}
	for _, table := range []string{"tcp", "tcp6", "udp", "udp6"} {
		lines, _ := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		for line := range strings.Lines(string(lines)) {
			f := strings.Fields(line)
			if len(f) < 10 || !own["socket:["+f[9]+"]"] || strings.Trim(f[2], "0:") != "" {
				continue
			}
			_, hex, _ := strings.Cut(f[1], ":")
			if port, err := strconv.ParseUint(hex, 16, 16); err == nil && port > 0 {
				ports = append(ports, strconv.FormatUint(port, 10))
			}
		}
	}
	return ports
}
