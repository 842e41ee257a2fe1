package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/config"
	"github.com/kvport/kvport/host/internal/plugin"
	"github.com/kvport/kvport/internal/meter"
	"github.com/kvport/kvport/internal/strictjson"
	"github.com/kvport/kvport/internal/tracker"
	"github.com/kvport/kvport/multiconnector"
)

// childStarter starts the children of a MultiConnector, with what all of them are given, however deep they
// are nested.
type childStarter struct {
	eng     Engine
	epoch   uint64
	log     *slog.Logger
	regions []*Region        // that the children map, by rank
	layout  connector.Layout // of those
	sources *Region          // where blocks of engines of other shapes are read to; nil: none come
	paths   []string
	metrics *childMetrics
	vitals  *vitals
	hurry   <-chan struct{} // closed when the host closes; nil: it does not
	started func(pid, pidfd int) error
	held    func(bytes int64) // called with the size of each arena
	filled  func(bytes int64) // called with what has been allocated of it since

	promised promised

	violated func(what string) // may be nil
	keys     *pluginKeys
	placing  *childPlacing // nil: a host above this one verifies what is loaded
}

// composite is the children of one MultiConnector and what joins them. To the host it is a plugin that
// never dies: its children do, and come back, one by one.
type composite struct {
	cfg     *Config
	multi   *multiconnector.Multi
	members []member
	groups  []connector.Group

	ending sync.Once
	end    error
	done   chan struct{}
}

// member is one child: a plugin or a MultiConnector of its own.
type member struct {
	label     string
	child     *child
	composite *composite
}

// startComposite starts all children of a MultiConnector.
func (h *Host) startComposite(ctx context.Context) (*generation, error) {
	var err error
	if h.metrics, err = newMetrics(h.opts.Metrics, MultiName, h.cfg.Settings.Trust); err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	regions, layout := h.mapped()
	n := &childStarter{
		eng: h.eng, epoch: h.epoch, log: h.log, regions: regions, layout: layout, sources: h.sources,
		paths: h.opts.PluginPath, metrics: h.metrics.children, vitals: h.metrics.vitals, hurry: h.hurry, started: h.opts.Started,
		held: func(n int64) { h.metrics.arena.Add(float64(n)) }, filled: func(n int64) { h.metrics.allocated.Add(float64(n)) }, violated: h.violation,
		keys: &pluginKeys{ring: h.keys}, placing: &childPlacing{ranks: h.ranks, metrics: h.metrics, failed: h.placedFailed},
	}
	if h.composite, err = n.open(ctx, h.cfg, "", "kv_connector_extra_config."); err != nil {
		h.metrics.set.Unregister()
		return nil, err
	}
	h.info = h.composite.multi.Info()
	err = h.showStats()
	var g *generation
	if err == nil {
		g, err = h.openComposite(ctx)
	}
	if err != nil {
		h.composite.shut(ctx, false)
		h.metrics.set.Unregister()
		return nil, err
	}
	return g, nil
}

// openComposite opens the sides of all children.
func (h *Host) openComposite(ctx context.Context) (*generation, error) {
	limit := h.cfg.Settings.Deadlines.Handshake
	ctx, cancel := plugin.Patient(ctx, limit, h.composite.waits())
	defer cancel()
	regions, layout := h.mapped()
	env := connector.Env{
		Engine: h.eng.ID, Epoch: h.epoch, Role: h.cfg.Role, World: len(regions),
		Model: h.eng.Model, Shape: h.eng.Shape, Base: h.eng.Base, Layout: h.eng.Layout, Log: h.log,
	}
	late := func(err error) error {
		if plugin.RanOut(ctx) {
			return plugin.Longer(err, limit)
		}
		return err
	}
	sched, err := h.composite.openScheduler(ctx, env, nil)
	if err != nil {
		return nil, late(err)
	}
	g := h.newGeneration(1, h.composite, sched)
	env.Layout = layout
	for rank := range regions {
		env.Rank = rank
		w, err := h.composite.openWorker(ctx, env, nil)
		if err != nil {
			return nil, errors.Join(late(err), sched.Close())
		}
		g.workers = append(g.workers, w)
	}
	return g, nil
}

// waits says how long the children have waited for a processor or a disk: the longest wait counts. The
// result is for one goroutine.
func (f *composite) waits() func() time.Duration {
	var each []func() time.Duration
	for _, m := range f.members {
		if m.composite != nil {
			each = append(each, m.composite.waits())
			continue
		}
		m.child.mu.Lock()
		if m.child.now != nil {
			each = append(each, m.child.now.proc.Waits())
		}
		m.child.mu.Unlock()
	}
	return func() (longest time.Duration) {
		for _, waited := range each {
			longest = max(longest, waited())
		}
		return longest
	}
}

// open starts the children of cfg. label is the place of the MultiConnector itself and path its
// config's, both ending so that a child's can follow.
func (n *childStarter) open(ctx context.Context, cfg *Config, label, path string) (*composite, error) {
	f := &composite{cfg: cfg, members: make([]member, len(cfg.Children)), groups: n.eng.Layout.Groups, done: make(chan struct{})}
	var group errgroup.Group
	for i, c := range cfg.Children {
		own := fmt.Sprintf("%s%d/", label, i)
		at := fmt.Sprintf("%sconnectors[%d]", path, i)
		group.Go(func() error {
			m := &f.members[i]
			m.label = own + c.Connector
			var err error
			if len(c.Children) > 0 {
				m.composite, err = n.open(ctx, c, own, at+".kv_connector_extra_config.")
			} else {
				m.child, err = n.start(ctx, c, m.label)
				err = under(at, err)
			}
			return err
		})
	}
	err := group.Wait()
	if err == nil {
		infos := make([]connector.Info, len(f.members))
		for i := range infos {
			infos[i] = f.members[i].info()
			if n.placing != nil { // the host has that power of each child itself
				infos[i].Capabilities &^= connector.CanPlace
			}
		}
		err = n.join(f, childrenOf(cfg, infos), path)
	}
	if err != nil {
		f.shut(ctx, false)
		return nil, err
	}
	return f, nil
}

// join makes the composite of children that have started.
func (n *childStarter) join(f *composite, children []multiconnector.Child, path string) (err error) {
	if f.multi, err = multiconnector.New(MultiName, children); err != nil {
		return fmt.Errorf("%w: %sconnectors: %w", ErrConfig, path, err)
	}
	for i := range children {
		if masked := children[i].Masked(f.multi.Info()); len(masked) > 0 {
			n.log.Info("a MultiConnector does not pass on all that its child can do", "child", f.members[i].label, "not_passed_on", strings.Join(masked, "; "))
		}
	}
	return nil
}

// start starts one child.
func (n *childStarter) start(ctx context.Context, cfg *Config, label string) (*child, error) {
	src := &source{
		cfg: cfg, eng: n.eng, epoch: n.epoch, log: n.log, regions: n.regions, layout: n.layout, sources: n.sources, started: n.started, held: n.held, filled: n.filled,
		hurry: n.hurry, left: &plugin.AbandonedMemory{},
		promised: &n.promised,
		keys:     n.keys,
	}
	if n.violated != nil {
		src.violated = func(what string) { n.violated(label + ": " + what) }
	}
	src.place = n.placing.placement(&src.eng, label)
	if _, err := src.find(ctx, n.paths); err != nil {
		return nil, err
	}
	first, err := src.start(ctx, 1)
	if err != nil {
		return nil, errors.Join(err, src.close())
	}
	if src.info.Lossy {
		n.log.Warn("loaded blocks are not verified: the connector may change their bytes", "child", label)
	}
	c := &child{label: label, src: src, set: &cfg.Settings, log: n.log, metrics: n.metrics.of(label), vital: n.vitals.of(label), placing: n.placing}
	c.adopt(first)
	return c, nil
}

// childrenOf is what a composite must know of its children.
func childrenOf(cfg *Config, infos []connector.Info) []multiconnector.Child {
	out := make([]multiconnector.Child, len(cfg.Children))
	for i := range out {
		c := cfg.Children[i]
		d := &c.Settings.Deadlines
		out[i] = multiconnector.Child{
			Name: c.tag, Label: c.Connector, Role: c.Role, Info: infos[i], Fail: c.FailurePolicy == PolicyFail,
			Patience: max(d.Match, multiconnector.DefaultPatience), Later: d.Later,
		}
	}
	return out
}

func (m *member) info() connector.Info {
	if m.composite != nil {
		return m.composite.multi.Info()
	}
	return m.child.src.info
}

// Done implements body.
func (f *composite) Done() <-chan struct{} { return f.done }

// Err implements body.
func (f *composite) Err() error {
	select {
	case <-f.done:
		return f.end
	default:
		return nil
	}
}

// Close implements body.
func (f *composite) Close(ctx context.Context) error {
	f.shut(ctx, true)
	<-f.done
	return f.end
}

// KillFor implements body. Only the end of the host ends all children: one that lets a transfer miss its
// deadline is killed alone, by the call that waits for it.
func (f *composite) KillFor(reason error) {
	if errors.Is(reason, errClosing) {
		go f.shut(context.Background(), false)
	}
}

// shut ends every child.
func (f *composite) shut(ctx context.Context, polite bool) {
	f.ending.Do(func() {
		errs := make([]error, len(f.members))
		var work sync.WaitGroup
		for i, m := range f.members {
			switch {
			case m.child != nil:
				work.Go(func() { errs[i] = m.child.close(ctx, polite) })
			case m.composite != nil:
				work.Go(func() {
					m.composite.shut(ctx, polite)
					<-m.composite.done
					errs[i] = m.composite.end
				})
			}
		}
		work.Wait()
		if polite {
			f.end = errors.Join(errs...)
		}
		close(f.done)
	})
}

// health adds the children's to that of the host. f may be nil.
func (f *composite) health(h *Health) {
	if f == nil {
		return
	}
	ready := 0
	for _, m := range f.members {
		var one Health
		if m.composite != nil {
			one = Health{Connector: m.label, State: "ready", Trust: h.Trust}
			m.composite.health(&one)
		} else {
			one = m.child.health()
		}
		h.Children = append(h.Children, one)
		h.Restarts += one.Restarts
		h.StartFailures += one.StartFailures
		h.FencesLost += one.FencesLost
		if one.State == "ready" {
			ready++
		}
	}
	switch {
	case ready == len(f.members):
	case ready > 0 || slices.ContainsFunc(h.Children, func(c Health) bool { return c.State == "degraded" }):
		h.State = "degraded"
	default:
		h.State = h.Children[0].State
	}
}

// ways are those of all children whose role takes part. The tickets of a child go into that of the MultiConnector, so
// only the same child of another MultiConnector reads them; place says which MultiConnector this is.
func (f *composite) ways(place string, takesPart func(connector.Role) bool) []string {
	ways := []string{}
	for i, m := range f.members {
		c := f.cfg.Children[i]
		switch {
		case !takesPart(c.Role):
		case m.composite != nil:
			ways = append(ways, m.composite.ways(place+c.tag+"/", takesPart)...)
		default:
			ways = append(ways, waysOf(&m.child.src.info, place+c.tag)...)
		}
	}
	return ways
}

// arenaBytes is the memory that all children have as arenas.
func (f *composite) arenaBytes() (n int64) {
	for _, m := range f.members {
		if m.composite != nil {
			n += m.composite.arenaBytes()
		} else {
			n += m.child.src.arena.Size()
		}
	}
	return n
}

// stretch gives a transfer as much time as it may take when one child after the other lets it down. f
// may be nil.
func (f *composite) stretch(c *tracker.Config) {
	if f == nil {
		return
	}
	c.Transfer, c.TransferPerGiB, c.Save = f.sum()
	c.Grace += c.Grace // the children's own kill comes first
}

func (f *composite) sum() (load, perGiB, save time.Duration) {
	for i, m := range f.members {
		d := &f.cfg.Children[i].Settings.Deadlines
		l, g, s := d.Transfer+2*d.Grace, d.TransferPerGiB, d.Save
		if m.composite != nil {
			l, g, s = m.composite.sum()
		}
		load, perGiB, save = load+l, perGiB+g, max(save, s)
	}
	return load, perGiB, save
}

// under says in a config error at which child it is.
func under(path string, err error) error {
	if err == nil {
		return nil
	}
	return &childError{path: path, err: err}
}

type childError struct {
	path string
	err  error
}

// Error implements error. The word "config: " stays in front.
func (e *childError) Error() string {
	text, cut := strings.CutPrefix(e.err.Error(), ErrConfig.Error()+": ")
	if !cut {
		return e.path + ": " + text
	}
	return fmt.Sprintf("%v: %s: %s", ErrConfig, e.path, text)
}

// Unwrap gives the cause.
func (e *childError) Unwrap() error { return e.err }

// childMetrics are those of the children of a MultiConnector.
type childMetrics struct {
	up       *prometheus.GaugeVec // child
	restarts *prometheus.CounterVec
	kills    *prometheus.CounterVec
	blocks   *prometheus.CounterVec // child, direction
	failed   *prometheus.CounterVec
}

func newChildMetrics(s *meter.Set) *childMetrics {
	return &childMetrics{
		up:       s.Gauges("kvport_child_up", "1 while a child of a MultiConnector takes calls.", "child"),
		restarts: s.Counters("kvport_child_restarts_total", "Processes of a child started after its first.", "child"),
		kills:    s.Counters("kvport_child_deadline_kills_total", "Processes of a child killed for a passed transfer deadline.", "child"),
		blocks:   s.Counters("kvport_child_blocks_total", "Blocks that a child was asked to load or save, counted for each rank.", "child", "direction"),
		failed:   s.Counters("kvport_child_failed_blocks_total", "Blocks among them that it did not.", "child", "direction"),
	}
}

// childCounters are the metrics of one child.
type childCounters struct {
	up              prometheus.Gauge
	restarts, kills prometheus.Counter
	blocks, failed  map[string]prometheus.Counter // by direction
}

func (m *childMetrics) of(label string) childCounters {
	c := childCounters{
		up: m.up.WithLabelValues(label), restarts: m.restarts.WithLabelValues(label), kills: m.kills.WithLabelValues(label),
		blocks: map[string]prometheus.Counter{}, failed: map[string]prometheus.Counter{},
	}
	for _, direction := range []string{"load", "save"} {
		c.blocks[direction] = m.blocks.WithLabelValues(label, direction)
		c.failed[direction] = m.failed.WithLabelValues(label, direction)
	}
	return c
}

// moved counts a call that has returned.
func (c *childCounters) moved(direction string, t *connector.Transfer, err error) {
	c.blocks[direction].Add(float64(len(t.Blocks)))
	if err != nil {
		c.failed[direction].Add(float64(len(t.Blocks) - len(tracker.Arrived(t.Blocks, err))))
	}
}

// childReports is what the scheduler side of a child has counted and reported in all its lives.
type childReports struct {
	stats *connectorStats

	mu    sync.Mutex
	mute  uint64 // the life that did not answer Stats and is not asked again
	seq   uint64 // of the last event that was passed on
	from  uint64 // the life whose events are read; 0: none yet
	order eventOrder
}

func newChildReports(c *child) *childReports {
	return &childReports{stats: newConnectorStats("", c.src.info.Stats)}
}

// Stats implements connector.StatsSource. Counters continue when the child starts again; while it is down
// they keep their values.
func (s childScheduler) Stats(ctx context.Context) ([]connector.Stat, error) {
	if l, side, err := sideOf[connector.Scheduler](s.child, s.side); err == nil && !s.muted(l.n) {
		source, ok := connector.As[connector.StatsSource](side)
		if !ok {
			return nil, connector.ErrIncompatible
		}
		s.note(ctx, l, source)
	}
	return s.news.stats.values(), nil
}

func (s childScheduler) muted(life uint64) bool {
	s.news.mu.Lock()
	defer s.news.mu.Unlock()
	return s.news.mute == life
}

// note asks one life for its numbers.
func (s childScheduler) note(ctx context.Context, l *life, source connector.StatsSource) {
	ctx, cancel := context.WithTimeout(ctx, statsWait)
	defer cancel()
	stats, err := source.Stats(ctx)
	switch {
	case err == nil:
		if err := s.news.stats.take(l.n, stats); err != nil {
			s.src.complain("stats: " + err.Error())
		}
	case errors.Is(err, plugin.ErrUnanswered):
		s.news.mu.Lock()
		s.news.mute = l.n
		s.news.mu.Unlock()
		s.src.complain("stats: no answer, it is not asked again (rule STAT-03)")
	}
}

// complain counts what broke the contract.
func (s *source) complain(what string) {
	if s.violated != nil {
		s.violated(what)
	}
}

// Events implements connector.EventSource. The end of a process is reported as BlocksCleared: what it
// said does not hold while it is down, and what its heir still has nobody knows. Events that were lost
// show as a gap.
func (s childScheduler) Events(ctx context.Context) ([]connector.BlockEvent, error) {
	for {
		s.mu.Lock()
		l, changed := s.now, s.changed
		var side connector.Scheduler
		if l != nil {
			side = l.scheduler(s.side)
		}
		s.mu.Unlock()
		if cleared := s.news.enter(l); cleared != nil {
			return cleared, nil
		}
		var events []connector.BlockEvent
		var err error
		if source, ok := connector.As[connector.EventSource](side); ok {
			events, err = source.Events(ctx)
		} else if side != nil {
			return nil, connector.ErrIncompatible
		}
		if err == nil && len(events) > 0 {
			if events = s.passOn(l, events); len(events) > 0 {
				return events, nil
			}
			continue
		}
		gone := side == nil || errors.Is(err, plugin.ErrLost) || errors.Is(err, plugin.ErrUnanswered)
		if !gone || ctx.Err() != nil {
			return nil, errors.Join(err, ctx.Err())
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// enter notes the life that events are read from; l is nil while none takes calls. The answer, unless
// nil, says that those of the life before are over.
func (n *childReports) enter(l *life) []connector.BlockEvent {
	n.mu.Lock()
	defer n.mu.Unlock()
	was, is := n.from, uint64(0)
	if l != nil {
		is = l.n
	}
	n.from = is
	if was == is {
		return nil
	}
	n.order = eventOrder{}
	if was == 0 {
		return nil
	}
	n.seq++
	return []connector.BlockEvent{{Seq: n.seq, Kind: connector.BlocksCleared, Scope: connector.ScopeEngine}}
}

// passOn numbers the events of one life on from those of the ones before.
func (s childScheduler) passOn(l *life, events []connector.BlockEvent) []connector.BlockEvent {
	s.news.mu.Lock()
	defer s.news.mu.Unlock()
	if s.news.from != l.n {
		return nil
	}
	events, lost, err := s.news.order.check(events)
	if err != nil {
		s.src.complain(err.Error())
	}
	s.news.seq += lost
	for i := range events {
		s.news.seq++
		events[i].Seq = s.news.seq
	}
	return events
}

// MultiName is the kv_connector that the host composes itself of the children in
// kv_connector_extra_config, unless kv_connector_module_path names a plugin for it.
const MultiName = "MultiConnector"

// maxNesting is how deep MultiConnectors may be nested.
const maxNesting = 4

// parseChildren reads the kv_connector_extra_config of a MultiConnector. The settings of parent are
// the defaults of its children. Errors name the field.
func parseChildren(v *strictjson.Value, parent *Config, depth int) (children []*Config, err error) {
	if depth > maxNesting {
		return nil, v.Errorf("MultiConnectors are nested more than %d deep", maxNesting)
	}
	var extra struct {
		Connectors []strictjson.Value `json:"connectors" jsonschema:"required"`
	}
	if err := strict().Decode(v, &extra); err != nil {
		return nil, err
	}
	switch n, list := len(extra.Connectors), v.Field("connectors"); {
	case n == 0:
		return nil, list.Errorf("is empty, must name at least one connector")
	case n > multiconnector.MaxChildren:
		return nil, list.Errorf("names %d connectors, at most %d", n, multiconnector.MaxChildren)
	}
	for i := range extra.Connectors {
		item := &extra.Connectors[i]
		at := fmt.Sprintf("kv_connector_extra_config.connectors[%d].", i)
		c, err := parseChild(item, parent, parent.at+at, depth)
		if err != nil {
			return nil, err
		}
		for k, other := range children {
			if sameChild(c, other) {
				return nil, item.Errorf("is the same as connectors[%d]", k)
			}
		}
		for _, w := range c.Warnings {
			parent.Warnings = append(parent.Warnings, at+w)
		}
		children = append(children, c)
	}
	names := make([]string, len(children))
	for i, c := range children {
		names[i] = c.Connector
	}
	for i, tag := range multiconnector.Tags(names) {
		children[i].tag = tag
	}
	return children, nil
}

func parseChild(v *strictjson.Value, parent *Config, at string, depth int) (*Config, error) {
	c := &Config{Settings: parent.Settings, at: at}
	c.Settings.PluginSHA256 = ""
	if err := c.decode(v, depth); err != nil {
		return nil, err
	}
	was, is := &parent.Settings, &c.Settings
	if len(is.Peers) == 0 {
		is.Peers = was.Peers
	}
	switch {
	case c.EngineID != "":
		return nil, v.Field("engine_id").Errorf("belongs to the engine: give it to the MultiConnector, not to a child")
	case !subset(c.Role, parent.Role):
		return nil, v.Field("kv_role").Errorf("%s is more than the %s of its MultiConnector", c.Role, parent.Role)
	case is.Trust != was.Trust || is.LandingBytes != was.LandingBytes:
		return nil, v.Field("kvport").Errorf("trust and landing_bytes are the same for all children: set them at the MultiConnector")
	case is.TicketKeyFile != was.TicketKeyFile || is.TenantSecretFile != was.TenantSecretFile || is.Digest != was.Digest || !slices.Equal(is.Peers, was.Peers):
		return nil, v.Field("kvport").Errorf("ticket_key_file, tenant_secret_file, digest and peers are the engine's: set them at the MultiConnector")
	}
	return c, nil
}

// subset reports whether a child may have a role under a parent's.
func subset(child, parent connector.Role) bool {
	return (!child.Loads() || parent.Loads()) && (!child.Saves() || parent.Saves())
}

// sameChild reports whether two children would do the same in the same place.
func sameChild(a, b *Config) bool {
	return a.Connector == b.Connector && config.SameJSON(a.Extra, b.Extra) && a.beside.Equal(b.beside)
}
