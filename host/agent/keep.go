package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// keep opens and closes the connector as ranks come and go.
func (s *server) keep(ctx context.Context) {
	for ctx.Err() == nil {
		for ctx.Err() == nil && s.settle(ctx) {
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
		}
	}
	s.mu.Lock()
	old := s.session
	s.session = nil
	s.mu.Unlock()
	if old != nil {
		s.log.Info("draining")
		old.close(s.limits.drain)
	}
}

// settle opens or closes the connector according to which processes are attached. It returns true if that
// has changed meanwhile. A host that served other memory, or a scheduler that has gone, is closed first: when an
// attach is answered nothing touches what was there before (rule AGENT-05).
func (s *server) settle(ctx context.Context) (again bool) {
	s.mu.Lock()
	if s.settled == s.version {
		s.mu.Unlock()
		return false
	}
	old := s.session
	s.session = nil
	s.mu.Unlock()
	if old != nil {
		old.close(s.limits.drain)
	}
	s.mu.Lock()
	s.used = false
	version := s.version // who came while it was closed counts already
	eng, first, err := s.engine()
	retired := s.retired
	s.retired = nil
	s.mu.Unlock()
	for _, r := range retired {
		_ = r.Close()
	}
	var fresh *session
	if err == nil && eng != nil {
		fresh, err = s.open(ctx, eng, first)
	}
	s.mu.Lock()
	if s.version != version {
		s.mu.Unlock()
		if fresh != nil {
			fresh.close(s.limits.drain)
		}
		return true
	}
	s.settled, s.session, s.failure = version, fresh, err
	if s.sched != nil && s.sched.joined && (old.publishes() || fresh.publishes()) {
		s.sched.send(blocksAnswer(true, nil))
	}
	s.answer(err)
	s.mu.Unlock()
	s.tellState()
	return false
}

// engine puts together what the ranks have brought; nil as long as one is missing. The caller holds mu.
func (s *server) engine() (*host.Engine, *rankAttach, error) {
	var first *rankAttach
	for _, seat := range s.seats {
		if first == nil || seat.attach.rank < first.rank {
			first = seat.attach
		}
	}
	if first == nil {
		return nil, nil, nil
	}
	for rank, seat := range s.seats {
		if what := first.differs(seat.attach); what != "" {
			return nil, nil, fmt.Errorf("rank %d and rank %d differ in %s: %w", first.rank, rank, what, connector.ErrIncompatible)
		}
	}
	if len(s.seats) < first.world {
		return nil, nil, nil
	}
	eng := &host.Engine{ID: first.engine, Model: first.model, Shape: first.shape, ShapeText: first.shapeText, Layout: first.layout}
	for rank := range first.world {
		eng.Ranks = append(eng.Ranks, s.seats[rank].attach.region)
	}
	return eng, first, nil
}

// differs names what two ranks of one engine must have in common and have not.
func (a *rankAttach) differs(b *rankAttach) string {
	switch {
	case a.engine != b.engine:
		return "engine"
	case a.world != b.world:
		return "world"
	case a.model != b.model:
		return "model"
	case a.shape != b.shape:
		return fmt.Sprintf("shape (%s; %s)", a.shapeText, b.shapeText)
	case a.hashes != b.hashes:
		return "hashes"
	case a.events != b.events:
		return "events"
	case !reflect.DeepEqual(a.layout, b.layout):
		return "layout"
	}
	return ""
}

// patience is how long a lookup waits at least before its answer is Later. The engine on the other side
// comes back for it only with its next step, and that pause is longer.
const patience = 2 * time.Millisecond

// open opens the connector for ranks that all are as first is.
func (s *server) open(ctx context.Context, eng *host.Engine, first *rankAttach) (*session, error) {
	began := time.Now()
	secret, err := s.cfg.Transfer.Settings.TenantSecret()
	if err != nil {
		return nil, err
	}
	transfer := *s.cfg.Transfer
	transfer.Settings.Deadlines.Match = max(transfer.Settings.Deadlines.Match, patience)
	opts := host.Options{PluginPath: s.cfg.PluginPath, Log: s.log, Metrics: s.ledger, Started: s.announce, Landed: s.landed, Overlap: s.layerWise}
	keys := newKeyring(connector.KeySpace{Model: eng.Model, Secret: secret}, first.hashes)
	var reports chan host.BlockReport
	if first.events {
		reports = make(chan host.BlockReport, waitingReports)
		opts.BlockEvents, keys.back = reports, newRecall()
	}
	h, err := host.Open(ctx, &transfer, *eng, opts)
	if err != nil {
		s.log.Error("the connector does not open", "error", err)
		return nil, err
	}
	s.log.Info("connector is open", "connector", h.Info().Name, "ranks", len(eng.Ranks), "shape", eng.ShapeText, "took", time.Since(began))
	if err := first.pages.serves(h.Info()); err != nil {
		return nil, errors.Join(err, h.Close(ctx))
	}
	return newSession(s, h, first, keys, reports), nil
}

// answer answers all who wait for the keeper. The caller holds mu.
func (s *server) answer(err error) {
	for _, seat := range s.seats {
		if seat.pending != 0 {
			seat.conn.send(s.welcome(seat.pending, err))
			seat.pending, seat.conn.joined = 0, err == nil
		}
	}
	for _, c := range s.waiting {
		s.seat(c, c.attachID)
	}
	s.waiting = nil
}

// welcome is the answer to an attach.
func (s *server) welcome(id uint64, err error) *kvportv1.AgentAnswer {
	if err != nil {
		return &kvportv1.AgentAnswer{Id: id, Error: wire.ErrorToProto(err)}
	}
	role := s.cfg.Transfer.Role
	return &kvportv1.AgentAnswer{Id: id, Result: &kvportv1.AgentAnswer_Attached{Attached: &kvportv1.AgentAttached{
		Life: s.life, Connector: s.cfg.Transfer.Connector, Loads: role.Loads(), Saves: role.Saves(), Ahead: true,
	}}}
}

// announce tells all processes of the engine about a new process of the plugin, and waits until the
// kernel has the message for each: should the agent die, they can make sure that the plugin has (rule
// AGENT-04). A process that does not take it keeps the plugin from starting.
func (s *server) announce(pid, pidfd int) error {
	fd, err := unix.FcntlInt(uintptr(pidfd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
	}
	s.mu.Lock()
	s.processes = slices.DeleteFunc(s.processes, (*osProcess).gone)
	g := &osProcess{pid: pid, pidfd: os.NewFile(uintptr(fd), "pidfd")}
	s.processes = append(s.processes, g)
	conns := s.everybody()
	sent := make([]<-chan struct{}, len(conns))
	for i, c := range conns {
		sent[i], err = s.introduce(c, g)
		if err != nil {
			s.mu.Unlock()
			return err
		}
	}
	s.mu.Unlock()
	for i, c := range conns {
		select {
		case <-sent[i]:
		case <-c.gone: // its place goes with it
		case <-time.After(s.cfg.Transfer.Settings.Deadlines.Handshake / 2):
			return fmt.Errorf("process %d: %w", c.pid, errSlow)
		}
	}
	return nil
}

// introduce queues the message about a process of a plugin. The caller holds mu.
func (s *server) introduce(c *conn, g *osProcess) (sent <-chan struct{}, err error) {
	fd, err := unix.FcntlInt(g.pidfd.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
	}
	return c.post(&kvportv1.AgentAnswer{Result: &kvportv1.AgentAnswer_Plugin{Plugin: &kvportv1.AgentPlugin{
		Pid: uint32(g.pid), Name: s.cfg.Transfer.Connector,
	}}}, os.NewFile(uintptr(fd), "pidfd")), nil
}

// watch tells the state when it changes, and counters every now and then.
func (s *server) watch(ctx context.Context) {
	ticker := time.NewTicker(s.limits.tick)
	defer ticker.Stop()
	counted := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		s.tellState()
		if time.Since(counted) >= s.limits.stats {
			counted = time.Now()
			s.tellCounters()
		}
		s.mu.Lock()
		alone := len(s.conns) == 0 && time.Since(s.since) >= s.limits.alone
		s.mu.Unlock()
		if alone {
			s.stop(fmt.Errorf("nobody has been there for %s", s.limits.alone))
		}
	}
}

// state says how the connector is.
func (s *server) state() (state, why string) {
	s.mu.Lock()
	h, failure := s.session, s.failure
	s.mu.Unlock()
	switch {
	case h != nil:
		health := h.host.Health()
		return health.State, health.Error
	case failure != nil:
		return "broken", failure.Error()
	}
	return "waiting", ""
}

// tellState tells everybody how the connector is, if that has changed.
func (s *server) tellState() {
	state, why := s.state()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reported == state+" "+why {
		return
	}
	s.reported = state + " " + why
	for _, c := range s.everybody() {
		c.send(stateAnswer(state, why, nil))
	}
}

// tellCounters gives the scheduler the counters, unless it has not read what it was sent: an engine
// without requests reads nothing, and would find hours of them.
func (s *server) tellCounters() {
	s.mu.Lock()
	c := s.sched
	if s.storesPages() {
		c = s.seats[0].conn
	}
	s.mu.Unlock()
	if c == nil || !c.idle() {
		return
	}
	counters, err := s.ledger.counters()
	if err != nil {
		s.log.Warn("counters", "error", err)
		return
	}
	state, why := s.state()
	c.send(stateAnswer(state, why, counters))
}

func stateAnswer(state, why string, counters []*kvportv1.AgentCounter) *kvportv1.AgentAnswer {
	return &kvportv1.AgentAnswer{Result: &kvportv1.AgentAnswer_State{State: &kvportv1.AgentState{
		State: state, Error: wire.ErrorToProto(errors.New(why)).GetMessage(), Counters: counters,
	}}}
}
