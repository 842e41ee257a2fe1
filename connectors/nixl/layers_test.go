package nixl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/verify/testkit"
)

// stat is the present value of one of an engine's numbers.
func (x *side) stat(name string) float64 {
	x.Helper()
	stats, err := x.s.(connector.StatsSource).Stats(x.Context())
	require.NoError(x, err)
	for _, s := range stats {
		if s.Name == name {
			return s.Value
		}
	}
	require.Fail(x, "no such number", name)
	return 0
}

// reaches waits until a number is large enough.
func (x *side) reaches(name string, least float64) {
	x.Helper()
	require.Eventually(x, func() bool { return x.stat(name) >= least }, time.Minute, time.Millisecond, name)
}

// early waits until that many blocks are ready that were read early.
func (x *side) early(blocks int) {
	x.Helper()
	e := x.w.(*worker).rank.prefetch
	require.Eventually(x, func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(e.have) >= blocks
	}, time.Minute, time.Millisecond)
}

// layerwise is a save under way, of blocks that hold garbage beyond the layers that are final.
type layerwise struct {
	*side
	blocks []connector.Block
	count  connector.LayerCount
	done   int
	ended  chan error
}

func (x *side) saveLayers(rng *rand.Rand, prefix byte, n int) *layerwise {
	l := &layerwise{side: x, blocks: run(rng, prefix, n), ended: make(chan error, 1)}
	x.fill(rng, l.blocks) // others' content
	t := &connector.Transfer{Request: "r", Tokens: tokens(n), Blocks: l.blocks}
	go func() { l.ended <- x.w.(connector.LayerWorker).SaveLayers(x.Context(), t, x.kv, &l.count) }()
	return l
}

// compute makes the layers up to n final.
func (l *layerwise) compute(rng *rand.Rand, n int) {
	for _, b := range l.blocks {
		for _, s := range l.kv.Between(b.Group, l.done, n) {
			view := l.kv.View(s, b.ID)
			for i := range view {
				view[i] = byte(rng.Uint32())
			}
		}
	}
	l.done = n
	l.count.Advance(n)
}

// size is how many bytes the layers up to n of the full blocks have, or of the partial ones.
func (l *layerwise) size(n int, partial bool) (sum float64) {
	for _, b := range l.blocks {
		if partial != (b.Key == connector.BlockKey{}) {
			continue
		}
		for _, s := range l.kv.Between(b.Group, 0, n) {
			sum += float64(len(l.kv.View(s, b.ID)))
		}
	}
	return sum
}

func (l *layerwise) finish() connector.Hold {
	require.NoError(l, <-l.ended)
	n := 0
	for _, b := range l.blocks {
		if b.Group == 0 {
			n++
		}
	}
	h, err := l.s.(connector.Holder).Finish(l.Context(), []connector.Ended{{Request: "r", Reason: connector.ReasonLength, Tokens: tokens(n), Remote: true, Blocks: l.blocks}})
	require.NoError(l, err)
	return h[0]
}

// TestLayers: a consumer that follows a producer has each layer before the next one is computed, and its load
// only copies.
func TestLayers(t *testing.T) {
	libDir(t)
	defer goleak.VerifyNone(t)
	t.Run("pair", func(t *testing.T) {
		rng := rand.New(rand.NewPCG(20, 21))
		p := open(t, connector.RoleProducer, Config{}, nil)
		d := open(t, connector.RoleConsumer, Config{Subscribe: []string{followTickets}}, nil)
		theirs, hold := p.finish(rng, 1, 3)
		ours, err := d.load(rng, 1, 3, hold.Ticket)
		require.NoError(t, err)
		require.Equal(t, p.bytes(theirs), d.bytes(ours))
		p.reaches("subscribers", 1)
		layers := p.kv.Layout().Layers()
		for i := range 10 {
			n := 2 + rng.IntN(8)
			before, here := p.stat("layer_confirmed_bytes_total"), d.stat("early_blocks_total")
			l := p.saveLayers(rng, byte(10+i), n)
			for layer := range layers {
				l.compute(rng, layer+1)
				p.reaches("layer_confirmed_bytes_total", before+l.size(layer+1, false))
			}
			hold := l.finish()
			full := slices.DeleteFunc(slices.Clone(l.blocks), func(b connector.Block) bool { return b.Key == connector.BlockKey{} })
			before = bytesRead(d)
			d.early(len(full))
			ours, err := d.load(rng, byte(10+i), n, hold.Ticket)
			require.NoError(t, err)
			require.Equal(t, p.bytes(l.blocks), d.bytes(ours))
			require.InDelta(t, float64(len(full)), d.stat("early_blocks_total")-here, 0, "blocks that were here already")
			require.InDelta(t, l.size(layers, true), bytesRead(d)-before, 0, "bytes of the partial blocks, which are read when they are held")
			p.fetched(hold.ID)
		}
	})
}

// bytesRead is how many bytes an engine's loads have read.
func bytesRead(x *side) (sum float64) {
	stats, err := x.s.(connector.StatsSource).Stats(x.Context())
	require.NoError(x, err)
	for _, s := range stats {
		if s.Name == "read_bytes_total" {
			sum += s.Value
		}
	}
	return sum
}

// TestLayersGivenUp: of what was not computed to the end nothing is used, and nothing is lost of the memory for
// what is read early.
func TestLayersGivenUp(t *testing.T) {
	rng := rand.New(rand.NewPCG(22, 23))
	p := open(t, connector.RoleProducer, Config{}, nil)
	d := open(t, connector.RoleConsumer, Config{Subscribe: []string{p.node.address()}}, nil)
	p.reaches("subscribers", 1)
	e := d.w.(*worker).rank.prefetch
	e.mu.Lock()
	frames := len(e.free)
	e.mu.Unlock()
	for range 20 {
		l := p.saveLayers(rng, 1, 6)
		n := 1 + rng.IntN(2)
		l.compute(rng, n)
		if rng.IntN(2) == 0 {
			p.reaches("layer_confirmed_bytes_total", 1)
		}
		l.count.GiveUp()
		require.ErrorIs(t, <-l.ended, connector.ErrGone)
	}
	whole := p.saveLayers(rng, 2, 4)
	whole.compute(rng, p.kv.Layout().Layers())
	hold := whole.finish()
	d.early(1)
	require.Eventually(t, func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(e.free)+len(e.have) == frames
	}, time.Minute, time.Millisecond)
	ours, err := d.load(rng, 2, 4, hold.Ticket)
	require.NoError(t, err)
	require.Equal(t, p.bytes(whole.blocks), d.bytes(ours))
	require.Positive(t, d.stat("early_blocks_total"))
}

// TestLayersSlow: whoever reads slowly, or not at all, holds up a save for a moment and gets nothing of what its
// slots hold next.
func TestLayersSlow(t *testing.T) {
	rng := rand.New(rand.NewPCG(24, 25))
	p := open(t, connector.RoleProducer, Config{}, nil)
	layers := p.kv.Layout().Layers()
	ask := func(read ...reached) *answer {
		e := &p.node.env
		a, err := p.node.reply(&question{
			Version: protocolVersion, Model: e.Model[:], Shape: e.Shape[:], World: 1, Follow: &follow{ID: "slow", Read: read},
		})
		require.NoError(t, err)
		return a
	}
	l := p.saveLayers(rng, 1, 3)
	l.compute(rng, 1)
	a := ask()
	require.Len(t, a.Saves, 1)
	require.Len(t, a.Saves[0].Blocks, 3, "two full blocks and one of the other group")
	require.NotEmpty(t, a.Metadata)
	id := a.Saves[0].Save
	require.Empty(t, ask(reached{Save: id, Layers: layers}).Kept, "it was not told about that many layers")
	l.compute(rng, layers)
	require.NoError(t, <-l.ended)
	require.Zero(t, p.stat("subscribers"), "it is no longer followed")
	a = ask(reached{Save: id, Layers: layers})
	require.Empty(t, a.Kept, "the save is over")
	_, err := p.node.reply(&question{Version: protocolVersion, Model: p.node.env.Model[:], Shape: p.node.env.Shape[:], World: 1, Follow: &follow{}})
	require.ErrorIs(t, err, connector.ErrIncompatible)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, p.w.(connector.LayerWorker).SaveLayers(ctx, &connector.Transfer{}, p.kv, &connector.LayerCount{}), context.Canceled)
}

// TestEarlyRoom: memory for what is read early is bounded: the oldest goes, and what is being read stays.
func TestEarlyRoom(t *testing.T) {
	d := open(t, connector.RoleConsumer, Config{Subscribe: []string{followTickets}, EarlyBytes: 1 << 20}, nil)
	e := d.w.(*worker).rank.prefetch
	key := func(i int) prefetchKey { return prefetchKey{key: connector.BlockKey{byte(i), byte(i >> 8), 1}} }
	frames := len(e.free)
	for i := range frames + 10 {
		frame, ok := e.room(key(i))
		require.True(t, ok)
		e.put([]prefetchBlock{{key: key(i), frame: frame}}, true)
	}
	require.Len(t, e.have, frames)
	require.NotContains(t, e.have, key(9))
	require.Contains(t, e.have, key(10))
	_, ok := e.room(key(10))
	require.False(t, ok, "it is here")
	for i := range frames {
		_, ok = e.room(key(1<<15 + i))
		require.True(t, ok)
	}
	_, ok = e.room(key(1 << 14))
	require.False(t, ok, "all are being read")
}

// TestSubscribe: what is neither an address nor the word for all is refused, with its place.
func TestSubscribe(t *testing.T) {
	none := func(string) string { return "" }
	_, err := Config{Subscribe: []string{"127.0.0.1:5600", "here"}}.settle(none)
	require.ErrorContains(t, err, "subscribe[1]")
	c, err := Config{Subscribe: []string{"127.0.0.1:5600", followTickets}}.settle(none)
	require.NoError(t, err)
	require.EqualValues(t, defaultEarly, c.EarlyBytes)
}

// TestLayersDoNotCome: the log has each reason why a producer's layers do not come, not only the first one.
func TestLayersDoNotCome(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	left := make(chan error, 1)
	go func() { // a producer that hangs up, and then is gone
		c, err := l.Accept()
		if err == nil {
			err = c.Close()
		}
		left <- errors.Join(err, l.Close())
	}()
	log := &testkit.Log{}
	open(t, connector.RoleConsumer, Config{Subscribe: []string{l.Addr().String()}}, func(e *connector.Env) {
		e.Log = slog.New(slog.NewTextHandler(log, nil))
	})
	require.NoError(t, <-left)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "connection refused") }, time.Minute, time.Millisecond)
	require.Greater(t, strings.Count(log.String(), "layers do not come"), 1)
}

// TestReasons: each reason is logged once in a row, whichever port it names, and there is an end to them.
func TestReasons(t *testing.T) {
	from := func(port int, err error) error {
		return fmt.Errorf("dial: %w", &net.OpError{Op: "read", Net: "tcp", Source: &net.TCPAddr{Port: port}, Err: err})
	}
	r := reasons{}
	require.True(t, r.add(from(1, io.EOF)))
	require.False(t, r.add(from(2, io.EOF)))
	require.True(t, r.add(from(2, net.ErrClosed)))
	for i := range 100 {
		r.add(fmt.Errorf("reason %d", i))
	}
	require.Len(t, r, maxReasons)
}
