package host

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/place"
)

const (
	libraryBlocks = 60
	pluginBlocks  = 40 // of them that the plugin writes; the host saves the others
	placerSlots   = 48
	placerReaders = 4
	placerWriters = 2
)

// placerRig is a host, with readers on threads of their own, and a plugin process that places and is killed again and again.
type placerRig struct {
	*testing.T
	lies    bool
	p       *placement
	damaged *atomic.Int64 // blocks
	rank    *rank
	arena   *Arena
	library *Arena // the blocks, as they are in the cache
	blocks  []connector.Block
	keys    [][32]byte
	seed    uint64

	cmd    *exec.Cmd
	begin  io.WriteCloser
	named  *bufio.Reader
	learnt chan struct{} // closed when all that this life has named is learnt

	each                                      int64         // a life lasts for as many loads
	due                                       chan struct{} // it has
	accepted, refused, matched, wrong, faults atomic.Int64
	saved                                     atomic.Int64
	before                                    int64 // of saved, when this life began
	late                                      *loadWatch
}

func newPlacerRig(t *testing.T, lies bool) *placerRig {
	inner := newPlacedRig(t, 1, all())
	r := &placerRig{T: t, lies: lies, p: inner.p, damaged: &inner.damaged, rank: inner.ranks[0], seed: 1}
	size := largestBlock(r.p.layout)
	var err error
	r.library, err = NewArena()
	require.NoError(t, err)
	require.NoError(t, r.library.Fit(libraryBlocks*size))
	for n, k := range keys(7, libraryBlocks) {
		b := inner.fill([]connector.BlockKey{k}, 0)[0]
		spans, err := r.rank.kv.Spans(b)
		require.NoError(t, err)
		copy(r.library.Bytes()[int64(n)*size:], slices.Concat(spans...))
		r.blocks, r.keys = append(r.blocks, b), append(r.keys, r.p.key(k, 0, 0))
	}
	r.arena, err = NewArena()
	require.NoError(t, err)
	g := place.Geometry{Slots: placerSlots, SlotBytes: size}
	require.NoError(t, r.arena.Fit(g.ArenaBytes()))
	t.Cleanup(func() { require.NoError(t, errors.Join(r.arena.Close(), r.library.Close())) })
	return r
}

// start opens the next life of the plugin, and looks at what it has made of the arena before it begins to work.
func (r *placerRig) start() {
	r.Helper()
	env, err := r.p.reopen(r.arena.Bytes(), false)
	require.NoError(r, err)
	require.NotNil(r, env)
	r.p.pools[0].open(placerSlots)
	r.before = r.saved.Load()
	require.Equal(r, placerSlots, env.Slots)
	r.seed++
	order, err := json.Marshal(placerOrder{
		Slots: env.Slots, SlotBytes: env.SlotBytes, Epoch: env.Epoch, Serial: env.Serial, ArenaBytes: len(r.arena.Bytes()), Keys: r.keys[:pluginBlocks], Seed: r.seed, Lies: r.lies,
	})
	require.NoError(r, err)
	r.cmd = exec.Command("/proc/self/exe")
	r.cmd.Env = []string{placerEnv + "=" + string(order), "GOMAXPROCS=2"}
	r.cmd.Stderr = os.Stderr
	r.cmd.ExtraFiles = []*os.File{r.arena.file, r.library.file}
	r.begin, err = r.cmd.StdinPipe()
	require.NoError(r, err)
	out, err := r.cmd.StdoutPipe()
	require.NoError(r, err)
	require.NoError(r, r.cmd.Start())
	r.named, r.learnt = bufio.NewReader(out), make(chan struct{})
	var opened [2]uint32
	require.NoError(r, binary.Read(r.named, binary.LittleEndian, &opened))
	r.recovered(int(opened[0]))
	_, err = r.begin.Write([]byte{1})
	require.NoError(r, err)
	go r.learn()
}

// recovered makes sure that every slot is either one of those that the plugin keeps, or free: none is lost.
func (r *placerRig) recovered(found int) {
	r.Helper()
	free, ready := 0, 0
	for s := range placerSlots {
		switch binary.LittleEndian.Uint64(r.arena.Bytes()[4096+128*s:]) & 0xff {
		case 0:
			free++
		case 3:
			ready++
		}
	}
	require.Equal(r, found, ready, "slots that are READY, and those that the plugin has found")
	require.Equal(r, placerSlots, free+ready, "no slot is lost")
}

// learn hears what the plugin names until it is gone.
func (r *placerRig) learn() {
	defer close(r.learnt)
	for {
		var slot [4]byte
		if _, err := io.ReadFull(r.named, slot[:]); err != nil {
			return
		}
		var err error
		if n := binary.LittleEndian.Uint32(slot[:]); n&lentMark != 0 {
			err = r.borrow(n &^ lentMark)
		} else {
			err = r.p.learn([]uint32{n}, 1)
		}
		if err != nil {
			r.faults.Add(1)
		}
	}
}

// borrow takes a slot that is lent, whose serial follows. Nobody makes a former life's slots one of this one's: they are learnt before it begins.
func (r *placerRig) borrow(slot uint32) error {
	var serial uint64
	if err := binary.Read(r.named, binary.LittleEndian, &serial); err != nil {
		return nil //nolint:nilerr // the plugin died
	}
	pool := r.p.pools[0]
	pool.mu.Lock()
	round := pool.round
	pool.mu.Unlock()
	return pool.answered(round, 1, &connector.Loan{Slots: []uint32{slot}, Serial: serial})
}

// write saves blocks into lent slots until stop is closed, each writer from a place of its own in the cache.
func (r *placerRig) write(writer int, stop <-chan struct{}) {
	rng := rand.New(rand.NewPCG(12, uint64(writer)))
	size := int(largestBlock(r.p.layout))
	turn := time.NewTicker(100 * time.Microsecond) // where nothing is lent it leaves the processor to others
	defer turn.Stop()
	for {
		select {
		case <-stop:
			return
		case <-turn.C:
		}
		n := pluginBlocks + rng.IntN(libraryBlocks-pluginBlocks)
		b := r.blocks[n]
		b.ID = connector.BlockID(placedBlocks/2 + writer)
		spans, err := r.rank.kv.Spans(b)
		if err != nil {
			r.Errorf("writer %d: %v", writer, err)
			return
		}
		from := r.library.Bytes()[n*size:][:size]
		for _, span := range spans {
			from = from[copy(span, from):]
		}
		over, wrong := r.p.save(r.Context(), r.rank, 0, &connector.Transfer{Blocks: []connector.Block{b}})
		switch {
		case wrong != nil:
			r.faults.Add(1)
		case over:
			r.saved.Add(1)
		}
	}
}

// kill ends a life, whatever it is doing.
func (r *placerRig) kill() {
	r.Helper()
	require.NoError(r, r.cmd.Process.Kill())
	<-r.learnt
	require.Error(r, r.cmd.Wait())
	require.Equal(r, -1, r.cmd.ProcessState.ExitCode(), "it was alive until it was killed")
}

// lends waits until something was saved into slots that this life has lent. A writer may count one of the life before late. What a liar lends is rarely of use.
func (r *placerRig) lends() {
	r.Helper()
	if !r.lies {
		require.Eventually(r, func() bool { return r.saved.Load() > r.before+placerWriters }, time.Minute, time.Millisecond, "this life lends nothing")
	}
}

// read loads blocks, each reader into a place of its own in the cache, until as many were accepted.
func (r *placerRig) read(reader int, most int64) {
	rng := rand.New(rand.NewPCG(11, uint64(reader)))
	size := int(largestBlock(r.p.layout))
	for r.accepted.Load() < most {
		n := rng.IntN(len(r.blocks))
		b := r.blocks[n]
		b.ID = connector.BlockID(reader)
		if _, ok := r.p.match(&connector.Query{Tokens: 16, Keys: []connector.BlockKey{b.Key}}); ok {
			r.matched.Add(1)
		}
		r.late.begin(reader)
		came := r.p.load(r.Context(), r.rank, 0, []connector.Block{b})
		r.late.end(reader)
		if !came {
			r.refused.Add(1)
			runtime.Gosched()
			continue
		}
		if r.accepted.Add(1)%r.each == 0 {
			r.due <- struct{}{}
		}
		spans, err := r.rank.kv.Spans(b)
		if err != nil {
			r.Errorf("reader %d: %v", reader, err)
			return
		}
		want := r.library.Bytes()[n*size:][:size]
		for _, span := range spans {
			if !bytes.Equal(want[:len(span)], span) {
				r.wrong.Add(1)
			}
			want = want[len(span):]
		}
	}
}

// Rules PLACE-20, PLACE-23 and PLACE-31: readers, and writers into lent slots, beside a plugin process that writes, lends and evicts, and is killed at any moment,
// accept only what is right, and no slot is lost; beside one that writes anything anywhere and names any slot, too.
func TestPlacementAcrossProcesses(t *testing.T) {
	loads, lives := int64(100_000), int64(50)
	switch {
	case os.Getenv("KVPORT_SOAK") != "":
		loads, lives = 1_000_000, 200
	case testing.Short():
		loads, lives = 2_000, 4
	}
	for _, c := range []struct {
		name string
		lies bool
	}{{"honest", false}, {"liar", true}} {
		t.Run(c.name, func(t *testing.T) {
			r := newPlacerRig(t, c.lies)
			r.each, r.due, r.late = loads/lives, make(chan struct{}, lives+placerReaders), newLoadWatch(placerReaders, time.Minute, r.p)
			over := r.late.start(t, func(text string) { t.Error(text) })
			r.start()
			stop := make(chan struct{})
			var readers, writers sync.WaitGroup
			for i := range placerReaders {
				readers.Go(func() { r.read(i, loads) })
			}
			for i := range placerWriters {
				writers.Go(func() { r.write(i, stop) })
			}
			for range lives - 1 {
				<-r.due
				r.lends()
				r.kill()
				r.start()
			}
			readers.Wait()
			r.lends()
			close(stop)
			writers.Wait()
			r.kill()
			over()
			t.Logf("%d loads accepted, %d wrong; %d were left to the plugin; %d matches; %d saves into lent slots; %d deaths; %d answers of the plugin refused",
				r.accepted.Load(), r.wrong.Load(), r.refused.Load(), r.matched.Load(), r.saved.Load(), lives, r.faults.Load())
			require.Zero(t, r.wrong.Load())
			require.False(t, !c.lies && r.damaged.Load() > 0, "an honest plugin is not blamed for its evictions and deaths")
			require.GreaterOrEqual(t, r.accepted.Load(), loads)
			require.Positive(t, r.refused.Load())
			require.Positive(t, r.matched.Load())
			require.Equal(t, c.lies, r.faults.Load() > 0)
		})
	}
}
