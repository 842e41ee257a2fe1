package engine

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model/sim"
	"github.com/kvport/kvport/engine/sched"
	"github.com/kvport/kvport/host"
)

// peered is the config of an engine whose connector moves blocks from engine to engine.
func peered(t testing.TB, cfg Config, role connector.Role, dir, extra string) Config {
	key := filepath.Join(dir, "ticket.key")
	require.NoError(t, os.WriteFile(key, []byte("0123456789abcdef0123456789abcdef"), 0o600))
	path, err := json.Marshal(dir)
	require.NoError(t, err)
	c, err := host.ParseConfig(fmt.Sprintf(`{"kv_connector": "HoldConnector", "kv_role": %q,
		"kv_connector_extra_config": {"dir": %s%s}}`, role, path, extra))
	require.NoError(t, err)
	c.Settings.TicketKeyFile = key
	cfg.Connector, cfg.PluginPath = c, []string{plugins}
	return cfg
}

// sockets is a folder whose name is short enough for sockets.
func sockets(t testing.TB) string {
	dir, err := os.MkdirTemp("", "kvp") //nolint:usetesting // the names of tests make paths too long for sockets
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// TestLostHold: when a plugin leaves somebody behind who may use its blocks for ever, those that it held are lost as well
// as those that it loaded. A request that has no room in what is left ends with an error and does not wait.
func TestLostHold(t *testing.T) {
	dir := sockets(t)
	parked, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "park.sock"), Net: "unix"})
	require.NoError(t, err)
	defer parked.Close()
	c, err := host.ParseConfig(fmt.Sprintf(`{"kv_connector": "TestConnector", "kv_role": "kv_both",
		"kv_connector_extra_config": {"dir": %q, "fault": "hold_fence", "once": true}, "kvport": {"trust": "in-place", "heartbeat": {"limit": "1m"},
		"deadlines": {"fence": "300ms", "later": "1m", "transfer": "1m", "finish": "1m", "hold": "5m"}}}`, dir))
	require.NoError(t, err)
	cfg := simConfig(t)
	cfg.NumBlocks, cfg.PrefixCaching, cfg.Connector, cfg.PluginPath = 12, false, c, []string{plugins}
	r := start(t, cfg)
	req := long("a", 80)
	req.MaxTokens = 1
	prefill(t, r, []Request{req}) // holds 5 blocks
	req.ID = "b"
	got := collect(submit(t, r, req)) // begins to load 4 blocks, and does not have 5 others then
	require.ErrorIs(t, got.last.Err, sched.ErrNoRoom)
	require.Equal(t, 9, r.Health().Host.BlocksLost)
	short := long("c", 20)
	short.MaxTokens = 1
	require.Len(t, collect(submit(t, r, short)).tokens, 1)
}

// released waits until a producer's holds are over.
func released(t testing.TB, p *rig) {
	require.Eventually(t, func() bool { return p.Health().Host.Held == 0 }, time.Minute, time.Millisecond)
	requireIdle(t, p)
}

// TestPartialTails: a consumer gets all of a prompt but its last token from a producer that keeps its
// blocks, the last block's part too.
func TestPartialTails(t *testing.T) {
	reqs := requests(24)
	for i, n := range []int{16, 17, 31, 32, 33, 48} { // around the ends of blocks
		reqs[i].Prompt = slices.Clone(slices.Repeat(reqs[i].Prompt, 48)[:n])
	}
	for _, c := range []struct {
		ranks, groups int
		p, d          sim.Stride
	}{{1, 1, sim.ByLayer, sim.ByLayer}, {3, 2, sim.ByBlock, sim.ByShared}, {2, 3, sim.ByPlane, sim.ByPlane}} {
		t.Run(fmt.Sprintf("%d ranks %d groups", c.ranks, c.groups), func(t *testing.T) {
			want := tokensOf(start(t, spreadConfig(t, c.ranks, c.groups, c.d)).ask(t, reqs, 1))
			dir := sockets(t)
			p := start(t, peered(t, spreadConfig(t, c.ranks, c.groups, c.p), connector.RoleProducer, dir, ""))
			cfg := spreadConfig(t, c.ranks, c.groups, c.d)
			cfg.PrefixCaching = false
			d := start(t, peered(t, cfg, connector.RoleConsumer, dir, ""))
			decode := prefill(t, p, reqs)
			require.Positive(t, p.Health().Host.Held)
			got := d.ask(t, decode, 8)
			require.Equal(t, want, tokensOf(got))
			for i, r := range got {
				require.Equal(t, len(reqs[i].Prompt)-1, r.last.Usage.External, "prompt of %d tokens", len(reqs[i].Prompt))
			}
			require.Zero(t, d.metric(t, "kvport_integrity_failures_total", ""))
			released(t, p)
			requireIdle(t, d)
		})
	}
}

// TestOtherTail: a ticket for a prompt that ends differently gives only its full blocks.
func TestOtherTail(t *testing.T) {
	cfg := spreadConfig(t, 2, 2, sim.ByLayer)
	cfg.PrefixCaching = false
	dir := sockets(t)
	p := start(t, peered(t, cfg, connector.RoleProducer, dir, ""))
	d := start(t, peered(t, cfg, connector.RoleConsumer, dir, ""))
	ours := Request{ID: "a", Prompt: slices.Repeat([]int32{40, 41, 42}, 20), MaxTokens: 8, IgnoreEOS: true}
	theirs := ours
	theirs.Prompt = slices.Clone(ours.Prompt)
	theirs.Prompt[50]++ // in the fourth block, of which there are 12 tokens
	want := start(t, cfg).ask(t, []Request{theirs}, 1)
	theirs.Ticket = prefill(t, p, []Request{ours})[0].Ticket
	got := d.ask(t, []Request{theirs}, 1)
	require.Equal(t, tokensOf(want), tokensOf(got))
	require.Equal(t, 48, external(got))
	require.Positive(t, d.metric(t, "kvport_integrity_failures_total", ""))
	released(t, p)
}

// TestFailingRank has the worker of one rank fail a block of each load, and damage one: the block is
// computed on all ranks.
func TestFailingRank(t *testing.T) {
	reqs := requests(16)
	want := tokensOf(start(t, spreadConfig(t, 3, 2, sim.ByBlock)).ask(t, reqs, 1))
	for _, extra := range []string{`, "fail_rank": 1`, `, "fail_rank": 2`, `, "fail_rank": 3`, `, "damage": true`} {
		t.Run(extra, func(t *testing.T) {
			dir := sockets(t)
			cfg := spreadConfig(t, 3, 2, sim.ByBlock)
			p := start(t, peered(t, cfg, connector.RoleProducer, dir, ""))
			decode := prefill(t, p, reqs)
			cfg.PrefixCaching = false
			d := start(t, peered(t, cfg, connector.RoleConsumer, dir, extra))
			got := d.ask(t, decode, 8)
			require.Equal(t, want, tokensOf(got))
			all := 0
			for _, r := range reqs {
				all += len(r.Prompt) - 1
			}
			require.Less(t, external(got), all)
			require.Positive(t, d.metric(t, "kvport_failed_loads_total", ""))
			requireIdle(t, d)
		})
	}
}
