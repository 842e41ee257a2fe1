package wire

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

func TestOpenRefusesAndNamesField(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*kvportv1.Open)
		want   string
	}{
		{"side", func(m *kvportv1.Open) { m.Side = 9 }, "side"},
		{"no engine", func(m *kvportv1.Open) { m.Engine = "" }, "engine"},
		{"long engine", func(m *kvportv1.Open) { m.Engine = strings.Repeat("e", MaxName+1) }, "engine"},
		{"role", func(m *kvportv1.Open) { m.Role = 0 }, "role"},
		{"rank", func(m *kvportv1.Open) { m.Rank = 2 }, "rank 2 of 2"},
		{"world", func(m *kvportv1.Open) { m.World = MaxWorld + 1 }, "limit"},
		{"model", func(m *kvportv1.Open) { m.Model = m.Model[1:] }, "open.model has 31"},
		{"shape", func(m *kvportv1.Open) { m.Shape = append(m.Shape, 0) }, "open.shape has 33"},
		{"no layout", func(m *kvportv1.Open) { m.Layout = nil }, "layout.blocks"},
		{"blocks", func(m *kvportv1.Open) { m.Layout.Blocks = 1 << 31 }, "layout.blocks"},
		{"groups", func(m *kvportv1.Open) { m.Layout.Groups = make([]*kvportv1.Group, 33) }, "layout.groups"},
		{"policy", func(m *kvportv1.Open) { m.Layout.Groups[1].Policy = 3 }, "layout.groups[1]"},
		{"tokens", func(m *kvportv1.Open) { m.Layout.Groups[0].BlockTokens = 0 }, "layout.groups[0]"},
		{"segment offset", func(m *kvportv1.Open) { m.Layout.Segments[0].Offset = 1 << 63 }, "layout.segments[0]"},
		{"segment group", func(m *kvportv1.Open) { m.Layout.Segments[1].Group = 1 << 20 }, "layout.segments[1]"},
		{"segment beyond", func(m *kvportv1.Open) { m.Layout.Segments[0].Offset = 300 }, "segments[0]"},
		{"region size", func(m *kvportv1.Open) { m.Regions[1].Size = 1 << 63 }, "open.regions[1]"},
		{"region fd", func(m *kvportv1.Open) { m.Regions[1].Fd = 1 << 31 }, "open.regions[1]"},
		{"regions", func(m *kvportv1.Open) { m.Regions = make([]*kvportv1.Region, MaxRegions+1) }, "open.regions"},
		{"arena fd", func(m *kvportv1.Open) { m.Arena = &kvportv1.Region{Fd: 1 << 31, Size: 1} }, "open.arena"},
		{"arena size", func(m *kvportv1.Open) { m.Arena = &kvportv1.Region{Fd: 3} }, "open.arena"},
		{"progress fd", func(m *kvportv1.Open) { m.Progress = &kvportv1.Region{Fd: 1 << 31, Size: 1} }, "open.progress"},
		{"ring fd", func(m *kvportv1.Open) { m.Ring = &kvportv1.Ring{Fd: 1 << 31} }, "open.ring"},
		{"ring bell", func(m *kvportv1.Open) { m.Ring = &kvportv1.Ring{Bell: 1 << 31} }, "open.ring"},
		{"ring offset", func(m *kvportv1.Open) { m.Ring = &kvportv1.Ring{Offset: 1 << 63} }, "open.ring"},
		{"link key", func(m *kvportv1.Open) { m.LinkKey = make([]byte, 31) }, "open.link_key has 31 bytes"},
		{"router key", func(m *kvportv1.Open) { m.RouterKey = make([]byte, 33) }, "open.router_key has 33 bytes"},
		{"more link keys", func(m *kvportv1.Open) { m.MoreLinkKeys = [][]byte{make([]byte, 31)} }, "open.more_link_keys has a key of 31 bytes"},
		{"too many router keys", func(m *kvportv1.Open) { m.MoreRouterKeys = make([][]byte, 16) }, "open.more_router_keys has 16 keys, limit 15"},
		{"no region", func(m *kvportv1.Open) { m.Regions = nil }, "segments[0]"},
		{"config", func(m *kvportv1.Open) { m.Config = make([]byte, MaxConfig+1) }, "open.config"},
		{"scheduler with regions", func(m *kvportv1.Open) { m.Side = kvportv1.Side_SIDE_SCHEDULER }, "scheduler"},
	} {
		m := OpenToProto(testOpen())
		c.change(m)
		_, err := OpenFromProto(m)
		require.ErrorIs(t, err, connector.ErrIncompatible, c.name)
		require.ErrorContains(t, err, c.want, c.name)
	}
	_, err := OpenFromProto(nil)
	require.ErrorIs(t, err, ErrMalformed)
}

func TestCallsRefuseAndNameField(t *testing.T) {
	keys := make([]byte, 32)
	transfer := func(m *kvportv1.Transfer) error { _, err := TransferFromProto(m); return err }
	reshape := func(m *kvportv1.Reshape) error { _, err := ReshapeFromProto(m); return err }
	query := func(m *kvportv1.Query) error {
		_, err := QueriesFromProto(&kvportv1.MatchRequest{Queries: []*kvportv1.Query{{}, m}})
		return err
	}
	long := strings.Repeat("r", MaxName+1)
	for want, err := range map[string]error{
		"33 bytes":                    query(&kvportv1.Query{Keys: make([]byte, 33)}),
		"match.queries[1]: request":   query(&kvportv1.Query{Request: long}),
		"match.queries[1]: ticket":    query(&kvportv1.Query{Ticket: make([]byte, MaxTicket+1)}),
		"match.queries[1]: tokens":    query(&kvportv1.Query{Tokens: MaxTokens + 1}),
		"match.queries[1]: computed":  query(&kvportv1.Query{Tokens: 1, Computed: 2}),
		"reshape: rank 2 of 2":        reshape(&kvportv1.Reshape{Rank: 2, World: 2}),
		"reshape: rank 0 of 0":        reshape(&kvportv1.Reshape{}),
		"layout.blocks is 0":          reshape(&kvportv1.Reshape{World: 1}),
		"reshaped 2 of 1":             query(&kvportv1.Query{Tokens: 1, Reshaped: 2}),
		"blocks: 32 bytes of keys":    transfer(&kvportv1.Transfer{Blocks: &kvportv1.Blocks{Keys: keys}}),
		"blocks: 0 bytes of keys":     transfer(&kvportv1.Transfer{Blocks: &kvportv1.Blocks{Ids: []int32{1}}}),
		"blocks: 2 groups for 1":      transfer(&kvportv1.Transfer{Blocks: &kvportv1.Blocks{Keys: keys, Ids: []int32{1}, Groups: []uint32{0, 0}}}),
		"blocks.groups[0] is 32":      transfer(&kvportv1.Transfer{Blocks: &kvportv1.Blocks{Keys: keys, Ids: []int32{1}, Groups: []uint32{32}}}),
		"blocks.ids[0] is -1":         transfer(&kvportv1.Transfer{Blocks: &kvportv1.Blocks{Keys: keys, Ids: []int32{-1}}}),
		"131073 ids":                  transfer(&kvportv1.Transfer{Blocks: &kvportv1.Blocks{Ids: make([]int32, MaxBlocks+1)}}),
		"extra has":                   transfer(&kvportv1.Transfer{Extra: make([]byte, MaxExtra+1)}),
		"from is":                     transfer(TransferToProto(&connector.Transfer{From: -1})),
		"tokens is 4294967295, limit": transfer(TransferToProto(&connector.Transfer{Tokens: 1 << 40})),
		"finish.ended[0]: reason":     second(EndedFromProto(&kvportv1.FinishRequest{Ended: []*kvportv1.Ended{{Reason: 5}}})),
		"finish.holds[0]: ttl_ms":     second(HoldsFromProto(HoldsToProto([]connector.Hold{{TTL: -1}}), 1)),
		"finish: 1 answers to 2":      second(HoldsFromProto(HoldsToProto(make([]connector.Hold, 1)), 2)),
		"plan.preempted[0]":           second(StepFromProto(&kvportv1.Step{Preempted: []string{long}})),
		"plan.admitted":               second(StepFromProto(&kvportv1.Step{Admitted: make([]*kvportv1.Transfer, MaxQueries+1)})),
		"plan.saves":                  second(PlanFromProto(&kvportv1.Plan{Saves: make([]*kvportv1.Transfer, 2*MaxQueries+1)})),
		"renewals.ended":              second(RenewalsFromProto(&kvportv1.RenewalsRequest{Ended: make([]uint64, MaxBlocks+1)})),
		"renewals.holds":              second(RenewedFromProto(&kvportv1.RenewalsResponse{Holds: make([]uint64, MaxBlocks+1)})),
		"lend.back has 65537":         second(LendingFromProto(&kvportv1.LendRequest{Back: make([]uint64, MaxPlaced+1)})),
		"lend.used has 65537":         second(LendingFromProto(&kvportv1.LendRequest{Used: make([]uint32, MaxPlaced+1)})),
		"blocks: 131074 ids":          second(LendingFromProto(&kvportv1.LendRequest{Written: &kvportv1.Blocks{Ids: make([]int32, MaxBlocks+2)}})),
		"lent.slots has 3 slots":      second(LoanFromProto(&kvportv1.LendResponse{Slots: make([]uint32, 3)}, 2)),
		"lent.placed has 65537":       second(LoanFromProto(&kvportv1.LendResponse{Placed: make([]uint32, MaxPlaced+1)}, 2)),
		"consumed.holds":              second(ConsumedFromProto(&kvportv1.ConsumedResponse{Holds: make([]uint64, MaxBlocks+1)})),
		"describe: name is empty":     second(InfoFromProto(&kvportv1.DescribeResponse{})),
		"describe: arena_blocks":      second(InfoFromProto(InfoToProto(&connector.Info{Name: "x", Scope: 1, ArenaBlocks: -1}))),
		"describe: arena_block_token": second(InfoFromProto(InfoToProto(&connector.Info{Name: "x", Scope: 1, ArenaBlockTokens: -1}))),
		"describe: arena_bytes":       second(InfoFromProto(InfoToProto(&connector.Info{Name: "x", Scope: 1, ArenaBytes: -1}))),
		"stats has 65":                second(InfoFromProto(&kvportv1.DescribeResponse{Name: "x", Scope: 1, Stats: make([]*kvportv1.StatInfo, 65)})),
		"describe: stats[0]: kind":    second(InfoFromProto(&kvportv1.DescribeResponse{Name: "x", Scope: 1, Stats: []*kvportv1.StatInfo{{Kind: 3}}})),
		`stat "A" must consist of`:    second(InfoFromProto(&kvportv1.DescribeResponse{Name: "x", Scope: 1, Stats: []*kvportv1.StatInfo{{Name: "A"}}})),
		"stats has 513":               second(StatsFromProto(&kvportv1.StatsResponse{Stats: make([]*kvportv1.Stat, connector.MaxSamples+1)})),
		"stats[0]: labels has 5":      second(StatsFromProto(&kvportv1.StatsResponse{Stats: []*kvportv1.Stat{{Labels: make([]string, 5)}}})),
		"stats[0]: name":              second(StatsFromProto(&kvportv1.StatsResponse{Stats: []*kvportv1.Stat{{Name: long}}})),
		"events has 4097":             second(EventsFromProto(&kvportv1.EventsResponse{Events: make([]*kvportv1.BlockEvent, connector.MaxEvents+1)})),
		"events[0]: kind":             second(EventsFromProto(&kvportv1.EventsResponse{Events: []*kvportv1.BlockEvent{{Kind: 4}}})),
		"events[0]: scope":            second(EventsFromProto(&kvportv1.EventsResponse{Events: []*kvportv1.BlockEvent{{Kind: 3, Scope: 4}}})),
		"events[0]: medium":           second(EventsFromProto(&kvportv1.EventsResponse{Events: []*kvportv1.BlockEvent{{Kind: 3, Scope: 1, Medium: long}}})),
		"cleared with 32 bytes":       second(EventsFromProto(&kvportv1.EventsResponse{Events: []*kvportv1.BlockEvent{{Kind: 3, Scope: 1, Keys: keys}}})),
		"stored with 0 bytes":         second(EventsFromProto(&kvportv1.EventsResponse{Events: []*kvportv1.BlockEvent{{Kind: 1, Scope: 1}}})),
		"describe: scope":             second(InfoFromProto(&kvportv1.DescribeResponse{Name: "x"})),
		"describe: complete":          second(InfoFromProto(&kvportv1.DescribeResponse{Name: "x", Scope: 2, Complete: true})),
	} {
		require.ErrorIs(t, err, ErrMalformed, want)
		require.ErrorContains(t, err, want)
	}
}

func second[T any](_ T, err error) error { return err }

// Rule ERR-01.
func TestErrorsSurviveTheWire(t *testing.T) {
	for _, sentinel := range []error{
		connector.ErrBusy, connector.ErrGone, connector.ErrIncompatible, connector.ErrCorrupt, connector.ErrOutdated, connector.ErrDeclined,
		context.Canceled, context.DeadlineExceeded, ErrPanic,
	} {
		for _, sent := range []error{sentinel, fmt.Errorf("disk 3: %w", sentinel), errors.Join(errors.New("other"), sentinel)} {
			got := ErrorFromProto(over(t, ErrorToProto(sent)))
			require.ErrorIs(t, got, sentinel)
			require.Equal(t, sent.Error(), got.Error())
			for _, other := range []error{connector.ErrBusy, connector.ErrGone, connector.ErrIncompatible, connector.ErrCorrupt, context.Canceled} {
				require.Equal(t, errors.Is(sent, other), errors.Is(got, other))
			}
		}
	}
	require.NoError(t, ErrorFromProto(ErrorToProto(nil)))
	plain := ErrorFromProto(over(t, ErrorToProto(errors.New("plain"))))
	require.EqualError(t, plain, "plain")
	require.NoError(t, errors.Unwrap(plain))
	require.EqualError(t, ErrorFromProto(&kvportv1.Error{Code: 99}), "unknown error")
	require.EqualError(t, ErrorFromProto(&kvportv1.Error{Code: kvportv1.ErrorCode_ERROR_CODE_BUSY}), connector.ErrBusy.Error())
}

func TestBlockErrorsSurviveTheWire(t *testing.T) {
	sent := fmt.Errorf("load: %w", &connector.BlockError{Blocks: []connector.BlockID{3, 1}, Err: connector.ErrCorrupt})
	var got *connector.BlockError
	require.ErrorAs(t, ErrorFromProto(over(t, ErrorToProto(sent))), &got)
	require.Equal(t, []connector.BlockID{3, 1}, got.Blocks)
	require.ErrorIs(t, got, connector.ErrCorrupt)

	for name, m := range map[string]*kvportv1.Error{
		"no blocks":       ErrorToProto(&connector.BlockError{Err: connector.ErrGone}),
		"negative block":  {Code: kvportv1.ErrorCode_ERROR_CODE_GONE, Blocks: []int32{1, -1}},
		"too many blocks": {Code: kvportv1.ErrorCode_ERROR_CODE_GONE, Blocks: make([]int32, MaxBlocks+1)},
	} {
		err := ErrorFromProto(m)
		require.ErrorIs(t, err, connector.ErrGone, name)
		require.NotErrorAs(t, err, &got, "%s: the whole transfer failed", name)
	}
}

func TestErrorTextIsCutAndValid(t *testing.T) {
	for _, s := range []string{strings.Repeat("ä", MaxText), "x" + strings.Repeat("語", MaxText), "bad \xff\xfe utf-8"} {
		m := over(t, ErrorToProto(errors.New(s)))
		require.LessOrEqual(t, len(m.GetMessage()), MaxText+2)
		require.True(t, utf8.ValidString(m.GetMessage()))
	}
}

// A message of two-byte sub-messages unfolds a hundredfold: it is refused before that.
func TestCodecRefusesBombs(t *testing.T) {
	part := func(field protowire.Number, inner []byte, n int) []byte {
		one := protowire.AppendBytes(protowire.AppendTag(nil, field, protowire.BytesType), inner)
		return []byte(strings.Repeat(string(one), n))
	}
	deep := []byte{}
	for range 30 {
		deep = part(200, deep, 1)
	}
	for name, c := range map[string]struct {
		data []byte
		into proto.Message
	}{
		"empty queries":   {part(4, part(1, nil, 4<<20), 1), &kvportv1.SessionRequest{}},
		"empty strings":   {part(5, part(5, nil, 1<<20), 1), &kvportv1.SessionRequest{}},
		"packed numbers":  {part(8, part(1, make([]byte, 2<<20), 1), 1), &kvportv1.SessionResponse{}},
		"unpacked":        {part(8, []byte(strings.Repeat("\x08\x01", 2<<20)), 1), &kvportv1.SessionResponse{}},
		"unknown fields":  {part(200, nil, 1<<20), &kvportv1.SessionResponse{}},
		"truncated":       {[]byte{0x22, 0x7f}, &kvportv1.SessionRequest{}},
		"truncated inner": {part(4, []byte{0x0a, 0x7f}, 1), &kvportv1.SessionRequest{}},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := Codec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(c.data)}, c.into)
		runtime.ReadMemStats(&after)
		require.ErrorIs(t, err, ErrMalformed, name)
		require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(1<<20), name)
	}
	require.NoError(t, Codec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(deep)}, &kvportv1.SessionRequest{}), "unknown fields are not entered")

	want := &kvportv1.SessionRequest{Id: 3, Call: &kvportv1.SessionRequest_Open{Open: OpenToProto(testOpen())}}
	data, err := Codec().Marshal(want)
	require.NoError(t, err)
	got := &kvportv1.SessionRequest{}
	require.NoError(t, Codec().Unmarshal(data, got))
	require.True(t, proto.Equal(want, got))
}

// trip decodes what a stranger sent. A refusal is typed; what is accepted says the same after another
// trip over the wire.
func trip[M proto.Message, T any](t *testing.T, m M, from func(M) (T, error), to func(T) M) (got T, ok bool) {
	t.Helper()
	got, err := from(m)
	if err != nil {
		require.ErrorIs(t, err, connector.ErrIncompatible)
		return got, false
	}
	again, err := from(over(t, to(got)))
	require.NoError(t, err)
	require.Equal(t, got, again)
	return got, true
}

// saneTransfers checks transfers that were accepted from a message of size bytes.
func saneTransfers(t *testing.T, size int, list ...connector.Transfer) {
	t.Helper()
	for _, tr := range list {
		require.True(t, tr.From >= 0 && tr.From <= MaxTokens && tr.Tokens >= 0 && tr.Tokens <= MaxTokens)
		require.LessOrEqual(t, len(tr.Blocks), size/keySize, "no more than was sent")
		for _, b := range tr.Blocks {
			require.True(t, b.ID >= 0 && b.Group < connector.MaxGroups)
		}
	}
}

func FuzzSessionRequest(f *testing.F) {
	for _, m := range []*kvportv1.SessionRequest{
		{Id: 1, Call: &kvportv1.SessionRequest_Open{Open: OpenToProto(testOpen())}},
		{Id: 2, Call: &kvportv1.SessionRequest_Match{Match: QueriesToProto([]connector.Query{{Request: "r", Tokens: 40, Keys: make([]connector.BlockKey, 2)}})}},
		{Id: 3, Call: &kvportv1.SessionRequest_Load{Load: TransferToProto(&connector.Transfer{Blocks: []connector.Block{{ID: 1, Group: 1}}})}},
		{Id: 4, Call: &kvportv1.SessionRequest_Finish{Finish: EndedToProto([]connector.Ended{{Reason: 1}})}},
		{Id: 5, Call: &kvportv1.SessionRequest_Plan{Plan: StepToProto(&connector.Step{Preempted: []connector.RequestID{"a"}})}},
	} {
		data, err := proto.Marshal(m)
		require.NoError(f, err)
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var m kvportv1.SessionRequest
		if Codec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, &m) != nil {
			return
		}
		if o, ok := trip(t, m.GetOpen(), OpenFromProto, OpenToProto); ok {
			require.Less(t, o.Env.Rank, o.Env.World)
			require.Equal(t, o.Side == kvportv1.Side_SIDE_WORKER, len(o.Regions) > 0)
		}
		qs, _ := trip(t, m.GetMatch(), QueriesFromProto, QueriesToProto)
		for _, q := range qs {
			require.True(t, q.Tokens >= q.Computed && q.Computed >= 0)
			require.LessOrEqual(t, len(q.Keys), len(data)/keySize, "no more than was sent")
		}
		for _, m := range []*kvportv1.Transfer{m.GetLoad(), m.GetSave()} {
			if tr, ok := trip(t, m, TransferFromProto, func(x connector.Transfer) *kvportv1.Transfer { return TransferToProto(&x) }); ok {
				saneTransfers(t, len(data), tr)
			}
		}
		if step, ok := trip(t, m.GetPlan(), StepFromProto, StepToProto); ok {
			saneTransfers(t, len(data), append(step.Admitted, step.Computed...)...)
		}
		ended, _ := trip(t, m.GetFinish(), EndedFromProto, EndedToProto)
		for _, e := range ended {
			require.True(t, e.Tokens >= 0 && e.Reason >= connector.ReasonStop)
		}
	})
}

func FuzzSessionResponse(f *testing.F) {
	for _, m := range []*kvportv1.SessionResponse{
		{Id: 1, Result: &kvportv1.SessionResponse_Match{Match: MatchesToProto([]connector.Match{{Tokens: 3}})}},
		{Id: 2, Result: &kvportv1.SessionResponse_Plan{Plan: PlanToProto(&connector.Plan{Loads: []connector.Transfer{{From: 1}}})}},
		{Id: 3, Result: &kvportv1.SessionResponse_Finish{Finish: HoldsToProto([]connector.Hold{{ID: 1, TTL: 5}})}},
		{Id: 4, Error: ErrorToProto(&connector.BlockError{Blocks: []connector.BlockID{1}, Err: connector.ErrGone})},
	} {
		data, err := proto.Marshal(m)
		require.NoError(f, err)
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var m kvportv1.SessionResponse
		if Codec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, &m) != nil {
			return
		}
		if err := ErrorFromProto(m.GetError()); err != nil {
			require.NotEmpty(t, err.Error())
			require.True(t, utf8.ValidString(err.Error()))
			if some, ok := errors.AsType[*connector.BlockError](err); ok {
				require.NotContains(t, some.Blocks, connector.BlockID(-1))
				require.NotEmpty(t, some.Blocks)
			}
		}
		one := func(m *kvportv1.MatchResponse) ([]connector.Match, error) { return MatchesFromProto(m, 1) }
		if ms, ok := trip(t, m.GetMatch(), one, MatchesToProto); ok {
			require.True(t, len(ms) == 1 && ms[0].Tokens >= 0 && ms[0].Tokens <= MaxTokens)
		}
		held := func(m *kvportv1.FinishResponse) ([]connector.Hold, error) { return HoldsFromProto(m, 1) }
		if hs, ok := trip(t, m.GetFinish(), held, HoldsToProto); ok {
			require.True(t, len(hs) == 1 && hs[0].TTL >= 0 && hs[0].TTL <= MaxHold && hs[0].Consumers <= MaxConsumers)
		}
		if plan, ok := trip(t, m.GetPlan(), PlanFromProto, PlanToProto); ok {
			saneTransfers(t, len(data), append(plan.Loads, plan.Saves...)...)
		}
		trip(t, m.GetConsumed(), ConsumedFromProto, ConsumedToProto)
		trip(t, m.GetRenewals(), RenewedFromProto, RenewedToProto)
		lent := func(m *kvportv1.LendResponse) (*connector.Loan, error) { return LoanFromProto(m, 3) }
		if loan, ok := trip(t, m.GetLent(), lent, LoanToProto); ok {
			require.LessOrEqual(t, len(loan.Slots), 3)
		}
		offered := CapabilitiesFromProto(m.GetOpened().GetCapabilities())
		for _, name := range offered.Names() {
			require.NotContains(t, name, "bit", "only what we know")
		}
	})
}
