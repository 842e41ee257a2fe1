package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvport/kvport/internal/machine"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
)

// strangerProbes are for another user of the machine, who has no key.
func strangerProbes() []probe {
	return []probe{
		{id: "stranger/looks", group: "other-users", does: "as another user reads and writes what engines, plugins and their folders have open, started with umask 0", door: "files that others may read", cost: 8, run: looks},
		{id: "stranger/subscribes", group: "loopback", does: "as another user runs an engine that subscribes to each connector that has a port, with a key of its own", door: "the key in the stranger's hands", cost: 40, run: subscribes},
		{id: "stranger/half-links", group: "loopback", does: "as another user opens 400 connections to each port of a plugin, says half a word and leaves", cost: 30, run: halfLinks},
		{id: "stranger/silent-links", group: "loopback", does: "opens 300 silent connections to each port of a plugin, and a consumer starts again", cost: 30, run: silentLinks},
		{id: "stranger/noise", group: "ports", does: "as another user sends random bytes, and UCX's frame that writes memory, to every port of every plugin", cost: 40, run: noisy},
		{id: "stranger/ports", group: "ports", does: "looks for ports of plugins that speak to anybody", door: "ucx_tcp", cost: 30, run: openPorts},
		{id: "stranger/keys", group: "other-users", does: "as another user reads the keys that engines of this user share", door: "files that others may read", run: readsKeys},
		{id: "stranger/command-lines", group: "other", does: "as another user reads the command lines of engines and plugins", run: commandLines},
	}
}

// pair is a prefill and a decode engine of a connector.
type pair struct {
	f    *fixture.Fixture
	p, d *cluster.Process
	url  string // of their router
}

// movers are the connectors between engines that are ready.
func (r *rig) movers() (out []*fixture.Fixture) {
	for _, f := range r.fixed {
		if f.Peers && strings.HasPrefix(f.Folder, "plugins/") && r.ready(f) {
			out = append(out, f)
		}
	}
	return out
}

// pairOf starts one and checks that blocks move.
func (r *rig) pairOf(ctx context.Context, f *fixture.Fixture, extra string) (*pair, error) {
	config := func(role string) string {
		c := r.fixtureConfig(f, role, `{}`)
		if extra != "" {
			c = strings.Replace(strings.Replace(c, `"kv_connector_extra_config":{`, `"kv_connector_extra_config":{`+extra+",", 1), ",}", "}", 1)
		}
		return c
	}
	if _, err := r.expected(ctx, sim, prompt(1), prompt(2), prompt(3)); err != nil {
		return nil, err
	}
	p, err := r.serve(ctx, sim, config("kv_producer"))
	if err != nil {
		return nil, err
	}
	d, err := r.serve(ctx, sim, config("kv_consumer"), "--enable-prefix-caching=false")
	if err != nil {
		return nil, err
	}
	router, err := r.route(ctx, p.URL, d.URL)
	if err != nil {
		return nil, err
	}
	s := &pair{f, p, d, router.URL}
	return s, s.works(ctx, r)
}

// works says whether blocks still come from the prefill engine, and are right.
func (s *pair) works(ctx context.Context, r *rig) error {
	external := func() float64 {
		m, err := r.client.Metrics(ctx, s.d.URL)
		if err != nil {
			return 0
		}
		return m.Sum("kvport_prompt_tokens_total", `source="external"`)
	}
	before := external()
	for try := 0; ; try++ {
		if err := r.same(ctx, sim, s.url, prompt(1), prompt(2), prompt(3)); err != nil {
			return err
		}
		if external() > before {
			return nil
		}
		if try == 20 || ctx.Err() != nil {
			return holef("%s: no block comes from the prefill engine any more: %s", s.f.Connector, cut(s.d.Logs()))
		}
		pause(ctx, 250*time.Millisecond)
	}
}

// plugins are the processes of both engines' plugins.
func (s *pair) plugins() []int {
	return slices.Concat(cluster.Plugins(s.p.PID()), cluster.Plugins(s.d.PID()))
}

// eachPair has something happen to a pair of each connector between engines.
func (r *rig) eachPair(ctx context.Context, attack func(s *pair) (string, error)) (string, error) {
	var seen []string
	for _, f := range r.movers() {
		s, err := r.pairOf(ctx, f, "")
		if err != nil {
			return "", err
		}
		before := s.plugins()
		text, err := attack(s)
		if err != nil {
			return "", err
		}
		if err := s.works(ctx, r); err != nil {
			return "", err
		}
		if after := s.plugins(); !slices.Equal(before, after) {
			return "", holef("%s: plugins have died: %v, now %v", f.Connector, before, after)
		}
		seen = append(seen, f.Connector+": "+text)
		r.stopAll()
	}
	if len(seen) == 0 {
		return "", &skipped{"no connector between engines is ready here"}
	}
	return strings.Join(seen, "; "), nil
}

// noises are what no protocol expects.
func noises(seed uint64) []string {
	rng := rand.New(rand.NewPCG(seed, 2))
	random := make([]byte, 2000)
	for i := range random {
		random[i] = byte(rng.Uint32())
	}
	out := []string{
		"", "\x00", string(random), strings.Repeat("\x00", 5000), strings.Repeat("\xff", 5000), "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + string(random[:512]),
		`{"op":"subscribe"}` + "\n", `{"op":"follow"}` + "\n", "subscribe\n",
	}
	for range 6 {
		length := binary.BigEndian.AppendUint32(nil, rng.Uint32()%4096)
		out = append(out, string(length)+string(random[:rng.IntN(1000)]))
	}
	const magic, put, head = 0xCAFEBABE12345678, 33, 20
	for _, at := range []uint64{0, 0x400000, 0x7fffffffe000, 0xc000000000} {
		frame := binary.LittleEndian.AppendUint64(nil, magic)
		frame = binary.LittleEndian.AppendUint32(append(frame, put), head)
		frame = binary.LittleEndian.AppendUint64(frame, at)
		frame = binary.LittleEndian.AppendUint64(frame, 64)
		out = append(out, string(binary.LittleEndian.AppendUint32(frame, 0))+strings.Repeat("x", 64))
	}
	return out
}

func noisy(ctx context.Context, r *rig, _ bool) (string, error) {
	return r.eachPair(ctx, func(s *pair) (string, error) {
		ports := 0
		for _, pid := range s.plugins() {
			for _, port := range listening(pid) {
				ports++
				got, err := r.stranger(ctx, "noise", aim{Address: "127.0.0.1:" + port, Seed: r.rng.Uint64()})
				if err != nil {
					return "", err
				}
				if len(got) > 0 {
					return "", holef("%s gives a stranger %v", s.f.Connector, got)
				}
			}
		}
		if ports == 0 {
			return "", fmt.Errorf("%s: its plugins have no port", s.f.Connector)
		}
		return fmt.Sprintf("%d ports, the plugins live", ports), nil
	})
}

func halfLinks(ctx context.Context, r *rig, _ bool) (string, error) {
	return r.eachPair(ctx, func(s *pair) (string, error) {
		var seen []string
		for _, pid := range s.plugins() {
			before := openFiles(pid)
			for _, port := range listening(pid) {
				if _, err := r.stranger(ctx, "connect", aim{Address: "127.0.0.1:" + port, Count: 400}); err != nil {
					return "", err
				}
			}
			if !wait(ctx, time.Minute, func() bool { return openFiles(pid) <= before+16 }) {
				return "", holef("%s: %d descriptors before, %d after", s.f.Connector, before, openFiles(pid))
			}
			seen = append(seen, fmt.Sprintf("%d → %d descriptors", before, openFiles(pid)))
		}
		return strings.Join(seen, ", "), nil
	})
}

func silentLinks(ctx context.Context, r *rig, _ bool) (string, error) {
	return r.eachPair(ctx, func(s *pair) (string, error) {
		n := 0 // of silent connections
		for _, pid := range cluster.Plugins(s.p.PID()) {
			for _, port := range listening(pid) {
				for range 300 {
					if _, err := r.dial(ctx, "127.0.0.1:"+port); err != nil {
						return "", err
					}
					n++
				}
			}
		}
		d, err := r.serve(ctx, sim, r.fixtureConfig(s.f, "kv_consumer", `{}`), "--enable-prefix-caching=false")
		if err != nil {
			return "", err
		}
		router, err := r.route(ctx, s.p.URL, d.URL)
		if err != nil {
			return "", err
		}
		again := &pair{s.f, s.p, d, router.URL}
		return fmt.Sprintf("%d silent connections, a new consumer gets its blocks", n), again.works(ctx, r)
	})
}

func openPorts(ctx context.Context, r *rig, open bool) (string, error) {
	var seen []string
	for _, f := range r.movers() {
		extra := ""
		if open {
			extra = `"ucx_tcp":"trusted-network"`
		}
		s, err := r.pairOf(ctx, f, extra)
		if open && err != nil && strings.Contains(err.Error(), "ucx_tcp") {
			continue // it has no UCX
		}
		if err != nil {
			return "", err
		}
		for _, pid := range s.plugins() {
			ports, plain := listening(pid), []string{}
			for _, port := range ports {
				if !demandsCertificate(ctx, "127.0.0.1:"+port) {
					plain = append(plain, port)
				}
			}
			// The side channel, or the port of a pipe, is one at which peers prove in another way that they have the link key.
			if len(plain) > 1 {
				return "", holef("%s: of the ports %v more than one does not ask for a certificate: %v", f.Connector, ports, plain)
			}
			seen = append(seen, fmt.Sprintf("%s: %d ports", f.Connector, len(ports)))
		}
		r.stopAll()
	}
	if open && len(seen) == 0 {
		return "", &skipped{"no connector with UCX is ready here"}
	}
	return strings.Join(seen, ", "), nil
}

func looks(ctx context.Context, r *rig, open bool) (string, error) {
	folder, err := r.folder()
	if err != nil {
		return "", err
	}
	if err := os.Chmod(folder, 0o755); err != nil { //nolint:gosec // so that the folder below decides
		return "", err
	}
	store := filepath.Join(folder, "kv")
	args := r.serveArgs(sim, r.storeConfig("kv_both", store, `{}`))
	p, err := r.startShell(ctx, "umask 0", args...)
	if err != nil {
		return "", err
	}
	if err := r.same(ctx, sim, p.URL, prompt(1), prompt(2)); err != nil {
		return "", err
	}
	peers, err := r.startShell(ctx, "umask 0", r.serveArgs(sim, r.peersConfig("kv_producer", `{}`))...)
	if err != nil {
		return "", err
	}
	if open {
		err = filepath.WalkDir(store, func(path string, _ os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			return os.Chmod(path, 0o755) //nolint:gosec // that is the door
		})
		if err != nil {
			return "", err
		}
	}
	pids := slices.Concat([]int{p.PID(), peers.PID()}, cluster.Children(p.PID()), cluster.Children(peers.PID()))
	got, err := r.stranger(ctx, "look", aim{PIDs: pids, Paths: []string{folder, filepath.Join(r.dir, "tmp"), filepath.Join(r.dir, "state"), filepath.Join(r.dir, "run"), filepath.Join(r.dir, "secrets"), "/dev/shm"}})
	if err != nil {
		return "", err
	}
	got = slices.DeleteFunc(got, func(text string) bool {
		return strings.Contains(text, "/dev/shm/") && !strings.Contains(text, "kvport")
	})
	if len(got) > 0 {
		return "", holef("a stranger %s", cut(strings.Join(got, "; ")))
	}
	return fmt.Sprintf("%d processes and their folders: nothing", len(pids)), nil
}

func readsKeys(ctx context.Context, r *rig, open bool) (string, error) {
	p, err := r.serve(ctx, sim, r.peersConfig("kv_producer", `{}`))
	if err != nil {
		return "", err
	}
	var paths []string
	for _, root := range []string{"state", "run", "secrets"} {
		_ = filepath.WalkDir(filepath.Join(r.dir, root), func(path string, d os.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				paths = append(paths, path)
			}
			return nil
		})
	}
	if !slices.ContainsFunc(paths, func(path string) bool { return strings.HasSuffix(path, "ticket.key") }) {
		return "", fmt.Errorf("no file is called ticket.key among %v: %s", paths, cut(p.Logs()))
	}
	if open {
		for _, path := range paths {
			if filepath.Base(path) != "ticket.key" {
				continue
			}
			if err := r.opened(filepath.Dir(path), 0o755); err != nil {
				return "", err
			}
			if err := r.opened(path, 0o644); err != nil {
				return "", err
			}
		}
	}
	got, err := r.stranger(ctx, "read", aim{Paths: paths})
	if err != nil {
		return "", err
	}
	if len(got) > 0 {
		return "", holef("%d of %d files", len(got), len(paths))
	}
	return fmt.Sprintf("none of %d files", len(paths)), nil
}

// opened lets others read a file or a folder until the probe is over.
func (r *rig) opened(path string, mode os.FileMode) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	r.later(func() { _ = os.Chmod(path, st.Mode().Perm()) })
	return os.Chmod(path, mode)
}

// subscribes runs an engine of another user.
func subscribes(ctx context.Context, r *rig, open bool) (string, error) {
	var seen []string
	for _, f := range r.fixed {
		if f.LayerWise == nil || !r.ready(f) {
			continue
		}
		text, err := r.subscribe(ctx, f, open)
		if err != nil {
			return "", err
		}
		seen = append(seen, f.Connector+": "+text)
		r.stopAll()
	}
	if len(seen) == 0 {
		return "", &skipped{"no connector to which others subscribe is ready here"}
	}
	return strings.Join(seen, "; "), nil
}

// layerwise are the configs of a producer and of a consumer that subscribes to it.
func (r *rig) layerwise(ctx context.Context, f *fixture.Fixture) (producer, consumer string, err error) {
	address, err := machine.FreePort(ctx)
	if err != nil {
		return "", "", err
	}
	port, err := strconv.Atoi(address)
	if err != nil {
		return "", "", err
	}
	if producer, err = fixture.Fill(f.LayerWise.Producer, fixture.Values{"PORT": port}); err != nil {
		return "", "", err
	}
	consumer, err = fixture.Fill(f.LayerWise.Consumer, fixture.Values{"PORT": port})
	return producer, consumer, err
}

func (r *rig) subscribe(ctx context.Context, f *fixture.Fixture, open bool) (string, error) {
	own, their, err := r.layerwise(ctx, f)
	if err != nil {
		return "", err
	}
	home, err := r.folder()
	if err != nil {
		return "", err
	}
	ours, ring, err := r.rings(ctx, home, open)
	if err != nil {
		return "", err
	}
	args := []string{"--enable-prefix-caching=false", "--max-num-batched-tokens", "128"}
	p, err := r.serve(ctx, tiny, configOf(f.Connector, "kv_producer", own, fmt.Sprintf(`{"ticket_key_file":%q}`, ours)), args...)
	if err != nil {
		return "", err
	}
	stranger, err := r.serveAsStranger(ctx, home, r.serveArgs(tiny, configOf(f.Connector, "kv_consumer", their, fmt.Sprintf(`{"ticket_key_file":%q}`, ring)), args...))
	if err != nil {
		return "", err
	}
	count := func(name string) float64 {
		m, _ := r.client.Metrics(ctx, p.URL) // none counts as 0
		return m.Sum(name)
	}
	subscribed := func() bool { return count("kvport_connector_subscribers") > 0 }
	sent := func() float64 {
		return count("kvport_connector_layer_bytes_total") + count("kvport_connector_layer_confirmed_bytes_total")
	}
	told := func() bool {
		return strings.Contains(stranger.Logs(), "kvport.ticket_key_file") || strings.Contains(stranger.Logs(), "it hung up where it had to prove the link key")
	}
	wait(ctx, time.Minute, func() bool { return subscribed() || told() })
	for n := range 4 {
		if _, err := r.tokens(ctx, p.URL, prompt(n)); err != nil {
			return "", err
		}
	}
	switch {
	case subscribed():
		return "", holef("%s: a stranger is a subscriber", f.Connector)
	case sent() > 0:
		return "", holef("%s: a stranger got %.0f bytes", f.Connector, sent())
	case !told():
		return "", fmt.Errorf("%s: the stranger was not refused, and got nothing: %s", f.Connector, cut(stranger.Logs()))
	}
	return "refused, 0 bytes", nil
}

// rings are a file of keys, and one for a stranger: another, or a copy.
func (r *rig) rings(ctx context.Context, home string, same bool) (ours, theirs string, err error) {
	ours, theirs = filepath.Join(r.dir, "secrets", "ring"), filepath.Join(home, "ring")
	for _, path := range []string{ours, theirs} {
		if _, _, err := r.ends(ctx, "keys", "init", "--file", path); err != nil { // that of the one before is there already
			return "", "", err
		}
	}
	if !same {
		return ours, theirs, nil
	}
	data, err := os.ReadFile(ours)
	if err != nil {
		return "", "", err
	}
	return ours, theirs, os.WriteFile(theirs, data, 0o600)
}

// serveAsStranger runs an engine as another user, with folders of its own.
func (r *rig) serveAsStranger(ctx context.Context, home string, args []string) (*cluster.Process, error) {
	if os.Getuid() != 0 {
		return nil, &skipped{"it needs another user, and only root can become one"}
	}
	bin := filepath.Join(r.dir, "bin")
	files, err := filepath.Glob(filepath.Join(r.root, "bin", "kvport*"))
	if err != nil {
		return nil, err
	}
	for _, path := range files {
		to := filepath.Join(bin, filepath.Base(path))
		if _, err := os.Stat(to); err == nil {
			continue
		}
		if err := copyFile(path, to, 0o755); err != nil {
			return nil, err
		}
	}
	if err := os.Symlink(filepath.Join(r.root, ".deps"), filepath.Join(r.dir, ".deps")); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	for _, name := range []string{"state", "run", "cache", "tmp"} {
		if err := os.Mkdir(filepath.Join(home, name), 0o700); err != nil {
			return nil, err
		}
	}
	err = filepath.WalkDir(home, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Chown(path, strangerID, strangerID)
	})
	if err != nil {
		return nil, err
	}
	env := []string{
		"XDG_STATE_HOME=" + home + "/state", "XDG_RUNTIME_DIR=" + home + "/run", "XDG_CACHE_HOME=" + home + "/cache", "HOME=" + home, "TMPDIR=" + home + "/tmp",
		"KVPORT_PLUGIN_PATH=" + bin,
	}
	all := append(append([]string{"-c", "cd " + home + `; exec env "$@"`, "sh"}, env...), r.strangerBinary(), strangerArg, "exec", filepath.Join(bin, "kvport"))
	return r.startAs(ctx, "/bin/sh", append(all, args...)...)
}

func copyFile(from, to string, mode os.FileMode) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if closed := out.Close(); err == nil {
		err = closed
	}
	return err
}

func commandLines(ctx context.Context, r *rig, _ bool) (string, error) {
	p, err := r.serve(ctx, sim, r.peersConfig("kv_producer", `{}`), r.keyed()...)
	if err != nil {
		return "", err
	}
	var paths []string
	pids := append([]int{p.PID()}, cluster.Children(p.PID())...)
	for _, pid := range pids {
		paths = append(paths, fmt.Sprintf("/proc/%d/cmdline", pid))
	}
	got, err := r.stranger(ctx, "read", aim{Paths: paths})
	if err != nil {
		return "", err
	}
	secrets := []string{r.key, r.canary}
	_ = filepath.WalkDir(filepath.Join(r.dir, "state"), func(path string, _ os.DirEntry, err error) error {
		if data, readErr := os.ReadFile(path); err == nil && readErr == nil && len(strings.TrimSpace(string(data))) > 8 {
			secrets = append(secrets, strings.TrimSpace(string(data)))
		}
		return nil
	})
	for _, line := range got {
		for _, secret := range secrets {
			if strings.Contains(line, secret) {
				return "", holef("a command line has a secret: %s", cut(line))
			}
		}
	}
	if len(got) != len(pids) {
		return "", fmt.Errorf("%d of %d command lines could be read", len(got), len(pids))
	}
	return fmt.Sprintf("%d command lines, none of %d secrets", len(got), len(secrets)), nil
}
