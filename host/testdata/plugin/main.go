// Command plugin is a connector for the host's own tests: it keeps blocks as files in a folder and
// misbehaves on request.
package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// config says where blocks are kept and what goes wrong.
type config struct {
	Dir     string `json:"dir" jsonschema:"description=where blocks are kept"`
	Fault   string `json:"fault" jsonschema:"description=what goes wrong"`
	At      int64  `json:"at" jsonschema:"description=from which call on"`
	Once    bool   `json:"once" jsonschema:"description=only in the first process"`
	Lossy   bool   `json:"lossy" jsonschema:"description=say so"`
	Layout  string `json:"layout" jsonschema:"description=the one layout it needs"`
	SlowMS  int    `json:"slow_ms" jsonschema:"description=time that a load takes"`
	MatchMS int    `json:"match_ms" jsonschema:"description=time that a match takes"`
	LeaseMS int    `json:"lease_ms" jsonschema:"description=how long a hold lasts that is not renewed; 300 without it and for requests named forgotten"`
	Scope   string `json:"scope" jsonschema:"description=engine: no other engine sees the blocks"`
	Beyond  string `json:"beyond" jsonschema:"description=why other machines see the blocks"`
	Secret  string `json:"secret" jsonschema:"description=a file that it should not read"`
	Address string `json:"address" jsonschema:"description=where it should not connect"`
	Arena   int64  `json:"arena" jsonschema:"description=bytes of the arena that it asks for; its first bytes count what was opened"`
}

// badLog looks like lines of hclog and is none.
const badLog = `{"@message":1}
{"@message":null,"@level":[]}
 {"@level":{}}
{"@message":"x","@timestamp":7}
{"@message":"good","@level":"warn"}
null
`

// poorer is a scheduler side without any power, as that of another build.
type poorer struct{ connector.Scheduler }

func main() {
	version := "1"
	switch filepath.Base(os.Args[0]) {
	case "kvport-hang":
		if len(os.Args) == 1 {
			select {}
		}
	case "kvport-hangmanifest":
		select {}
	case "kvport-spy":
		if _, err := os.ReadFile(filepath.Join(filepath.Dir(os.Args[0]), "secret")); err == nil {
			version = "stolen"
		}
	case "kvport-marks":
		_ = os.WriteFile(filepath.Join(filepath.Dir(os.Args[0]), "marked"), nil, 0o600)
	case "kvport-badlog":
		fmt.Fprint(os.Stderr, badLog)
	case "kvport-exits":
		if len(os.Args) == 1 {
			fmt.Fprintln(os.Stderr, "no licence")
			os.Exit(3)
		}
	case "kvport-talks":
		if len(os.Args) == 1 {
			fmt.Println("hello")
			select {}
		}
	}
	sdk.Serve(connector.Plugin{
		Name: "TestConnector", Aliases: []string{"TestAlias"}, Version: version, Environment: []string{"KVPORT_TEST_SEEN", "TOKEN_OF_ANOTHER"}, Needs: connector.Needs{Writes: []string{"dir"}},
		Capabilities: connector.CanPlan | connector.CanHold | connector.CanReset | connector.CanStat | connector.CanEvents | connector.CanLayers | connector.CanLease | connector.CanReshape,
		Schema:       sdk.SchemaOf[config](),
		Describe: func(_ context.Context, raw json.RawMessage) (connector.Info, error) {
			c, err := sdk.DecodeConfig[config](raw)
			failEarly(c.Fault, "describe")
			info := connector.Info{Name: "TestConnector", Capabilities: connector.CanReset, Scope: connector.ScopeNode, Lossy: c.Lossy}
			if _, err := os.Stat(filepath.Join(c.Dir, "replaced")); err == nil {
				info.Groups = true // as another binary might say
			}
			if c.Scope == "engine" {
				info.Scope = connector.ScopeEngine
			}
			info.ArenaBytes, info.ArenaField, info.BeyondMachine = c.Arena, "arena", c.Beyond
			if _, err := os.Stat(filepath.Join(c.Dir, "mounted")); err == nil {
				info.BeyondMachine = "dir is on a network file system (NFS)"
			}
			if _, err := os.Stat(filepath.Join(c.Dir, "larger")); err == nil {
				info.ArenaBytes++
			}
			if c.Layout != "" {
				info.Layouts = []string{c.Layout}
			}
			if c.Fault == "plan" {
				info.Capabilities |= connector.CanPlan
			}
			if strings.HasPrefix(c.Fault, "reshape") {
				info.Capabilities |= connector.CanHold | connector.CanReshape
			}
			if c.Fault == "hold" || c.Fault == "hold_fence" {
				info.Capabilities |= connector.CanHold
			}
			if c.Fault == "lease" {
				info.Capabilities |= connector.CanHold | connector.CanLease
			}
			if strings.HasPrefix(c.Fault, "stat") {
				info.Capabilities |= connector.CanStat
				info.Stats = statInfos(c.Fault)
			}
			if strings.HasSuffix(c.Fault, "layers") {
				info.Capabilities |= connector.CanLayers
			}
			if c.Fault == "events" {
				info.Capabilities |= connector.CanEvents
			}
			return info, err
		},
		Scheduler: func(_ context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
			c, err := sdk.DecodeConfig[config](raw)
			failEarly(c.Fault, "open")
			if err := count(&env, c.Arena, 0); err != nil {
				return nil, err
			}
			if err := tellKeys(c.Dir, &env); err != nil {
				return nil, err
			}
			s := &side{config: c, env: env}
			if _, err := os.Stat(filepath.Join(c.Dir, "poorer")); err == nil {
				return poorer{&scheduler{s}}, nil
			}
			if strings.HasPrefix(c.Fault, "stat") {
				return &counter{scheduler: scheduler{s}}, err
			}
			if strings.HasPrefix(c.Fault, "reshape") {
				return &cutter{holder{scheduler: scheduler{s}, consumed: make(chan connector.HoldID, 64)}}, err
			}
			switch c.Fault {
			case "events":
				return &eventScheduler{scheduler{s}}, err
			case "plan":
				return &planner{scheduler{s}}, err
			case "lease":
				return newLeaser(s), err
			case "hold", "hold_fence":
				return &holder{scheduler: scheduler{s}, consumed: make(chan connector.HoldID, 64)}, err
			}
			return &scheduler{s}, err
		},
		Worker: func(_ context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
			c, err := sdk.DecodeConfig[config](raw)
			if os.Getenv("HOME") != "" {
				err = fmt.Errorf("the environment is not empty: %q", os.Environ())
			}
			if err := count(&env, c.Arena, 1+env.Rank); err != nil {
				return nil, err
			}
			if c.Fault == "escape" {
				if err := escape(&c); err != nil {
					return nil, err
				}
			}
			w := &worker{&side{config: c, env: env}}
			if strings.HasSuffix(c.Fault, "layers") {
				return &layered{w}, err
			}
			if strings.HasPrefix(c.Fault, "reshape") {
				return &reshaper{worker: w}, err
			}
			return w, err
		},
	})
}

// count adds one to a byte of the arena.
func count(env *connector.Env, size int64, at int) error {
	if err := env.CheckArena(size); err != nil {
		return err
	}
	if size > 0 {
		env.Arena[at]++
	}
	return nil
}

// failEarly ends or hangs a process in the phase that the fault names.
func failEarly(fault, phase string) {
	switch fault {
	case "exit_" + phase:
		_, _ = syscall.Write(2, []byte("no licence to "+phase+"\n")) // os.Stderr goes over the connection, that ends
		os.Exit(3)
	case "hang_" + phase:
		_, _ = syscall.Write(2, []byte("waiting for a licence to "+phase+"\n"))
		select {}
	}
}

type side struct {
	config
	env   connector.Env
	calls atomic.Int64
}

// due counts a call and says whether it goes wrong.
func (s *side) due(fault string) bool {
	if s.Fault != fault || s.calls.Add(1) < s.At {
		return false
	}
	if s.Once {
		f, err := os.OpenFile(filepath.Join(s.Dir, "happened"), os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return false
		}
		_ = f.Close()
	}
	return true
}

func (s *side) path(k connector.BlockKey, rank int) string {
	return filepath.Join(s.Dir, fmt.Sprintf("%s.%d", k, rank))
}

func (s *side) Close() error { return nil }

type scheduler struct{ *side }

func (s *scheduler) Match(ctx context.Context, qs []connector.Query) ([]connector.Match, error) {
	time.Sleep(time.Duration(s.MatchMS) * time.Millisecond)
	switch {
	case s.due("hang_match"):
		select {}
	case s.due("crash_match"):
		os.Exit(3)
	case s.due("busy_match"):
		return nil, connector.ErrBusy
	}
	out := make([]connector.Match, len(qs))
	for i, q := range qs {
		size := s.env.Layout.Groups[0].BlockTokens
		n := min(q.Computed/size, len(q.Keys))
		for _, k := range q.Keys[n:] {
			if _, err := os.Stat(s.path(k, s.env.World-1)); err != nil {
				break
			}
			n++
		}
		out[i].Tokens = max(n*size-q.Computed, 0)
		switch {
		case s.due("more"):
			out[i].Tokens = q.Tokens + 1
		case s.due("all"):
			out[i].Tokens = q.Tokens
		case s.due("groups"):
			out[i].Groups = 1 << 30
		}
	}
	return out, nil
}

func (s *scheduler) Reset(context.Context) (bool, error) {
	files, err := os.ReadDir(s.Dir)
	for _, f := range files {
		err = os.Remove(filepath.Join(s.Dir, f.Name()))
	}
	return err == nil, err
}

// planner plans the loads and saves it is offered, less the last block of each.
type planner struct{ scheduler }

func (p *planner) Plan(_ context.Context, s *connector.Step) (*connector.Plan, error) {
	cut := func(in []connector.Transfer) (out []connector.Transfer) {
		for _, t := range in {
			n := p.env.Layout.Groups[0].BlockTokens
			if len(t.Blocks) > 1 {
				t.Blocks, t.Tokens, t.Extra = t.Blocks[:len(t.Blocks)-1], t.Tokens-n, []byte("planned")
				out = append(out, t)
			}
		}
		return out
	}
	return &connector.Plan{Loads: cut(s.Admitted), Saves: append(cut(s.Computed), connector.Transfer{
		Request: "invented", Tokens: 16, Blocks: []connector.Block{{ID: 1}},
	})}, nil
}

// holder keeps what ends remotely until the file "fetched" appears.
type holder struct {
	scheduler
	mu       sync.Mutex
	last     connector.HoldID
	consumed chan connector.HoldID
}

func (h *holder) Finish(_ context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]connector.Hold, len(ended))
	for i, e := range ended {
		if e.Remote {
			h.last++
			out[i] = connector.Hold{ID: h.last, Ticket: []byte("ticket of " + e.Request)}
			if strings.HasPrefix(string(e.Request), "fetched") {
				h.consumed <- h.last
			}
		}
	}
	return out, nil
}

func (h *holder) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	select {
	case id := <-h.consumed:
		return []connector.HoldID{id, 4711}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// leaser keeps holds of requests named "kept" as long as it may; what it was told is over is in the next ticket. How
// often it was told that a hold is renewed is in the file "renewed" and its number.
type leaser struct {
	holder
	kept    []connector.HoldID
	over    []connector.HoldID
	named   []connector.HoldID // by the last answer
	renewed map[connector.HoldID]int
}

func newLeaser(s *side) *leaser {
	return &leaser{holder: holder{scheduler: scheduler{s}, consumed: make(chan connector.HoldID, 64)}, renewed: map[connector.HoldID]int{}}
}

func (l *leaser) Finish(ctx context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	out, err := l.holder.Finish(ctx, ended)
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, e := range ended {
		if out[i].ID == 0 {
			continue
		}
		out[i].TTL, out[i].Ticket = 300*time.Millisecond, fmt.Appendf(nil, "%v", l.over)
		if !strings.HasPrefix(string(e.Request), "forgotten") {
			out[i].TTL = max(out[i].TTL, time.Duration(l.LeaseMS)*time.Millisecond)
		}
		if strings.HasPrefix(string(e.Request), "kept") {
			l.kept = append(l.kept, out[i].ID)
		}
	}
	return out, err
}

func (l *leaser) Renewals(ctx context.Context, ended []connector.HoldID) ([]connector.HoldID, error) {
	if err := l.hear(ended); err != nil {
		return nil, err
	}
	timer := time.NewTimer(50 * time.Millisecond)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = append(l.over, ended...)
	l.kept = slices.DeleteFunc(l.kept, func(id connector.HoldID) bool { return slices.Contains(ended, id) })
	l.named = slices.Clone(l.kept)
	return slices.Clone(l.kept), nil
}

// hear counts what the last answer has named and the host has not refused.
func (l *leaser) hear(ended []connector.HoldID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range l.named {
		if slices.Contains(ended, id) {
			continue
		}
		l.renewed[id]++
		path := filepath.Join(l.Dir, fmt.Sprint("renewed", id))
		if err := os.WriteFile(path+".new", fmt.Append(nil, l.renewed[id]), 0o600); err != nil {
			return err
		}
		if err := os.Rename(path+".new", path); err != nil {
			return err
		}
	}
	l.named = nil
	return nil
}

func statInfos(fault string) []connector.StatInfo {
	infos := []connector.StatInfo{
		{Name: "calls_total", Help: "Calls.", Kind: connector.Counter, Labels: []string{"of"}},
		{Name: "level", Help: "A level.", Kind: connector.Gauge},
	}
	if fault == "stat_bad_name" {
		infos[0].Name = "Calls"
	}
	return infos
}

// counter shows how often it was asked.
type counter struct {
	scheduler
	n float64
}

func (c *counter) Stats(context.Context) ([]connector.Stat, error) {
	c.n++
	stats := []connector.Stat{{Name: "calls_total", Labels: []string{"stats"}, Value: c.n}, {Name: "level", Value: 7}}
	if c.Fault == "stat_many" {
		stats = append(stats, connector.Stat{Name: "unknown"}, connector.Stat{Name: "level", Labels: []string{"one"}})
		for i := range connector.MaxSamples - len(stats) {
			stats = append(stats, connector.Stat{Name: "calls_total", Labels: []string{fmt.Sprint(c.n, i)}})
		}
	}
	return stats, nil
}

// saved are the events of this process.
var (
	saved = make(chan connector.BlockEvent, 1024)
	seq   atomic.Uint64
)

// eventScheduler reports each block that was saved.
type eventScheduler struct{ scheduler }

func (t *eventScheduler) Events(ctx context.Context) ([]connector.BlockEvent, error) {
	select {
	case e := <-saved:
		return []connector.BlockEvent{e}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type worker struct{ *side }

func (w *worker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	time.Sleep(time.Duration(w.SlowMS) * time.Millisecond)
	switch {
	case w.due("hang_load"):
		select {}
	case w.due("wait_load"):
		<-ctx.Done()
		return ctx.Err()
	case w.due("panic_load"):
		panic("as told")
	case w.due("crash_load"):
		os.Exit(3)
	case w.due("hide_fence"), w.due("hold_fence"):
		hideFence(w.Dir)
	case w.due("leave_child"):
		leaveChild(w.Dir)
	case w.due("busy_load"):
		if w.calls.Load() < w.At+3 {
			return connector.ErrBusy
		}
	case w.due("lie_load"):
		return nil
	case w.due("outdated"):
		return fmt.Errorf("another version has stored it: %w", connector.ErrOutdated)
	case w.due("foreign"):
		return &connector.BlockError{Blocks: []connector.BlockID{t.Blocks[0].ID + 1000}, Err: connector.ErrGone}
	}
	var missing []connector.BlockID
	why := connector.ErrGone
	for _, b := range t.Blocks {
		spans, err := kv.Spans(b)
		if err != nil {
			return err
		}
		data, err := os.ReadFile(w.path(b.Key, w.env.Rank))
		if err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				why = err
			}
			missing = append(missing, b.ID)
			continue
		}
		if w.due("damage") {
			data[0] ^= 1
		}
		for _, s := range spans {
			data = data[copy(s, data):]
		}
	}
	if missing != nil {
		return &connector.BlockError{Blocks: missing, Err: why}
	}
	if w.due("flip_load") {
		go flip(t, kv)
	}
	return nil
}

// flip goes on writing the blocks of a transfer that is over.
func flip(t *connector.Transfer, kv *connector.KV) {
	for {
		for _, b := range t.Blocks {
			view := kv.View(0, b.ID)
			for i := range view {
				view[i] ^= 1
			}
		}
	}
}

func (w *worker) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	switch {
	case w.due("hang_save"):
		select {}
	case w.due("crash_save"):
		os.Exit(3)
	case w.due("full_save"):
		return fmt.Errorf("write %s: %w", w.Dir, syscall.ENOSPC)
	case w.due("fail_save"):
		return &connector.BlockError{Blocks: []connector.BlockID{t.Blocks[len(t.Blocks)-1].ID}, Err: connector.ErrGone}
	}
	for _, b := range t.Blocks {
		spans, err := kv.Spans(b)
		if err != nil {
			return err
		}
		path := w.path(b.Key, w.env.Rank)
		if _, err := os.Stat(path); err == nil && !t.Replace {
			continue
		}
		var data []byte
		for _, s := range spans {
			data = append(data, s...)
		}
		if err := os.WriteFile(path+".new", data, 0o600); err != nil {
			return err
		}
		if err := os.Rename(path+".new", path); err != nil {
			return err
		}
		if w.Fault == "events" {
			saved <- connector.BlockEvent{
				Seq: seq.Add(1), Kind: connector.BlocksStored, Keys: []connector.BlockKey{b.Key}, Medium: "disk", Scope: connector.ScopeNode,
			}
		}
	}
	return nil
}

// tellKeys writes down the keys that the host gave, for a test that has put a file there to ask for it.
func tellKeys(dir string, env *connector.Env) error {
	path := filepath.Join(dir, "tell-keys")
	if _, err := os.Stat(path); err != nil {
		return nil
	}
	return os.WriteFile(path, fmt.Appendf(nil, "%s %s", hex.EncodeToString(env.LinkKey), hex.EncodeToString(env.RouterKey)), 0o600)
}
