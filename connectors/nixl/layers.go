package nixl

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
)

// A consumer can read a prompt's blocks while they are computed: it follows the producer, which means that it
// asks over the side channel again and again how many layers of which blocks are final, reads them in place, and
// says so with its next question. The producer's engine keeps the blocks as long as the save lasts, and the save
// waits for its readers. So a consumer that is told, after the last layer, that the save still lasted has read
// what was computed.

const (
	followWait  = time.Second // an answer without news
	followLimit = 5 * time.Second
	// followPatience is how long a save waits for its readers after its last layer. A consumer that is
	// slower no longer counts as a reader until it asks again.
	followPatience = 500 * time.Millisecond
	maxFollowers   = 64
	maxFollowID    = 64
)

// follow is the question of a consumer's rank for layers.
type follow struct {
	ID   string    `json:"id"`             // of the reader; no two share it
	Read []reached `json:"read,omitempty"` // how far it has come
}

// reached is how many layers of a save are final, or were read.
type reached struct {
	Save   uint64      `json:"save"`
	Layers int         `json:"layers"`
	Over   bool        `json:"over,omitempty"`   // nothing more can be read
	Blocks []heldBlock `json:"blocks,omitempty"` // with the first news of a save
}

// layering is what the ranks of a producer save while it is computed.
type layering struct {
	mu        sync.Mutex
	last      uint64
	saves     map[uint64]*saving
	followers map[string]*follower
	news      chan struct{} // closed at the next change
	tally     *tally
}

// saving is one save that lasts.
type saving struct {
	id     uint64
	rank   int
	layout *connector.Layout
	blocks []heldBlock
	final  int
}

// follower is a consumer's rank that reads layers.
type follower struct {
	rank  int
	heard time.Time
	asks  int            // questions that wait
	told  map[uint64]int // layers, by save
	read  map[uint64]int
}

func newLayering(t *tally) *layering {
	return &layering{tally: t, saves: map[uint64]*saving{}, followers: map[string]*follower{}, news: make(chan struct{})}
}

// change lets everybody look again. The caller holds mu.
func (l *layering) change() {
	close(l.news)
	l.news = make(chan struct{})
}

// SaveLayers implements connector.LayerWorker. The blocks stay where they are; who follows reads them there.
func (w *worker) SaveLayers(ctx context.Context, t *connector.Transfer, kv *connector.KV, p connector.Progress) error {
	l := w.rank.node.layers
	s := l.begin(w.rank.env.Rank, t, kv.Layout())
	defer l.end(s)
	layers := kv.Layout().Layers()
	for n := 0; n < layers; {
		final, err := p.Wait(ctx, n)
		if err != nil {
			return fmt.Errorf("layer %d of %d: %w", n, layers, err)
		}
		n = final
		l.advance(s, n, n >= layers)
	}
	l.await(ctx, s)
	return nil
}

func (l *layering) begin(rank int, t *connector.Transfer, layout *connector.Layout) *saving {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, f := range l.followers {
		if f.asks == 0 && time.Since(f.heard) > followLimit {
			delete(l.followers, id)
		}
	}
	l.last++
	s := &saving{id: l.last, rank: rank, layout: layout}
	for _, b := range t.Blocks {
		if b.Key != (connector.BlockKey{}) {
			s.blocks = append(s.blocks, heldBlock{Group: b.Group, ID: b.ID, Key: b.Key[:]})
		}
	}
	l.saves[s.id] = s
	return s
}

func (l *layering) advance(s *saving, final int, last bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s.final = final
	for _, f := range l.followers {
		if last && f.rank == s.rank {
			l.tally.count("layer_early_bytes_total", s.bytes(0, f.read[s.id]))
		}
	}
	l.change()
}

func (l *layering) end(s *saving) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.saves, s.id)
	l.change()
}

// await waits for those who read a save, all of whose layers are final.
func (l *layering) await(ctx context.Context, s *saving) {
	timer := time.NewTimer(followPatience)
	defer timer.Stop()
	for {
		l.mu.Lock()
		var slow []string
		for id, f := range l.followers {
			if f.rank == s.rank && f.read[s.id] < s.final {
				slow = append(slow, id)
			}
		}
		news := l.news
		l.mu.Unlock()
		if len(slow) == 0 {
			return
		}
		select {
		case <-news:
		case <-ctx.Done():
			return
		case <-timer.C:
			l.mu.Lock()
			defer l.mu.Unlock()
			for _, id := range slow {
				delete(l.followers, id)
			}
			return
		}
	}
}

// bytes are those of layers of a save's blocks.
func (s *saving) bytes(from, to int) float64 {
	sum := int64(0)
	for _, b := range s.blocks {
		for _, i := range s.layout.Between(b.Group, from, to) {
			sum += s.layout.Segments[i].Bytes
		}
	}
	return float64(sum)
}

// follow answers a question for layers: what is new, or nothing after a while.
func (n *Node) follow(q *question) (*answer, error) {
	if len(q.Follow.ID) == 0 || len(q.Follow.ID) > maxFollowID {
		return nil, fmt.Errorf("a reader of layers without a name: %w", connector.ErrIncompatible)
	}
	l := n.layers
	a := &answer{}
	timer := time.NewTimer(followWait)
	defer timer.Stop()
	f, err := l.hear(q, a)
	if err != nil {
		return nil, err
	}
	defer l.heard(f)
	for waits := true; waits && len(a.Saves) == 0 && len(a.Kept) == 0; {
		news := l.tell(f, a)
		if len(a.Saves) > 0 {
			break
		}
		select {
		case <-news:
		case <-timer.C:
			waits = false
		case <-n.stop:
			waits = false
		}
	}
	if len(a.Saves) == 0 {
		return a, nil
	}
	r, err := n.rankOf(q.Rank)
	if err != nil {
		return nil, err
	}
	r.wake()
	where := r.cache().answer()
	where.Saves, where.Kept = a.Saves, a.Kept
	return where, nil
}

// hear notes how far a follower has come, and tells which saves it has read whole while they lasted.
func (l *layering) hear(q *question, a *answer) (*follower, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.followers[q.Follow.ID]
	if f == nil {
		if len(l.followers) >= maxFollowers {
			return nil, fmt.Errorf("%d consumers read layers here already: %w", len(l.followers), connector.ErrGone)
		}
		f = &follower{rank: q.Rank, told: map[uint64]int{}, read: map[uint64]int{}}
		l.followers[q.Follow.ID] = f
	}
	f.asks++
	for _, r := range q.Follow.Read {
		s := l.saves[r.Save]
		if s == nil || s.rank != f.rank || r.Layers > f.told[r.Save] || r.Layers <= f.read[r.Save] {
			continue
		}
		l.tally.count("layer_confirmed_bytes_total", s.bytes(f.read[r.Save], r.Layers))
		f.read[r.Save] = r.Layers
		if r.Layers >= s.layout.Layers() {
			a.Kept = append(a.Kept, r.Save)
		}
		l.change()
	}
	return f, nil
}

// heard notes that a follower's question was answered.
func (l *layering) heard(f *follower) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f.asks--
	f.heard = time.Now()
}

// tell adds what a follower does not know yet; news is closed when there may be more.
func (l *layering) tell(f *follower, a *answer) (news <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id := range f.told {
		if l.saves[id] == nil {
			a.Saves = append(a.Saves, reached{Save: id, Over: true})
			delete(f.told, id)
			delete(f.read, id)
		}
	}
	for id, s := range l.saves {
		was, known := f.told[id]
		if s.rank != f.rank || s.final <= was {
			continue
		}
		r := reached{Save: id, Layers: s.final}
		if !known {
			r.Blocks = s.blocks
		}
		l.tally.count("layer_bytes_total", s.bytes(was, s.final))
		f.told[id] = s.final
		a.Saves = append(a.Saves, r)
	}
	return l.news
}
