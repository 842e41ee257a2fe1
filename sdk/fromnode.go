package sdk

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"

	"github.com/kvport/kvport/connector"
)

// A Node is what all sides and ranks of one engine share in a plugin process, such as a listener or a table
// of holds. It is for connectors with a Scheduler and a Worker of their own.
type Node interface {
	// Scheduler opens a scheduler side. The side's Close calls leave at its end and returns the error of
	// leave.
	Scheduler(ctx context.Context, env connector.Env, leave func() error) (connector.Scheduler, error)
	// Worker opens the worker side of one rank. Its Close also calls leave at its end and returns the error
	// of leave.
	Worker(ctx context.Context, env connector.Env, leave func() error) (connector.Worker, error)
	// Close is called once, after all sides have left.
	Close() error
}

// FromNode is [FromSides] for sides that share a Node. The first side of an engine that opens also opens
// the Node, with that side's Env, in which Rank has no meaning; the last side that closes also closes the
// Node. d.Capabilities are those of the scheduler side.
func FromNode[C any, N Node](d Definition, open func(ctx context.Context, env connector.Env, config C) (N, error)) connector.Plugin {
	all := &shares[N]{
		shut: func(n N, _ *slog.Logger) error { return n.Close() },
		open: func(ctx context.Context, env connector.Env, raw json.RawMessage) (n N, err error) {
			return openSide(ctx, env, raw, open)
		},
	}
	p := FromSides[C, connector.Scheduler, connector.Worker](d, nil, nil)
	p.Scheduler = func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
		return enter(ctx, all, env, raw, N.Scheduler)
	}
	p.Worker = func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
		return enter(ctx, all, env, raw, N.Worker)
	}
	return p
}

// enter opens a side of the Node that serves the engine.
func enter[N Node, S any](ctx context.Context, all *shares[N], env connector.Env, raw json.RawMessage,
	open func(N, context.Context, connector.Env, func() error) (S, error),
) (side S, err error) {
	n, leave, err := all.acquire(ctx, env, raw)
	if err != nil {
		return side, err
	}
	if side, err = open(n, ctx, env, leave); err != nil {
		return side, errors.Join(err, leave())
	}
	return side, nil
}
