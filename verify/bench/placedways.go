package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/mac"
)

// memorySlots are blocks in memory of the kind that a cache has, each with its segments one behind the other. Copies between them and the
// cache are what limits a memory tier.
type memorySlots struct {
	cache  *connector.KV
	memory *host.Region
	stride int
	mac    *mac.MAC
}

func newMemorySlots(cache *connector.KV) (*memorySlots, error) {
	l := cache.Layout()
	stride := (int(l.BlockBytes(0)) + 4095) &^ 4095
	memory, err := host.NewRegion(int64(stride) * int64(l.Blocks))
	if err != nil {
		return nil, err
	}
	fill(memory.Bytes())
	return &memorySlots{cache: cache, memory: memory, stride: stride, mac: mac.New(&mac.Key{1})}, nil
}

func (m *memorySlots) close() error { return m.memory.Close() }

// move moves bytes from one place to another.
type move func(to, from []byte)

// in copies n slots to the cache, as a load does.
func (m *memorySlots) in(at, n int, how move) {
	m.each(n, func(i int) {
		m.segments(m.block(at+i), m.block(at+i+m.cache.Layout().Blocks/2), func(slot, cache []byte) { how(cache, slot) })
	})
}

// out copies n blocks of the cache to slots, as a save does.
func (m *memorySlots) out(at, n int, how move) {
	m.each(n, func(i int) {
		m.segments(m.block(at+i), m.block(at+i), func(slot, cache []byte) { how(slot, cache) })
	})
}

func (m *memorySlots) block(n int) int { return n % m.cache.Layout().Blocks }

// segments visits the segments of a block, in a slot and in the cache.
func (m *memorySlots) segments(slot, block int, visit func(slot, cache []byte)) {
	rest := m.memory.Bytes()[slot*m.stride:]
	for s := range m.cache.Layout().Segments {
		cache := m.cache.View(s, connector.BlockID(block))
		visit(rest[:len(cache)], cache)
		rest = rest[len(cache):]
	}
}

// each does n things on as many threads as a host has for digests.
func (m *memorySlots) each(n int, do func(int)) {
	threads := min(n, runtime.GOMAXPROCS(0))
	if threads == 1 {
		for i := range n {
			do(i)
		}
		return
	}
	var g errgroup.Group
	for t := range threads {
		g.Go(func() error {
			for i := t; i < n; i += threads {
				do(i)
			}
			return nil
		})
	}
	_ = g.Wait() // nothing of it fails
}

// digested copies through the caches, and then digests the copy.
func (m *memorySlots) digested(to, from []byte) {
	var sum [mac.Size]byte
	copy(to, from)
	m.mac.Sum(&sum, nil, to)
}

// cost is what one run of a way took.
type cost struct{ wall, cpu float64 } // microseconds

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// cpu is the processor time of this process and of the plugin.
func (p *placed) cpu() time.Duration {
	return cpuTime() + clockTime(p.plugin)
}

// rounds are those that count.
func (p *placed) rounds() int {
	if p.Quick {
		return 3
	}
	return 61
}

// turns runs the ways in turns, after other work if there is any, and gives what each cost in each round. The first round does not count.
func (p *placed) turns(ctx context.Context, other time.Duration, ways ...func(round int) error) ([][]cost, error) {
	all := make([][]cost, len(ways))
	memory := make([]byte, 16<<20) // what an engine touches meanwhile
	for round := range p.rounds() + 1 {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		for turn := range ways {
			way := (round + turn) % len(ways)
			compute(memory, other)
			began, cpu := time.Now(), p.cpu()
			if err := ways[way](round); err != nil {
				return nil, err
			}
			c := cost{wall: micros(time.Since(began)), cpu: micros(p.cpu() - cpu)}
			if round > 0 {
				all[way] = append(all[way], c)
			}
		}
	}
	return all, nil
}

// compute keeps the thread and its caches busy.
func compute(memory []byte, d time.Duration) {
	for began := time.Now(); time.Since(began) < d; {
		for i := range memory {
			memory[i]++
		}
	}
}

// column is one number of each cost.
func column(costs []cost, of func(cost) float64) []float64 {
	out := make([]float64, len(costs))
	for i, c := range costs {
		out[i] = of(c)
	}
	return out
}

func wall(c cost) float64 { return c.wall }
func cpu(c cost) float64  { return c.cpu }

// compared is a cost in each round, and that of a limit.
type compared struct {
	unit         string
	value, limit []float64
	budget       budget
}

// beside emits how much less a value costs than its limit, with between what the median of that ratio is said to be.
func (p *placed) beside(name string, bytes int64, c compared) error {
	value, limit := c.value, c.limit
	ratios := make([]float64, len(value))
	for i := range value {
		ratios[i] = limit[i] / value[i]
	}
	low, median, high := medianInterval(ratios)
	row := shorter(name, bytes, middle(slices.Clone(value)), middle(slices.Clone(limit)), c.unit)(c.budget)
	row.judge(median, c.budget)
	return p.Emit.all(row.Between(median, low, high))
}

// heat names what came before.
func heat(other time.Duration) string {
	if other == 0 {
		return "hot"
	}
	return fmt.Sprintf("after %v of other work", other)
}

// lookups measures what it takes to find the prompt of a request, all of which is there.
func (p *placed) lookups(ctx context.Context, other time.Duration) error {
	for _, n := range []int{32, 128} {
		if n > p.layout.Blocks {
			continue
		}
		costs, err := p.turns(ctx, other, func(round int) error {
			q := connector.Query{Tokens: n*blockTokens + 1, Keys: placedKeys(round%(p.layout.Blocks-n+1), n)}
			if m := p.Probe(ctx, q); m.Tokens != n*blockTokens {
				return fmt.Errorf("%d of %d tokens were found", m.Tokens, n*blockTokens)
			}
			return nil
		})
		if err != nil {
			return err
		}
		name := fmt.Sprintf("lookup of %d keys of %s, %s", n, p.shape.name, heat(other))
		row := Row{Name: name, Value: round(middle(column(costs[0], wall))), Unit: "us"}
		if n == 32 {
			row.judge(0, atMost(25))
		}
		row.Ratio = nil
		if err := errors.Join(p.Emit(row), p.Emit(Row{Name: name + ", processor time", Value: round(middle(column(costs[0], cpu))), Unit: "us"})); err != nil {
			return err
		}
	}
	return nil
}

// moves measures loads or saves of each batch, and then of all batches of more than one block together.
func (p *placed) moves(ctx context.Context, what string, other time.Duration, ours func(at, n int) error, limit func(at, n int, how move)) error {
	var sum [3][]float64 // walls of all batches, by round
	var bytes int64
	for _, n := range p.shape.batches {
		costs, err := p.turns(ctx, other,
			func(int) error { return ours(p.somewhere(n), n) },
			func(int) error { limit(p.somewhere(n), n, mac.CopyPast); return nil },
			func(int) error { limit(p.somewhere(n), n, p.slots.digested); return nil })
		if err != nil {
			return err
		}
		size := p.shape.block() * int64(n)
		if n > 1 {
			bytes += size
			for i := range sum {
				sum[i] = added(sum[i], column(costs[i], wall))
			}
		}
		name := fmt.Sprintf("%s of %d x %s, %s", what, n, p.shape.name, heat(other))
		if err := errors.Join(
			p.beside(name, size, compared{"us", column(costs[0], wall), column(costs[1], wall), p.budget(n)}),
			p.beside(name+" : copy, then digest", size, compared{"us", column(costs[0], wall), column(costs[2], wall), budget{}}),
			p.beside(name+", processor time : copy, then digest", size, compared{"us", column(costs[0], cpu), column(costs[2], cpu), atLeast(0.77)}),
		); err != nil {
			return err
		}
	}
	name := fmt.Sprintf("%s of all batches of %s, %s", what, p.shape.name, heat(other))
	return errors.Join(
		p.beside(name, bytes, compared{"us", sum[0], sum[1], budget{}}),
		p.beside(name+" : copy, then digest", bytes, compared{"us", sum[0], sum[2], budget{}}),
	)
}

// budget is that of a transfer of n blocks with digests.
func (p *placed) budget(n int) budget {
	switch {
	case p.shape.block() >= 700<<10 && n == 1:
		return atLeast(0.8)
	case p.shape.block() >= 700<<10 || n >= 32:
		return atLeast(0.6)
	}
	return budget{}
}

// somewhere is a place in the cache with n blocks: another each time, so that nothing of it is in a processor's cache.
func (p *placed) somewhere(n int) int { return rand.IntN(p.layout.Blocks - n + 1) }

func added(a, b []float64) []float64 {
	if a == nil {
		return b
	}
	for i := range a {
		a[i] += b[i]
	}
	return a
}
