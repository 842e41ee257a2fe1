package host

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/meter"
	"github.com/kvport/kvport/internal/tracker"
)

// Host is one connector at work for one engine. Match, Step and Events are for the engine's loop;
// the other methods may be called from anywhere.
type Host struct {
	cfg       *Config
	eng       Engine
	opts      Options
	log       *slog.Logger
	epoch     uint64
	src       *source    // of plugin processes; nil: the children of a MultiConnector have theirs, or there are none
	composite *composite // nil: there is one plugin
	info      connector.Info
	caps      connector.Capability // of the scheduler side
	ranks     []*rank
	lands     *connector.Layout // of landing memory; nil: the plugin maps the cache
	sources   *Region           // where blocks of engines of other shapes are read to; nil: none come
	window    int64             // the size of each of its parts
	copies    *scratch          // where no plugin can write, for copies of what was read
	others    sourceHashers     // of engines of other shapes
	tickets   *ticketSigner
	tenant    string // names the tenant secret
	keys      *keyring.File
	digests   digest.Keys
	metrics   *metrics
	vital     *vital // nil: the children of a MultiConnector have theirs
	events    *eventQueue
	layers    int // of the cache

	layerWise bool
	arriving  map[arrival]*arriving // loads that the engine has begun to use; guarded by mu

	stats       *connectorStats
	blockEvents blockEventReporter
	broke       atomic.Uint64 // answers that broke the protocol

	mu       sync.Mutex // guards all below; never held across a call to the plugin
	tracker  *tracker.Tracker
	gen      *generation // nil while none is up
	waiter   *waiter
	restarts int
	failures int // starts that failed
	broken   bool
	since    time.Time // of the last change of the state
	lastErr  error
	drained  chan struct{} // closed when the tracker is idle after Close
	resets   map[tracker.CallID]chan<- tracker.ResetOver
	badLoads complaints
	badSaves complaints
	misses   complaints // about matches that stayed undecided

	place *placement                            // of one plugin without children; else nil
	alone map[tracker.CallID]context.CancelFunc // loads without a plugin; guarded by mu

	unreadable unreadableLog // blocks whose digests cannot be checked here

	cuts      bool // our tickets are made for engines of other shapes, and theirs are accepted
	closing   atomic.Bool
	hurry     chan struct{}      // closed when closing
	leave     context.CancelFunc // ends the context that starts run under
	left      chan struct{}      // closed when the supervisor has ended
	nudge     chan struct{}      // the next deadline may have changed
	work      sync.WaitGroup     // supervisor and timer
	closeOnce sync.Once
	closeErr  error
}

// Open starts the connector that cfg names, checks that it fits the engine, and opens both of its
// sides. ctx bounds the opening. What a changed config or binary would cure wraps ErrConfig; nothing
// is left behind then. From then on a plugin that dies is restarted, and the host answers without
// it meanwhile.
func Open(ctx context.Context, cfg *Config, eng Engine, opts Options) (*Host, error) {
	h := newHost(cfg, eng, opts)
	if n := plugin.SweepSockets(plugin.SocketRoots(), time.Now()); n > 0 {
		h.log.Debug("removed socket folders of engines that were killed", "folders", n)
	}
	if err := h.identify(); err != nil {
		return nil, err
	}
	if err := h.openRanks(); err != nil {
		return nil, err
	}
	first, err := h.firstStart(ctx)
	if err != nil {
		return nil, errors.Join(err, h.closeLanding())
	}
	h.begin(first)
	return h, nil
}

// newHost is one that has not begun: it knows its engine, and no connector.
func newHost(cfg *Config, eng Engine, opts Options) *Host {
	return &Host{
		cfg: cfg, eng: eng, opts: opts, log: cmp.Or(opts.Log, slog.New(slog.DiscardHandler)), blockEvents: blockEventReporter{out: opts.BlockEvents},
		stats:  newConnectorStats("", nil),
		resets: map[tracker.CallID]chan<- tracker.ResetOver{}, alone: map[tracker.CallID]context.CancelFunc{}, layers: eng.Layout.Layers(), arriving: map[arrival]*arriving{},
		drained: make(chan struct{}), hurry: make(chan struct{}), left: make(chan struct{}), nudge: make(chan struct{}, 1),
	}
}

// begin puts the first generation to work.
func (h *Host) begin(first *generation) {
	h.events = newEventQueue()
	h.caps = first.caps
	h.layerWise = h.findLayerWise(first)
	h.openReshape()
	h.warnScope()
	warnOwnKey(h.log, h.keys)
	h.warnFreshKey()
	h.tracker = tracker.New(h.bookConfig())
	var life context.Context
	life, h.leave = context.WithCancel(context.Background())
	h.install(first)
	h.work.Go(func() { h.supervise(life, first) })
	h.work.Go(h.watchClock)
	h.work.Go(func() { h.keys.Watch(life, h.log, func(stale bool) { meter.Mark(h.metrics.staleKeys, stale) }) })
}

// identify gives the engine a name, if it has none, and this life of it a number.
func (h *Host) identify() error {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return err
	}
	h.epoch = uint64(time.Now().UnixNano()) // a name that grows from life to life; never read as a time
	switch {
	case h.cfg.EngineID != "":
		h.eng.ID = h.cfg.EngineID
	case h.eng.ID == "":
		h.eng.ID = hex.EncodeToString(b[:])
	}
	var err error
	if h.keys, err = h.cfg.Settings.keys(h.log); err != nil {
		return err
	}
	h.tickets = newTicketSigner(&h.cfg.Settings, h.eng, h.epoch, h.keys)
	return nil
}

// firstStart finds the plugin, starts it, asks what it would do and opens it.
func (h *Host) firstStart(ctx context.Context) (*generation, error) {
	switch {
	case h.opts.Workers != nil:
		return h.startWorkers()
	case len(h.cfg.Children) > 0:
		return h.startComposite(ctx)
	}
	h.src = h.source(h.cfg)
	h.src.reland = h.reland
	h.place = newPlacement(&h.eng.Layout, h.eng.Shape, len(h.ranks), func(blocks, damaged int) { h.placedFailed(h.info.Name, blocks, damaged) })
	h.src.place = h.place
	h.src.violated, h.src.held = h.violation, func(n int64) { h.metrics.arena.Add(float64(n)) }
	h.src.filled = func(n int64) { h.metrics.allocated.Add(float64(n)) }
	manifest, err := h.src.find(ctx, h.opts.PluginPath)
	if err != nil {
		return nil, err
	}
	if h.metrics, err = newMetrics(h.opts.Metrics, manifest.Name, h.cfg.Settings.Trust); err != nil {
		return nil, errors.Join(fmt.Errorf("metrics: %w", err), h.src.close())
	}
	h.vital = h.metrics.vitals.of(manifest.Name)
	h.src.openAll()
	first, err := h.src.start(ctx, 1)
	if err != nil {
		h.metrics.set.Unregister()
		return nil, errors.Join(err, h.src.close())
	}
	h.info = h.src.info
	if h.info.Lossy {
		h.log.Warn("loaded blocks are not verified: the connector may change their bytes", "connector", h.info.Name)
	}
	if err := h.showStats(); err != nil {
		first.proc.Kill()
		h.metrics.set.Unregister()
		return nil, errors.Join(err, h.src.close())
	}
	return h.generation(first), nil
}

// showStats makes metrics of what the connector declares.
func (h *Host) showStats() error {
	h.stats = newConnectorStats(h.info.Name, h.info.Stats)
	if len(h.info.Stats) == 0 {
		return nil
	}
	if err := h.metrics.set.Show(h.stats); err != nil {
		return fmt.Errorf("%w: the stats of %s cannot be metrics: %w", ErrConfig, h.info.Name, err)
	}
	return nil
}

// source is where the processes of the plugin that cfg names come from.
func (h *Host) source(cfg *Config) *source {
	regions, layout := h.mapped()
	return &source{
		cfg: cfg, eng: h.eng, epoch: h.epoch, log: h.log, regions: regions, layout: layout, sources: h.sources, started: h.opts.Started,
		hurry: h.hurry, left: &plugin.AbandonedMemory{},
		promised: &promised{},
		keys:     &pluginKeys{ring: h.keys},
	}
}

func (h *Host) bookConfig() tracker.Config {
	d := &h.cfg.Settings.Deadlines
	c := tracker.Config{
		Ranks: len(h.ranks), Role: h.cfg.Role, Groups: h.eng.Layout.Groups, Can: h.caps,
		Later: d.Later, Fresh: matchFresh, Transfer: d.Transfer, TransferPerGiB: d.TransferPerGiB,
		Save: d.Save, Plan: d.Plan, Finish: d.Finish, Grace: d.Grace, Hold: d.Hold, HoldMax: d.HoldMax,
		BackoffMin: firstRetry, BackoffMax: slowestRetry, CorruptKeys: maxCorruptKeys,
		Slots: h.slots(), Layers: h.layers, Threshold: h.cfg.Settings.RecomputeThreshold, Addresses: h.eng.Addresses, Windows: sourceWindows, Reshape: h.cuts, Lossy: h.info.Lossy,
		Quarantine: h.cfg.Role.Saves() || h.cfg.FailurePolicy == PolicyFail,
		Placed:     h.place != nil && h.info.Capabilities&connector.CanPlace != 0 && !h.info.Lossy, // whose blocks only the plugin can load
	}
	c.Overlap = h.opts.Overlap != nil && h.cfg.Role.Loads() && (c.Placed || h.info.Capabilities&connector.CanOverlap != 0)
	h.composite.stretch(&c)
	for g := range h.eng.Layout.Groups {
		c.BlockBytes = append(c.BlockBytes, h.eng.Layout.BlockBytes(uint16(g))*int64(len(h.ranks)))
	}
	return c
}

// Info is what the connector said of itself.
func (h *Host) Info() connector.Info { return h.info }

// Events is how the host reports. The queue behind it is unbounded, so the host never waits for the
// reader. It is closed after Close, when all events were read or Close gave up on the reader.
func (h *Host) Events() <-chan Event { return h.events.out }

// Step hands over what the engine decided in one step. It never blocks. s is the host's from now
// on, and the blocks of its transfers stay untouched by the engine until their events arrive.
func (h *Host) Step(s *connector.Step) {
	tails := h.tails(s)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.do(h.tracker.Step(time.Now(), s, tails))
}

// Reset makes the connector forget every block. It waits for saves that are under way, at most
// until ctx ends or, if that has no deadline, for as long as a save may take. emptied is true only if no block that was ever saved can be matched any more; it
// is false for a connector that cannot reset.
func (h *Host) Reset(ctx context.Context) (emptied bool, err error) {
	over := make(chan tracker.ResetOver, 1)
	deadline, _ := ctx.Deadline()
	h.mu.Lock()
	id, actions := h.tracker.Reset(time.Now(), deadline)
	h.resets[id] = over
	h.do(actions)
	h.mu.Unlock()
	defer context.AfterFunc(ctx, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.do(h.tracker.GiveUpReset(time.Now(), id, ctx.Err()))
	})()
	r := <-over
	if r.Err != nil {
		return false, fmt.Errorf("reset: %w", r.Err)
	}
	return r.Emptied, nil
}

// Health says how the plugin is.
func (h *Host) Health() Health {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := Health{
		Connector: h.info.Name, State: "restarting", Restarts: h.restarts, StartFailures: h.failures,
		Since: time.Since(h.since), Pending: h.tracker.Pending(), Loading: h.tracker.Loading(), Held: h.tracker.Held(),
		Trust: h.cfg.Settings.Trust, LandingSlots: h.slots() * len(h.ranks), LandingUsed: h.tracker.LandingUsed(),
		ArenaBytes: h.arenaBytes(),
	}
	if h.src != nil {
		s.Sandbox, s.SandboxLacks = h.src.box.state()
	}
	switch {
	case h.gen != nil && h.gen.waiting():
		s.State = "waiting_for_fence"
	case h.gen != nil:
		s.State, s.PID = "ready", h.gen.pid()
		h.composite.health(&s)
		h.lostSome(&s)
	case h.broken:
		s.State = "broken"
	}
	s.BlocksLost = h.tracker.Counters().Lost
	if h.lastErr != nil && s.State != "ready" {
		s.Error = h.lastErr.Error()
	}
	return s
}

// Close lets running transfers end, until ctx is done or the drain deadline passes, and then ends
// the plugin. Every Step gets its events, and afterwards no process, descriptor, socket or
// goroutine is left. The engine's regions stay open; they are the engine's.
func (h *Host) Close(ctx context.Context) error {
	h.closeOnce.Do(func() { h.closeErr = h.close(ctx) })
	return h.closeErr
}

func (h *Host) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, h.cfg.Settings.Deadlines.Drain)
	defer cancel()
	h.mu.Lock()
	fault.Crash("host.close")
	h.closing.Store(true)
	close(h.hurry)
	h.leave()
	h.do(h.tracker.Close(time.Now()))
	h.mu.Unlock()
	var err error
	select {
	case <-h.drained:
	case <-ctx.Done():
		err = fmt.Errorf("close: transfers were still running: %w", ctx.Err())
	}
	h.mu.Lock()
	g := h.gen
	if err != nil {
		g.cancelCalls()
		h.cancelAlone()
	}
	h.mu.Unlock()
	if g != nil {
		g.end(ctx, err == nil)
	}
	h.work.Wait()
	fault.Crash("host.closed")
	h.events.close(readerWait)
	h.metrics.set.Unregister()
	return errors.Join(err, h.src.close(), h.closeLanding())
}

// do carries out what the tracker decided. The caller holds mu. Nothing here waits.
func (h *Host) do(actions []tracker.Action) {
	if n := h.metrics.observe(h.tracker.Counters()); n > 0 { // before those who are told look
		h.missed(n)
	}
	h.metrics.landing.Set(float64(h.tracker.LandingUsed()))
	for _, a := range actions {
		switch a := a.(type) {
		case tracker.Tell:
			h.tell(&a.Event)
		case tracker.Move:
			h.startMove(&a)
		case tracker.Ask:
			h.startAsk(&a)
		case tracker.Plan:
			h.startPlan(&a)
		case tracker.Finish:
			h.startFinish(&a)
		case tracker.Reset:
			h.startReset(&a)
		case tracker.ResetOver:
			h.resets[a.ID] <- a
			delete(h.resets, a.ID)
		case tracker.Advance:
			h.gen.advance(a)
		case tracker.CancelCall:
			h.cancelCall(a.ID)
		case tracker.Kill:
			h.gen.killFor(a)
		}
	}
	h.noteIdle()
	select {
	case h.nudge <- struct{}{}:
	default:
	}
}

// noteIdle tells Close that nothing is left to wait for.
func (h *Host) noteIdle() {
	if !h.closing.Load() {
		return
	}
	select {
	case <-h.drained:
	default:
		if h.tracker.Idle() {
			close(h.drained)
		}
	}
}

// watchClock lets the tracker know when a deadline has passed.
func (h *Host) watchClock() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		h.mu.Lock()
		next, due := h.tracker.Next()
		h.mu.Unlock()
		wait := time.Hour
		if due {
			wait = time.Until(next)
		}
		timer.Reset(wait)
		select {
		case <-h.left:
			return
		case <-h.nudge:
		case <-timer.C:
			h.mu.Lock()
			h.do(h.tracker.Tick(time.Now()))
			h.mu.Unlock()
		}
	}
}
