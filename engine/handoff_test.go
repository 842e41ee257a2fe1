package engine

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/kvcache"
	"github.com/kvport/kvport/engine/sched"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// long is one request whose prompt has several full blocks at every block size used here.
func long(id connector.RequestID, length int) Request {
	return Request{ID: id, Prompt: slices.Repeat([]int32{5, 6, 7, 8, 9}, length/5), MaxTokens: 3, IgnoreEOS: true}
}

// What became of a ticket is known with the first token, and says why nothing was loaded.
func TestHandoff(t *testing.T) {
	cfg := simConfig(t)
	dir := storage(t)
	p := start(t, shared(t, cfg, connector.RoleProducer, dir, ""))
	ticket := func(id connector.RequestID) Request { return prefill(t, p, []Request{long(id, 200)})[0] }
	ask := func(r *rig, req Request) Handoff {
		var first *Handoff
		var last Output
		for o := range submit(t, r, req) {
			if first == nil && len(o.Tokens) > 0 {
				first = &o.Usage.Handoff
			}
			last = o
		}
		require.Equal(t, last.Usage.Handoff, *first)
		return last.Usage.Handoff
	}
	d := start(t, shared(t, cfg, connector.RoleConsumer, dir, ""))
	require.Equal(t, Handoff{Result: HandoffLoaded}, ask(d, ticket("a")))
	require.Equal(t, Handoff{Result: HandoffLocal}, ask(d, ticket("b")))
	require.Equal(t, Handoff{}, ask(d, long("c", 200)), "it brought none")

	used := ticket("d")
	require.Equal(t, Handoff{Result: HandoffLocal}, ask(d, used))
	cold := simConfig(t)
	cold.PrefixCaching = false
	d = start(t, shared(t, cold, connector.RoleConsumer, dir, ""))
	ask(d, used)
	used.ID = "e"
	require.Equal(t, Handoff{HandoffRefused, "replayed"}, ask(d, used))

	wide := cold
	wide.BlockSize = 32
	require.Equal(t, Handoff{HandoffRefused, "block_size"}, ask(start(t, shared(t, wide, connector.RoleConsumer, dir, "")), ticket("f")))
	require.Equal(t, Handoff{HandoffRefused, "role"}, ask(p, ticket("g")))
	require.Equal(t, Handoff{HandoffRefused, "unsupported"}, ask(start(t, cold), ticket("h")))

	other := shared(t, cold, connector.RoleConsumer, dir, "")
	other.Connector.Settings.TicketKeyFile = filepath.Join(t.TempDir(), "other.key")
	require.NoError(t, os.WriteFile(other.Connector.Settings.TicketKeyFile, []byte("another key of thirty-two bytes."), 0o600))
	require.Equal(t, Handoff{HandoffRefused, "key"}, ask(start(t, other), ticket("i")))

	tail := ticket("j")
	tail.Prompt = append(slices.Clone(tail.Prompt), slices.Repeat([]int32{1}, 64)...)
	require.Equal(t, Handoff{Result: HandoffLoaded}, ask(d, tail), "what the ticket promised, though the prompt is longer")

	lost := ticket("k")
	require.NoError(t, os.RemoveAll(dir))
	require.NoError(t, os.Mkdir(dir, 0o700))
	d = start(t, shared(t, cold, connector.RoleConsumer, dir, `{"deadlines": {"later": "100ms"}}`))
	require.Equal(t, Handoff{HandoffNone, "gone"}, ask(d, lost))
}

// A damaged block ends a load; what was loaded before it is a part.
func TestHandoffOfDamagedBlocks(t *testing.T) {
	cfg := simConfig(t)
	cfg.PrefixCaching = false
	dir := storage(t)
	decode := prefill(t, start(t, shared(t, cfg, connector.RoleProducer, dir, "")), []Request{long("a", 200)})
	files := 0
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil || len(data) == 0 {
			return err
		}
		files++
		data[len(data)-100] ^= 4
		return os.WriteFile(path, data, 0o600)
	}))
	require.Positive(t, files)
	d := start(t, shared(t, cfg, connector.RoleConsumer, dir, ""))
	require.Equal(t, Handoff{HandoffNone, "load_failed"}, collect(submit(t, d, decode[0])).last.Usage.Handoff)
}

// An engine says what must agree at both ends of a hand-off, and no more of its key than its name.
func TestFit(t *testing.T) {
	dir := storage(t)
	p := start(t, shared(t, simConfig(t), connector.RoleProducer, dir, "")).Info().Fit
	d := start(t, shared(t, simConfig(t), connector.RoleConsumer, dir, "")).Info().Fit
	alone := start(t, simConfig(t)).Info().Fit
	require.Equal(t, "kv_producer", p.Role)
	require.Equal(t, "kv_consumer", d.Role)
	require.Equal(t, "none", alone.Role)
	require.Equal(t, testkit.Typical(t, fixture.Store).Connector, p.Connector)
	require.Equal(t, "shared", p.Scope)
	require.True(t, p.Carries)
	require.False(t, alone.Carries)
	require.Equal(t, 16, p.BlockSize)
	require.Regexp(t, `^block_size 16, 3 layers in 1 groups, 1 ranks, \d+ bytes a block and rank, sim/`, p.ShapeText)
	require.NotEqual(t, p.EngineID, d.EngineID)
	require.Regexp(t, "^[0-9a-f]{16}$", p.TicketKey)
	for _, same := range [][2]string{{p.Model, d.Model}, {p.Model, alone.Model}, {p.Shape, d.Shape}, {p.TicketKey, d.TicketKey}} {
		require.NotEmpty(t, same[0])
		require.Equal(t, same[0], same[1])
	}
	data, err := json.Marshal(p)
	require.NoError(t, err)
	require.NotContains(t, string(data), "0123456789abcdef")
}

// TestHandoffOfForgottenTicket: what a store has of a prompt whose ticket brought nothing is not what the ticket promised.
func TestHandoffOfForgottenTicket(t *testing.T) {
	pool := kvcache.New(8)
	cfg := Config{BlockSize: 16, Connector: &host.Config{Role: connector.RoleConsumer}}
	l := &loop{e: &Engine{host: &host.Host{}, cfg: cfg}, pool: pool}
	for want, b := range map[Handoff]brought{
		{Result: HandoffLoaded}:      {any: true, promised: 32},
		{HandoffNone, "load_failed"}: {any: true, promised: 32, failed: true, forgot: true},
	} {
		require.Equal(t, want, l.handoff(&stream{prompt: 40, brought: b}, sched.Output{External: 32}))
	}
}

// A load whose blocks are lost has failed; a lost save says nothing of the ticket.
func TestHandoffOfLostLoad(t *testing.T) {
	for kind, failed := range map[host.EventKind]bool{host.Loaded: true, host.Saved: false} {
		pool := kvcache.New(8)
		l := &loop{pool: pool, sched: sched.New(sched.Config{}, pool), streams: map[connector.RequestID]*stream{"a": {brought: brought{any: true}}}}
		l.event(host.Event{Kind: kind, Request: "a", Lost: true}, true)
		require.Equal(t, failed, l.streams["a"].brought.failed)
	}
}
