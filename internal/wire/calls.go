package wire

import (
	"fmt"
	"math"
	"time"

	"github.com/kvport/kvport/connector"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// QueriesToProto converts the argument of Match.
func QueriesToProto(qs []connector.Query) *kvportv1.MatchRequest {
	return &kvportv1.MatchRequest{Queries: each(qs, QueryToProto)}
}

// QueriesFromProto converts the argument of Match.
func QueriesFromProto(m *kvportv1.MatchRequest) ([]connector.Query, error) {
	return list("match.queries", m.GetQueries(), MaxQueries, QueryFromProto)
}

// QueryToProto converts one query.
func QueryToProto(q *connector.Query) *kvportv1.Query {
	return &kvportv1.Query{
		Request: string(q.Request), Tokens: count(q.Tokens), Keys: keysToProto(q.Keys),
		Computed: count(q.Computed), Ticket: q.Ticket, Reshaped: count(q.Reshaped),
	}
}

// QueryFromProto converts one query.
func QueryFromProto(m *kvportv1.Query) (connector.Query, error) {
	q := connector.Query{Request: connector.RequestID(m.GetRequest()), Ticket: ticket(m.GetTicket())}
	if err := short("request", m.GetRequest(), MaxName); err != nil {
		return q, err
	}
	if err := short("ticket", m.GetTicket(), MaxTicket); err != nil {
		return q, err
	}
	var err error
	if q.Tokens, err = tokens("tokens", m.GetTokens()); err != nil {
		return q, err
	}
	if q.Computed, err = tokens("computed", m.GetComputed()); err != nil {
		return q, err
	}
	if q.Reshaped, err = tokens("reshaped", m.GetReshaped()); err != nil {
		return q, err
	}
	if q.Computed > q.Tokens || q.Reshaped > q.Tokens {
		return q, malformed("computed is %d and reshaped %d of %d tokens", q.Computed, q.Reshaped, q.Tokens)
	}
	q.Keys, err = keysFromProto(m.GetKeys())
	return q, err
}

// ticket keeps nil apart from nothing: proto does not.
func ticket(b []byte) connector.Ticket {
	if len(b) == 0 {
		return nil
	}
	return b
}

// MatchesToProto converts the answer of Match.
func MatchesToProto(ms []connector.Match) *kvportv1.MatchResponse {
	return &kvportv1.MatchResponse{Matches: each(ms, MatchToProto)}
}

// MatchToProto converts one match.
func MatchToProto(m *connector.Match) *kvportv1.Match {
	return &kvportv1.Match{Tokens: count(m.Tokens), Groups: m.Groups, Async: m.Async, Later: m.Later}
}

// MatchesFromProto converts the answer of Match to want queries (rule SCHED-01).
func MatchesFromProto(m *kvportv1.MatchResponse, want int) ([]connector.Match, error) {
	if len(m.GetMatches()) != want {
		return nil, malformed("match: %d answers to %d queries", len(m.GetMatches()), want)
	}
	return list("match.matches", m.GetMatches(), want, func(m *kvportv1.Match) (connector.Match, error) {
		n, err := tokens("tokens", m.GetTokens())
		return connector.Match{Tokens: n, Groups: m.GetGroups(), Async: m.GetAsync(), Later: m.GetLater()}, err
	})
}

// MaxPlaced bounds the slots that a save or load names, and those that it tells the plugin about.
const MaxPlaced = 1 << 16

// MaxUnnamed bounds how many of the slots that a save or load names are not of its own blocks (rule PLACE-26).
const MaxUnnamed = 1 << 12

// SlotsFromProto checks a list of slots.
func SlotsFromProto(name string, slots []uint32) ([]uint32, error) {
	if len(slots) > MaxPlaced {
		return nil, malformed("%s has %d slots, limit %d", name, len(slots), MaxPlaced)
	}
	return slots, nil
}

// LendingToProto converts the argument of Lend.
func LendingToProto(l *connector.Lending) *kvportv1.LendRequest {
	return &kvportv1.LendRequest{Written: BlocksToProto(l.Written), Back: l.Back, Used: l.Used, Want: count(l.Want)}
}

// LendingFromProto converts the argument of Lend.
func LendingFromProto(m *kvportv1.LendRequest) (*connector.Lending, error) {
	l := &connector.Lending{Back: m.GetBack(), Want: int(min(m.GetWant(), MaxPlaced))}
	if len(l.Back) > MaxPlaced {
		return nil, malformed("lend.back has %d serials, limit %d", len(l.Back), MaxPlaced)
	}
	var err error
	if l.Used, err = SlotsFromProto("lend.used", m.GetUsed()); err != nil {
		return nil, err
	}
	l.Written, err = BlocksFromProto(m.GetWritten())
	return l, err
}

// LoanToProto converts the answer of Lend.
func LoanToProto(l *connector.Loan) *kvportv1.LendResponse {
	return &kvportv1.LendResponse{Slots: l.Slots, Serial: l.Serial, Placed: l.Placed}
}

// LoanFromProto converts the answer of Lend, in which there are that many slots at most.
func LoanFromProto(m *kvportv1.LendResponse, want int) (*connector.Loan, error) {
	l := &connector.Loan{Slots: m.GetSlots(), Serial: m.GetSerial()}
	if len(l.Slots) > want {
		return nil, malformed("lent.slots has %d slots, %d were wanted", len(l.Slots), want)
	}
	var err error
	l.Placed, err = SlotsFromProto("lent.placed", m.GetPlaced())
	return l, err
}

// TransferToProto converts a Transfer.
func TransferToProto(t *connector.Transfer) *kvportv1.Transfer {
	return &kvportv1.Transfer{
		Request: string(t.Request), From: count(t.From), Tokens: count(t.Tokens), Blocks: BlocksToProto(t.Blocks),
		Ticket: t.Ticket, Extra: t.Extra, Replace: t.Replace, Tenant: t.Tenant,
	}
}

// TransferFromProto converts a Transfer.
func TransferFromProto(m *kvportv1.Transfer) (connector.Transfer, error) {
	t := connector.Transfer{
		Request: connector.RequestID(m.GetRequest()), Ticket: ticket(m.GetTicket()),
		Extra: ticket(m.GetExtra()), Replace: m.GetReplace(), Tenant: m.GetTenant(),
	}
	if err := short("request", m.GetRequest(), MaxName); err != nil {
		return t, err
	}
	if err := short("ticket", m.GetTicket(), MaxTicket); err != nil {
		return t, err
	}
	if err := short("extra", m.GetExtra(), MaxExtra); err != nil {
		return t, err
	}
	var err error
	if t.From, err = tokens("from", m.GetFrom()); err != nil {
		return t, err
	}
	if t.Tokens, err = tokens("tokens", m.GetTokens()); err != nil {
		return t, err
	}
	t.Blocks, err = BlocksFromProto(m.GetBlocks())
	return t, err
}

// Reshape is a load of whole blocks of an engine with another shape.
type Reshape struct {
	Transfer connector.Transfer
	Source   connector.Source
	Layout   connector.Layout
}

// ReshapeToProto converts a Reshape.
func ReshapeToProto(r *Reshape) *kvportv1.Reshape {
	return &kvportv1.Reshape{
		Transfer: TransferToProto(&r.Transfer), Rank: count(r.Source.Rank), World: count(r.Source.World), Last: r.Source.Last,
		Layout: LayoutToProto(&r.Layout),
	}
}

// ReshapeFromProto converts a Reshape. That the layout lies within the session's regions is for NewKV to check.
func ReshapeFromProto(m *kvportv1.Reshape) (*Reshape, error) {
	if m.GetWorld() == 0 || m.GetWorld() > MaxWorld || m.GetRank() >= m.GetWorld() {
		return nil, malformed("reshape: rank %d of %d, limit %d", m.GetRank(), m.GetWorld(), MaxWorld)
	}
	layout, err := LayoutFromProto(m.GetLayout())
	if err != nil {
		return nil, err
	}
	r := &Reshape{Source: connector.Source{Rank: int(m.GetRank()), World: int(m.GetWorld()), Last: m.GetLast()}, Layout: *layout}
	r.Transfer, err = TransferFromProto(m.GetTransfer())
	return r, err
}

// EndedToProto converts the argument of Finish.
func EndedToProto(ended []connector.Ended) *kvportv1.FinishRequest {
	return &kvportv1.FinishRequest{Ended: each(ended, EndToProto)}
}

// EndedFromProto converts the argument of Finish.
func EndedFromProto(m *kvportv1.FinishRequest) ([]connector.Ended, error) {
	return list("finish.ended", m.GetEnded(), MaxQueries, EndFromProto)
}

// EndToProto converts one ended request.
func EndToProto(e *connector.Ended) *kvportv1.Ended {
	return &kvportv1.Ended{
		Request: string(e.Request), Reason: kvportv1.Reason(e.Reason), Tokens: count(e.Tokens),
		Blocks: BlocksToProto(e.Blocks), Remote: e.Remote, Weak: e.Weak,
	}
}

// EndFromProto converts one ended request.
func EndFromProto(m *kvportv1.Ended) (connector.Ended, error) {
	e := connector.Ended{Request: connector.RequestID(m.GetRequest()), Reason: connector.Reason(m.GetReason()), Remote: m.GetRemote(), Weak: m.GetWeak()}
	if m.GetReason() < kvportv1.Reason_REASON_STOP || m.GetReason() > kvportv1.Reason_REASON_ERROR {
		return e, malformed("reason is %d", m.GetReason())
	}
	if err := short("request", m.GetRequest(), MaxName); err != nil {
		return e, err
	}
	var err error
	if e.Tokens, err = tokens("tokens", m.GetTokens()); err != nil {
		return e, err
	}
	e.Blocks, err = BlocksFromProto(m.GetBlocks())
	return e, err
}

// HoldsToProto converts the answer of Finish.
func HoldsToProto(holds []connector.Hold) *kvportv1.FinishResponse {
	return &kvportv1.FinishResponse{Holds: each(holds, func(h *connector.Hold) *kvportv1.Hold {
		ttl := (h.TTL + time.Millisecond - 1) / time.Millisecond
		if h.TTL < 0 {
			ttl = math.MaxInt64 // refused
		}
		return &kvportv1.Hold{Id: uint64(h.ID), TtlMs: uint64(ttl), Consumers: count(h.Consumers), Weak: h.Weak, Ticket: h.Ticket}
	})}
}

// HoldsFromProto converts the answer of Finish to want ended requests. A TTL beyond MaxHold is
// refused.
func HoldsFromProto(m *kvportv1.FinishResponse, want int) ([]connector.Hold, error) {
	if len(m.GetHolds()) != want {
		return nil, malformed("finish: %d answers to %d ended requests", len(m.GetHolds()), want)
	}
	return list("finish.holds", m.GetHolds(), want, func(m *kvportv1.Hold) (connector.Hold, error) {
		h := connector.Hold{ID: connector.HoldID(m.GetId()), Weak: m.GetWeak(), Ticket: ticket(m.GetTicket())}
		if m.GetTtlMs() > uint64(MaxHold/time.Millisecond) || m.GetConsumers() > MaxConsumers {
			return h, malformed("ttl_ms is %d, consumers %d", m.GetTtlMs(), m.GetConsumers())
		}
		h.TTL, h.Consumers = time.Duration(m.GetTtlMs())*time.Millisecond, int(m.GetConsumers())
		return h, short("ticket", m.GetTicket(), MaxTicket)
	})
}

// ConsumedToProto converts the answer of Consumed.
func ConsumedToProto(ids []connector.HoldID) *kvportv1.ConsumedResponse {
	return &kvportv1.ConsumedResponse{Holds: each(ids, func(id *connector.HoldID) uint64 { return uint64(*id) })}
}

// RenewalsToProto converts a call of Renewals.
func RenewalsToProto(ended []connector.HoldID) *kvportv1.RenewalsRequest {
	return &kvportv1.RenewalsRequest{Ended: each(ended, func(id *connector.HoldID) uint64 { return uint64(*id) })}
}

// RenewalsFromProto converts a call of Renewals. That the holds exist is for the plugin to check.
func RenewalsFromProto(m *kvportv1.RenewalsRequest) ([]connector.HoldID, error) {
	return list("renewals.ended", m.GetEnded(), MaxBlocks, func(id uint64) (connector.HoldID, error) { return connector.HoldID(id), nil })
}

// RenewedToProto converts the answer of Renewals.
func RenewedToProto(ids []connector.HoldID) *kvportv1.RenewalsResponse {
	return &kvportv1.RenewalsResponse{Holds: each(ids, func(id *connector.HoldID) uint64 { return uint64(*id) })}
}

// RenewedFromProto converts the answer of Renewals. That the holds exist is for the host to check.
func RenewedFromProto(m *kvportv1.RenewalsResponse) ([]connector.HoldID, error) {
	return list("renewals.holds", m.GetHolds(), MaxBlocks, func(id uint64) (connector.HoldID, error) { return connector.HoldID(id), nil })
}

// ConsumedFromProto converts the answer of Consumed. That the holds exist is for the host to check.
func ConsumedFromProto(m *kvportv1.ConsumedResponse) ([]connector.HoldID, error) {
	return list("consumed.holds", m.GetHolds(), MaxBlocks, func(id uint64) (connector.HoldID, error) {
		return connector.HoldID(id), nil
	})
}

// StepToProto converts the argument of Plan.
func StepToProto(s *connector.Step) *kvportv1.Step {
	return &kvportv1.Step{
		Id: s.ID, Arrived: each(s.Arrived, QueryToProto),
		Admitted: each(s.Admitted, TransferToProto), Computed: each(s.Computed, TransferToProto),
		Preempted: each(s.Preempted, func(r *connector.RequestID) string { return string(*r) }),
		Ended:     each(s.Ended, EndToProto),
	}
}

// StepFromProto converts the argument of Plan.
func StepFromProto(m *kvportv1.Step) (*connector.Step, error) {
	s := &connector.Step{ID: m.GetId()}
	var err error
	if s.Arrived, err = list("plan.arrived", m.GetArrived(), MaxQueries, QueryFromProto); err != nil {
		return nil, err
	}
	if s.Admitted, err = list("plan.admitted", m.GetAdmitted(), MaxQueries, TransferFromProto); err != nil {
		return nil, err
	}
	if s.Computed, err = list("plan.computed", m.GetComputed(), MaxQueries, TransferFromProto); err != nil {
		return nil, err
	}
	if s.Preempted, err = list("plan.preempted", m.GetPreempted(), MaxQueries, requestFromProto); err != nil {
		return nil, err
	}
	s.Ended, err = list("plan.ended", m.GetEnded(), MaxQueries, EndFromProto)
	return s, err
}

func requestFromProto(s string) (connector.RequestID, error) {
	return connector.RequestID(s), short("request", s, MaxName)
}

// PlanToProto converts the answer of Plan; nil is an empty one.
func PlanToProto(p *connector.Plan) *kvportv1.Plan {
	if p == nil {
		return &kvportv1.Plan{}
	}
	return &kvportv1.Plan{Loads: each(p.Loads, TransferToProto), Saves: each(p.Saves, TransferToProto)}
}

// PlanFromProto converts the answer of Plan. That its transfers are the step's is for the host to
// check (rule PLAN-01).
func PlanFromProto(m *kvportv1.Plan) (*connector.Plan, error) {
	p := &connector.Plan{}
	var err error
	if p.Loads, err = list("plan.loads", m.GetLoads(), 2*MaxQueries, TransferFromProto); err != nil {
		return nil, err
	}
	p.Saves, err = list("plan.saves", m.GetSaves(), 2*MaxQueries, TransferFromProto)
	return p, err
}

const keySize = len(connector.BlockKey{})

// BlocksToProto converts blocks to columns.
func BlocksToProto(blocks []connector.Block) *kvportv1.Blocks {
	if len(blocks) == 0 {
		return nil
	}
	m := &kvportv1.Blocks{Keys: make([]byte, 0, len(blocks)*keySize), Ids: make([]int32, len(blocks))}
	for i := range blocks {
		b := &blocks[i]
		m.Keys = append(m.Keys, b.Key[:]...)
		m.Ids[i] = int32(b.ID)
		if b.Group != 0 && m.Groups == nil {
			m.Groups = make([]uint32, len(blocks))
		}
		if m.Groups != nil {
			m.Groups[i] = uint32(b.Group)
		}
	}
	return m
}

// BlocksFromProto converts columns to blocks. That the ids exist is for the receiver to check.
func BlocksFromProto(m *kvportv1.Blocks) ([]connector.Block, error) {
	n := len(m.GetIds())
	if n > MaxBlocks {
		return nil, malformed("blocks: %d ids, limit %d", n, MaxBlocks)
	}
	if len(m.GetKeys()) != n*keySize {
		return nil, malformed("blocks: %d bytes of keys for %d ids", len(m.GetKeys()), n)
	}
	if len(m.GetGroups()) != 0 && len(m.GetGroups()) != n {
		return nil, malformed("blocks: %d groups for %d ids", len(m.GetGroups()), n)
	}
	if n == 0 {
		return nil, nil
	}
	blocks := make([]connector.Block, n)
	for i, id := range m.GetIds() {
		if id < 0 {
			return nil, malformed("blocks.ids[%d] is %d", i, id)
		}
		blocks[i] = connector.Block{Key: connector.BlockKey(m.GetKeys()[i*keySize:]), ID: connector.BlockID(id)}
		if len(m.GetGroups()) != 0 {
			if m.GetGroups()[i] >= connector.MaxGroups {
				return nil, malformed("blocks.groups[%d] is %d", i, m.GetGroups()[i])
			}
			blocks[i].Group = uint16(m.GetGroups()[i])
		}
	}
	return blocks, nil
}

func keysToProto(keys []connector.BlockKey) []byte {
	out := make([]byte, 0, len(keys)*keySize)
	for i := range keys {
		out = append(out, keys[i][:]...)
	}
	return out
}

func keysFromProto(b []byte) ([]connector.BlockKey, error) {
	if len(b)%keySize != 0 || len(b) > MaxBlocks*keySize {
		return nil, malformed("keys has %d bytes, want a multiple of %d up to %d", len(b), keySize, MaxBlocks*keySize)
	}
	if len(b) == 0 {
		return nil, nil
	}
	keys := make([]connector.BlockKey, len(b)/keySize)
	for i := range keys {
		copy(keys[i][:], b[i*keySize:])
	}
	return keys, nil
}

// Layers is a save or a load with a counter: which one of the board it is, and which use of it.
type Layers struct {
	Transfer *connector.Transfer
	Slot     int
	Call     uint32 // never 0
}

// SaveLayersToProto converts a save.
func SaveLayersToProto(l *Layers) *kvportv1.SaveLayers {
	return &kvportv1.SaveLayers{Transfer: TransferToProto(l.Transfer), Slot: count(l.Slot), Call: l.Call}
}

// LoadLayersToProto converts a load.
func LoadLayersToProto(l *Layers) *kvportv1.LoadLayers {
	return &kvportv1.LoadLayers{Transfer: TransferToProto(l.Transfer), Slot: count(l.Slot), Call: l.Call}
}

// LayersFromProto converts a SaveLayers or a LoadLayers.
func LayersFromProto(m interface {
	GetTransfer() *kvportv1.Transfer
	GetSlot() uint32
	GetCall() uint32
},
) (*Layers, error) {
	if m.GetCall() == 0 || m.GetSlot() >= MaxCounters {
		return nil, malformed("counter %d of call %d, there are %d", m.GetSlot(), m.GetCall(), MaxCounters)
	}
	t, err := TransferFromProto(m.GetTransfer())
	return &Layers{Transfer: &t, Slot: int(m.GetSlot()), Call: m.GetCall()}, err
}

func statInfoToProto(s *connector.StatInfo) *kvportv1.StatInfo {
	return &kvportv1.StatInfo{Name: s.Name, Help: s.Help, Kind: kvportv1.StatKind(s.Kind), Labels: s.Labels}
}

func statInfoFromProto(m *kvportv1.StatInfo) (connector.StatInfo, error) {
	s := connector.StatInfo{Name: m.GetName(), Help: m.GetHelp(), Kind: connector.StatKind(m.GetKind())}
	if m.GetKind() < 0 || m.GetKind() > kvportv1.StatKind_STAT_KIND_GAUGE {
		return s, malformed("kind is %d", m.GetKind())
	}
	if err := short("help", m.GetHelp(), MaxName); err != nil {
		return s, err
	}
	var err error
	s.Labels, err = list("labels", m.GetLabels(), connector.MaxStatLabels, nameFromProto)
	return s, err
}

// statsFromProto reads what a Describe declares.
func statsFromProto(m []*kvportv1.StatInfo) ([]connector.StatInfo, error) {
	stats, err := list("describe: stats", m, connector.MaxStats, statInfoFromProto)
	if err != nil {
		return nil, err
	}
	if err := connector.ValidateStats(stats); err != nil {
		return nil, fmt.Errorf("describe: %w: %w", err, ErrMalformed)
	}
	return stats, nil
}

// StatsToProto converts the answer of Stats.
func StatsToProto(stats []connector.Stat) *kvportv1.StatsResponse {
	return &kvportv1.StatsResponse{Stats: each(stats, func(s *connector.Stat) *kvportv1.Stat {
		return &kvportv1.Stat{Name: s.Name, Labels: s.Labels, Value: s.Value}
	})}
}

// StatsFromProto converts the answer of Stats. That the stats were declared is for the host to check.
func StatsFromProto(m *kvportv1.StatsResponse) ([]connector.Stat, error) {
	return list("stats", m.GetStats(), connector.MaxSamples, func(m *kvportv1.Stat) (connector.Stat, error) {
		s := connector.Stat{Name: m.GetName(), Value: m.GetValue()}
		if err := short("name", m.GetName(), connector.MaxStatName); err != nil {
			return s, err
		}
		var err error
		s.Labels, err = list("labels", m.GetLabels(), connector.MaxStatLabels, nameFromProto)
		return s, err
	})
}

// BlockEventsToProto converts events.
func BlockEventsToProto(events []connector.BlockEvent) []*kvportv1.BlockEvent {
	return each(events, func(e *connector.BlockEvent) *kvportv1.BlockEvent {
		return &kvportv1.BlockEvent{
			Seq: e.Seq, Kind: kvportv1.BlockEventKind(e.Kind), Keys: keysToProto(e.Keys), Medium: e.Medium, Scope: kvportv1.Scope(e.Scope),
		}
	})
}

// EventsToProto converts the answer of Events.
func EventsToProto(events []connector.BlockEvent) *kvportv1.EventsResponse {
	return &kvportv1.EventsResponse{Events: BlockEventsToProto(events)}
}

// EventsFromProto converts the answer of Events. That Seq grows is for the host to check.
func EventsFromProto(m *kvportv1.EventsResponse) ([]connector.BlockEvent, error) {
	return list("events", m.GetEvents(), connector.MaxEvents, blockEventFromProto)
}

func blockEventFromProto(m *kvportv1.BlockEvent) (connector.BlockEvent, error) {
	e := connector.BlockEvent{
		Seq: m.GetSeq(), Kind: connector.BlockEventKind(m.GetKind()), Medium: m.GetMedium(), Scope: connector.Scope(m.GetScope()),
	}
	if k := m.GetKind(); k < kvportv1.BlockEventKind_BLOCK_EVENT_KIND_STORED || k > kvportv1.BlockEventKind_BLOCK_EVENT_KIND_CLEARED {
		return e, malformed("kind is %d", k)
	}
	if s := m.GetScope(); s < kvportv1.Scope_SCOPE_ENGINE || s > kvportv1.Scope_SCOPE_SHARED {
		return e, malformed("scope is %d", s)
	}
	if err := short("medium", m.GetMedium(), connector.MaxMedium); err != nil {
		return e, err
	}
	if (len(m.GetKeys()) == 0) != (e.Kind == connector.BlocksCleared) {
		return e, malformed("%v with %d bytes of keys", e.Kind, len(m.GetKeys()))
	}
	var err error
	e.Keys, err = keysFromProto(m.GetKeys())
	return e, err
}
