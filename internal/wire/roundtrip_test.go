package wire

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// over sends a message through its encoding.
func over[M proto.Message](t require.TestingT, m M) M {
	data, err := proto.Marshal(m)
	require.NoError(t, err)
	require.NoError(t, CheckSize(data, m.ProtoReflect().Descriptor()))
	out := m.ProtoReflect().New().Interface()
	require.NoError(t, proto.Unmarshal(data, out))
	return out.(M)
}

func bytes32() *rapid.Generator[[32]byte] {
	return rapid.Custom(func(t *rapid.T) (k [32]byte) {
		copy(k[:], rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "key"))
		return k
	})
}

// some is a list that is nil when empty, as the messages give it back.
func some[T any](t *rapid.T, name string, g *rapid.Generator[T]) []T {
	list := rapid.SliceOfN(g, 0, 4).Draw(t, name)
	if len(list) == 0 {
		return nil
	}
	return list
}

func someTokens() *rapid.Generator[int] { return rapid.IntRange(0, MaxTokens) }

func genQuery() *rapid.Generator[connector.Query] {
	return rapid.Custom(func(t *rapid.T) connector.Query {
		q := connector.Query{
			Request: connector.RequestID(rapid.String().Draw(t, "request")), Tokens: someTokens().Draw(t, "tokens"),
			Ticket: some(t, "ticket", rapid.Byte()),
		}
		q.Computed = rapid.IntRange(0, q.Tokens).Draw(t, "computed")
		q.Reshaped = rapid.IntRange(0, q.Tokens).Draw(t, "reshaped")
		for _, k := range some(t, "keys", bytes32()) {
			q.Keys = append(q.Keys, k)
		}
		return q
	})
}

func genBlock() *rapid.Generator[connector.Block] {
	return rapid.Custom(func(t *rapid.T) connector.Block {
		return connector.Block{
			Key: bytes32().Draw(t, "key"), ID: connector.BlockID(rapid.Int32Min(0).Draw(t, "id")),
			Group: rapid.Uint16Max(connector.MaxGroups-1).Draw(t, "group"),
		}
	})
}

func genTransfer() *rapid.Generator[connector.Transfer] {
	return rapid.Custom(func(t *rapid.T) connector.Transfer {
		return connector.Transfer{
			Request: connector.RequestID(rapid.String().Draw(t, "request")), From: someTokens().Draw(t, "from"), Tokens: someTokens().Draw(t, "tokens"),
			Blocks: some(t, "blocks", genBlock()), Ticket: some(t, "ticket", rapid.Byte()), Replace: rapid.Bool().Draw(t, "replace"),
			Extra: some(t, "extra", rapid.Byte()), Tenant: rapid.Uint64().Draw(t, "tenant"),
		}
	})
}

func genEnded() *rapid.Generator[connector.Ended] {
	return rapid.Custom(func(t *rapid.T) connector.Ended {
		return connector.Ended{
			Request: connector.RequestID(rapid.String().Draw(t, "request")), Reason: connector.Reason(rapid.IntRange(1, 4).Draw(t, "reason")),
			Tokens: someTokens().Draw(t, "tokens"), Remote: rapid.Bool().Draw(t, "remote"), Weak: rapid.Bool().Draw(t, "weak"), Blocks: some(t, "blocks", genBlock()),
		}
	})
}

func TestCallsRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		queries := some(t, "queries", genQuery())
		gotQueries, err := QueriesFromProto(over(t, QueriesToProto(queries)))
		require.NoError(t, err)
		require.Equal(t, queries, gotQueries)

		transfer := genTransfer().Draw(t, "transfer")
		gotTransfer, err := TransferFromProto(over(t, TransferToProto(&transfer)))
		require.NoError(t, err)
		require.Equal(t, transfer, gotTransfer)

		layout := connector.Layout{Name: "l", Blocks: 3, Groups: []connector.Group{{BlockTokens: 4, Policy: connector.PolicyAll}}, Segments: []connector.Segment{{Region: 1, BlockStride: 8, Bytes: 8, Planes: 1, Heads: 2}}}
		world := rapid.IntRange(1, MaxWorld).Draw(t, "world")
		reshape := &Reshape{
			Transfer: transfer, Layout: layout,
			Source: connector.Source{Rank: rapid.IntRange(0, world-1).Draw(t, "rank"), World: world, Last: rapid.Bool().Draw(t, "last")},
		}
		gotReshape, err := ReshapeFromProto(over(t, ReshapeToProto(reshape)))
		require.NoError(t, err)
		require.Equal(t, reshape, gotReshape)

		layers := &Layers{Transfer: &transfer, Slot: rapid.IntRange(0, MaxCounters-1).Draw(t, "slot"), Call: rapid.Uint32Min(1).Draw(t, "call")}
		loads := &Layers{Transfer: layers.Transfer, Slot: layers.Slot, Call: layers.Call}
		gotLoads, err := LayersFromProto(over(t, LoadLayersToProto(loads)))
		require.NoError(t, err)
		require.Equal(t, loads, gotLoads)
		gotLayers, err := LayersFromProto(over(t, SaveLayersToProto(layers)))
		require.NoError(t, err)
		require.Equal(t, layers, gotLayers)

		step := &connector.Step{
			ID: rapid.Uint64().Draw(t, "id"), Arrived: some(t, "arrived", genQuery()), Admitted: some(t, "admitted", genTransfer()),
			Computed: some(t, "computed", genTransfer()), Ended: some(t, "ended", genEnded()),
		}
		for _, r := range some(t, "preempted", rapid.String()) {
			step.Preempted = append(step.Preempted, connector.RequestID(r))
		}
		gotStep, err := StepFromProto(over(t, StepToProto(step)))
		require.NoError(t, err)
		require.Equal(t, step, gotStep)

		ended := some(t, "ended", genEnded())
		gotEnded, err := EndedFromProto(over(t, EndedToProto(ended)))
		require.NoError(t, err)
		require.Equal(t, ended, gotEnded)
	})
}

func TestAnswersRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		matches := some(t, "matches", rapid.Custom(func(t *rapid.T) connector.Match {
			return connector.Match{
				Tokens: someTokens().Draw(t, "tokens"), Groups: rapid.Uint32().Draw(t, "groups"),
				Async: rapid.Bool().Draw(t, "async"), Later: rapid.Bool().Draw(t, "later"),
			}
		}))
		gotMatches, err := MatchesFromProto(over(t, MatchesToProto(matches)), len(matches))
		require.NoError(t, err)
		require.Equal(t, matches, gotMatches)
		_, err = MatchesFromProto(MatchesToProto(matches), len(matches)+1)
		require.ErrorIs(t, err, ErrMalformed)

		plan := &connector.Plan{Loads: some(t, "loads", genTransfer()), Saves: some(t, "saves", genTransfer())}
		gotPlan, err := PlanFromProto(over(t, PlanToProto(plan)))
		require.NoError(t, err)
		require.Equal(t, plan, gotPlan)

		holds := some(t, "holds", rapid.Custom(func(t *rapid.T) connector.Hold {
			return connector.Hold{
				ID: connector.HoldID(rapid.Uint64().Draw(t, "id")), TTL: time.Duration(rapid.Int64Range(0, 86400000).Draw(t, "ttl")) * time.Millisecond,
				Consumers: rapid.IntRange(0, MaxConsumers).Draw(t, "consumers"), Weak: rapid.Bool().Draw(t, "weak"), Ticket: some(t, "ticket", rapid.Byte()),
			}
		}))
		gotHolds, err := HoldsFromProto(over(t, HoldsToProto(holds)), len(holds))
		require.NoError(t, err)
		require.Len(t, gotHolds, len(holds))
		for i := range holds {
			require.True(t, bytes.Equal(holds[i].Ticket, gotHolds[i].Ticket))
			holds[i].Ticket, gotHolds[i].Ticket = nil, nil
		}
		require.Equal(t, holds, gotHolds)

		ids := some(t, "ids", rapid.Map(rapid.Uint64(), func(n uint64) connector.HoldID { return connector.HoldID(n) }))
		renewed, err := RenewedFromProto(over(t, RenewedToProto(ids)))
		require.NoError(t, err)
		require.Equal(t, ids, renewed)
		gone, err := RenewalsFromProto(over(t, RenewalsToProto(ids)))
		require.NoError(t, err)
		require.Equal(t, ids, gone)
		gotIDs, err := ConsumedFromProto(over(t, ConsumedToProto(ids)))
		require.NoError(t, err)
		require.Equal(t, ids, gotIDs)

		info := connector.Info{
			Name: "x" + rapid.StringN(0, 20, 100).Draw(t, "name"), Capabilities: connector.Capability(rapid.Uint64Range(0, 31).Draw(t, "capabilities")),
			Layouts: some(t, "layouts", rapid.StringN(0, 20, 100)), Groups: rapid.Bool().Draw(t, "groups"),
			Scope: connector.Scope(rapid.IntRange(1, 3).Draw(t, "scope")), Lossy: rapid.Bool().Draw(t, "lossy"), MatchFetches: rapid.Bool().Draw(t, "fetches"),
			ArenaBytes: rapid.Int64Range(0, MaxArena).Draw(t, "arena"), ArenaBlocks: rapid.Int64Range(0, MaxArena).Draw(t, "arena blocks"),
			ArenaField:       rapid.StringN(0, 20, 100).Draw(t, "arena field"),
			BeyondMachine:    rapid.StringN(0, 20, 100).Draw(t, "beyond machine"),
			ArenaBlockTokens: rapid.Int64Range(0, MaxArena).Draw(t, "arena block tokens"),
			UnsignedPairs:    rapid.Bool().Draw(t, "unsigned pairs"),
		}
		info.Complete = info.Scope == connector.ScopeEngine && rapid.Bool().Draw(t, "complete")
		for i := range rapid.IntRange(0, connector.MaxStats).Draw(t, "stats") {
			info.Stats = append(info.Stats, connector.StatInfo{
				Name: fmt.Sprintf("n%d_total", i), Kind: connector.Counter, Help: rapid.StringN(0, 20, 100).Draw(t, "help"),
			})
		}
		if len(info.Stats) > 0 {
			info.Stats[0] = connector.StatInfo{Name: "level", Kind: connector.Gauge, Labels: []string{"a", "b"}}
		}
		gotInfo, err := InfoFromProto(over(t, InfoToProto(&info)))
		require.NoError(t, err)
		require.Equal(t, info, gotInfo)
	})
}

// testOpen is a worker's Open that is valid as it is.
func testOpen() *Open {
	return &Open{
		Side: kvportv1.Side_SIDE_WORKER,
		Env: connector.Env{
			Engine: "e", Epoch: 7, Role: connector.RoleBoth, Rank: 1, World: 2,
			Model: connector.NewFingerprint("m"), Shape: connector.NewFingerprint("s"), Base: connector.NewFingerprint("b"),
			LinkKey: bytes.Repeat([]byte{1}, 32), RouterKey: bytes.Repeat([]byte{2}, 32),
			MoreLinkKeys: []connector.Secret{bytes.Repeat([]byte{3}, 32)}, MoreRouterKeys: []connector.Secret{bytes.Repeat([]byte{4}, 32), bytes.Repeat([]byte{5}, 32)},
			Layout: connector.Layout{
				Name: "l", Blocks: 4,
				Groups: []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}, {BlockTokens: 16, Policy: connector.PolicyTrailing, Trailing: 2}},
				Segments: []connector.Segment{
					{Layer: 0, Group: 0, Region: 0, Offset: 64, BlockStride: 64, Bytes: 48, Planes: 1, Heads: 3},
					{Layer: connector.DigestLayer, Group: 1, Region: 1, Offset: 0, BlockStride: 16, Bytes: 16},
				},
			},
		},
		Regions: []Region{{FD: 3, Size: 320}, {FD: 4, Size: 64}},
		Config:  json.RawMessage(`{"a": 1}`),
		Ring:    &Ring{FD: 9, Bell: 10, Offset: 4096},
	}
}

func TestOpenRoundTrip(t *testing.T) {
	want := testOpen()
	got, err := OpenFromProto(over(t, OpenToProto(want)))
	require.NoError(t, err)
	require.Equal(t, want, got)

	scheduler := testOpen()
	scheduler.Side, scheduler.Regions, scheduler.Env.Rank = kvportv1.Side_SIDE_SCHEDULER, nil, 0
	got, err = OpenFromProto(over(t, OpenToProto(scheduler)))
	require.NoError(t, err)
	require.Equal(t, scheduler, got)
}

func TestCapabilitiesIgnoreNewerPeers(t *testing.T) {
	require.Equal(t, connector.CanHold|connector.CanReset, CapabilitiesFromProto([]kvportv1.Capability{-1, 0, 2, 3, 40, math.MaxInt32}))
	require.Equal(t, []kvportv1.Capability{1, 3}, CapabilitiesToProto(connector.CanPlan|connector.CanReset))
}

func TestTimeoutRoundTrip(t *testing.T) {
	require.Zero(t, Timeout(context.Background()))
	past, cancel := context.WithTimeout(context.Background(), -time.Second)
	defer cancel()
	require.EqualValues(t, 1, Timeout(past))
	future, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	require.InDelta(t, 3600e6, float64(Timeout(future)), 60e6)

	ctx, cancel := WithTimeout(context.Background(), 0)
	_, bounded := ctx.Deadline()
	require.False(t, bounded)
	cancel()
	require.ErrorIs(t, ctx.Err(), context.Canceled)
	ctx, cancel = WithTimeout(context.Background(), math.MaxUint64)
	defer cancel()
	require.NoError(t, ctx.Err(), "a huge timeout must not overflow into the past")
}

func TestManifestRoundTrip(t *testing.T) {
	p := &connector.Plugin{Name: "X", Version: "1", Capabilities: connector.CanHold | connector.CanPlan, Schema: json.RawMessage(`{"type":"object"}`)}
	data, err := json.Marshal(NewManifest(p, &connector.Info{Capabilities: connector.CanHold, Scope: connector.ScopeNode}))
	require.NoError(t, err)
	require.JSONEq(t, `{"name":"X","aliases":[],"version":"1","protocol_versions":[1],"capabilities":["hold"],"environment":[],"scope":"node","config_schema":{"type":"object"}}`, string(data))
	m, err := ParseManifest(data)
	require.NoError(t, err)
	require.True(t, m.Speaks(1) && !m.Speaks(2) && m.Answers("X") && !m.Answers("Y"))
	require.Equal(t, []string{"plan", "hold"}, NewManifest(p, nil).Capabilities)
	require.Empty(t, NewManifest(p, nil).Scope)

	for _, bad := range []string{``, `null`, `[]`, `{}`, `{"name":""}`, `{"name":"a/b"}`, `{"name":1}`, `{"name":"` + strings.Repeat("x", MaxName+1) + `"}`} {
		_, err := ParseManifest([]byte(bad))
		require.ErrorIs(t, err, ErrMalformed, bad)
	}
}

func TestPowersRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		stats := some(t, "stats", rapid.Custom(func(t *rapid.T) connector.Stat {
			return connector.Stat{
				Name: "n_total", Value: rapid.Float64Range(-1e9, 1e9).Draw(t, "value"),
			}
		}))
		for i := range stats {
			if i%2 == 0 {
				stats[i].Labels = []string{"a", ""}
			}
		}
		gotStats, err := StatsFromProto(over(t, StatsToProto(stats)))
		require.NoError(t, err)
		require.Equal(t, stats, gotStats)

		events := some(t, "events", rapid.Custom(func(t *rapid.T) connector.BlockEvent {
			e := connector.BlockEvent{
				Seq: rapid.Uint64().Draw(t, "seq"), Kind: connector.BlockEventKind(rapid.IntRange(1, 3).Draw(t, "kind")),
				Medium: rapid.StringN(0, 20, connector.MaxMedium).Draw(t, "medium"), Scope: connector.Scope(rapid.IntRange(1, 3).Draw(t, "scope")),
			}
			if e.Kind != connector.BlocksCleared {
				e.Keys = []connector.BlockKey{bytes32().Draw(t, "key")}
			}
			return e
		}))
		gotEvents, err := EventsFromProto(over(t, EventsToProto(events)))
		require.NoError(t, err)
		require.Equal(t, events, gotEvents)
	})
	o := testOpen()
	o.Arena, o.Progress = Region{FD: 5, Size: 4096}, Region{FD: 6, Size: 4096}
	for _, side := range []kvportv1.Side{kvportv1.Side_SIDE_WORKER, kvportv1.Side_SIDE_SCHEDULER} {
		if o.Side = side; side == kvportv1.Side_SIDE_SCHEDULER {
			o.Regions, o.Env.Rank, o.Progress = nil, 0, Region{}
		}
		got, err := OpenFromProto(over(t, OpenToProto(o)))
		require.NoError(t, err)
		require.Equal(t, o, got)
	}
}

func TestLendingRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lending := &connector.Lending{
			Back: some(t, "back", rapid.Uint64()), Used: some(t, "used", rapid.Uint32()), Want: rapid.IntRange(0, MaxPlaced).Draw(t, "want"),
		}
		for _, k := range some(t, "written", bytes32()) {
			lending.Written = append(lending.Written, connector.Block{Key: k, ID: 7, Group: 1})
		}
		gotLending, err := LendingFromProto(over(t, LendingToProto(lending)))
		require.NoError(t, err)
		require.Equal(t, lending, gotLending)
		loan := &connector.Loan{Slots: some(t, "slots", rapid.Uint32()), Serial: rapid.Uint64().Draw(t, "serial"), Placed: some(t, "placed", rapid.Uint32())}
		gotLoan, err := LoanFromProto(over(t, LoanToProto(loan)), len(loan.Slots))
		require.NoError(t, err)
		require.Equal(t, loan, gotLoan)
	})
}
