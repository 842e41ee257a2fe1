package bench

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvport/kvport/host"
)

//go:embed peers/stores.py
var storesScript string

// rival is somebody else's store and the connector of ours that does the same work.
type rival struct {
	name, connector string
	budget          budget // of the rows without digests: no rival has any
	at              installed
}

// rivals are the stores of verify/bench/peers/stores.py, as the fixtures name them.
func (s *store) rivals() (all []rival) {
	for _, f := range s.fixtures {
		for _, b := range f.Bench {
			for _, r := range b.Rivals {
				rival := rival{name: r.Name, connector: f.Connector}
				if r.AtLeast > 0 {
					rival.budget = atLeast(r.AtLeast)
				}
				all = append(all, rival)
			}
		}
	}
	return all
}

// installed is a line of peers.json, which verify/bench/peers/setup.py writes.
type installed struct {
	Python string `json:"python"`
	Path   string `json:"path"`   // PYTHONPATH
	Absent string `json:"absent"` // why it cannot be used; empty: it can
}

const notInstalled = "not installed, run python3 verify/bench/peers/setup.py"

// readPeers reads what is installed; nothing if setup.py never ran.
func readPeers(dir string) (map[string]installed, error) {
	data, err := os.ReadFile(filepath.Join(dir, "peers.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	all := map[string]installed{}
	if err := json.Unmarshal(data, &all); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, "peers.json"), err)
	}
	return all, nil
}

// compare measures rivals beside ours. One that cannot be measured is a row that says why.
func (s *store) compare(ctx context.Context) error {
	have, err := readPeers(s.PeersDir)
	if err != nil {
		return err
	}
	for _, r := range s.rivals() {
		if !s.measures(r.name) {
			continue
		}
		var ok bool
		if r.at, ok = have[r.name]; !ok {
			r.at.Absent = notInstalled
		}
		why := r.at.Absent
		if why == "" {
			why, err = s.against(ctx, r)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
		if why != "" {
			if err := s.Emit(absent(r.name, why)); err != nil {
				return err
			}
		}
	}
	return nil
}

// against is one rival with blocks of each size. why says what is missing.
func (s *store) against(ctx context.Context, r rival) (why string, err error) {
	binary, err := host.Find(s.PluginPath, r.connector)
	if err != nil {
		return "to be compared with " + r.connector + ", which is not built", nil //nolint:nilerr // told in a row
	}
	sets, why := s.setups(r.connector)
	if why != "" {
		return why, nil
	}
	if sets[0].absent != "" {
		return sets[0].absent, nil
	}
	for _, sh := range storeShapes() {
		if sh.batch > 1 {
			continue
		}
		if why, err = s.duel(ctx, binary.Path, sets[0], sh, r); err != nil || why != "" {
			return why, err
		}
	}
	return "", nil
}

// duel is one rival with one size: ours without and with digests and theirs take turns.
func (s *store) duel(ctx context.Context, binary string, set setup, sh shape, r rival) (why string, err error) {
	dir, err := os.MkdirTemp(set.dir, "peer-")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	config, err := set.config(dir, sh)
	if err != nil {
		return "", err
	}
	l, err := openLink(ctx, linkOptions{binary: binary, config: config, shape: sh, digests: true, arena: true, bytes: s.bytes(sh), life: set.name + " : " + r.name})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	theirs, err := startRival(ctx, r.name, r.at, dir, s.environment()...)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, theirs.Close()) }()
	if _, err := theirs.ask("open", sh.segments, sh.bytes, l.blocks, sh.batch); err != nil {
		return reason(err)
	}
	w := &walk{link: l, hasher: l.hasher, fresh: l.blocks / sh.batch}
	for n := range w.fresh + set.warm(l) {
		if err := w.save(ctx, n, true); err != nil {
			return "", err
		}
	}
	for range 2 * w.fresh { // theirs is full then, as ours is
		if _, err := theirs.ask("store"); err != nil {
			return reason(err)
		}
	}
	for _, way := range []struct {
		name string
		ours func(context.Context, int, bool) error
	}{{"store", w.save}, {"load", w.load}} {
		if err := w.settle(ctx, set.later); err != nil { // loads find blocks that have digests
			return "", err
		}
		var peer took
		all, err := s.turns(set).measure(ctx,
			func(n int) error { return way.ours(ctx, 2*n, false) },
			func(n int) error { return way.ours(ctx, 2*n+1, true) },
			func(int) error {
				seconds, err := theirs.ask(way.name)
				peer = append(peer, time.Duration(seconds*float64(time.Second)))
				return err
			})
		if err != nil {
			return reason(err)
		}
		slices.Sort(peer)
		budgets := [2]budget{r.budget} // they have no digests
		for i, name := range rowNames(set, way.name, sh) {
			if err := s.row(name+" : "+r.name, sh, all[i], peer, budgets[i]); err != nil {
				return "", err
			}
		}
	}
	return "", nil
}

// reason is what an error says about a peer that is not there; other errors stay errors.
func reason(err error) (string, error) {
	if why, isAbsent := strings.CutSuffix(err.Error(), ": "+errAbsent.Error()); isAbsent && errors.Is(err, errAbsent) {
		return why, nil
	}
	return "", err
}

// environment tells a rival where the server is.
func (s *store) environment() []string {
	if s.server == nil {
		return nil
	}
	return []string{"KVPORT_BENCH_REDIS=" + s.server.Address}
}

// startRival starts the interpreter of a rival, in a folder that it may write to.
func startRival(ctx context.Context, name string, at installed, dir string, environment ...string) (*Peer, error) {
	p := &Peer{cmd: exec.CommandContext(ctx, at.Python, "-c", storesScript, name, dir)}
	p.cmd.Env = append(append(os.Environ(), "PYTHONPATH="+at.Path), environment...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p.answers = bufio.NewReader(out)
	return p, nil
}
