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

	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host/internal/plugin"
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
	paths   []string
	metrics *childMetrics
	vitals  *vitals
	hurry   <-chan struct{} // closed when the host closes; nil: it does not
	started func(pid, pidfd int) error
	held    func(bytes int64) // called with the size of each arena

	promised promised

	violated func(what string) // may be nil
	keys     keyring
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
		eng: h.eng, epoch: h.epoch, log: h.log, regions: regions, layout: layout,
		paths: h.opts.PluginPath, metrics: h.metrics.children, vitals: h.metrics.vitals, hurry: h.hurry, started: h.opts.Started,
		held: func(n int64) { h.metrics.arena.Add(float64(n)) }, violated: h.violation,
		keys: h.keys,
	}
	if h.composite, err = n.open(ctx, h.cfg, "", "kv_connector_extra_config."); err != nil {
		h.metrics.close()
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
		h.metrics.close()
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
		Model: h.eng.Model, Shape: h.eng.Shape, Layout: h.eng.Layout, Log: h.log,
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
		}
		children := childrenOf(cfg, infos)
		if f.multi, err = multiconnector.New(MultiName, children); err != nil {
			err = fmt.Errorf("%w: %sconnectors: %w", ErrConfig, path, err)
		}
		for i := range children {
			if masked := children[i].Masked(); len(masked) > 0 {
				n.log.Info("a MultiConnector does not pass on all that its child can do", "child", f.members[i].label, "not_passed_on", strings.Join(masked, "; "))
			}
		}
	}
	if err != nil {
		f.shut(ctx, false)
		return nil, err
	}
	return f, nil
}

// start starts one child.
func (n *childStarter) start(ctx context.Context, cfg *Config, label string) (*child, error) {
	src := &source{
		cfg: cfg, eng: n.eng, epoch: n.epoch, log: n.log, regions: n.regions, layout: n.layout, started: n.started, held: n.held,
		hurry: n.hurry, left: &plugin.AbandonedMemory{},
		promised: &n.promised,
		keys:     n.keys,
	}
	if n.violated != nil {
		src.violated = func(what string) { n.violated(label + ": " + what) }
	}
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
	c := &child{label: label, src: src, set: &cfg.Settings, log: n.log, metrics: n.metrics.of(label), vital: n.vitals.of(label)}
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
