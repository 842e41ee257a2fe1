package conformance

import (
	"context"
	"fmt"
	"time"

	"github.com/kvport/kvport/conformance/internal/model"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/machine"
)

// layerCase is a case of a connector that saves layers while others are computed.
func layerCase(id, rule, text string, body func(*rig)) Case {
	return Case{
		ID: id, Rule: rule, Text: text, Profiles: []Profile{LayerWise}, Needs: connector.CanLayers,
		Run: rigged(connector.CanLayers, false, body),
	}
}

func layerCases() []Case {
	read := layerCase("layer-read", "LAYER-01", "A consumer that has fetched before gets what was final, though it may read while layers are computed.", layerRead)
	read.Optional = true // it is about tickets
	random := layerCase("random-layers", "LAYER-01", "Random histories of saves that wait for layers, many at once: layers come one by one and in jumps, saves are given up and cancelled, and others save the same blocks.", randomLayers)
	groups := layerCase("layer-groups", "LAYER-01", "Layers of two groups become final in one order: each segment is read in its turn.", layerGroups)
	groups.Groups, groups.Run = true, rigged(connector.CanLayers, true, layerGroups)
	return []Case{
		layerCase("layer-order", "LAYER-01", "Each layer holds garbage until it is announced; what is loaded afterwards is right.", layerOrder),
		layerCase("layer-deep", "LAYER-01", "The cache has 130 layers, of which each holds garbage until it is announced.", layerDeep),
		layerCase("layer-jump", "LAYER-01", "Several layers are announced at once, and none is missed.", layerJump),
		layerCase("layer-digests", "LAYER-01", "The digests hold garbage until the last layer is announced.", layerDigests),
		groups,
		read,
		layerCase("layer-last", "LAYER-02", "Until the last layer is there, nothing is acknowledged and nothing matches.", layerLast),
		layerCase("layer-match", "LAYER-02", "When SaveLayers has returned nil, a Match finds the blocks.", layerMatch),
		layerCase("layer-again", "LAYER-02", "Blocks that are stored already are saved again layer by layer, with Replace too.", layerAgain),
		layerCase("layer-ranks", "LAYER-02", "Blocks match when the last rank's last layer is stored, and not before.", layerRanks),
		layerCase("layer-give-up", "LAYER-03", "The engine gives up in the middle: the save fails, and no block matches.", layerGiveUp),
		layerCase("layer-give-up-first", "LAYER-03", "The engine gives up before the first layer: the save fails soon, and later saves work.", layerGiveUpFirst),
		layerCase("layer-cancel", "LAYER-04", "SaveLayers returns when its context is done, although no layer comes.", layerCancel),
		layerCase("layer-many", "LAYER-05", "Each of three transfers ends with its own layers, in the reverse of the order in which they began.", layerMany),
		layerCase("layer-beside", "LAYER-05", "Saves, loads and matches go on while a save waits for layers.", layerBeside),
		layerCase("layer-idle", "LAYER-06", "A connector that waits for a layer uses no processor.", layerIdle),
		budgeted(random),
	}
}

// layering is one SaveLayers under way on one rank.
type layering struct {
	*engine
	rank  int
	t     connector.Transfer
	count *connector.LayerCount
	done  int // layers that are filled and announced
	ended chan error
	stop  context.CancelFunc
}

// layerBlocks begins to save blocks that hold garbage. The call ends with the case at the latest.
func (e *engine) layerBlocks(rank int, bs ...connector.Block) *layering {
	e.Helper()
	worker, ok := connector.As[connector.LayerWorker](e.workers[rank])
	if !ok {
		e.Errorf("Info claims layers, the worker side does not have it")
		e.FailNow()
	}
	ctx, stop := context.WithCancel(e.Context())
	l := &layering{engine: e, rank: rank, t: transfer(bs), count: &connector.LayerCount{}, ended: make(chan error, 1), stop: stop}
	for _, b := range bs {
		for _, s := range e.kv[rank].Segments(b.Group) {
			fillWith(e.kv[rank].View(s, b.ID), guardByte)
		}
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		l.ended <- worker.SaveLayers(ctx, &l.t, e.kv[rank], l.count)
	}()
	e.closers = append(e.closers, func() error { // before the sides are closed
		stop()
		l.count.GiveUp()
		ended := time.Now()
		if _, came := awaited(e.rig, over, soon); !came {
			e.check(e.timed(ended, fmt.Errorf("the call had not returned %v after its context ended and the engine gave up: %w", soon, context.DeadlineExceeded)), "SaveLayers")
		}
		return nil
	})
	return l
}

func fillWith(view []byte, with byte) {
	for i := range view {
		view[i] = with
	}
}

// fillTo writes the content of the layers up to n, without announcing them.
func (l *layering) fillTo(n int) {
	kv := l.kv[l.rank]
	for _, b := range l.t.Blocks {
		for _, s := range kv.Between(b.Group, l.done, n) {
			content := l.stream(b, l.rank, s)
			for i, view := 0, kv.View(s, b.ID); i < len(view); i++ {
				view[i] = byte(content.Uint32())
			}
		}
		if n == l.layers() {
			l.seal(kv, b)
		}
	}
	l.done = n
}

// compute fills and announces the layers up to n.
func (l *layering) compute(n int) {
	l.fillTo(n)
	l.count.Advance(n)
}

// layers is how many the cache has.
func (e *engine) layers() int { return e.env.Layout.Layers() }

// result waits for the end of the call.
func (l *layering) result() error {
	l.Helper()
	select {
	case err := <-l.ended:
		return err
	case <-time.After(2 * soon):
		l.Errorf("SaveLayers does not return, although nothing is left to wait for")
		l.FailNow()
		return nil
	}
}

// running checks that the call is under way, now and a while later.
func (l *layering) running(why string) {
	l.Helper()
	select {
	case err := <-l.ended:
		l.Errorf("SaveLayers returned %v %s", err, why)
		l.FailNow()
	case <-time.After(pauseOfLayer):
	}
}

// pauseOfLayer is how long a connector has time to do something wrong.
const pauseOfLayer = 40 * time.Millisecond

// comesBack checks that blocks match and are loaded with the right content.
func (e *engine) comesBack(first int, bs ...connector.Block) {
	e.Helper()
	keys := keysOf(bs)
	to := blocks(first, keys...)
	if e.info.Capabilities&connector.CanHold != 0 && e.match(keys...) < len(keys) { // found by ticket only
		e.comesByTicket(bs, to)
		return
	}
	e.equal(len(keys), e.match(keys...), "blocks offered after their layers were saved")
	e.wipe(0, to...)
	e.must(e.load(to...), "load of what was saved layer by layer")
	e.holds(to...)
}

// comesByTicket checks that the content of blocks can be loaded into other blocks by the ticket of a request that ends with them.
func (e *engine) comesByTicket(from, to []connector.Block) {
	e.Helper()
	end := ended("request", from)
	end.Tokens = 0
	for _, b := range from {
		if b.Group == 0 {
			end.Tokens += blockTokens
		}
	}
	hold := e.finish(end)[0]
	if hold.Ticket == nil {
		e.Errorf("blocks whose layers were saved are not offered, and there is not a ticket for them")
		return
	}
	e.wipe(0, to...)
	t := transfer(to)
	t.Tokens, t.Ticket = end.Tokens, hold.Ticket
	e.must(e.move(e.Context(), t, false), "load of what was saved layer by layer, by its ticket")
	e.holds(to...)
}

func layerOrder(r *rig) {
	e := r.engine(setup{})
	bs := blocks(0, e.keys(3)...)
	l := e.layerBlocks(0, bs...)
	for n := range e.layers() {
		l.running("before the last layer was announced")
		l.compute(n + 1)
	}
	r.must(l.result(), "save layers")
	e.comesBack(6, bs...)
}

// layerDeep stops behind as many layers as a word has bits, and where a second word ends.
func layerDeep(r *rig) {
	const deep = 130
	layout := layoutOf(&model.Shape{Slots: slots, Gaps: true, Groups: []model.Group{{Segments: deep, Bytes: 32 * deep}}})
	e := r.engine(setup{layout: &layout})
	bs := blocks(0, e.keys(3)...)
	l := e.layerBlocks(0, bs...)
	for _, n := range []int{1, 32, 63, 64, 65, 127, 128} {
		l.compute(n)
		e.pause(pauseOfLayer / 4)
		l.running("before the last layer was announced")
	}
	l.compute(deep)
	r.must(l.result(), "save layers")
	e.comesBack(6, bs...)
}

func layerJump(r *rig) {
	layout := planes(slots)
	e := r.engine(setup{layout: &layout})
	for _, steps := range [][]int{{e.layers()}, {e.layers() - 1, e.layers()}, {1, e.layers()}} {
		bs := blocks(0, e.keys(2)...)
		l := e.layerBlocks(0, bs...)
		for _, n := range steps {
			e.pause(pauseOfLayer / 4)
			l.compute(n)
		}
		r.must(l.result(), "save layers, announced as %v", steps)
		e.comesBack(6, bs...)
	}
}

func layerDigests(r *rig) {
	e := r.engine(setup{})
	bs := blocks(0, e.keys(2)...)
	l := e.layerBlocks(0, bs...)
	l.compute(e.layers() - 1)
	l.running("before the last layer was announced")
	for _, b := range bs { // nothing is promised of the digests yet
		for _, s := range e.kv[0].Segments(b.Group) {
			if e.env.Layout.Segments[s].Layer == connector.DigestLayer {
				fillWith(e.kv[0].View(s, b.ID), 0x5A)
			}
		}
	}
	e.pause(pauseOfLayer)
	l.compute(e.layers())
	r.must(l.result(), "save layers")
	e.comesBack(6, bs...)
}

func layerGroups(r *rig) {
	layout := bothAll()
	e := r.engine(setup{layout: &layout})
	keys := e.keys(2)
	from := append(blocks(0, keys...), in(1, blocks(2, keys...))...)
	l := e.layerBlocks(0, from...)
	for n := range e.layers() {
		l.running("before the last layer was announced")
		l.compute(n + 1)
	}
	r.must(l.result(), "save layers")
	to := append(blocks(6, keys...), in(1, blocks(10, keys...))...)
	if e.info.Capabilities&connector.CanHold != 0 && e.match(keys...) < len(keys) {
		e.comesByTicket(from, to)
		return
	}
	r.equal(2, e.match(keys...), "blocks offered after their layers were saved")
	e.wipe(0, to...)
	r.must(e.load(to...), "load of both groups")
	e.holds(to...)
}

func layerRead(r *rig) {
	if r.info.Capabilities&connector.CanHold == 0 {
		r.Skipf("the connector gives no tickets")
	}
	p, d := r.talkers(1)
	first := p.hand(3, 0)
	if d.offer(first, 0) == 0 {
		r.Skipf("the connector's tickets give other engines nothing")
	}
	d.take(first) // so that it knows where to read
	for n := range 4 {
		pr := p.layered(4, n%2*2)
		l := p.layerBlocks(0, pr.blocks[:len(pr.keys)]...)
		for n := range p.layers() {
			l.running("before the last layer was announced")
			l.compute(n + 1)
		}
		r.must(l.result(), "save layers")
		p.endRequest(pr, connector.ReasonLength)
		p.churn()
		d.take(pr)
		p.sweep()
	}
}

// layered is a prompt whose full blocks are still to be computed and saved layer by layer. Some more tokens are in a partial block, which
// engines compute as well and do not save.
func (p *pd) layered(full, more int) *prompt {
	p.Helper()
	content := p.keys(full + (more+blockTokens-1)/blockTokens)
	pr := &prompt{request: "layers", keys: content[:full], tokens: full*blockTokens + more}
	pr.blocks = p.place(content, p.slots(len(content)))
	p.fill(pr.blocks[full:]...)
	return pr
}

func layerLast(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(3)
	l := e.layerBlocks(0, blocks(0, keys...)...)
	for n := range e.layers() {
		r.equal(0, e.match(keys...), "blocks offered when %d of %d layers are there", n, e.layers())
		l.running("before the last layer was announced")
		l.compute(n + 1)
	}
	r.must(l.result(), "save layers")
	e.comesBack(6, blocks(0, keys...)...)
}

func layerMatch(r *rig) {
	e := r.engine(setup{})
	peer := e.peer()
	for range 3 {
		bs := blocks(0, e.keys(4)...)
		l := e.layerBlocks(0, bs...)
		l.compute(e.layers())
		r.must(l.result(), "save layers")
		peer.comesBack(6, bs...)
	}
}

func layerAgain(r *rig) {
	e := r.engine(setup{})
	bs := blocks(0, e.keys(2)...)
	e.save(bs...)
	for _, replace := range []bool{false, true} {
		if replace {
			e.wipe(0x11, bs...)
			t := transfer(bs)
			t.Replace = true
			r.must(e.saveOnly(r.Context(), t), "save of what is wrong")
		}
		l := e.layerBlocksAs(0, replace, bs...)
		for n := range e.layers() {
			l.compute(n + 1)
		}
		r.must(l.result(), "save layers of blocks that are stored, replace %v", replace)
		e.comesBack(6, bs...)
	}
}

// layerBlocksAs is layerBlocks with or without Replace.
func (e *engine) layerBlocksAs(rank int, replace bool, bs ...connector.Block) *layering {
	e.Helper()
	if !replace {
		return e.layerBlocks(rank, bs...)
	}
	inner := e.workers[rank]
	defer func() { e.workers[rank] = inner }()
	if w, ok := connector.As[connector.LayerWorker](inner); ok {
		e.workers[rank] = replacing{inner, w}
	}
	return e.layerBlocks(rank, bs...)
}

// replacing sets Replace in every transfer.
type replacing struct {
	connector.Worker
	layers connector.LayerWorker
}

// SaveLayers implements connector.LayerWorker.
func (w replacing) SaveLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, p connector.Progress) error {
	t.Replace = true
	return w.layers.SaveLayers(ctx, t, kv, p)
}

func layerRanks(r *rig) {
	e := r.engine(setup{world: ranks})
	bs := blocks(0, e.keys(2)...)
	var calls []*layering
	for rank := range ranks {
		calls = append(calls, e.layerBlocks(rank, bs...))
	}
	for rank, l := range calls {
		l.compute(e.layers() - 1)
		l.running("before the last layer was announced")
		r.equal(0, e.match(keysOf(bs)...), "blocks offered while rank %d has not got its last layer", rank)
		l.compute(e.layers())
		r.must(l.result(), "save layers on rank %d", rank)
	}
	e.comesBack(6, bs...)
}

func layerGiveUp(r *rig) {
	e := r.engine(setup{})
	for n := 1; n < e.layers(); n++ {
		keys := e.keys(3)
		l := e.layerBlocks(0, blocks(0, keys...)...)
		l.compute(n)
		e.pause(pauseOfLayer)
		l.count.GiveUp()
		if l.result() == nil {
			r.Errorf("SaveLayers returned nil, the engine gave up after %d of %d layers", n, e.layers())
		}
		r.equal(0, e.match(keys...), "blocks offered of which %d of %d layers were computed", n, e.layers())
		e.save(blocks(0, keys...)...)
		e.comesBack(6, blocks(0, keys...)...)
	}
}

func layerGiveUpFirst(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(2)
	l := e.layerBlocks(0, blocks(0, keys...)...)
	e.pause(pauseOfLayer)
	l.count.GiveUp()
	if l.result() == nil {
		r.Errorf("SaveLayers returned nil, the engine gave up before the first layer")
	}
	r.equal(0, e.match(keys...), "blocks offered of which nothing was computed")
	l = e.layerBlocks(0, blocks(0, keys...)...)
	l.compute(e.layers())
	r.must(l.result(), "save layers, the second time")
	e.comesBack(6, blocks(0, keys...)...)
}

func layerCancel(r *rig) {
	e := r.engine(setup{})
	keys := e.keys(2)
	l := e.layerBlocks(0, blocks(0, keys...)...)
	l.compute(1)
	l.running("before the last layer was announced")
	l.stop()
	if l.result() == nil {
		r.Errorf("SaveLayers returned nil when its context was done after one layer")
	}
	r.equal(0, e.match(keys...), "blocks offered of a save that was cancelled")
}

func layerMany(r *rig) {
	e := r.engine(setup{})
	const n = 3
	var calls [n]*layering
	for i := range calls {
		calls[i] = e.layerBlocks(0, blocks(2*i, e.keys(1)...)...)
		calls[i].compute(1)
	}
	for i := n - 1; i >= 0; i-- {
		calls[i].compute(e.layers())
		r.must(calls[i].result(), "save layers of transfer %d, while %d others wait", i, i)
		for _, l := range calls[:i] {
			l.running("with another transfer's last layer")
		}
		e.comesBack(12, calls[i].t.Blocks...)
	}
}

func layerBeside(r *rig) {
	e := r.engine(setup{})
	l := e.layerBlocks(0, blocks(0, e.keys(1)...)...)
	l.compute(1)
	l.running("before the last layer was announced")
	for range 3 {
		bs := blocks(4, e.keys(2)...)
		e.fill(bs...)
		t := transfer(bs)
		r.must(e.returns("Save", soon, func(ctx context.Context) error { return e.workers[0].Save(ctx, &t, e.kv[0]) }), "save while layers are waited for")
		e.comesBack(8, bs...)
	}
	l.running("before the last layer was announced")
	l.compute(e.layers())
	r.must(l.result(), "save layers")
}

func layerIdle(r *rig) {
	e := r.engine(setup{})
	for i := range 3 {
		e.layerBlocks(0, blocks(2*i, e.keys(1)...)...).compute(1)
	}
	if cpuTime(0) == 0 {
		r.unfit("the processor time of threads cannot be read in /proc (schedstat)")
	}
	e.pause(pauseOfLayer)
	const wait, share = 600 * time.Millisecond, 12
	var began time.Time
	var used time.Duration
	for range 3 { // what else runs in the process may disturb one measurement, not all
		before := cpuTime(e.inst.PID)
		began = time.Now()
		e.pause(wait)
		if used = cpuTime(e.inst.PID) - before; used < r.watched().spent(began)/share { // on a busy machine one that spins does not get more
			return
		}
	}
	const said = "while three transfers wait for a layer the process keeps a processor busy"
	if e.inst.PID == 0 && used < time.Since(began)/share {
		r.inconclusive("%s, or the suite does in its own process: the machine is busy", said)
	}
	r.Errorf(said)
}

// cpuTime is how much processor time a process has used; 0 is this one.
func cpuTime(pid int) time.Duration {
	folder := "/proc/self/task"
	if pid != 0 {
		folder = fmt.Sprintf("/proc/%d/task", pid)
	}
	var ran uint64
	for _, thread := range machine.SchedStats(folder) {
		ran += thread.Ran
	}
	return time.Duration(ran) //nolint:gosec // less than a life
}
