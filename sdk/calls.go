package sdk

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// side is one opened half of the connector: either scheduler or worker is set.
type side struct {
	scheduler connector.Scheduler
	worker    connector.Worker
	kv        *connector.KV
	memory    [][]byte       // kv's regions, and behind them what Reshape reads into, if the host has that
	board     *shm.BoardView // nil if the host has none
	placing   bool           // the host has placed the arena
	log       *slog.Logger
	close     func() error // closes the half, then frees its memory
}

// dispatch runs one call and fills its answer.
func (s *session) dispatch(ctx context.Context, c *call, answer *kvportv1.SessionResponse) error {
	if open, ok := c.request.GetCall().(*kvportv1.SessionRequest_Open); ok {
		opened, err := s.open(ctx, open.Open)
		answer.Result = &kvportv1.SessionResponse_Opened{Opened: opened}
		return err
	}
	s.mu.Lock()
	side := s.side
	s.mu.Unlock()
	switch {
	case side == nil:
		return fmt.Errorf("%s: the side is not open: %w", wire.CallName(c.request), connector.ErrIncompatible)
	case side.worker != nil:
		return callWorker(ctx, c, side, answer)
	}
	return callScheduler(ctx, c, side.scheduler, answer)
}

func callWorker(ctx context.Context, c *call, w *side, answer *kvportv1.SessionResponse) error {
	if lend, ok := c.request.GetCall().(*kvportv1.SessionRequest_Lend); ok {
		return callLend(ctx, w, lend.Lend, answer)
	}
	var move mover
	var m *kvportv1.Transfer
	moved := &kvportv1.Moved{}
	switch request := c.request.GetCall().(type) {
	case *kvportv1.SessionRequest_Load:
		fault.Crash("sdk.load")
		move, m = w.load(request.Load, moved), request.Load
		defer fault.Crash("sdk.loaded")
	case *kvportv1.SessionRequest_Save:
		fault.Crash("sdk.save")
		move, m = w.save(request.Save, moved), request.Save
		defer fault.Crash("sdk.saved")
	case *kvportv1.SessionRequest_SaveLayers:
		save, err := w.saveLayers(request.SaveLayers)
		if err != nil {
			return err
		}
		move, m = save, request.SaveLayers.GetTransfer()
	case *kvportv1.SessionRequest_LoadLayers:
		load, err := w.loadLayers(request.LoadLayers)
		if err != nil {
			return err
		}
		move, m = load, request.LoadLayers.GetTransfer()
	case *kvportv1.SessionRequest_ReshapeBlocks:
		r, read, err := w.reshape(request.ReshapeBlocks)
		if err != nil {
			return err
		}
		answer.Result = &kvportv1.SessionResponse_Moved{Moved: &kvportv1.Moved{}}
		return read(ctx, &r.Transfer)
	default:
		return fmt.Errorf("%s is not for a worker side: %w", wire.CallName(c.request), connector.ErrIncompatible)
	}
	if err := fault.Point("sdk.move"); err != nil {
		return err
	}
	t, err := wire.TransferFromProto(m)
	if err != nil {
		return err
	}
	if err := within(&t, w.kv); err != nil {
		return err
	}
	answer.Result = &kvportv1.SessionResponse_Moved{Moved: moved}
	return move(ctx, &t, w.kv)
}

// callLend has a worker lend slots.
func callLend(ctx context.Context, w *side, m *kvportv1.LendRequest, answer *kvportv1.SessionResponse) error {
	lender, ok := w.worker.(connector.Lender)
	if !ok || w.lends() == 0 {
		return fmt.Errorf("the connector lends no slots: %w", connector.ErrIncompatible)
	}
	l, err := wire.LendingFromProto(m)
	if err != nil {
		return err
	}
	fault.Crash("sdk.lend")
	loan, err := lender.Lend(ctx, l)
	if err != nil {
		return err
	}
	fault.Crash("sdk.lent")
	answer.Result = &kvportv1.SessionResponse_Lent{Lent: wire.LoanToProto(loan)}
	return nil
}

// lends is how many slots the worker lends; 0: none.
func (w *side) lends() int {
	if lender, ok := w.worker.(connector.Lender); ok && w.placing {
		return max(0, lender.Lends())
	}
	return 0
}

// mover is Load or Save, and placer is LoadPlaced or SavePlaced.
type (
	mover  func(context.Context, *connector.Transfer, *connector.KV) error
	placer func(context.Context, *connector.Transfer, *connector.KV, []uint32) ([]uint32, error)
)

// save is the worker's Save, which fills moved if the worker is a Placer whose arena the host has placed.
func (w *side) save(m *kvportv1.Transfer, moved *kvportv1.Moved) mover {
	p, ok := connector.As[connector.Placer](w.worker)
	if !ok || !w.placing {
		return w.worker.Save
	}
	return place("save.used", m, moved, p.SavePlaced)
}

// load is the worker's Load, which fills moved as save does.
func (w *side) load(m *kvportv1.Transfer, moved *kvportv1.Moved) mover {
	p, ok := connector.As[connector.Placer](w.worker)
	if !ok || !w.placing {
		return w.worker.Load
	}
	return place("load.used", m, moved, p.LoadPlaced)
}

// place is a move that hears which slots the host has read, and fills moved with those in which blocks lie then.
func place(name string, m *kvportv1.Transfer, moved *kvportv1.Moved, move placer) mover {
	return func(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
		used, err := wire.SlotsFromProto(name, m.GetUsed())
		if err != nil {
			return err
		}
		moved.Placed, err = move(ctx, t, kv, used)
		return err
	}
}

// within makes sure that a transfer's blocks are in the memory that it is about.
func within(t *connector.Transfer, kv *connector.KV) error {
	for _, b := range t.Blocks {
		if int(b.ID) >= kv.Layout().Blocks || int(b.Group) >= len(kv.Layout().Groups) {
			return fmt.Errorf("block %d of group %d is not in the cache: %w", b.ID, b.Group, connector.ErrIncompatible)
		}
	}
	return nil
}

// reshape prepares for a load of whole blocks of an engine with another shape.
func (w *side) reshape(m *kvportv1.Reshape) (r *wire.Reshape, read func(context.Context, *connector.Transfer) error, err error) {
	reshaper, err := power[connector.Reshaper](w.worker, connector.CanReshape)
	if err == nil {
		r, err = wire.ReshapeFromProto(m)
	}
	if err != nil {
		return nil, nil, err
	}
	kv, err := connector.NewKV(r.Layout, w.memory)
	if err == nil {
		err = within(&r.Transfer, kv)
	}
	return r, func(ctx context.Context, t *connector.Transfer) error { return reshaper.Reshape(ctx, t, r.Source, kv) }, err
}

func callScheduler(ctx context.Context, c *call, scheduler connector.Scheduler, answer *kvportv1.SessionResponse) error {
	switch request := c.request.GetCall().(type) {
	case *kvportv1.SessionRequest_Match:
		queries, err := wire.QueriesFromProto(request.Match)
		if err != nil {
			return err
		}
		if err := fault.Point("sdk.match"); err != nil {
			return err
		}
		matches, err := scheduler.Match(ctx, queries)
		fault.Crash("sdk.matched")
		answer.Result = &kvportv1.SessionResponse_Match{Match: wire.MatchesToProto(matches)}
		return err
	case *kvportv1.SessionRequest_Plan:
		return callPlan(ctx, scheduler, request.Plan, answer)
	case *kvportv1.SessionRequest_Finish:
		return callFinish(ctx, scheduler, request.Finish, answer)
	case *kvportv1.SessionRequest_Reset_:
		resetter, err := power[connector.Resetter](scheduler, connector.CanReset)
		if err != nil {
			return err
		}
		emptied, err := resetter.Reset(ctx)
		answer.Result = &kvportv1.SessionResponse_Reset_{Reset_: &kvportv1.ResetResponse{Emptied: emptied}}
		return err
	}
	return callBeside(ctx, c, scheduler, answer)
}

// beside reports whether a call runs concurrently with others of the scheduler side and ends when that side
// closes.
func beside(m *kvportv1.SessionRequest) bool {
	switch m.GetCall().(type) {
	case *kvportv1.SessionRequest_Consumed, *kvportv1.SessionRequest_Stats, *kvportv1.SessionRequest_Events, *kvportv1.SessionRequest_Renewals:
		return true
	}
	return false
}

// callBeside runs a call that does not wait for other calls.
func callBeside(ctx context.Context, c *call, scheduler connector.Scheduler, answer *kvportv1.SessionResponse) error {
	switch request := c.request.GetCall().(type) {
	case *kvportv1.SessionRequest_Consumed:
		holder, err := power[connector.Holder](scheduler, connector.CanHold)
		if err != nil {
			return err
		}
		ids, err := holder.Consumed(ctx)
		fault.Crash("sdk.consumed")
		answer.Result = &kvportv1.SessionResponse_Consumed{Consumed: wire.ConsumedToProto(ids)}
		return err
	case *kvportv1.SessionRequest_Stats:
		source, err := power[connector.StatsSource](scheduler, connector.CanStat)
		if err != nil {
			return err
		}
		stats, err := source.Stats(ctx)
		answer.Result = &kvportv1.SessionResponse_Stats{Stats: wire.StatsToProto(stats)}
		return err
	case *kvportv1.SessionRequest_Events:
		source, err := power[connector.EventSource](scheduler, connector.CanEvents)
		if err != nil {
			return err
		}
		events, err := source.Events(ctx)
		answer.Result = &kvportv1.SessionResponse_Events{Events: wire.EventsToProto(events)}
		return err
	case *kvportv1.SessionRequest_Renewals:
		return callRenewals(ctx, scheduler, request.Renewals, answer)
	}
	return fmt.Errorf("%s is not for a scheduler side: %w", wire.CallName(c.request), connector.ErrIncompatible)
}

func callRenewals(ctx context.Context, scheduler connector.Scheduler, m *kvportv1.RenewalsRequest, answer *kvportv1.SessionResponse) error {
	leaser, err := power[connector.Leaser](scheduler, connector.CanLease)
	if err != nil {
		return err
	}
	ended, err := wire.RenewalsFromProto(m)
	if err != nil {
		return err
	}
	ids, err := leaser.Renewals(ctx, ended)
	answer.Result = &kvportv1.SessionResponse_Renewals{Renewals: wire.RenewedToProto(ids)}
	return err
}

func callPlan(ctx context.Context, scheduler connector.Scheduler, m *kvportv1.Step, answer *kvportv1.SessionResponse) error {
	planner, err := power[connector.Planner](scheduler, connector.CanPlan)
	if err != nil {
		return err
	}
	step, err := wire.StepFromProto(m)
	if err != nil {
		return err
	}
	plan, err := planner.Plan(ctx, step)
	answer.Result = &kvportv1.SessionResponse_Plan{Plan: wire.PlanToProto(plan)}
	return err
}

func callFinish(ctx context.Context, scheduler connector.Scheduler, m *kvportv1.FinishRequest, answer *kvportv1.SessionResponse) error {
	holder, err := power[connector.Holder](scheduler, connector.CanHold)
	if err != nil {
		return err
	}
	ended, err := wire.EndedFromProto(m)
	if err != nil {
		return err
	}
	if err := fault.Point("sdk.hold"); err != nil {
		return err
	}
	holds, err := holder.Finish(ctx, ended)
	fault.Crash("sdk.held")
	answer.Result = &kvportv1.SessionResponse_Finish{Finish: wire.HoldsToProto(holds)}
	return err
}

// power returns the optional interface T of a side.
func power[T any](v any, c connector.Capability) (T, error) {
	t, ok := connector.As[T](v)
	if !ok {
		return t, fmt.Errorf("the connector cannot %v: %w", c, connector.ErrIncompatible)
	}
	return t, nil
}

// open opens the session's side.
func (s *session) open(ctx context.Context, m *kvportv1.Open) (*kvportv1.Opened, error) {
	o, err := wire.OpenFromProto(m)
	if err != nil {
		return nil, err
	}
	o.Env.Log = s.log.With("engine", o.Env.Engine, "side", "scheduler")
	if err := fault.Point("sdk.open"); err != nil {
		return nil, err
	}
	opened, err := s.openInArena(ctx, o)
	if err != nil {
		return nil, err
	}
	capabilities := connector.CapabilitiesOf(opened.worker)
	if opened.scheduler != nil {
		capabilities = connector.CapabilitiesOf(opened.scheduler)
	}
	fault.Crash("sdk.opened")
	s.mu.Lock()
	s.side, opened.log = opened, o.Env.Log
	s.mu.Unlock()
	return &kvportv1.Opened{Capabilities: wire.CapabilitiesToProto(capabilities), Ring: s.openRing(o.Ring), Lends: uint32(opened.lends())}, nil
}

// openInArena opens a side with its arena mapped from before its opening until after its Close.
func (s *session) openInArena(ctx context.Context, o *wire.Open) (opened *side, err error) {
	var free func() error
	if o.Env.Arena, free, err = s.server.regions.arena(o.Arena); err != nil {
		return nil, err
	}
	defer func() {
		if opened == nil { // also after a panic
			err = errors.Join(err, free())
		}
	}()
	if o.Side == kvportv1.Side_SIDE_WORKER {
		o.Env.Log = s.log.With("engine", o.Env.Engine, "side", "worker", "rank", o.Env.Rank)
		opened, err = s.openWorker(ctx, o)
	} else {
		opened, err = s.openScheduler(ctx, o)
	}
	if err != nil {
		return nil, err
	}
	closeSide := opened.close
	opened.close = func() (err error) {
		defer func() { err = errors.Join(err, free()) }() // even if Close panics
		return closeSide()
	}
	return opened, nil
}

func (s *session) openScheduler(ctx context.Context, o *wire.Open) (*side, error) {
	if s.server.plugin.Scheduler == nil {
		return nil, fmt.Errorf("connector %s has no scheduler side: %w", s.server.plugin.Name, connector.ErrIncompatible)
	}
	scheduler, err := s.server.plugin.Scheduler(ctx, o.Env, o.Config)
	if err == nil && scheduler == nil {
		err = fmt.Errorf("connector %s opened a nil scheduler: %w", s.server.plugin.Name, connector.ErrIncompatible)
	}
	if err != nil {
		return nil, err
	}
	return &side{scheduler: scheduler, close: scheduler.Close}, nil
}

func (s *session) openWorker(ctx context.Context, o *wire.Open) (_ *side, err error) {
	if s.server.plugin.Worker == nil {
		return nil, fmt.Errorf("connector %s has no worker side: %w", s.server.plugin.Name, connector.ErrIncompatible)
	}
	views, unmap, err := s.server.regions.worker(o)
	if err != nil {
		return nil, err
	}
	board, leave, err := s.server.regions.board(o.Progress)
	free := func() error { return errors.Join(leave(), unmap()) }
	opened := false
	defer func() { // also after a panic
		if !opened {
			err = errors.Join(err, free())
		}
	}()
	if err != nil {
		return nil, err
	}
	kv, err := connector.NewKV(o.Env.Layout, views)
	if err != nil {
		return nil, err
	}
	worker, err := s.server.plugin.Worker(ctx, o.Env, o.Config)
	if err == nil && worker == nil {
		err = fmt.Errorf("connector %s opened a nil worker: %w", s.server.plugin.Name, connector.ErrIncompatible)
	}
	if err != nil {
		return nil, err
	}
	if r, ok := worker.(connector.Registerer); ok {
		if err := r.RegisterKV(ctx, kv); err != nil {
			return nil, errors.Join(err, worker.Close())
		}
	}
	opened = true
	return &side{worker: worker, kv: kv, memory: views, board: board, placing: o.Env.Placement != nil, close: func() (err error) {
		defer func() { err = errors.Join(err, free()) }() // even if Close panics
		return worker.Close()
	}}, nil
}
