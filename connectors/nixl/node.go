// Package nixl moves blocks between engines with NIXL: a consumer reads them out of its producer's cache,
// in place, while the producer's engine goes on; or it has the producer write them, which is faster over TCP.
//
// A producer holds the blocks of a finished request for a lease and gives a ticket. The consumer asks at
// the address in it where the blocks are, reads them with one transfer, and asks whether they were still
// held: what was not is computed. The host's digests, which come as one more segment, say the same of
// every single block.
package nixl

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/peerkey"
	"github.com/kvport/kvport/native/nixl"
	"github.com/kvport/kvport/pipe"
)

// Capabilities are the optional powers of both sides.
const Capabilities = connector.CanHold | connector.CanLease | connector.CanReset | connector.CanStat | connector.CanLayers | connector.CanReshape

// Scope is who sees what the connector keeps: others need a ticket.
const Scope = connector.ScopeEngine

// Environment names the variables that the connector and the libraries under it read.
func Environment() []string {
	return []string{
		EnvHost, EnvPort, EnvLease, nixl.EnvDir, "HOME", "NIXL_CONFIG_FILE", "NIXL_LOG_LEVEL", "NIXL_PLUGIN_DIR",
		envTransports, envDevices, "UCX_MODULES", "UCX_LOG_LEVEL", "UCX_RCACHE_MAX_UNRELEASED",
	}
}

// Needs says that the plugin talks to others, and names the files that it reads, for its manifest.
func Needs() connector.Needs {
	return connector.Needs{Network: true, Reads: []string{"key_file", "nixl_lib_dir", nixl.EnvDir, "NIXL_CONFIG_FILE", "NIXL_PLUGIN_DIR"}}
}

// Node is one life of an engine in this process: both sides and all ranks share it.
type Node struct {
	config     Config
	transports transportPolicy
	env        connector.Env // of whichever side came first: engine, role, fingerprints and world count
	lib        *nixl.Library
	tls        *tls.Config
	name       string // of agents, with the rank behind it; no two lives share it
	life       string // its last part
	holds      *holds
	pool       connPool
	heartbeats heartbeats
	tally      *tally
	board      *board // nil where the role does not save
	pushes     pushes
	layers     *layering
	log        *slog.Logger

	listener *pipe.Acceptor // nil where the role does not save
	stop     chan struct{}
	leave    context.CancelFunc // ends what the node does by itself
	tasks    sync.WaitGroup

	told  func() // tests: called when a consumer has been told where blocks are
	moved func() // tests: called when blocks were moved, before it is found out whether they were held

	mu    sync.Mutex
	ranks map[int]*rank
	conns map[net.Conn]time.Time // of consumers, and since when they are silent; zero while they are answered

	complained atomic.Int64 // when a refused connection was last logged
}

// Open makes the node of one life of an engine. Errors name the field, or say what the library lacks.
func Open(ctx context.Context, env connector.Env, c Config) (*Node, error) {
	if err := env.Validate(); err != nil {
		return nil, err
	}
	c, err := c.settle(os.Getenv)
	if err != nil {
		return nil, err
	}
	life, counts := rand.Text(), newTally()
	n := &Node{
		config: c, env: env, name: env.Engine + "/" + strconv.FormatUint(env.Epoch, 16) + "/" + life[:8], life: life, log: env.Log,
		tally: counts, holds: newHolds(env.World, c.lease(), counts), layers: newLayering(counts), pushes: pushes{all: map[readName]*pushed{}}, stop: make(chan struct{}), ranks: map[int]*rank{}, conns: map[net.Conn]time.Time{},
	}
	if n.transports, err = c.transportPolicy(env.Log); err != nil {
		return nil, err
	}
	if n.tls, err = peerkey.TLS(c.KeyFile, env.LinkKey); err != nil {
		return nil, err
	}
	n.pool = connPool{tls: n.tls, key: env.LinkKey, more: env.MoreLinkKeys, idle: map[string][]net.Conn{}}
	n.leave = n.heartbeats.begin(ctx, n)
	if err := n.transports.set(c.NetDevices); err != nil {
		return nil, err
	}
	if n.lib, err = nixl.Open(c.LibDir); err != nil {
		return nil, fmt.Errorf("%w: %w", err, connector.ErrIncompatible)
	}
	if env.Role.Saves() {
		if n.board, err = newBoard(); err != nil {
			return nil, err
		}
		n.holds.board = n.board
		if err := n.listen(ctx); err != nil {
			return nil, errors.Join(err, n.board.close())
		}
	}
	return n, nil
}

// Scheduler opens the scheduler side, as sdk.Node has it.
func (n *Node) Scheduler(_ context.Context, env connector.Env, leave func() error) (connector.Scheduler, error) {
	return &scheduler{node: n, env: env, leave: leave}, nil
}

// Worker opens the worker side of a rank, which has an agent of its own. It may take half a second.
func (n *Node) Worker(_ context.Context, env connector.Env, leave func() error) (connector.Worker, error) {
	r, err := n.newRank(env)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ranks[env.Rank] != nil {
		return nil, errors.Join(fmt.Errorf("rank %d is open: %w", env.Rank, connector.ErrBusy), r.agent.Close(), r.prefetch.unmap())
	}
	n.ranks[env.Rank] = r
	n.tasks.Go(r.progress)
	r.prefetch.start()
	return &worker{rank: r, leave: leave}, nil
}

// Close ends what the sides have left: they are closed.
func (n *Node) Close() error {
	close(n.stop)
	n.leave()
	var err error
	if n.listener != nil {
		err = n.listener.Close()
	}
	n.mu.Lock()
	for c := range n.conns {
		_ = c.Close() // its task ends
	}
	n.mu.Unlock()
	n.tasks.Wait()
	n.pool.close()
	if n.board != nil {
		err = errors.Join(err, n.holds.shut())
	}
	return err
}

// rankOf is an open rank, whose memory it waits to be registered. Errors wrap connector.ErrGone.
func (n *Node) rankOf(i int) (*rank, error) {
	n.mu.Lock()
	r := n.ranks[i]
	n.mu.Unlock()
	if r == nil {
		return nil, fmt.Errorf("rank %d is not open: %w", i, connector.ErrGone)
	}
	if err := r.registered(n.heartbeats.ctx); err != nil {
		return nil, fmt.Errorf("rank %d has no registered cache: %w (%w)", i, connector.ErrGone, err)
	}
	return r, nil
}
