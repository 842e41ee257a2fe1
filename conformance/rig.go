package conformance

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/digest"
)

const (
	blockTokens = 4
	slots       = 24                    // blocks of each rank's cache, except in large cases
	soon        = 2 * time.Second       // what "soon" means in the rules
	askAgain    = 10 * time.Millisecond // between two Matches while the answer is Later
	guardByte   = 0xA5                  // fills everything that is not a block
)

// rig is what one case works with.
type rig struct {
	T
	h        Harness
	settings settings
	rand     *rand.Rand
	info     connector.Info
	closers  []func() error
	opened   map[*engine]bool // its sides are closed with the case
	ready    bool             // all sides of an engine were open
	epoch    uint64
	config   json.RawMessage
}

// rigged makes a Case's Run of a function that works on a rig, and closes what it opened.
func rigged(needs connector.Capability, groups bool, body func(*rig)) func(T, Harness) {
	return func(t T, h Harness) {
		r := newRig(t, h)
		defer r.close()
		if r.settings.info != nil {
			r.info = *r.settings.info
		} else {
			r.info = r.describe()
		}
		if lacks := lacking(needs, groups, &r.info); lacks != "" {
			r.undeclared("%s", lacks)
		}
		body(r)
	}
}

// lacking says what a connector does not have that a case needs; empty if it has all, or nobody knows.
func lacking(needs connector.Capability, groups bool, info *connector.Info) string {
	switch {
	case info == nil:
		return ""
	case needs&^info.Capabilities != 0:
		return fmt.Sprintf("%s%v", notOffered, needs&^info.Capabilities)
	case groups && !info.Groups:
		return notOffered + "groups"
	}
	return ""
}

// notOffered comes before the name of what a connector does not have.
const notOffered = "the connector does not offer "

func newRig(t T, h Harness) *rig {
	r := &rig{T: t, h: h, opened: map[*engine]bool{}, config: h.Config(), settings: settings{log: slog.New(slog.DiscardHandler)}}
	if s, ok := h.(seeded); ok {
		r.settings = s.settings
	}
	r.rand = rand.New(rand.NewPCG(r.settings.seed, 0))
	return r
}

// describe asks what the connector is.
func (r *rig) describe() connector.Info {
	r.Helper()
	info, err := r.start(1, 64).Describe(r.Context(), r.h.Config())
	r.mustAs("CONF-02", err, "describe")
	return info
}

func (r *rig) close() {
	for _, v := range slices.Backward(r.closers) {
		r.check(v(), "close")
	}
}

// must ends the case if err is not nil.
func (r *rig) must(err error, format string, args ...any) {
	r.Helper()
	if err != nil {
		r.check(err, format, args...)
		r.FailNow()
	}
}

// mustAs is must for a call that breaks another rule than the case's if it fails.
func (r *rig) mustAs(rule string, err error, what string) {
	r.Helper()
	if err != nil {
		r.blame(rule)
	}
	r.must(err, "%s", what)
}

// mustOpen is must for the start of an instance or the opening of its sides. Until all sides of an engine were open once, nothing that the
// case is about has happened; and what fails beside another engine is told with that engine.
func (r *rig) mustOpen(i *Instance, err error, format string, args ...any) {
	r.Helper()
	if err != nil && !r.ready {
		r.blame("OPEN-01")
	}
	refused := errors.Is(err, connector.ErrIncompatible) || errors.Is(err, connector.ErrBusy) // and no other failure, as of a server or a disk
	if other := r.openBeside(i); refused && other != nil && r.info.Scope != connector.ScopeEngine {
		r.blame("OPEN-03")
		err = fmt.Errorf("%w; engine %s of the case has its sides open, in process %d", err, other.env.Engine, cmp.Or(other.inst.PID, os.Getpid()))
	}
	r.must(err, format, args...)
}

// openBeside is the first engine of the case that has a side open in another instance; nil: none has.
func (r *rig) openBeside(i *Instance) (first *engine) {
	for e := range r.opened {
		side := e.scheduler != nil || slices.ContainsFunc(e.workers, func(w connector.Worker) bool { return w != nil })
		if side && e.inst != i && !e.inst.killed && (first == nil || e.env.Epoch < first.env.Epoch) {
			first = e
		}
	}
	return first
}

// endless blames a Close that began at a moment and is not answered, whatever the case is about: it waits for what an earlier call has left. One
// that soon answers with an error of its own is no such thing, whatever the error is.
func (r *rig) endless(began time.Time, closing error) error {
	if errors.Is(closing, context.DeadlineExceeded) && time.Since(began) >= soon {
		r.blame("LIFE-04")
	}
	return closing
}

// start starts another instance of the connector.
func (r *rig) start(ranks int, size int64) *Instance {
	r.Helper()
	i, err := r.h.Start(r.Context(), ranks, size)
	r.mustOpen(i, err, "start")
	return r.keep(i)
}

// keep ends an instance with the case.
func (r *rig) keep(i *Instance) *Instance {
	r.watched().watch(i.PID)
	end := i.Close
	i.Close = sync.OnceValue(func() error {
		began := time.Now()
		return r.timed(began, end())
	})
	r.closers = append(r.closers, func() error {
		if err := i.Close(); !i.killed {
			return err
		}
		return nil
	})
	return i
}

// engine is one engine with its connector open.
type engine struct {
	*rig
	inst      *Instance
	env       connector.Env
	kv        []*connector.KV // of each rank
	scheduler connector.Scheduler
	workers   []connector.Worker // of each rank
	steps     uint64
	sources   []byte // memory for source blocks, if there is any
}

// setup says how an engine differs from the plain one.
type setup struct {
	world  int    // ranks; 0: 1
	shape  string // other: another byte layout
	model  string
	layout *connector.Layout
	config json.RawMessage // for Describe; nil: the harness's

	sources bool // the ranks can read blocks of engines of other shapes
}

// engine opens an engine in an instance of its own.
func (r *rig) engine(s setup) *engine {
	r.Helper()
	e := r.closed(s)
	e.openAll()
	return e
}

// closed makes an engine whose sides are not open yet.
func (r *rig) closed(s setup) *engine {
	r.Helper()
	layout := interleaved(slots)
	if s.layout != nil {
		layout = *s.layout
	}
	if len(r.info.Layouts) > 0 {
		layout.Name = r.info.Layouts[0]
	}
	world := max(1, s.world)
	var inst *Instance
	var sources []byte
	if s.sources { // of as many bytes as a cache has, or more
		inst = r.start(world+1, max(end(&layout), sourceBytes))
		sources, inst.Memory = inst.Memory[world], inst.Memory[:world]
	} else {
		inst = r.start(world, end(&layout))
	}
	s.layout = &layout
	e, err := r.on(inst, s)
	r.must(err, "engine")
	e.sources = sources
	return e
}

// on makes an engine of an instance that is started, whose memory may be larger than the layout of the setup.
func (r *rig) on(inst *Instance, s setup) (*engine, error) {
	r.Helper()
	layout, world := *s.layout, max(1, s.world)
	if s.config == nil {
		s.config = r.config
	}
	r.epoch++
	e := &engine{rig: r, inst: inst}
	e.env = connector.Env{
		Engine: fmt.Sprintf("conformance-%d", r.epoch), Epoch: r.epoch, Role: connector.RoleBoth, World: world,
		Model: connector.NewFingerprint("conformance model", r.settings.salt, s.model),
		Shape: connector.NewFingerprint("conformance shape", r.settings.salt, s.shape, fmt.Sprint(world)),
		Log:   r.settings.log, Layout: layout, Arena: r.arena(inst, s.config, &layout, world),
		LinkKey: r.settings.secret("link"), RouterKey: r.settings.secret("router"),
	}
	for rank, mem := range inst.Memory[:world] {
		mem = mem[:end(&layout):end(&layout)]
		for i := range mem {
			mem[i] = guardByte
		}
		kv, err := connector.NewKV(layout, [][]byte{mem})
		if err != nil {
			return nil, fmt.Errorf("cache of rank %d: %w", rank, err)
		}
		e.kv = append(e.kv, kv)
	}
	e.workers = make([]connector.Worker, world)
	return e, nil
}

// again opens the engine's sides in the connector's next life, with the same cache and arena.
func (e *engine) again() *engine {
	e.Helper()
	i, err := e.inst.Again(e.Context())
	e.must(err, "start again")
	n := *e
	n.inst, n.env.Arena = e.keep(i), i.Arena
	n.scheduler, n.workers = nil, make([]connector.Worker, len(e.workers))
	n.openAll()
	return &n
}

// peer is an engine that must see what e saved: another one if Scope reaches it, else e itself.
func (e *engine) peer() *engine {
	e.Helper()
	if e.info.Scope == connector.ScopeEngine {
		return e
	}
	layout := e.env.Layout
	p := e.closed(setup{world: e.env.World, layout: &layout})
	p.env.Model, p.env.Shape = e.env.Model, e.env.Shape
	p.openAll()
	return p
}

// beside makes another engine, whose sides are not open yet. Where Scope is engine, nobody else sees what e keeps, and one process may hold
// it alone: e ends then, and the other one is e after a restart with another model, shape or number of ranks, which finds what e has kept.
func (e *engine) beside(s setup) *engine {
	e.Helper()
	if e.info.Scope != connector.ScopeEngine {
		return e.closed(s)
	}
	e.end()
	other := e.closed(s)
	other.env.Engine = e.env.Engine
	return other
}

func (e *engine) openAll() {
	e.Helper()
	e.openScheduler()
	for rank := range e.workers {
		e.openWorker(rank)
	}
	e.ready = true
}

// begunScheduler opens a scheduler side, with a context that ends with the opening (rule OPEN-01).
func (e *engine) begunScheduler() (connector.Scheduler, error) {
	ctx, cancel := context.WithCancel(e.Context())
	defer cancel()
	return e.inst.Scheduler(ctx, e.env, e.config)
}

// begunWorker opens the worker side of a rank, with such a context.
func (e *engine) begunWorker(rank int) (connector.Worker, error) {
	ctx, cancel := context.WithCancel(e.Context())
	defer cancel()
	env := e.env
	env.Rank = rank
	return e.inst.Worker(ctx, env, e.config)
}

func (e *engine) openScheduler() {
	e.Helper()
	s, err := e.begunScheduler()
	e.mustOpen(e.inst, err, "open the scheduler side")
	e.scheduler = s
	e.endWithCase()
}

func (e *engine) openWorker(rank int) {
	e.Helper()
	w, err := e.begunWorker(rank)
	e.mustOpen(e.inst, err, "open the worker side of rank %d", rank)
	e.workers[rank] = w
	e.endWithCase()
}

func (e *engine) closeScheduler() error {
	s := e.scheduler
	e.scheduler = nil
	if s == nil {
		return nil
	}
	return e.endless(time.Now(), s.Close())
}

func (e *engine) closeWorker(rank int) error {
	w := e.workers[rank]
	e.workers[rank] = nil
	if w == nil {
		return nil
	}
	return e.endless(time.Now(), w.Close())
}

func (e *engine) closeAll() {
	e.Helper()
	for rank := range e.workers {
		e.must(e.closeWorker(rank), "close the worker side of rank %d", rank)
	}
	e.must(e.closeScheduler(), "close the scheduler side")
}

// keys makes the keys of a fresh prompt of n full blocks.
func (e *engine) keys(n int) []connector.BlockKey {
	tokens := make([]int32, n*blockTokens)
	for i := range tokens {
		tokens[i] = int32(e.rand.Uint32() >> 1)
	}
	space := connector.KeySpace{Model: e.env.Model}
	return space.Keys(tokens, blockTokens)
}

// blocks places keys in the slots from first on.
func blocks(first int, keys ...connector.BlockKey) []connector.Block {
	out := make([]connector.Block, len(keys))
	for i, k := range keys {
		out[i] = connector.Block{Key: k, ID: connector.BlockID(first + i)}
	}
	return out
}

func transfer(bs []connector.Block) connector.Transfer {
	return connector.Transfer{Request: "request", Tokens: len(bs) * blockTokens, Blocks: bs}
}

// stream is the content of one segment of one block: a function of what makes it unique.
func (e *engine) stream(b connector.Block, rank, segment int) *rand.Rand {
	h := fnv.New64a()
	_, _ = h.Write(b.Key[:])
	place := binary.LittleEndian.AppendUint64(nil, e.settings.seed)
	return rand.New(rand.NewPCG(h.Sum64(), binary.LittleEndian.Uint64(place)^uint64(b.Group)<<40^uint64(rank)<<20^uint64(segment)))
}

// fill writes a block's content on every rank.
func (e *engine) fill(bs ...connector.Block) {
	for rank, kv := range e.kv {
		for _, b := range bs {
			for _, s := range kv.Segments(b.Group) {
				content := e.stream(b, rank, s)
				for i, view := 0, kv.View(s, b.ID); i < len(view); i++ {
					view[i] = byte(content.Uint32())
				}
			}
			e.seal(kv, b)
		}
	}
}

// seal puts the digests of a block's bytes into its digest segment, as the host of one rank does. A partial
// block has none.
func (e *engine) seal(kv *connector.KV, b connector.Block) { _ = e.hasher().Make(kv, b) }

// hasher has no key, so that hosts in other processes need none: see openStaged.
func (e *engine) hasher() *digest.Hasher {
	return digest.New(digest.XXH3(), e.env.Model, e.env.Shape, connector.Shard{World: 1})
}

// wipe overwrites blocks with one byte on every rank.
func (e *engine) wipe(with byte, bs ...connector.Block) {
	for _, kv := range e.kv {
		for _, b := range bs {
			for _, s := range kv.Segments(b.Group) {
				view := kv.View(s, b.ID)
				for i := range view {
					view[i] = with
				}
			}
		}
	}
}

// spoil gives blocks other bytes than theirs, and digests that are in order, so that only Replace has a save write them over others.
func (e *engine) spoil(bs ...connector.Block) {
	e.wipe(0x5A, bs...)
	for _, kv := range e.kv {
		for _, b := range bs {
			e.seal(kv, b)
		}
	}
}

// differs says where a block does not hold its content; "" when it does.
func (e *engine) differs(b connector.Block) string {
	for rank, kv := range e.kv {
		for _, s := range kv.Segments(b.Group) {
			if e.isDigest(s) && b.Key != (connector.BlockKey{}) {
				if e.hasher().Check(kv, b) != nil {
					return fmt.Sprintf("block %d, group %d, rank %d: segment %d, the digest (see LAYOUT-03), is wrong", b.ID, b.Group, rank, s)
				}
				continue
			}
			content := e.stream(b, rank, s)
			for i, have := range kv.View(s, b.ID) {
				if have != byte(content.Uint32()) {
					return fmt.Sprintf("block %d, group %d, rank %d: byte %d of segment %d is wrong", b.ID, b.Group, rank, i, s)
				}
			}
		}
	}
	return ""
}

// holds fails the case for each block that does not hold its content.
func (e *engine) holds(bs ...connector.Block) {
	e.Helper()
	for _, b := range bs {
		if d := e.differs(b); d != "" {
			e.Errorf("%s", d)
		}
	}
}

// memory is a copy of every rank's cache.
func (e *engine) memory() [][]byte {
	out := make([][]byte, len(e.inst.Memory))
	for r, m := range e.inst.Memory {
		out[r] = bytes.Clone(m)
	}
	return out
}

// save fills blocks and saves them on every rank.
func (e *engine) save(bs ...connector.Block) {
	e.Helper()
	e.fill(bs...)
	e.must(e.saveOnly(e.Context(), transfer(bs)), "save")
}

// saveOnly saves on every rank what lies in the blocks.
func (e *engine) saveOnly(ctx context.Context, t connector.Transfer) error {
	return e.move(ctx, t, true)
}

// load loads blocks on every rank; the error is that of the first rank that failed.
func (e *engine) load(bs ...connector.Block) error {
	return e.loadTicket(e.Context(), bs, nil)
}

func (e *engine) loadTicket(ctx context.Context, bs []connector.Block, ticket connector.Ticket) error {
	t := transfer(bs)
	t.Ticket = ticket
	return e.move(ctx, t, false)
}

// move is what a host does with a transfer: it asks the Planner, if there is one, and runs what it
// answers on every rank.
func (e *engine) move(ctx context.Context, t connector.Transfer, save bool) error {
	todo, err := e.planned(ctx, t, save)
	if err != nil {
		return err
	}
	for i := range todo {
		for rank := range e.workers {
			if err := e.moveRank(ctx, rank, &todo[i], save); err != nil {
				return err
			}
		}
	}
	return nil
}

// planned is what a Planner makes of a transfer; without one the transfer itself.
func (e *engine) planned(ctx context.Context, t connector.Transfer, save bool) ([]connector.Transfer, error) {
	todo := []connector.Transfer{t}
	planner, ok := connector.As[connector.Planner](e.scheduler)
	if !ok {
		return todo, nil
	}
	e.steps++
	step := &connector.Step{ID: e.steps, Admitted: todo}
	if save {
		step = &connector.Step{ID: e.steps, Computed: todo}
	}
	plan, err := planner.Plan(ctx, step)
	if err != nil {
		return nil, fmt.Errorf("plan: %w", err)
	}
	if save {
		return plan.Saves, nil
	}
	return plan.Loads, nil
}

// moveRank runs one transfer on one rank, again while the connector is busy.
func (e *engine) moveRank(ctx context.Context, rank int, t *connector.Transfer, save bool) error {
	call := e.workers[rank].Load
	if save {
		call = e.workers[rank].Save
	}
	for w := e.patience(soon); ; e.pause(askAgain) {
		err := call(ctx, t, e.kv[rank])
		if !errors.Is(err, connector.ErrBusy) || w.over() {
			return err
		}
	}
}

// query is a prompt of full blocks and three more tokens.
func query(keys []connector.BlockKey) connector.Query {
	return connector.Query{Request: "request", Tokens: len(keys)*blockTokens + 3, Keys: keys}
}

// match asks for one prompt and gives the blocks that are offered.
func (e *engine) match(keys ...connector.BlockKey) int {
	e.Helper()
	return e.ask(query(keys))[0].Tokens / blockTokens
}

// ask asks as a host does: again while the answer is Later or busy.
func (e *engine) ask(qs ...connector.Query) []connector.Match {
	e.Helper()
	for w := e.patience(soon); ; {
		ms, err := e.scheduler.Match(e.Context(), qs)
		if err == nil && len(ms) != len(qs) {
			e.must(fmt.Errorf("%d answers to %d queries", len(ms), len(qs)), "match")
		}
		again := errors.Is(err, connector.ErrBusy)
		if err != nil && !again {
			e.must(err, "match")
		}
		for _, m := range ms {
			again = again || m.Later
		}
		if !again {
			return ms
		}
		if w.over() {
			e.must(errors.New("no answer but Later"), "match")
		}
		e.pause(askAgain)
	}
}

// pause waits, or ends the case when its time is over.
func (e *engine) pause(d time.Duration) {
	select {
	case <-time.After(d):
	case <-e.Context().Done():
		e.must(e.Context().Err(), "waiting")
	}
}

// failed checks that an error names exactly the blocks.
func (e *engine) failed(err error, want ...connector.BlockID) {
	e.Helper()
	var be *connector.BlockError
	if !errors.As(err, &be) {
		e.Errorf("got error %v, want a BlockError for blocks %v", err, want)
		return
	}
	missing := map[connector.BlockID]bool{}
	for _, id := range want {
		missing[id] = true
	}
	for _, id := range be.Blocks {
		if !missing[id] {
			e.Errorf("the error names block %d, want %v", id, want)
		}
		delete(missing, id)
	}
	if len(missing) > 0 {
		e.Errorf("the error names blocks %v, want %v", be.Blocks, want)
	}
}
