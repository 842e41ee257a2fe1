package nixl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/native/nixl"
)

// rank is one rank's agent.
type rank struct {
	node    *Node
	env     connector.Env
	agent   *nixl.Agent
	backend *nixl.Backend // the first of the config: memory moves by it
	awake   chan struct{}
	stop    chan struct{}
	stopped chan struct{}

	known     atomic.Pointer[cache]
	ready     chan struct{}               // closed once known is there, or will never be
	failed    error                       // why it will never be; read after ready is closed
	sources   atomic.Pointer[nixl.Region] // registered for what Reshape reads; nil: nothing yet
	mu        sync.Mutex                  // held while sources are registered
	peers     *peers
	producers producerCache  // producers
	tasks     sync.WaitGroup // registering, and what is said without waiting for an answer

	view     sync.Mutex
	now      *aliasMapping // that loads go to; nil: not made yet
	prefetch *prefetch     // nil: nothing is read before its ticket
}

// cache is a rank's paged cache as NIXL knows it.
type cache struct {
	metadata []byte
	segments []segment
	areas    []nixl.Region // that hold them all
}

func (n *Node) newRank(env connector.Env) (*rank, error) {
	agent, err := n.lib.NewAgent(n.name+"/"+strconv.Itoa(env.Rank), nixl.Options{})
	if err != nil {
		return nil, err
	}
	r := &rank{
		node: n, env: env, agent: agent, awake: make(chan struct{}, 1),
		stop: make(chan struct{}), stopped: make(chan struct{}), ready: make(chan struct{}), producers: producerCache{all: map[string]*producer{}},
	}
	r.peers = &peers{rank: r}
	if err := r.startBackends(); err != nil {
		return nil, errors.Join(err, agent.Close())
	}
	if r.prefetch, err = r.newPrefetch(); err != nil {
		return nil, errors.Join(err, agent.Close())
	}
	return r, nil
}

// startBackends starts those of the config that start here, of which one has to reach other engines. The others
// are named in the log.
func (r *rank) startBackends() error {
	n := r.node
	var lacking []error
	for i, name := range n.config.Backends {
		b, err := r.agent.Backend(name, nil)
		if err != nil && name == backendUCX && n.transports.far && !n.transports.open {
			return n.config.errFar("UCX finds no RDMA transport that it can use (see stderr)")
		}
		if err != nil {
			lacking = append(lacking, fmt.Errorf("backends[%d]: %s: %w", i, needs(name), err))
			continue
		}
		if r.backend == nil {
			r.backend = b
		}
	}
	if r.backend == nil {
		return fmt.Errorf("%w: %w", errors.Join(lacking...), connector.ErrIncompatible)
	}
	if _, err := r.agent.Metadata(); err != nil { // as with one for files alone
		lacking = append(lacking, fmt.Errorf("backends: none that starts moves memory between engines: %w: %w", err, connector.ErrIncompatible))
		return errors.Join(lacking...)
	}
	for _, err := range lacking {
		n.log.Warn("a backend does not start and is not used", "rank", r.env.Rank, "error", err)
	}
	return nil
}

// needs says what a backend that does not start is likely to lack: NIXL says so on stderr at most.
func needs(backend string) string {
	switch backend {
	case "GDS", "GDS_MT":
		return backend + " needs an NVIDIA GPU with GPUDirect Storage"
	case backendUCX:
		return "UCX needs one of the transports that it may use"
	}
	return "this machine may lack what " + backend + " needs"
}

// cache is the registered cache; nil until it is registered.
func (r *rank) cache() *cache { return r.known.Load() }

// start registers the cache in the background: a large one may take longer than a side has to open.
func (r *rank) start(kv *connector.KV) {
	r.tasks.Go(func() {
		defer close(r.ready)
		if r.failed = r.register(kv); r.failed != nil {
			r.env.Log.Error("NIXL cannot register the cache: nothing is loaded or handed over", "error", r.failed)
		}
	})
}

// registered waits until the cache is registered.
func (r *rank) registered(ctx context.Context) error {
	select {
	case <-r.ready:
		return r.failed
	case <-ctx.Done():
		return fmt.Errorf("the cache is still being registered: %w", ctx.Err())
	}
}

// register makes the rank's cache known to NIXL.
func (r *rank) register(kv *connector.KV) error {
	l := kv.Layout()
	c := &cache{segments: make([]segment, len(l.Segments))}
	bounds := map[uint16][2]uint64{} // by region
	for i, s := range l.Segments {
		first := nixl.Bytes(kv.View(i, 0))
		c.segments[i] = segment{Group: s.Group, Addr: first.Addr, Stride: uint64(s.BlockStride), Bytes: uint64(s.Bytes)}
		end := first.Addr + uint64(l.Blocks-1)*uint64(s.BlockStride) + uint64(s.Bytes)
		b, there := bounds[s.Region]
		if !there {
			b = [2]uint64{first.Addr, end}
		}
		bounds[s.Region] = [2]uint64{min(b[0], first.Addr), max(b[1], end)}
	}
	for _, b := range bounds {
		area := nixl.Region{Addr: b[0], Len: b[1] - b[0]}
		if _, err := r.agent.Register(r.backend, nixl.DRAM, area); err != nil {
			return err
		}
		c.areas = append(c.areas, area)
	}
	var err error
	if c.metadata, err = r.agent.Metadata(); err != nil {
		return err
	}
	r.known.Store(c)
	r.remap()
	return nil
}

// remap has loads use a mapping of all memory that is registered by now.
func (r *rank) remap() {
	r.view.Lock()
	w := r.now
	if w != nil {
		w.users++
		w.retire()
	}
	r.view.Unlock()
	if w != nil {
		w.leave()
	}
}

// answer is what a peer needs to read the cache.
func (c *cache) answer() *answer {
	host, _ := os.Hostname() // without one the transport is not told
	return &answer{Metadata: c.metadata, Segments: c.segments, Host: host, PID: os.Getpid()}
}

const (
	busyPause = 100 * time.Microsecond
	idlePause = 20 * time.Millisecond
	busyTime  = time.Second // after a question
)

// wake has progress poll often for a while: somebody is about to read.
func (r *rank) wake() { signal(r.awake) }

// progress lets NIXL work: a peer connects, and reads over TCP, only while somebody calls.
func (r *rank) progress() {
	defer close(r.stopped)
	timer := time.NewTimer(0)
	defer timer.Stop()
	var busy time.Time
	for {
		select {
		case <-r.stop:
			return
		case <-r.awake:
			busy = time.Now().Add(busyTime)
		case <-timer.C:
		}
		if _, err := r.agent.Notifications(); err != nil {
			r.env.Log.Warn("NIXL makes no progress", "error", err)
			return
		}
		pause := idlePause
		if time.Now().Before(busy) {
			pause = busyPause
		}
		timer.Reset(pause)
	}
}

// work lets NIXL work until over: as fast as bytes come where it copies them here, and else, where the writer needs
// nobody except to connect, only now and then.
func (r *rank) work(over <-chan struct{}, copies bool) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var pace nixl.Pace
	for {
		pace.Begin()
		if _, err := r.agent.Notifications(); err != nil {
			<-over
			return
		}
		pause := pace.End()
		if !copies {
			pause = busyPause
		}
		if pause == 0 {
			runtime.Gosched()
			select {
			case <-over:
				return
			default:
				continue
			}
		}
		timer.Reset(pause)
		select {
		case <-over:
			return
		case <-timer.C:
		}
	}
}

// close ends the rank: no load runs any more.
func (r *rank) close() error {
	r.tasks.Wait()
	r.prefetch.stop()
	close(r.stop)
	<-r.stopped
	r.node.mu.Lock()
	delete(r.node.ranks, r.env.Rank)
	r.node.mu.Unlock()
	r.peers.close()
	err := r.agent.Close() // deregisters the cache, which is unmapped next
	return errors.Join(err, r.prefetch.unmap())
}
