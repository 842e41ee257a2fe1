package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/machine"
	"github.com/kvport/kvport/internal/wire"
)

const (
	// pageAlign is where pages begin in the agent's own memory.
	pageAlign = 4096
	// pageCalls are how many calls of one engine may be under way, and how many questions.
	pageCalls = 64
)

var (
	errMemory = errors.New("the engine's memory is smaller than it was")
	errLost   = errors.New("no memory is left for pages: somebody that a dead plugin left behind may write all of it")
	errServed = fmt.Errorf("attach_pages: this agent serves another process: %w", connector.ErrBusy)
)

// pageStore serves an engine that moves pages between its own memory and a store, and schedules itself. To the
// host it is an engine whose cache is the agent's own memory: a put is copied there and saved, a get is loaded
// there, verified, and copied out. So a plugin sees nothing of the engine's memory, and writes nothing to it,
// however late it is (rule PAGES-01), and the engine's memory need not be sealed (rule PAGES-04).
type pageStore struct {
	*wire.AttachPages
	s      *server
	region *host.Region
	stride int64

	work   sync.WaitGroup // calls
	asking chan struct{}  // questions on their way to the connector
	puts   slots
	gets   slots
	doubt  *doubt

	mu       sync.Mutex // guards all below; the server's mu may be held when it is taken, not the other way round
	closed   bool
	running  map[uint64]context.CancelFunc // calls by their ids
	memory   map[int]*pageMemory           // of the engine
	moves    map[connector.RequestID]*pageMove
	next     uint64
	lostPuts int
	lostGets int
}

// newPageStore makes the agent's memory for an engine's pages. Its errors wrap connector.ErrIncompatible where
// the engine or the config must change.
func newPageStore(s *server, a *wire.AttachPages) (*pageStore, connector.Layout, error) {
	stride := (a.Bytes() + pageAlign - 1) / pageAlign * pageAlign
	layout, size := host.WithDigests(connector.Layout{
		Name: "pages", Blocks: a.Pages, Groups: []connector.Group{{BlockTokens: a.Tokens, Policy: connector.PolicyAll}},
		Segments: []connector.Segment{{BlockStride: stride, Bytes: a.Bytes()}},
	})
	if err := hasRoom(size, machine.FreeMemory("/")); err != nil {
		return nil, layout, err
	}
	region, err := host.NewRegion(size)
	if err != nil {
		return nil, layout, fmt.Errorf("attach_pages: memory for %d pages: %w", a.Pages, err)
	}
	p := &pageStore{
		AttachPages: a, s: s, region: region, stride: stride, asking: make(chan struct{}, pageCalls),
		running: map[uint64]context.CancelFunc{}, memory: map[int]*pageMemory{}, moves: map[connector.RequestID]*pageMove{},
		doubt: newDoubt(s.limits.doubt),
	}
	half := a.Pages / 2
	p.puts, p.gets = newSlots(0, half), newSlots(half, a.Pages)
	return p, layout, nil
}

// hasRoom refuses memory that would leave the machine too little: it is all allocated at once.
func hasRoom(size, free int64) error {
	if size <= free/2 {
		return nil
	}
	return fmt.Errorf("attach_pages.pages: their memory has %d bytes, more than half of the %d that this machine has free: ask for fewer pages: %w", size, free, connector.ErrIncompatible)
}

// pageFingerprints are those under which pages are kept. Everything counts that an engine says about its pages, so
// that neither blocks of another kind of engine nor pages of another shape are ever found (rule PAGES-03).
func pageFingerprints(a *wire.AttachPages) (model, shape connector.Fingerprint) {
	fields := []string{string(a.Model[:]), string(a.Shape[:]), a.Hashes, strconv.Itoa(a.Tokens)}
	for _, l := range a.Lengths {
		fields = append(fields, strconv.FormatInt(l, 10))
	}
	return connector.NewFingerprint("kvport/pages/model/1", fields...), connector.NewFingerprint("kvport/pages/shape/1", fields...)
}

// slot is the agent's memory of one page.
func (p *pageStore) slot(b connector.BlockID) []byte {
	at := int64(b) * p.stride
	return p.region.Bytes()[at : at+p.Bytes()]
}

// Close ends the calls and gives back the memory. No connector may be open that uses it.
func (p *pageStore) Close() error {
	p.mu.Lock()
	p.closed = true
	for _, cancel := range p.running {
		cancel()
	}
	p.mu.Unlock()
	p.work.Wait()
	err := p.region.Close()
	for _, m := range p.memory {
		err = errors.Join(err, m.file.Close())
	}
	p.memory = nil
	return err
}

// begin runs a call beside the others, unless too many are under way, or one of that id, or the end has come. A call ends by its
// deadline, or when it is aborted by its id.
func (p *pageStore) begin(id uint64, deadline time.Duration, call func(ctx context.Context)) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.running) >= pageCalls || p.running[id] != nil {
		return false
	}
	if deadline <= 0 || deadline > p.s.limits.pages {
		deadline = p.s.limits.pages
	}
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	p.running[id] = cancel
	p.work.Go(func() {
		defer func() {
			cancel()
			p.mu.Lock()
			delete(p.running, id)
			p.mu.Unlock()
		}()
		call(ctx)
	})
	return true
}

// abort ends a call; false: it is over.
func (p *pageStore) abort(id uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	cancel, ok := p.running[id]
	if ok {
		cancel()
	}
	return ok
}

// pageMemory is a piece of the engine's memory. It is read and written by calls, which fail where a mapping
// would end the process.
type pageMemory struct {
	file *os.File
	size int64
}

// register takes a piece of the engine's memory. sealed says that nobody can make it smaller. The file is
// closed on an error.
func (p *pageStore) register(number int, size uint64, file *os.File) (sealed bool, err error) {
	got, err := unix.FcntlInt(file.Fd(), unix.F_GET_SEALS, 0)
	if err != nil { // a file could make its reader wait
		return false, errors.Join(fmt.Errorf("pages_region: the descriptor is not a memfd (%w): %w", err, connector.ErrIncompatible), file.Close())
	}
	m := &pageMemory{file: file, size: int64(min(size, wire.MaxArena))}
	p.mu.Lock()
	_, taken := p.memory[number]
	switch {
	case number >= wire.MaxPageRegions || taken || size == 0 || size > wire.MaxArena:
		err = fmt.Errorf("pages_region: region %d of %d bytes, want one of 0 to %d that is not there yet: %w", number, size, wire.MaxPageRegions-1, wire.ErrMalformed)
	case !m.whole():
		err = fmt.Errorf("pages_region: region %d is smaller than %d bytes: %w", number, size, connector.ErrIncompatible)
	case p.closed:
		err = errOver
	default:
		p.memory[number] = m
	}
	p.mu.Unlock()
	if err != nil {
		return false, errors.Join(err, file.Close())
	}
	return got&unix.F_SEAL_SHRINK != 0, nil
}

// whole says whether the memory is as large as it was.
func (m *pageMemory) whole() bool {
	var st unix.Stat_t
	return unix.Fstat(int(m.file.Fd()), &st) == nil && st.Size >= m.size
}

// read copies a page's segments out of the engine's memory.
func (m *pageMemory) read(into []byte, offsets, lengths []int64) error {
	return m.each(into, offsets, lengths, m.file.ReadAt)
}

// write copies a page's segments into the engine's memory.
func (m *pageMemory) write(from []byte, offsets, lengths []int64) error {
	return m.each(from, offsets, lengths, m.file.WriteAt)
}

func (m *pageMemory) each(page []byte, offsets, lengths []int64, move func([]byte, int64) (int, error)) error {
	if !m.whole() {
		return errMemory
	}
	for i, length := range lengths {
		if _, err := move(page[:length], offsets[i]); err != nil {
			return fmt.Errorf("%w: %w", errMemory, err)
		}
		page = page[length:]
	}
	return nil
}

// slots are pages of the agent's memory that are free.
type slots chan connector.BlockID

func newSlots(from, to int) slots {
	s := make(slots, to-from)
	for i := from; i < to; i++ {
		s <- connector.BlockID(i)
	}
	return s
}

// take gives at least one and at most n, or none when ctx is over first.
func (s slots) take(ctx context.Context, n int) []connector.BlockID {
	var out []connector.BlockID
	select {
	case b := <-s:
		out = append(out, b)
	case <-ctx.Done():
		return nil
	}
	for len(out) < n {
		select {
		case b := <-s:
			out = append(out, b)
		default:
			return out
		}
	}
	return out
}

func (s slots) give(blocks []connector.BlockID) {
	for _, b := range blocks {
		s <- b
	}
}

// pageMove is a save or load of some pages between the agent's memory and the connector.
type pageMove struct {
	request connector.RequestID
	load    bool
	keys    []connector.BlockKey
	blocks  []connector.BlockID
	free    slots
	left    bool          // nobody waits for it: its memory is free when it is over
	over    chan struct{} // closed then
	event   host.Event    // its end
	right   []bool        // then: which pages are stored, or loaded and verified
}

// end notes how a move has ended. Then its memory is used for something else, and over is closed.
func (m *pageMove) end(e host.Event) {
	failed := make(map[connector.BlockID]bool, len(e.Failed))
	for _, b := range e.Failed {
		failed[b] = true
	}
	m.event, m.right = e, make([]bool, len(m.blocks))
	for i, b := range m.blocks {
		m.right[i] = !e.Lost && !e.Unverified && !failed[b]
	}
}

// release gives a move's memory back.
func (m *pageMove) release() {
	m.free.give(m.blocks)
	m.blocks = nil
}

// start hands a save or load of some pages to the connector.
func (p *pageStore) start(load bool, keys []connector.BlockKey, blocks []connector.BlockID) *pageMove {
	m := &pageMove{load: load, keys: keys, blocks: blocks, free: p.puts, over: make(chan struct{})}
	if load {
		m.free = p.gets
	}
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	o := p.s.session
	if o == nil || o.pages != p {
		m.end(host.Event{Failed: blocks, Err: connector.ErrGone})
		close(m.over)
		return m
	}
	p.mu.Lock()
	p.next++
	id := p.next
	m.request = connector.RequestID("pages-" + strconv.FormatUint(id, 10))
	p.moves[m.request] = m
	p.mu.Unlock()
	t := connector.Transfer{Request: m.request, Tokens: len(blocks) * p.Tokens, Replace: !load && p.doubt.any(keys)}
	for i, b := range blocks {
		t.Blocks = append(t.Blocks, connector.Block{ID: b, Key: o.keys.of(keys[i])})
	}
	step := &connector.Step{ID: id}
	if load {
		step.Admitted = []connector.Transfer{t}
	} else {
		step.Computed = []connector.Transfer{t}
	}
	o.host.Step(step)
	return m
}

// wait waits for the end of a move. false: ctx is over first, and the move goes on alone: a load is told to stop,
// and its memory is used again when nobody writes there any more.
func (p *pageStore) wait(ctx context.Context, m *pageMove) bool {
	select {
	case <-m.over:
		return true
	default:
	}
	select {
	case <-m.over:
		return true
	case <-ctx.Done():
	}
	p.mu.Lock()
	select {
	case <-m.over:
		p.mu.Unlock()
		return true
	default:
	}
	m.left = true
	p.mu.Unlock()
	p.tell(&connector.Step{Preempted: []connector.RequestID{m.request}})
	return false
}

// tell sends a step that moves nothing.
func (p *pageStore) tell(step *connector.Step) {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	o := p.s.session
	if o == nil || o.pages != p {
		return
	}
	p.mu.Lock()
	p.next++
	step.ID = p.next
	p.mu.Unlock()
	o.host.Step(step)
}

// take hears the host's events.
func (p *pageStore) take(e *host.Event) {
	if e.Kind != host.Loaded && e.Kind != host.Saved {
		return
	}
	p.mu.Lock()
	m := p.moves[e.Request]
	delete(p.moves, e.Request)
	if m != nil {
		m.end(*e)
		if m.left && m.load { // nobody else does
			p.learn(m)
		}
		switch {
		case e.Lost: // somebody may write there for ever
			p.lose(m)
		case m.left:
			m.release()
		}
		close(m.over)
	}
	p.mu.Unlock()
	p.tell(&connector.Step{Ended: []connector.Ended{{Request: e.Request, Reason: connector.ReasonStop}}})
}

// lose gives up a move's memory. Where none is left for puts or for gets, the agent ends, and the engine starts another with new memory.
// The caller holds mu.
func (p *pageStore) lose(m *pageMove) {
	lost := &p.lostPuts
	if m.load {
		lost = &p.lostGets
	}
	*lost += len(m.blocks)
	m.blocks = nil
	p.s.pages.lost.Set(float64(p.lostPuts + p.lostGets))
	if *lost >= cap(m.free) {
		p.s.stop(errLost)
	}
}

// learn notes what the end of a move shows of the store. Pages that a plugin takes with it when it dies, and those that are
// known to be missing, are not hidden.
func (p *pageStore) learn(m *pageMove) {
	var good, bad []connector.BlockKey
	for i, key := range m.keys {
		if m.right[i] {
			good = append(good, key)
		} else {
			bad = append(bad, key)
		}
	}
	p.doubt.learn(good, bad, m.load && (m.left || m.event.Replace || !errors.Is(m.event.Err, connector.ErrGone)))
}
