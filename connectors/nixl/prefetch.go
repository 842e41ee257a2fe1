package nixl

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/nixl"
)

// prefetch is what a consumer's rank has read of its producers while they computed it. Nobody knows yet where the
// blocks will belong, so they lie in frames of their own until a load asks for them; most of that load is then a
// copy within this process. The load reads the rest as it would without prefetching.
type prefetch struct {
	rank    *rank
	slab    []byte
	offsets []int           // of a layout's segment in a frame
	frame   int             // bytes
	ctx     context.Context //nolint:containedctx // the rank's life
	cancel  context.CancelFunc
	tasks   sync.WaitGroup

	mu        sync.Mutex
	free      []int // frames
	have      map[prefetchKey]int
	order     []prefetchKey // of have, the oldest first; some may be gone
	following map[string]bool
}

// aheadKey is the content of a block of one group.
type prefetchKey struct {
	group uint16
	key   connector.BlockKey
}

const (
	followTickets   = "tickets" // in subscribe: all producers that tickets name
	redialPause     = 100 * time.Millisecond
	maxRedial       = 2 * time.Second
	redials         = 5               // of a producer that only a ticket has named
	prefetchTimeout = 2 * time.Second // of one read
	maxReasons      = 8               // that are logged in a row
)

// newPrefetch makes room for blocks; it returns nil where the config asks for no prefetching.
func (r *rank) newPrefetch() (*prefetch, error) {
	c := &r.node.config
	if len(c.Subscribe) == 0 || !r.env.Role.Loads() {
		return nil, nil
	}
	h := &prefetch{rank: r, have: map[prefetchKey]int{}, following: map[string]bool{}}
	l := &r.env.Layout
	sizes := make([]int, len(l.Groups))
	for _, s := range l.Segments {
		h.offsets = append(h.offsets, sizes[s.Group])
		sizes[s.Group] += int(s.Bytes)
		h.frame = max(h.frame, sizes[s.Group])
	}
	frames := int(c.EarlyBytes) / max(1, h.frame)
	if frames == 0 {
		return nil, fmt.Errorf("early_bytes: %d bytes do not hold a block of %d: %w", c.EarlyBytes, h.frame, connector.ErrIncompatible)
	}
	var err error
	if h.slab, err = unix.Mmap(-1, 0, frames*h.frame, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE); err != nil {
		return nil, fmt.Errorf("early_bytes: %w", err)
	}
	if _, err := r.agent.Register(r.backend, nixl.DRAM, nixl.Bytes(h.slab)); err != nil {
		return nil, errors.Join(err, unix.Munmap(h.slab))
	}
	for i := range frames {
		h.free = append(h.free, i)
	}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	return h, nil
}

// start follows the producers that the config names.
func (h *prefetch) start() {
	if h == nil {
		return
	}
	for _, address := range h.rank.node.config.Subscribe {
		if address != followTickets {
			h.follow(address, true)
		}
	}
}

// stop ends all reading.
func (h *prefetch) stop() {
	if h != nil {
		h.cancel()
		h.tasks.Wait()
	}
}

// unmap gives the memory back; the agent is closed.
func (h *prefetch) unmap() error {
	if h == nil {
		return nil
	}
	return unix.Munmap(h.slab)
}

// learn starts to follow a producer that a ticket names, if the config asks for that.
func (h *prefetch) learn(address string) {
	if h == nil {
		return
	}
	n := h.rank.node
	for _, s := range n.config.Subscribe {
		if s == followTickets && (n.listener == nil || address != n.address()) { // not a ticket of its own
			h.follow(address, false)
			return
		}
	}
}

func (h *prefetch) follow(address string, always bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.following[address] || h.ctx.Err() != nil || len(h.following) >= maxPeers {
		return
	}
	h.following[address] = true
	f := &following{prefetch: h, address: address, id: rand.Text()}
	h.tasks.Go(func() {
		f.run(always)
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.following, address)
	})
}

// take copies the leading blocks of each group of a transfer that are here, and gives the transfer of the
// others. A block is given out once.
func (h *prefetch) take(t *connector.Transfer, kv *connector.KV) *connector.Transfer {
	if h == nil {
		return t
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	rest := *t
	rest.Blocks = nil
	ended := map[uint16]bool{}
	for _, b := range t.Blocks {
		at, here := h.have[prefetchKey{b.Group, b.Key}]
		if !here || ended[b.Group] || b.Key == (connector.BlockKey{}) {
			ended[b.Group] = true
			rest.Blocks = append(rest.Blocks, b)
			continue
		}
		frame := h.slab[at*h.frame:][:h.frame]
		for _, s := range kv.Segments(b.Group) {
			copy(kv.View(s, b.ID), frame[h.offsets[s]:])
		}
		delete(h.have, prefetchKey{b.Group, b.Key})
		h.free = append(h.free, at)
	}
	h.rank.node.tally.count("early_blocks_total", float64(len(t.Blocks)-len(rest.Blocks)))
	return &rest
}

// room takes a frame for a block, at the cost of the oldest that nobody came for. None: the block is here, or
// all frames are in use.
func (h *prefetch) room(k prefetchKey) (frame int, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, here := h.have[k]; here {
		return 0, false
	}
	for len(h.free) == 0 && len(h.order) > 0 {
		oldest := h.order[0]
		h.order = h.order[1:]
		if at, here := h.have[oldest]; here {
			delete(h.have, oldest)
			h.free = append(h.free, at)
		}
	}
	if len(h.free) == 0 {
		return 0, false
	}
	frame = h.free[len(h.free)-1]
	h.free = h.free[:len(h.free)-1]
	return frame, true
}

// put makes blocks ready to be taken, or gives their frames back.
func (h *prefetch) put(blocks []prefetchBlock, whole bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, b := range blocks {
		if _, here := h.have[b.key]; !whole || here {
			h.free = append(h.free, b.frame)
			continue
		}
		h.have[b.key] = b.frame
		h.order = append(h.order, b.key)
	}
	if len(h.order) > 2*len(h.have)+1024 { // those that were taken
		left := h.order[:0]
		for _, k := range h.order {
			if _, here := h.have[k]; here {
				left = append(left, k)
			}
		}
		h.order = left
	}
}

// aheadBlock is a block that is being read.
type prefetchBlock struct {
	key   prefetchKey
	id    connector.BlockID // the producer's
	frame int
}

// following reads what one producer computes.
type following struct {
	prefetch *prefetch
	address  string
	id       string
	saves    map[uint64]*prefetchSave
	read     []reached // to be said with the next question
}

// aheadSave is what is read of one save.
type prefetchSave struct {
	blocks []prefetchBlock
	layers int
}

// reasons are those for which a producer's layers do not come, in a row. Each is logged once.
type reasons map[string]bool

// add notes one, and says whether it belongs in the log.
func (r reasons) add(err error) bool {
	text := err.Error()
	if op, is := errors.AsType[*net.OpError](err); is {
		text = op.Op + ": " + op.Err.Error() // our own port is another one each time
	}
	if r[text] || len(r) >= maxReasons {
		return false
	}
	r[text] = true
	return true
}

// run dials again and again. Without always it gives up a producer that is gone.
func (f *following) run(always bool) {
	log := f.prefetch.rank.env.Log
	pause, failed, said := redialPause, 0, reasons{}
	for {
		began := time.Now()
		err := f.once()
		for id := range f.saves {
			f.drop(id)
		}
		if f.prefetch.ctx.Err() != nil {
			return
		}
		if failed++; time.Since(began) > maxRedial {
			pause, failed = redialPause, 1
			clear(said)
		}
		if said.add(err) {
			log.Info("a producer's layers do not come, its blocks are read when they are held", "address", f.address, "error", err)
		}
		if !always && failed > redials {
			return
		}
		select {
		case <-time.After(pause):
		case <-f.prefetch.ctx.Done():
			return
		}
		pause = min(2*pause, maxRedial)
	}
}

// once follows until something fails.
func (f *following) once() error {
	f.saves, f.read = map[uint64]*prefetchSave{}, nil
	ctx, env := f.prefetch.ctx, &f.prefetch.rank.env
	conn, _, err := f.prefetch.rank.node.pool.conn(ctx, f.address)
	if err != nil {
		return err
	}
	defer func(c net.Conn) { _ = c.Close() }(conn)
	for {
		q := newQuestion(env)
		q.Follow = &follow{ID: f.id, Read: f.read}
		a, err := exchange(ctx, conn, q)
		if err == nil {
			err = a.err()
		}
		if err != nil {
			return err
		}
		f.settle(a.Kept)
		if err := f.hear(a); err != nil {
			return err
		}
	}
}

// settle takes the producer's word on what was read whole.
func (f *following) settle(kept []uint64) {
	for _, id := range kept {
		if s := f.saves[id]; s != nil && s.layers == f.prefetch.rank.env.Layout.Layers() {
			f.prefetch.put(s.blocks, true)
			delete(f.saves, id)
		}
	}
	for _, r := range f.read { // read whole, but not kept
		if s := f.saves[r.Save]; s != nil && s.layers == f.prefetch.rank.env.Layout.Layers() {
			f.drop(r.Save)
		}
	}
	f.read = f.read[:0]
}

func (f *following) drop(id uint64) {
	if s := f.saves[id]; s != nil {
		f.prefetch.put(s.blocks, false)
		delete(f.saves, id)
	}
}

// hear reads what an answer says is final.
func (f *following) hear(a *answer) error {
	if len(a.Saves) == 0 {
		return nil
	}
	if err := f.prefetch.fits(a); err != nil {
		return err
	}
	p := &reads{}
	for _, r := range a.Saves {
		if r.Over {
			f.drop(r.Save)
			continue
		}
		s := f.saves[r.Save]
		if s == nil {
			s = f.begin(&r)
		}
		if r.Layers > f.prefetch.rank.env.Layout.Layers() {
			return fmt.Errorf("a producer says that %d layers are final: %w", r.Layers, connector.ErrIncompatible)
		}
		f.prefetch.plan(p, a, s, r.Layers)
		s.layers = max(s.layers, r.Layers)
		f.read = append(f.read, reached{Save: r.Save, Layers: s.layers})
	}
	return f.fetch(a, p)
}

func (f *following) begin(r *reached) *prefetchSave {
	s := &prefetchSave{}
	f.saves[r.Save] = s
	for _, b := range r.Blocks {
		k := prefetchKey{group: b.Group}
		if copy(k.key[:], b.Key) != len(k.key) || int(b.Group) >= len(f.prefetch.rank.env.Layout.Groups) || b.ID < 0 {
			continue
		}
		if frame, ok := f.prefetch.room(k); ok {
			s.blocks = append(s.blocks, prefetchBlock{key: k, id: b.ID, frame: frame})
		}
	}
	return s
}

// plan adds the layers up to n of a save's blocks.
func (h *prefetch) plan(p *reads, a *answer, s *prefetchSave, n int) {
	l := &h.rank.env.Layout
	for _, b := range s.blocks {
		for _, i := range l.Between(b.key.group, s.layers, n) {
			at := h.slab[b.frame*h.frame+h.offsets[i]:][:l.Segments[i].Bytes]
			from := a.Segments[i]
			p.add(nixl.Bytes(at), nixl.Region{Addr: from.Addr + uint64(b.id)*from.Stride, Len: from.Bytes})
		}
	}
}

// fits makes sure that a producer's segments have our sizes.
func (h *prefetch) fits(a *answer) error {
	told := *a
	told.Tokens = 1 // no hold, so no tokens
	return sameShape(&h.rank.env.Layout, &told)
}

// fetch reads. Memory that a read may still write to, because it did not end in time, is no longer used.
func (f *following) fetch(a *answer, p *reads) error {
	if len(p.local) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(f.prefetch.ctx, prefetchTimeout)
	defer cancel()
	r := f.prefetch.rank
	done := read{mode: modePrefetched}
	done.err = r.move(ctx, &move{
		op: nixl.Read, metadata: a.Metadata, local: p.local, remote: p.remote,
		transport: r.node.transports.transport(r.backend.Name(), a.Host, a.PID, p.remote[0].Addr),
	}, &done)
	r.node.tally.add(&done)
	if errors.Is(done.err, errUnfinished) {
		clear(f.saves) // with their frames
	}
	return done.err
}

// modeAhead is what reads of layers are counted as.
const modePrefetched = "ahead"
