package sdk

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/kvport/kvport/connector"
)

// A Node is one life of an engine in a plugin process, for connectors that are written in full and whose
// sides and ranks share something: a listener, a table of holds.
type Node interface {
	// Scheduler and Worker open a side; Worker is called for each rank. The side's Close calls leave
	// last and returns its error.
	Scheduler(ctx context.Context, env connector.Env, leave func() error) (connector.Scheduler, error)
	Worker(ctx context.Context, env connector.Env, leave func() error) (connector.Worker, error)
	// Close is called once all sides have left.
	Close() error
}

// FromNode makes a connector of a Node. C is the struct of its config, see [DecodeConfig]. The first side
// of an engine's life opens its Node, with that side's Env; the last to close closes it. Of the Definition
// Capabilities are those of the scheduler side.
func FromNode[C any, N Node](d Definition, open func(ctx context.Context, env connector.Env, config C) (N, error)) connector.Plugin {
	all := &nodes{byID: map[nodeID]*sharedNode{}, open: func(ctx context.Context, env connector.Env, raw json.RawMessage) (Node, error) {
		config, err := DecodeConfig[C](raw)
		if err != nil {
			return nil, err
		}
		return open(ctx, env, config)
	}}
	return connector.Plugin{
		Name: d.Name, Aliases: d.Aliases, Version: d.Version, Environment: d.Environment, Schema: SchemaOf[C](),
		Capabilities: d.Capabilities,
		Describe: func(_ context.Context, raw json.RawMessage) (connector.Info, error) {
			_, err := DecodeConfig[C](raw)
			return connector.Info{Name: d.Name, Scope: d.Scope, Groups: d.Groups, Capabilities: d.Capabilities}, err
		},
		Scheduler: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
			n, free, err := all.acquire(ctx, env, raw)
			if err != nil {
				return nil, err
			}
			s, err := n.Scheduler(ctx, env, free)
			if err != nil {
				return nil, errors.Join(err, free())
			}
			return s, nil
		},
		Worker: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
			n, free, err := all.acquire(ctx, env, raw)
			if err != nil {
				return nil, err
			}
			w, err := n.Worker(ctx, env, free)
			if err != nil {
				return nil, errors.Join(err, free())
			}
			return w, nil
		},
	}
}

type nodeID struct {
	engine string
	epoch  uint64
	config [sha256.Size]byte
}

// sharedNode is a Node and how many sides use it.
type sharedNode struct {
	mu   sync.Mutex // held while it opens and closes
	node Node       // nil: not open
	refs int        // guarded by nodes.mu; counts those that wait for mu too
}

// nodes are the Nodes of this process.
type nodes struct {
	open func(ctx context.Context, env connector.Env, raw json.RawMessage) (Node, error)
	mu   sync.Mutex
	byID map[nodeID]*sharedNode
}

// acquire opens the Node of an engine's life or joins the open one. free gives it back.
func (s *nodes) acquire(ctx context.Context, env connector.Env, raw json.RawMessage) (Node, func() error, error) {
	if err := env.Validate(); err != nil {
		return nil, nil, err
	}
	id := nodeID{env.Engine, env.Epoch, sha256.Sum256(raw)}
	s.mu.Lock()
	n := s.byID[id]
	if n == nil {
		n = &sharedNode{}
		s.byID[id] = n
	}
	n.refs++
	s.mu.Unlock()
	free := sync.OnceValue(func() error { return s.release(id, n) })
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.node == nil {
		node, err := s.open(ctx, env, raw)
		if err != nil {
			s.drop(id, n)
			return nil, nil, err
		}
		n.node = node
	}
	return n.node, free, nil
}

// drop takes one user away and says whether it was the last.
func (s *nodes) drop(id nodeID, n *sharedNode) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n.refs--; n.refs == 0 {
		delete(s.byID, id)
	}
	return n.refs == 0
}

// release closes the Node after its last user. Whoever comes meanwhile opens a new one afterwards.
func (s *nodes) release(id nodeID, n *sharedNode) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !s.drop(id, n) {
		return nil
	}
	if err := n.node.Close(); err != nil {
		return fmt.Errorf("close what the sides shared: %w", err)
	}
	return nil
}
