package host

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/verify/testkit"
)

// A connector whose blocks no other engine can load is of no use between prefill and decode: the start says
// so, once, and only where somebody asked for that.
func TestEngineScopeIsToldAtStart(t *testing.T) {
	for _, tt := range []struct {
		role connector.Role
		info connector.Info
		told int
	}{
		{connector.RoleProducer, connector.Info{Name: "X", Scope: connector.ScopeEngine}, 1},
		{connector.RoleConsumer, connector.Info{Name: "X", Scope: connector.ScopeEngine}, 1},
		{connector.RoleBoth, connector.Info{Name: "X", Scope: connector.ScopeEngine}, 0},
		{connector.RoleProducer, connector.Info{Name: "X", Scope: connector.ScopeEngine, Capabilities: connector.CanHold}, 0},
		{connector.RoleProducer, connector.Info{Name: "X", Scope: connector.ScopeShared}, 0},
		{connector.RoleProducer, connector.Info{Name: "X"}, 0}, // over a pipe
	} {
		var log testkit.Log
		h := &Host{cfg: &Config{Role: tt.role}, info: tt.info, log: slog.New(slog.NewTextHandler(&log, nil))}
		h.warnScope()
		require.Equal(t, tt.told, strings.Count(log.String(), "level=WARN"), "%+v", tt)
		require.Equal(t, tt.told, strings.Count(log.String(), "keeps blocks inside one engine"))
	}
}

// An engine says by which ways its blocks leave it and come to it: a MultiConnector's tickets are for MultiConnectors
// with the same child, and every engine sees a shared store.
func TestWaysOfBlocks(t *testing.T) {
	info := func(name string, scope connector.Scope, can connector.Capability) connector.Info {
		return connector.Info{Name: name, Scope: scope, Capabilities: can}
	}
	holder, store := info("Holder", connector.ScopeEngine, connector.CanHold), info("Store", connector.ScopeShared, 0)
	one := func(i connector.Info, role connector.Role) *Host { return &Host{cfg: &Config{Role: role}, info: i} }
	child := func(i connector.Info) member { return member{child: &child{src: &source{info: i}}} }
	children := &composite{
		members: []member{child(info("Memory", connector.ScopeEngine, 0)), child(holder), child(store), {composite: &composite{
			members: []member{child(holder)}, cfg: &Config{Children: []*Config{{Role: connector.RoleBoth, tag: "Inner"}}},
		}}},
		cfg: &Config{Children: []*Config{
			{Role: connector.RoleBoth, tag: "Memory"},
			{Role: connector.RoleProducer, tag: "Holder"},
			{Role: connector.RoleConsumer, tag: "Store"},
			{Role: connector.RoleBoth, tag: "Nested"},
		}},
	}
	for name, tt := range map[string]struct {
		h            *Host
		gives, takes []string
	}{
		"memory of one engine": {one(info("M", connector.ScopeEngine, 0), connector.RoleBoth), []string{}, []string{}},
		"holder":               {one(holder, connector.RoleProducer), []string{"Holder"}, []string{}},
		"consumer":             {one(holder, connector.RoleConsumer), []string{}, []string{"Holder"}},
		"shared store":         {one(store, connector.RoleBoth), []string{"a shared store", "the node's Store"}, []string{"a shared store", "the node's Store"}},
		"store of a node":      {one(info("S", connector.ScopeNode, 0), connector.RoleBoth), []string{"the node's S"}, []string{"the node's S"}},
		"children":             {&Host{cfg: &Config{Role: connector.RoleBoth}, composite: children}, []string{"MultiConnector/Holder", "MultiConnector/Nested/Inner"}, []string{"a shared store", "the node's Store", "MultiConnector/Nested/Inner"}},
		"children in a plugin": {one(info(MultiName, connector.ScopeShared, connector.CanHold), connector.RoleBoth), nil, nil},
	} {
		require.Equal(t, tt.gives, tt.h.ways(connector.Role.Saves), name)
		require.Equal(t, tt.takes, tt.h.ways(connector.Role.Loads), name)
	}
}

// A refused ticket is told in words that an operator can act on, and the host remembers why for the answer.
func TestRefusalsAreRemembered(t *testing.T) {
	words := func(text string) func(*Engine) { return func(e *Engine) { e.ShapeText = text } }
	dir := t.TempDir()
	p := newRig(t, rigOptions{dir: dir, engine: "p", change: words("block_size 32, 2 layers")})
	same := newRig(t, rigOptions{dir: dir, change: words("block_size 32, 2 layers")})
	var log testkit.Log
	o := rigOptions{dir: dir, engine: "d", shape: "other", change: words("block_size 16, 2 layers")}
	cfg, eng, opts := o.build(t)
	opts.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	h, err := Open(t.Context(), cfg, eng, opts)
	require.NoError(t, err)
	d := &rig{Host: h, t: t}
	defer func() { require.NoError(t, d.closeNow()) }()

	ks := keys(1, 2)
	p.save("a", ks, 0)
	ticket := p.end("a", 33, true).Ticket
	d.match(query("x", ks), ticket)
	_, refused := d.Brought("x")
	require.Equal(t, "block_size", refused)
	require.Contains(t, log.String(), `its blocks are made as \"block_size 32, 2 layers\", ours as \"block_size 16, 2 layers\"`)
	d.match(query("y", ks), append([]byte{9}, ticket...))
	_, refused = d.Brought("y")
	require.Equal(t, "key", refused)
	require.Contains(t, log.String(), "see kvport.ticket_key_file")
	same.match(query("x", ks), ticket)
	promised, refused := same.Brought("x")
	require.Equal(t, 32, promised)
	require.Empty(t, refused)
	_, refused = same.Brought("nobody")
	require.Empty(t, refused)
}
