package sdk

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// begin starts to save blocks layer by layer; their content is there when the one layer is announced.
func (e *peerEngine) begin(keys ...byte) (count *connector.LayerCount, ended chan error) {
	e.Helper()
	return e.beginOf(e.Context(), blocksAt(0, keys...))
}

// beginOf is begin for a transfer.
func (e *peerEngine) beginOf(ctx context.Context, t *connector.Transfer) (count *connector.LayerCount, ended chan error) {
	e.Helper()
	worker, ok := connector.As[connector.LayerWorker](e.worker)
	require.True(e, ok)
	for _, b := range t.Blocks {
		for j := range 64 {
			e.memory[64*int(b.ID)+j] = b.Key[0] + byte(j)
		}
	}
	count, ended = &connector.LayerCount{}, make(chan error, 1)
	go func() { ended <- worker.SaveLayers(ctx, t, e.kv, count) }()
	return count, ended
}

func (e *peerEngine) has(keys ...byte) int {
	e.Helper()
	return e.match("", nil, keys...).Tokens / 4
}

// A consumer that has subscribed has the blocks without asking, also after its link was cut.
func TestSubscribe(t *testing.T) {
	w := &wires{}
	p := w.engine(t, "p", connector.RoleProducer, pipe.Peers{})
	d := w.engine(t, "d", connector.RoleConsumer, pipe.Peers{Subscribe: []string{"wire-0"}})
	subscribed := func() bool { return p.count("subscribers") == 1 }
	require.Eventually(t, subscribed, time.Minute, time.Millisecond)
	count, ended := p.begin(1, 2)
	require.Zero(t, d.has(1, 2))
	count.Advance(1)
	require.NoError(t, <-ended)
	require.Eventually(t, func() bool { return d.has(1, 2) == 2 }, time.Minute, time.Millisecond)
	d.load(nil, 1, 2)
	require.Zero(t, p.count("served_blocks_total"), "nothing was asked for")
	require.Eventually(t, func() bool { return p.count("layer_confirmed_bytes_total") == 128 }, time.Minute, time.Millisecond)

	w.refuses(true) // so that nobody misses that the subscription has ended
	w.cut()
	require.Eventually(t, func() bool { return !subscribed() }, time.Minute, time.Millisecond)
	w.refuses(false)
	require.Eventually(t, subscribed, time.Minute, time.Millisecond, "it subscribes again")
	count, ended = p.begin(3)
	count.Advance(1)
	require.NoError(t, <-ended)
	require.Eventually(t, func() bool { return d.has(3) == 1 }, time.Minute, time.Millisecond)
}

// Blocks that the engine gives up are nowhere, and their room is free again.
func TestSubscribedGivenUp(t *testing.T) {
	w := &wires{}
	p := w.engine(t, "p", connector.RoleProducer, pipe.Peers{Bytes: 512})
	d := w.engine(t, "d", connector.RoleConsumer, pipe.Peers{Subscribe: []string{"wire-0"}, Bytes: 512})
	require.Eventually(t, func() bool { return p.count("subscribers") == 1 }, time.Minute, time.Millisecond)
	for range 4 {
		count, ended := p.begin(1, 2, 3, 4)
		count.GiveUp()
		require.ErrorIs(t, <-ended, connector.ErrGone)
	}
	require.Zero(t, p.has(1))
	count, ended := p.begin(5, 6, 7, 8)
	count.Advance(1)
	require.NoError(t, <-ended)
	require.Eventually(t, func() bool { return d.has(5, 6, 7, 8) == 4 }, time.Minute, time.Millisecond)
}

// Subscribers that do not receive lose their links. They cost a save no more than the patience of one, and nothing once the save is
// given up or cancelled. Others get everything.
func TestSubscribersThatSleep(t *testing.T) {
	const patience = 5 * time.Second
	for name, test := range map[string]struct {
		goesOn func(count *connector.LayerCount, cancel func()) // after the first layer
		takes  time.Duration
		err    error
		blocks int
	}{
		"goes on":   {func(count *connector.LayerCount, _ func()) { count.Advance(3) }, patience, nil, 2},
		"given up":  {func(count *connector.LayerCount, _ func()) { count.GiveUp() }, 0, connector.ErrGone, 0},
		"cancelled": {func(count *connector.LayerCount, cancel func()) { count.Advance(2); synctest.Wait(); cancel() }, 0, context.Canceled, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &wires{}
				p := w.layered(t, "p", connector.RoleBoth, pipe.Peers{Patience: patience})
				d := w.layered(t, "d", connector.RoleConsumer, pipe.Peers{Subscribe: []string{"wire-0"}})
				for range 3 {
					link, err := w.Dial(t.Context(), "wire-0")
					require.NoError(t, err)
					t.Cleanup(func() { _ = link.Close() })
					require.NoError(t, link.Out.Send(t.Context(), []byte{1, 6}, nil)) // it subscribes
				}
				synctest.Wait()
				require.Equal(t, int64(4), p.count("subscribers"))
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				count, ended := p.beginOf(ctx, blocksAt(0, 1, 2))
				count.Advance(1) // the pipe has room for one frame
				synctest.Wait()
				began := time.Now()
				test.goesOn(count, cancel)
				require.ErrorIs(t, <-ended, test.err)
				require.Equal(t, test.takes, time.Since(began))
				<-time.After(patience)
				synctest.Wait()
				require.Equal(t, int64(1), p.count("subscribers"))
				require.Equal(t, test.blocks, p.has(1, 2))
				require.Equal(t, test.blocks, d.has(1, 2))
			})
		})
	}
}

// A consumer to which blocks are pushed, and which has subscribed as well, is sent the blocks of a request once. One that has not
// is sent them when they are saved.
func TestSubscribedAndPushed(t *testing.T) {
	for _, subscribes := range []bool{true, false} {
		w := &wires{}
		p := w.engine(t, "p", connector.RoleProducer, pipe.Peers{Push: func(connector.RequestID) string { return "wire-1" }})
		peers := pipe.Peers{Pushed: true, Wait: 3 * time.Second}
		subscribers, pushed := int64(0), int64(2)
		if subscribes {
			peers.Subscribe, subscribers, pushed = []string{"wire-0"}, 1, 0
		}
		d := w.engine(t, "d", connector.RoleConsumer, peers)
		require.Eventually(t, func() bool { return p.count("subscribers") == subscribers }, time.Minute, time.Millisecond)
		count, ended := p.begin(1, 2)
		count.Advance(1)
		require.NoError(t, <-ended)
		require.Eventually(t, func() bool { return d.has(1, 2) == 2 }, time.Minute, time.Millisecond)
		ticket := p.save(1, 2) // they are stored already, and were sent
		require.Equal(t, 2, d.settled(ticket, 1, 2))
		d.load(ticket, 1, 2)
		p.counts("pushed_blocks_total", pushed)
		require.Zero(t, p.count("served_blocks_total"), "nothing was asked for")
	}
}

// A step that is larger than the buffer is stored as by a save after the step, whether somebody has subscribed or not, also if it
// replaces what is there.
func TestLayersBeyondTheBuffer(t *testing.T) {
	keys := []byte{1, 2, 3, 4, 5, 6, 7, 8}
	for _, subscribers := range []int64{0, 1} {
		w := &wires{}
		p := w.engine(t, "p", connector.RoleBoth, pipe.Peers{Bytes: 256, Spill: 1 << 13})
		if subscribers > 0 {
			w.engine(t, "d", connector.RoleConsumer, pipe.Peers{Subscribe: []string{"wire-0"}})
		}
		require.Eventually(t, func() bool { return p.count("subscribers") == subscribers }, time.Minute, time.Millisecond)
		for _, replace := range []bool{false, true} {
			save := blocksAt(0, keys...)
			save.Replace = replace
			count, ended := p.beginOf(t.Context(), save)
			count.Advance(1)
			require.NoError(t, <-ended)
			require.Equal(t, len(keys), p.has(keys...))
			p.load(nil, keys...)
		}
	}
}

// Two requests of one step compute the same blocks: a subscriber gets the layers of one of them, and has the blocks if that one is
// not given up. The producer has them in any case, and the subscription goes on.
func TestSubscribedTwins(t *testing.T) {
	for _, givenUp := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := &wires{}
			p := w.layered(t, "p", connector.RoleBoth, pipe.Peers{})
			d := w.layered(t, "d", connector.RoleConsumer, pipe.Peers{Subscribe: []string{"wire-0"}})
			synctest.Wait()
			first, firstEnded := p.begin(1, 2)
			synctest.Wait()
			second, secondEnded := p.begin(1, 2)
			for n := 1; n <= 3; n++ {
				synctest.Wait()
				if n == 2 && givenUp {
					first.GiveUp()
					require.ErrorIs(t, <-firstEnded, connector.ErrGone)
				}
				first.Advance(n)
				second.Advance(n)
			}
			require.NoError(t, <-secondEnded)
			synctest.Wait()
			require.Equal(t, 2, p.has(1, 2))
			if givenUp {
				require.Zero(t, d.has(1))
			} else {
				require.NoError(t, <-firstEnded)
				require.Equal(t, 2, d.has(1, 2))
				d.load(nil, 1, 2)
				require.Equal(t, int64(128), p.count("layer_bytes_total"))
			}
			require.Equal(t, int64(1), p.count("subscribers"))

			again := blocksAt(0, 1, 2)
			again.Replace = true
			count, ended := p.beginOf(t.Context(), again)
			count.Advance(3)
			require.NoError(t, <-ended)
			synctest.Wait()
			require.Equal(t, 2, d.has(1, 2), "they are sent again")
			d.load(nil, 1, 2)
			require.Equal(t, 1, w.dials)
		})
	}
}

// Where the config says so, the layers of a request go to the consumer that the request names and to no other subscriber.
func TestLayersToTarget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, target := &wires{}, "wire-1"
		p := w.layered(t, "p", connector.RoleBoth, pipe.Peers{Push: func(connector.RequestID) string { return target }, LayersToTarget: true})
		var ds []*peerEngine
		for _, name := range []string{"d", "e"} {
			ds = append(ds, w.layered(t, name, connector.RoleConsumer, pipe.Peers{Pushed: true, Subscribe: []string{"wire-0"}}))
		}
		synctest.Wait()
		require.Equal(t, int64(2), p.count("subscribers"))
		for i, to := range []string{"wire-1", "wire-2", ""} {
			target = to
			k := byte(1 + i)
			count, ended := p.begin(k)
			count.Advance(3)
			require.NoError(t, <-ended)
			synctest.Wait()
			require.Equal(t, 1, p.has(k))
			for n, d := range ds {
				want := 0
				if n == i {
					want = 1
				}
				require.Equal(t, want, d.has(k), "the layers of %q at consumer %d", to, n)
			}
			require.Equal(t, int64(64*min(i+1, 2)), p.count("layer_bytes_total"))
		}
		require.Zero(t, p.count("pushed_blocks_total"))
	})
}

// That everything has been pushed is said after the layers that are still on their way over another link: the consumer does not ask
// for them. If that link ends, it is said at once.
func TestPushedAfterLayers(t *testing.T) {
	for _, cut := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := &wires{gate: make(chan struct{})}
			p := w.layered(t, "p", connector.RoleProducer, pipe.Peers{Push: func(connector.RequestID) string { return "wire-1" }})
			d := w.layered(t, "d", connector.RoleConsumer, pipe.Peers{Pushed: true, Subscribe: []string{"wire-0"}, Wait: 3 * time.Second})
			synctest.Wait()
			count, ended := p.begin(1, 2)
			count.Advance(3)
			require.NoError(t, <-ended)
			ticket := p.save(1, 2) // they are stored already, and were sent
			synctest.Wait()
			require.True(t, d.match("r", ticket, 1, 2).Later)
			synctest.Wait()
			require.Zero(t, p.count("served_blocks_total"), "nothing was asked for")

			if cut {
				w.open()
				w.cut()
				synctest.Wait()
				require.True(t, d.match("r", ticket, 1, 2).Later)
				synctest.Wait()
				require.Equal(t, int64(2), p.count("served_blocks_total"))
			} else {
				close(w.gate)
				synctest.Wait()
				require.Zero(t, p.count("served_blocks_total"))
			}
			m := d.match("r", ticket, 1, 2)
			require.False(t, m.Later)
			require.Equal(t, 8, m.Tokens)
			d.load(ticket, 1, 2)
			require.Zero(t, p.count("pushed_blocks_total"))
		})
	}
}

// The room for layers of a producer that has stopped is free again after a while, and the subscription goes on.
func TestSubscribedToStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &wires{}
		p := w.layered(t, "p", connector.RoleProducer, pipe.Peers{})
		d := w.layered(t, "d", connector.RoleConsumer, pipe.Peers{Subscribe: []string{"wire-0"}})
		synctest.Wait()
		count, ended := p.begin(1, 2)
		for _, n := range []int{1, 2} { // it stops after each of them
			count.Advance(n)
			synctest.Wait()
			require.Equal(t, int64(128), d.count("buffer_bytes"))
			<-time.After(time.Hour)
			synctest.Wait()
			require.Zero(t, d.count("buffer_bytes"))
		}
		count.Advance(3)
		require.NoError(t, <-ended)
		synctest.Wait()
		require.Zero(t, d.has(1))

		count, ended = p.begin(3)
		count.Advance(3)
		require.NoError(t, <-ended)
		synctest.Wait()
		require.Equal(t, 1, d.has(3))
		d.load(nil, 3)
		require.Equal(t, 1, w.dials)
	})
}

// An engine does not subscribe to itself.
func TestSubscribedToItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &wires{}
		b := w.layered(t, "b", connector.RoleBoth, pipe.Peers{Subscribe: []string{"wire-0", "wire-1"}})
		w.layered(t, "p", connector.RoleProducer, pipe.Peers{})
		<-time.After(time.Minute)
		synctest.Wait()
		require.Zero(t, b.count("subscribers"))
		require.Len(t, w.made, 1, "with the other one")
	})
}

// A consumer that subscribes while blocks are being computed gets nothing of them, whether others get them or not, but all that comes later.
func TestSubscribedAmidASave(t *testing.T) {
	for _, others := range []int64{0, 1} {
		synctest.Test(t, func(t *testing.T) {
			w := &wires{}
			p := w.layered(t, "p", connector.RoleBoth, pipe.Peers{})
			consumer := func() *peerEngine {
				return w.layered(t, "d", connector.RoleConsumer, pipe.Peers{Subscribe: []string{"wire-0"}})
			}
			var before []*peerEngine
			for range others {
				before = append(before, consumer())
			}
			synctest.Wait()
			count, ended := p.begin(1)
			count.Advance(1)
			synctest.Wait()
			d := consumer()
			synctest.Wait()
			require.Equal(t, others+1, p.count("subscribers"))
			count.Advance(3)
			require.NoError(t, <-ended)
			synctest.Wait()
			require.Equal(t, 1, p.has(1))
			for _, e := range before {
				require.Equal(t, 1, e.has(1))
			}
			require.Zero(t, d.has(1))
			require.Zero(t, d.count("buffer_bytes"))
			count, ended = p.begin(2)
			count.Advance(3)
			require.NoError(t, <-ended)
			synctest.Wait()
			require.Equal(t, 1, d.has(2))
		})
	}
}

// Blocks whose layers are pushed take half of a buffer at most: what comes beyond is stored after the last layer, and others find room
// meanwhile.
func TestLayersTakeHalfOfTheBuffer(t *testing.T) {
	w := &wires{}
	p := w.engine(t, "p", connector.RoleBoth, pipe.Peers{Bytes: 256})
	d := w.engine(t, "d", connector.RoleConsumer, pipe.Peers{Subscribe: []string{"wire-0"}, Bytes: 512})
	require.Eventually(t, func() bool { return p.count("subscribers") == 1 }, time.Minute, time.Millisecond)
	first, one := p.begin(1, 2, 3, 4)
	first.Advance(1)
	require.NoError(t, <-one)
	require.Equal(t, 4, p.has(1, 2, 3, 4))
	require.Eventually(t, func() bool { return d.has(1, 2) == 2 }, time.Minute, time.Millisecond)
	require.Zero(t, d.has(3), "it was not sent by layers")
}
