package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// read serves the calls of one connection, in order, until it ends. The error says why; nil is a good
// end. One that breaks the protocol is told so before it is cut.
func (s *server) read(c *conn) error {
	if err := c.SetReadDeadline(time.Now().Add(s.limits.attach)); err != nil {
		return err
	}
	for first := true; ; first = false {
		call, file, err := c.next()
		if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err == nil {
			err = s.handle(c, call, file, first)
		}
		if errors.Is(err, errLeft) {
			c.finish()
			<-c.gone
			return nil
		}
		if err != nil {
			s.log.Warn("connection is cut", "pid", c.pid, "error", err)
			c.send(&kvportv1.AgentAnswer{Id: call.GetId(), Error: wire.ErrorToProto(err)})
			c.finish()
			select {
			case <-c.gone:
			case <-time.After(time.Second):
			}
			return err
		}
	}
}

// errLeft says that a process has left in good order.
var errLeft = errors.New("detached")

// handle serves one call. An error ends the connection.
func (s *server) handle(c *conn, call *kvportv1.AgentCall, file *os.File, first bool) error {
	attach, isAttach := call.GetCall().(*kvportv1.AgentCall_Attach)
	pages, storesPages := call.GetCall().(*kvportv1.AgentCall_AttachPages)
	if first != (isAttach || storesPages) {
		closeFile(file)
		return fmt.Errorf("attach is the first call of a connection, and only the first: %w", wire.ErrMalformed)
	}
	if isAttach {
		return s.attach(c, call.GetId(), attach.Attach, file)
	}
	if storesPages {
		closeFile(file)
		return s.attachPages(c, call.GetId(), pages.AttachPages)
	}
	if region, ok := call.GetCall().(*kvportv1.AgentCall_PagesRegion); ok && c.pages != nil {
		return c.registerPages(call.GetId(), region.PagesRegion, file)
	}
	if file != nil {
		closeFile(file)
		return fmt.Errorf("%w: %w", errFiles, wire.ErrMalformed)
	}
	if _, ok := call.GetCall().(*kvportv1.AgentCall_Detach); ok {
		c.send(&kvportv1.AgentAnswer{Id: call.GetId(), Result: &kvportv1.AgentAnswer_Detached{Detached: &kvportv1.AgentDetached{}}})
		return errLeft
	}
	if c.pages != nil {
		return c.pagesCall(call)
	}
	s.mu.Lock()
	scheduler := s.sched == c
	s.mu.Unlock()
	if !scheduler {
		return fmt.Errorf("only the scheduler calls %T: %w", call.GetCall(), wire.ErrMalformed)
	}
	switch m := call.GetCall().(type) {
	case *kvportv1.AgentCall_Match:
		return s.match(c, call, m.Match)
	case *kvportv1.AgentCall_Step:
		return s.step(m.Step, call.GetLayerWise())
	case *kvportv1.AgentCall_Finish:
		return s.finish(c, call.GetId(), m.Finish)
	case *kvportv1.AgentCall_Reset_:
		s.work.Go(func() { s.reset(c, call.GetId()) })
	}
	return nil
}

func closeFile(f *os.File) {
	if f != nil {
		_ = f.Close()
	}
}

// attach gives a process its place. The answer comes when nothing of its former self is left, to a rank
// from the keeper; an error is the answer, and ends the connection.
func (s *server) attach(c *conn, id uint64, m *kvportv1.AgentAttach, file *os.File) error {
	a, err := wire.AttachFromProto(m)
	var brought *rankAttach
	if err == nil && a.Side == kvportv1.Side_SIDE_WORKER {
		brought, err = s.receive(a, file)
		file = nil
	}
	closeFile(file)
	if err != nil {
		return err
	}
	if err := c.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	s.mu.Lock()
	err = s.sameEngine(a)
	if s.storesPages() {
		err = fmt.Errorf("attach: this agent stores pages for another process: %w", connector.ErrIncompatible)
	}
	if err == nil {
		err = s.meet(c)
	}
	if err != nil {
		s.mu.Unlock()
		if brought != nil {
			_ = brought.region.Close()
		}
		return err
	}
	c.engine = a.Engine
	var replaced *conn
	if brought == nil {
		replaced, s.sched = s.sched, c
	} else {
		replaced = s.sit(c, id, brought)
	}
	sent, err := s.greet(c, id, brought == nil)
	s.mu.Unlock()
	if replaced != nil && replaced != c {
		replaced.cut(errors.New("another process has taken its place"))
	}
	if err != nil {
		return err
	}
	s.log.Info("attached", "pid", c.pid, "side", a.Side.String(), "rank", a.Rank, "world", a.World)
	c.await(sent)
	return nil
}

// sameEngine returns an error if a scheduler names another engine than the ranks, or a rank another one than the
// scheduler. That ranks name the same is for the keeper to see. The caller holds mu.
func (s *server) sameEngine(a *wire.Attach) error {
	there := s.sched
	if a.Side == kvportv1.Side_SIDE_SCHEDULER {
		there = nil
		for _, seat := range s.seats {
			there = seat.conn
		}
	}
	if there == nil || there.engine == a.Engine {
		return nil
	}
	return fmt.Errorf("attach.engine is %q, but the other side of the connector is of engine %q: both must have the same engine_id: %w",
		a.Engine, there.engine, connector.ErrIncompatible)
}

// receive maps what a rank has brought and checks that its cache, and digests, lie in it.
func (s *server) receive(a *wire.Attach, file *os.File) (*rankAttach, error) {
	if file == nil {
		return nil, fmt.Errorf("attach: the descriptor of the region did not come beside the frame: %w", wire.ErrMalformed)
	}
	layout, size := host.WithDigests(a.Layout)
	err := checkHashes(a.Hashes, &s.cfg.Transfer.Settings)
	if err == nil && a.Region < size {
		err = fmt.Errorf("attach.region is %d bytes, the cache with room for its digests needs %d: %w", a.Region, size, connector.ErrIncompatible)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	region, err := host.OpenRegion(file, a.Region)
	if err != nil {
		return nil, fmt.Errorf("attach.region: %w", err)
	}
	return &rankAttach{
		rank: a.Rank, world: a.World, model: a.Model, shape: a.Shape, shapeText: a.ShapeText, layout: layout,
		region: region, memory: region, engine: a.Engine, hashes: a.Hashes, events: a.Events,
	}, nil
}

// sit gives a rank its seat and returns who had it. The caller holds mu.
func (s *server) sit(c *conn, id uint64, a *rankAttach) (replaced *conn) {
	if old := s.seats[a.rank]; old != nil {
		replaced = old.conn
		s.retired = append(s.retired, old.attach.memory)
	}
	s.seats[a.rank] = &seat{conn: c, attach: a, pending: id}
	s.change()
	return replaced
}

// greet tells a process that has just come what there is, and answers a scheduler whose predecessor
// left nothing behind. The caller holds mu.
func (s *server) greet(c *conn, id uint64, scheduler bool) (sent <-chan struct{}, err error) {
	c.attachID = id
	s.processes = slices.DeleteFunc(s.processes, (*osProcess).gone)
	for _, g := range s.processes {
		if sent, err = s.introduce(c, g); err != nil { // the last is sent last
			return nil, err
		}
	}
	switch {
	case !scheduler:
	case s.used:
		s.waiting = append(s.waiting, c)
		s.change()
	default:
		s.seat(c, id)
	}
	return sent, nil
}

// seat answers a scheduler. The caller holds mu.
func (s *server) seat(c *conn, id uint64) {
	c.send(s.welcome(id, nil))
	c.joined = true
	if s.session.publishes() {
		c.send(blocksAnswer(true, nil))
	}
}

// match answers a lookup, and those that came ahead with it (rule AGENT-16). Without an open connector all are misses.
func (s *server) match(c *conn, call *kvportv1.AgentCall, m *kvportv1.Query) error {
	q, err := wire.QueryFromProto(m)
	if err != nil {
		return err
	}
	ahead := make([]connector.Query, len(call.GetAhead()))
	for i, m := range call.GetAhead() {
		if ahead[i], err = wire.QueryFromProto(m); err != nil {
			return err
		}
	}
	s.mu.Lock()
	h := s.session
	s.used = s.used || h != nil
	s.mu.Unlock()
	found := make([]connector.Match, 1+len(ahead))
	if h != nil {
		found = h.match(q, ahead)
	}
	answers := wire.MatchesToProto(found).GetMatches()
	c.send(&kvportv1.AgentAnswer{Id: call.GetId(), Result: &kvportv1.AgentAnswer_Match{Match: answers[0]}, Ahead: answers[1:]})
	return nil
}

// match asks the connector. A question of no request, a probe, comes alone. Keys of what came ahead are made when q was asked.
func (o *session) match(q connector.Query, ahead []connector.Query) []connector.Match {
	signed := q.Ticket
	q.Ticket = nil
	o.keys.query(&q)
	if len(ahead) == 0 {
		return []connector.Match{o.host.Match(q, signed)}
	}
	return o.host.MatchAll(q, signed, func(yield func(connector.Query) bool) {
		for i := range ahead {
			o.keys.query(&ahead[i])
			if !yield(ahead[i]) {
				return
			}
		}
	})
}

// step hands over what the engine decided and computed. The ranks wait for the loads of some requests layer by layer.
func (s *server) step(m *kvportv1.Step, layerWise []string) error {
	step, err := wire.StepFromProto(m)
	if err != nil {
		return err
	}
	loads, err := chosen(step, layerWise)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hand(step, loads)
}

// hand gives a step to the connector, and says for which of its loads the ranks wait layer by layer. The caller holds mu,
// so that the connector is not closed before it has it.
func (s *server) hand(step *connector.Step, layerWise map[connector.RequestID]bool) error {
	s.last = max(s.last, step.ID)
	h := s.session
	if h == nil {
		s.refuse(step)
		return nil
	}
	if err := h.check(step); err != nil {
		return err
	}
	s.used = true
	h.keys.remember(step)
	h.keys.step(step)
	h.expect(step, layerWise)
	h.host.Step(step)
	return nil
}

// finish ends one request and answers with its ticket: at once where the connector stores, else when
// the holder has answered, or after a while without one: the engine stalls meanwhile, so a holder
// that was late is not waited for as long again.
func (s *server) finish(c *conn, id uint64, m *kvportv1.Ended) error {
	e, err := wire.EndFromProto(m)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.session
	var ticket []byte
	var later chan []byte
	if h != nil {
		if err := checkBlocks(h.layout, e.Blocks); err != nil {
			return fmt.Errorf("finish: %w", err)
		}
		switch {
		case !e.Remote:
		case h.host.Info().Capabilities&connector.CanHold == 0:
			ticket = h.host.Ticket(&e)
		default:
			later = make(chan []byte, 1)
			h.tickets[e.Request] = later
		}
	}
	if err := s.hand(&connector.Step{ID: s.last, Ended: []connector.Ended{e}}, nil); err != nil {
		return err
	}
	if later == nil {
		c.send(finished(id, ticket))
		return nil
	}
	wait := s.limits.finish
	if s.tardy {
		wait /= 10
	}
	s.work.Go(func() {
		var ticket []byte
		late := false
		select {
		case ticket = <-later:
		case <-time.After(wait):
			late = true
		}
		s.mu.Lock()
		s.tardy = late
		s.mu.Unlock()
		c.send(finished(id, ticket))
	})
	return nil
}

func finished(id uint64, ticket []byte) *kvportv1.AgentAnswer {
	return &kvportv1.AgentAnswer{Id: id, Result: &kvportv1.AgentAnswer_Finish{Finish: &kvportv1.AgentFinished{Ticket: ticket}}}
}

// reset makes the connector forget every block.
func (s *server) reset(c *conn, id uint64) {
	s.mu.Lock()
	h := s.session
	s.mu.Unlock()
	answer := &kvportv1.AgentAnswer{Id: id}
	emptied, err := false, errNotOpen
	if h != nil {
		ctx, cancel := context.WithTimeout(context.Background(), s.limits.reset)
		defer cancel()
		emptied, err = h.host.Reset(ctx)
	}
	if answer.Error = wire.ErrorToProto(err); err == nil {
		answer.Result = &kvportv1.AgentAnswer_Reset_{Reset_: &kvportv1.ResetResponse{Emptied: emptied}}
	}
	c.send(answer)
}
