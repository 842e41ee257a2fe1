package bench

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/kvport/kvport/native/nixl"
)

// tcpOnly is the UCX_TLS of a network that has nothing else.
const tcpOnly = "tcp,self"

// sockets compares reading with writing where NIXL's bytes go over TCP, as between two machines without RDMA:
// the library alone, and the connector.
func (t *transfer) sockets(ctx context.Context) (err error) {
	const variable = "UCX_TLS"
	before, set := os.LookupEnv(variable)
	if err := os.Setenv(variable, tcpOnly); err != nil {
		return err
	}
	defer func() {
		if set {
			err = errors.Join(err, os.Setenv(variable, before))
		} else {
			err = errors.Join(err, os.Unsetenv(variable))
		}
	}()
	shapes := append([]shape{{"1 MiB", 1, 1 << 20, 1}}, transportShapes()...)
	if t.Quick {
		shapes = shapes[:1]
	}
	for _, s := range shapes {
		if err := t.courses(ctx, &field{shape: s, tcp: true, lines: []line{t.rawSockets, t.socketCrossings}}); err != nil {
			return fmt.Errorf("over tcp, %s: %w", s.name, err)
		}
	}
	return nil
}

const (
	rawReadTCP  = "raw nixl over tcp"
	rawWriteTCP = "raw nixl write over tcp"
	pullTCP     = "nixl connector over tcp"
)

// rawSockets are NIXL alone. Its peer looks for bytes all the time, while it is its turn.
func (t *transfer) rawSockets(f *field) ([]course, error) {
	r, err := openRaw(f.ctx, t.Self, f.to)
	if err != nil {
		return nil, err
	}
	f.closers = append(f.closers, r.close)
	way := func(op nixl.Op) func(n int) error {
		return func(n int) error {
			return f.awake(r, func() error { return r.moveNIXL(f.ctx, op, f.parts(n+1)) })
		}
	}
	return []course{
		{name: rawReadTCP, absent: r.noNIXL, move: way(nixl.Read)},
		{name: rawWriteTCP, absent: r.noNIXL, limit: rawReadTCP, move: way(nixl.Write)},
	}, nil
}

// awake has the other process look for bytes meanwhile. The clock is paused while it gets that command.
func (f *field) awake(r *raw, do func() error) error {
	if err := f.clock.pause(func() error { return r.command(spinCommand) }); err != nil {
		return err
	}
	err := do()
	return errors.Join(err, f.clock.pause(func() error { return r.command(restCommand) }))
}

func (t *transfer) socketCrossings(f *field) ([]course, error) {
	all := []course{{name: pullTCP, limit: rawReadTCP}, {name: "nixl connector push over tcp", limit: rawWriteTCP, beside: pullTCP}}
	t.cross(f, all)
	return all, nil
}
