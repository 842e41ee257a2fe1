package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"google.golang.org/grpc"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// How long a proxy waits after ctx is done before it takes the plugin for hung, and how long a plugin that could
// run may take to close.
const (
	schedulerPatience = 500 * time.Millisecond
	ClosePatience     = 2 * time.Second
)

// Remote is a plugin at the other end of a connection. The sides that it opens are the connector's,
// seen through the wire: a Load or Save returns only when the plugin has answered or the connection
// is gone.
type Remote struct {
	client     kvportv1.PluginClient
	regions    []wire.Region // by rank, as the plugin knows them
	arena      arenaRef
	board      *shm.Board // which the process was started with; nil: each worker side has its own
	boardFD    int        // in the plugin
	rings      ringsRef
	violations atomic.Int64
	violated   func(what string)           // nil: only counted
	waits      func() func() time.Duration // of the process, see Process.Waits; nil: none is known
}

// Connect makes a Remote of any connection, such as one in memory. The plugin must run in this
// process or have inherited the regions under the same descriptor numbers. regions[r] is the cache
// of rank r; one that follows those of the ranks is for what Reshape reads.
func Connect(conn grpc.ClientConnInterface, regions []Region) *Remote {
	r := &Remote{client: kvportv1.NewPluginClient(conn)}
	for _, m := range regions {
		r.regions = append(r.regions, wire.Region{FD: int(m.File.Fd()), Size: m.Size})
	}
	return r
}

// arenaRef is an arena as a plugin knows it.
type arenaRef struct {
	arena *Arena // nil: none
	fd    int    // in the plugin
}

// region is how an Open describes the memory that a side gets as Env.Arena: that of the arena,
// or none. The plugin could not reach any other memory.
func (r *arenaRef) region(want []byte) (wire.Region, error) {
	if len(want) == 0 {
		return wire.Region{}, nil
	}
	if r.arena == nil || unsafe.SliceData(want) != unsafe.SliceData(r.arena.Bytes()) {
		return wire.Region{}, fmt.Errorf("arena: its memory is not this plugin's Arena: %w", connector.ErrIncompatible)
	}
	return wire.Region{FD: r.fd, Size: int64(len(want))}, nil
}

// UseArena says which arena Env.Arena is of in the sides that are opened from now on. The plugin
// must run in this process or have inherited the arena under the same descriptor number.
func (r *Remote) UseArena(a *Arena) { r.arena = arenaRef{a, int(a.File.Fd())} }

// Violations counts answers that broke the protocol so far.
func (r *Remote) Violations() int64 { return r.violations.Load() }

func (r *Remote) violation(what string) {
	r.violations.Add(1)
	if r.violated != nil {
		r.violated(what)
	}
}

// Describe asks what the connector would do with a config. It has no side effects. Errors of the
// config name the field.
func (r *Remote) Describe(ctx context.Context, config json.RawMessage) (connector.Info, error) {
	answer, err := r.client.Describe(ctx, &kvportv1.DescribeRequest{Config: config})
	if err != nil {
		if OutOfTime(ctx) {
			return connector.Info{}, fmt.Errorf("describe: %w in time: %w", ErrUnanswered, connector.ErrGone)
		}
		return connector.Info{}, fmt.Errorf("describe: %w: %w", ErrLost, err)
	}
	if answer.GetError() != nil {
		return connector.Info{}, wire.ErrorFromProto(answer.GetError())
	}
	return wire.InfoFromProto(answer)
}

// Heartbeat asks for a sign of life.
func (r *Remote) Heartbeat(ctx context.Context) error {
	_, err := r.client.Heartbeat(ctx, &kvportv1.HeartbeatRequest{})
	return err
}

// OpenScheduler opens the scheduler side. The result implements connector.Partial; ask it for
// optional interfaces with connector.As.
func (r *Remote) OpenScheduler(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Scheduler, error) {
	env.Rank = 0
	arena, err := r.arena.region(env.Arena)
	if err != nil {
		return nil, fmt.Errorf("scheduler side: %w", err)
	}
	open := &wire.Open{Side: kvportv1.Side_SIDE_SCHEDULER, Env: env, Config: config, Arena: arena}
	s, err := r.openSession(ctx, open)
	if err != nil {
		return nil, fmt.Errorf("scheduler side: %w", err)
	}
	return &schedulerProxy{s}, nil
}

// OpenWorker opens the worker side of rank env.Rank. The plugin maps that rank's region itself, so
// the KV that is passed to Load and Save later is not used.
func (r *Remote) OpenWorker(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Worker, error) {
	if env.Rank < 0 || env.Rank >= len(r.regions) {
		return nil, fmt.Errorf("worker side: rank %d has no region: %w", env.Rank, connector.ErrIncompatible)
	}
	arena, err := r.arena.region(env.Arena)
	if err != nil {
		return nil, fmt.Errorf("worker side of rank %d: %w", env.Rank, err)
	}
	p := &workerProxy{board: r.board, own: r.board == nil, layers: env.Layout.Layers()}
	fd := r.boardFD
	if p.own { // the plugin is in this process
		if p.board, err = shm.NewBoard(); err != nil {
			return nil, fmt.Errorf("worker side of rank %d: %w", env.Rank, err)
		}
		fd = int(p.board.Region().File().Fd())
	}
	regions := []wire.Region{r.regions[env.Rank]}
	if env.World > 0 && env.World < len(r.regions) {
		regions = append(regions, r.regions[env.World])
	}
	open := &wire.Open{
		Side: kvportv1.Side_SIDE_WORKER, Env: env, Config: config,
		Regions: regions, Arena: arena, Progress: wire.Region{FD: fd, Size: shm.BoardBytes},
	}
	if p.session, err = r.openSession(ctx, open); err != nil {
		return nil, errors.Join(fmt.Errorf("worker side of rank %d: %w", env.Rank, err), p.closeBoard())
	}
	return p, nil
}

// schedulerProxy is the scheduler side with every optional method; Capabilities says which work.
type schedulerProxy struct{ *session }

// Match implements connector.Scheduler.
func (p *schedulerProxy) Match(ctx context.Context, queries []connector.Query) ([]connector.Match, error) {
	req := &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Match{Match: wire.QueriesToProto(queries)}}
	return ask(ctx, p.session, req, (*reply).GetMatch, func(m *kvportv1.MatchResponse) ([]connector.Match, error) {
		return wire.MatchesFromProto(m, len(queries))
	})
}

// Plan implements connector.Planner.
func (p *schedulerProxy) Plan(ctx context.Context, s *connector.Step) (*connector.Plan, error) {
	req := &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Plan{Plan: wire.StepToProto(s)}}
	return ask(ctx, p.session, req, (*reply).GetPlan, wire.PlanFromProto)
}

// Finish implements connector.Holder.
func (p *schedulerProxy) Finish(ctx context.Context, ended []connector.Ended) ([]connector.Hold, error) {
	req := &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Finish{Finish: wire.EndedToProto(ended)}}
	return ask(ctx, p.session, req, (*reply).GetFinish, func(m *kvportv1.FinishResponse) ([]connector.Hold, error) {
		return wire.HoldsFromProto(m, len(ended))
	})
}

// Consumed implements connector.Holder.
func (p *schedulerProxy) Consumed(ctx context.Context) ([]connector.HoldID, error) {
	req := &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Consumed{Consumed: &kvportv1.ConsumedRequest{}}}
	return ask(ctx, p.session, req, (*reply).GetConsumed, wire.ConsumedFromProto)
}

// Renewals implements connector.Leaser.
func (p *schedulerProxy) Renewals(ctx context.Context, ended []connector.HoldID) ([]connector.HoldID, error) {
	req := &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Renewals{Renewals: wire.RenewalsToProto(ended)}}
	return ask(ctx, p.session, req, (*reply).GetRenewals, wire.RenewedFromProto)
}

// Reset implements connector.Resetter.
func (p *schedulerProxy) Reset(ctx context.Context) (bool, error) {
	req := &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Reset_{Reset_: &kvportv1.ResetRequest{}}}
	return ask(ctx, p.session, req, (*reply).GetReset_, func(m *kvportv1.ResetResponse) (bool, error) { return m.GetEmptied(), nil })
}

// Stats implements connector.StatsSource.
func (p *schedulerProxy) Stats(ctx context.Context) ([]connector.Stat, error) {
	req := &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Stats{Stats: &kvportv1.StatsRequest{}}}
	return ask(ctx, p.session, req, (*reply).GetStats, wire.StatsFromProto)
}

// Events implements connector.EventSource.
func (p *schedulerProxy) Events(ctx context.Context) ([]connector.BlockEvent, error) {
	req := &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Events{Events: &kvportv1.EventsRequest{}}}
	return ask(ctx, p.session, req, (*reply).GetEvents, wire.EventsFromProto)
}

// ask makes one call of the scheduler side, gets its kind of answer and reads that. One that breaks the protocol
// is counted.
func ask[M, T any](ctx context.Context, s *session, req *kvportv1.SessionRequest, get func(*reply) *M, read func(*M) (T, error)) (v T, err error) {
	r, err := s.call(ctx, req, schedulerPatience)
	if err != nil {
		return v, err
	}
	if m := get(r); m != nil {
		v, err = read(m)
	} else {
		err = wrongAnswer(req)
	}
	return v, s.broken(req, err)
}

// Close implements connector.Scheduler.
func (p *schedulerProxy) Close() error { return p.closeInTime() }

// broken counts an answer that breaks the protocol and passes its error on.
func (s *session) broken(req *kvportv1.SessionRequest, err error) error {
	if err != nil {
		s.violated(wire.CallName(req) + ": " + err.Error())
	}
	return err
}

// workerProxy is the worker side of one rank.
type workerProxy struct {
	*session
	board  *shm.Board // of the counters of SaveLayers and LoadLayers
	own    bool       // closed with the side
	layers int
}

// Load implements connector.Worker.
func (p *workerProxy) Load(ctx context.Context, t *connector.Transfer, _ *connector.KV) error {
	return p.move(ctx, &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Load{Load: wire.TransferToProto(t)}})
}

// Reshape implements connector.Reshaper. Of kv only the layout is used: its regions are those that the side was opened
// with.
func (p *workerProxy) Reshape(ctx context.Context, t *connector.Transfer, from connector.Source, kv *connector.KV) error {
	m := wire.ReshapeToProto(&wire.Reshape{Transfer: *t, Source: from, Layout: *kv.Layout()})
	return p.move(ctx, &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_ReshapeBlocks{ReshapeBlocks: m}})
}

// Save implements connector.Worker.
func (p *workerProxy) Save(ctx context.Context, t *connector.Transfer, _ *connector.KV) error {
	return p.move(ctx, &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Save{Save: wire.TransferToProto(t)}})
}

// SavePlaced implements connector.Placer.
func (p *workerProxy) SavePlaced(ctx context.Context, t *connector.Transfer, _ *connector.KV, used []uint32) ([]uint32, error) {
	m := wire.TransferToProto(t)
	m.Used = used
	return p.placed(ctx, &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Save{Save: m}})
}

// LoadPlaced implements connector.Placer.
func (p *workerProxy) LoadPlaced(ctx context.Context, t *connector.Transfer, _ *connector.KV, used []uint32) ([]uint32, error) {
	m := wire.TransferToProto(t)
	m.Used = used
	return p.placed(ctx, &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Load{Load: m}})
}

// Lends implements connector.Lender.
func (p *workerProxy) Lends() int { return int(min(p.lends, wire.MaxPlaced)) }

// Lend implements connector.Lender. A plugin that does not answer in time is taken for hung: what a late answer lends would be lost.
func (p *workerProxy) Lend(ctx context.Context, l *connector.Lending) (*connector.Loan, error) {
	req := &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Lend{Lend: wire.LendingToProto(l)}}
	r, err := p.call(ctx, req, schedulerPatience)
	if err != nil {
		return nil, err
	}
	m := r.GetLent()
	if m == nil {
		return nil, p.broken(req, wrongAnswer(req))
	}
	loan, err := wire.LoanFromProto(m, l.Want)
	return loan, p.broken(req, err)
}

// placed moves, and gives the slots that the answer names.
func (p *workerProxy) placed(ctx context.Context, req *kvportv1.SessionRequest) ([]uint32, error) {
	moved, err := p.moved(ctx, req)
	if err != nil {
		return nil, err
	}
	slots, err := wire.SlotsFromProto("moved.placed", moved.GetPlaced())
	return slots, p.broken(req, err)
}

// move waits for the answer however long it takes: the end of ctx ends the plugin's wait, but only
// its answer says that the blocks are untouched from now on.
func (p *workerProxy) move(ctx context.Context, req *kvportv1.SessionRequest) error {
	_, err := p.moved(ctx, req)
	return err
}

func (p *workerProxy) moved(ctx context.Context, req *kvportv1.SessionRequest) (*kvportv1.Moved, error) {
	r, err := p.call(ctx, req, forever)
	if err != nil {
		return nil, err
	}
	m := r.GetMoved()
	if m == nil {
		return nil, p.broken(req, wrongAnswer(req))
	}
	return m, nil
}

// SaveLayers implements connector.LayerWorker. The counter that the plugin waits for is fed from
// progress as long as the call lasts. Without a free counter it is Save, after the last layer.
func (p *workerProxy) SaveLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, progress connector.Progress) error {
	counter, ok := p.board.Take()
	if !ok {
		if err := connector.AwaitLayers(ctx, progress, p.layers); err != nil {
			return err
		}
		return p.Save(ctx, t, kv)
	}
	defer counter.Give()
	feeding, stop := context.WithCancel(ctx)
	fed := make(chan struct{})
	go func() {
		defer close(fed)
		feed(feeding, counter, progress, p.layers)
	}()
	defer func() {
		stop()
		<-fed
	}()
	return p.move(ctx, &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_SaveLayers{
		SaveLayers: wire.SaveLayersToProto(&wire.Layers{Transfer: t, Slot: counter.Slot, Call: counter.Call}),
	}})
}

// LoadLayers implements connector.LayerLoader. What the plugin counts is passed on as long as the call lasts. Without
// a free counter it is Load.
func (p *workerProxy) LoadLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, arrived connector.Arrivals) error {
	counter, ok := p.board.Take()
	if !ok {
		return p.Load(ctx, t, kv)
	}
	defer counter.Give()
	looking, stop := context.WithCancel(ctx)
	over := make(chan struct{})
	go func() {
		defer close(over)
		for n := uint32(0); int(n) < p.layers; {
			var err error
			if n, err = counter.Wait(looking, n); err != nil || int(n) > p.layers {
				return
			}
			arrived.Advance(int(n))
		}
	}()
	defer func() {
		stop()
		<-over
	}()
	return p.move(ctx, &kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_LoadLayers{
		LoadLayers: wire.LoadLayersToProto(&wire.Layers{Transfer: t, Slot: counter.Slot, Call: counter.Call}),
	}})
}

// feed shows on a counter how far something has come, until it is over or ctx is done.
func feed(ctx context.Context, counter *shm.Counter, progress connector.Progress, layers int) {
	for n := 0; n < layers; {
		var err error
		if n, err = progress.Wait(ctx, n); err != nil {
			counter.Set(shm.GivenUp)
			return
		}
		counter.Set(uint32(n))
	}
}

// Close implements connector.Worker.
func (p *workerProxy) Close() error { return errors.Join(p.closeInTime(), p.closeBoard()) }

func (p *workerProxy) closeBoard() error {
	if !p.own {
		return nil
	}
	return p.board.Close()
}
