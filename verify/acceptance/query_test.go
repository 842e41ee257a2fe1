package acceptance

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

// cached is the answer to a cache query.
type cached struct {
	Tokens int `json:"cached_tokens"`
	Engine inScope
	Node   inScope
	Shared inScope
}

type inScope struct {
	Tokens  int      `json:"cached_tokens"`
	Blocks  []string `json:"block_ids"`
	Unknown bool
}

// queries asks engines what they have.
type queries struct {
	*rig.Rig
	prompt string
	full   int // tokens of its full blocks before its last token
}

// ask makes a cache query until all connectors have answered in time.
func (q *queries) ask(e *cluster.Process) (c cached) {
	q.Helper()
	require.Eventually(q, func() bool {
		a := q.Post(e, q.prompt, 9, map[string]json.RawMessage{"cache_query": []byte("true")})
		require.Empty(q, a.Choices[0].Tokens)
		c = cached{}
		require.NoError(q, json.Unmarshal(a.Transfer["kvport_cache"], &c))
		return !c.Engine.Unknown && !c.Node.Unknown && !c.Shared.Unknown
	}, time.Minute, time.Millisecond)
	require.Equal(q, c.Tokens, c.Engine.Tokens+c.Node.Tokens+c.Shared.Tokens)
	require.Len(q, append(append(c.Engine.Blocks, c.Node.Blocks...), c.Shared.Blocks...), c.Tokens/16)
	return c
}

func (q *queries) loaded(e *cluster.Process) int {
	return int(q.Metrics(e).Sum("kvport_prompt_tokens_total", `source="external"`))
}

// TestCacheQuery: what an engine says that it has of a prompt is what the next request with it gets, through every
// connector that keeps blocks, and the query itself loads nothing. Where blocks stay in an engine's cache, its ticket
// brings them to another one.
func TestCacheQuery(t *testing.T) {
	b := newBackend(t)
	wanted := func(f *fixture.Fixture) bool {
		s := &f.Setups[0]
		return s.Pairs && (s.Keeps || f.Holds) && (*flagConnector == "" || slices.Contains(strings.Split(*flagConnector, ","), f.Connector))
	}
	for _, plugin := range rig.Connectors(t, wanted) {
		f := scene{Fixture: plugin, Setup: plugin.Setups[0], name: plugin.Connector}
		if f.name != host.MultiName { // the host composes that one
			f.binary = filepath.Join(testkit.Root(t), "bin", "kvport-"+filepath.Base(f.Folder))
		}
		t.Run(f.name, func(t *testing.T) {
			q := &queries{Rig: rig.New(t), prompt: rig.Texts(t, *rig.Seed+4400, 1, 1200, 1300)[0]}
			q.full = (len(q.prompt) - 1) / 16 * 16
			own := b.under(t, "query "+f.name)
			engine := func(name string) *cluster.Process {
				return q.ServeModel("sim", name, f.config("kv_both", name, f.extra(t, own, "kv_both"), `"deadlines":{"handshake":"30s"}`))
			}
			p, d := engine("P"), engine("D")
			require.Zero(t, q.ask(p).Tokens)
			want := q.Post(p, q.prompt, 8, nil).Choices[0].Tokens
			q.Idle(p)
			require.Equal(t, q.full, q.ask(p).Engine.Tokens)
			there := q.ask(d)
			require.Zero(t, q.loaded(d), "a query loads nothing")
			params := map[string]json.RawMessage(nil)
			if f.Holds {
				require.Zero(t, there.Tokens)
				params = q.Post(p, q.prompt, 1, map[string]json.RawMessage{"cache_query": []byte("true"), "hold": []byte("true")}).Transfer
				require.NotEmpty(t, params["kvport_ticket"])
				there.Tokens = q.full
			}
			require.Positive(t, there.Tokens)
			require.Equal(t, want, q.Post(d, q.prompt, 8, params).Choices[0].Tokens)
			require.Equal(t, there.Tokens, q.loaded(d))
			require.Zero(t, int(q.Metrics(d).Sum("kvport_integrity_failures_total")))
			t.Logf("%d tokens of %d; in the engine %d, on the node %d, shared %d", there.Tokens, len(q.prompt), there.Engine.Tokens, there.Node.Tokens, there.Shared.Tokens)
			q.Idle(p)
			q.Idle(d)
		})
	}
}
