package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
)

// TransferOptions say what Transfer works with.
type TransferOptions struct {
	Self       string   // a binary that calls ServePlugin first thing: kvport's own
	PluginPath []string // where plugins are looked for
	Dir        string   // folder for stored blocks; empty: the system's for temporary files
	Peer       *Peer    // nil: none
	Only       string   // measure only the parts whose name this is: blocks, message, files, lookup, restart, transports, sockets; empty: all
	Quick      bool     // a few rounds and small caches: to see that it works, not to measure
	Emit       Emit
}

// transfer is one run of Transfer.
type transfer struct {
	TransferOptions
	memory string // path of the memory plugin
}

func (t *transfer) turns() turns {
	if t.Quick {
		return turns{few: 2, budget: 1}
	}
	return turns{few: 40}
}

// Transfer measures how blocks move through a plugin process, and emits a row for each thing as soon as it
// is known.
func Transfer(ctx context.Context, o TransferOptions) (err error) {
	t := &transfer{TransferOptions: o}
	path, remove, err := selfLink(o.Self, memoryBinary)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	t.memory = path
	known := false
	for _, part := range []struct {
		name string
		run  func(context.Context) error
	}{
		{"blocks", t.blocks},
		{"message", t.roundTrip},
		{"files", t.storage},
		{"lookup", t.lookup},
		{"restart", t.restart},
		{"transports", t.transports},
		{"sockets", t.sockets},
	} {
		if o.Only != "" && o.Only != part.name {
			continue
		}
		known = true
		if err := part.run(ctx); err != nil {
			return err
		}
	}
	if !known {
		return fmt.Errorf("transfer has no part %q: want blocks, message, files, lookup, restart, transports or sockets", o.Only)
	}
	return nil
}

// shapes are the sizes of blocks: two layers of the demo model, all of it, and larger ones.
func shapes() []shape {
	return []shape{
		{"48 KB", 2, 24 << 10, 1},
		{"48 KB x 32", 2, 24 << 10, 32},
		{"737 KB", 30, 24 << 10, 1},
		{"1 MB", 32, 32 << 10, 1},
		{"8 MB", 32, 256 << 10, 1},
	}
}

// blocks compares save and load through the memory plugin with plain copies.
func (t *transfer) blocks(ctx context.Context) error {
	for _, s := range shapes() {
		for _, digests := range []bool{false, true} {
			if err := t.copies(ctx, s, digests); err != nil {
				return fmt.Errorf("%s blocks: %w", s.name, err)
			}
		}
	}
	return nil
}

func (t *transfer) copies(ctx context.Context, s shape, digests bool) (err error) {
	o := linkOptions{binary: t.memory, config: memoryConfig{}, shape: s, digests: digests}
	if t.Quick {
		o.bytes = 1
	}
	l, err := openLink(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	slab := make([]byte, int64(l.blocks)*s.block())
	fill(slab)
	for n := range l.blocks / s.batch { // every page of both ends has been touched
		if err := l.save(ctx, l.transfer(n, n*s.batch)); err != nil {
			return err
		}
	}
	p := &plain{link: l, slab: slab}
	names := []string{"memcpy", "+digest"}
	suffix := ""
	if digests {
		suffix = names[1]
	}
	saves, err := t.turns().measure(ctx, func(n int) error { return l.save(ctx, p.ours(n)) },
		func(n int) error { p.save(n); return nil })
	if err != nil {
		return err
	}
	loads, err := t.turns().measure(ctx, func(n int) error { return l.load(ctx, p.ours(n)) },
		func(n int) error { p.load(n); return nil })
	if err != nil {
		return err
	}
	bytes := s.block() * int64(s.batch)
	if err := t.Emit(faster("save"+suffix+" "+s.name, bytes, saves[0].speed(bytes), saves[1].speed(bytes), "GB/s")(atLeast(0.9))); err != nil {
		return err
	}
	return t.Emit(faster("load"+suffix+" "+s.name, bytes, loads[0].speed(bytes), loads[1].speed(bytes), "GB/s")(atLeast(0.9)))
}

// plain is the limit: the same bytes copied in this process, after or before one XXH3 pass if the link
// has digests. It walks half a cache behind the link.
type plain struct {
	link *link
	slab []byte
	sum  xxh3.Uint128
}

// ours is the link's transfer of a round.
func (p *plain) ours(n int) *connector.Transfer {
	at := n * p.link.shape.batch % p.link.blocks
	return p.link.transfer(n, at)
}

func (p *plain) walk(n int, do func(part, place []byte)) {
	l := p.link
	n += l.blocks / l.shape.batch / 2
	at := int64(n*l.shape.batch%l.blocks) * l.shape.block()
	l.each(l.transfer(n, 0), func(part []byte) {
		do(part, p.slab[at:])
		at += int64(len(part))
	})
}

func (p *plain) hash(part, _ []byte) {
	h := xxh3.Hash128(part)
	p.sum.Lo ^= h.Lo
}

func (p *plain) save(n int) {
	if p.link.hasher != nil {
		p.walk(n, p.hash)
	}
	p.walk(n, func(part, place []byte) { copy(place, part) })
}

func (p *plain) load(n int) {
	p.walk(n, func(part, place []byte) { copy(part, place) })
	if p.link.hasher != nil {
		p.walk(n, p.hash)
	}
}

// roundTrip is a Match with one key: a message there and back and next to no work, through the ring and over
// the stream.
func (t *transfer) roundTrip(ctx context.Context) (err error) {
	var links [2]*link
	for i, noRing := range []bool{false, true} {
		l, err := openLink(ctx, linkOptions{binary: t.memory, config: memoryConfig{}, shape: shape{"op", 1, 64, 1}, bytes: 4096, noRing: noRing})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, l.close()) }()
		links[i] = l
	}
	a, b, err := socketPair()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	done := make(chan struct{})
	go func() { defer close(done); echo(b) }()
	var message [64]byte
	took, err := t.turns().measure(ctx, func(int) error { return links[0].match(ctx, 0, 1) }, func(int) error { return links[1].match(ctx, 0, 1) }, func(int) error {
		if _, err := a.Write(message[:]); err != nil {
			return err
		}
		_, err := a.Read(message[:])
		return err
	})
	if err != nil {
		return err
	}
	if err := t.Emit(shorter("op round trip, ring", 0, took[0].micros(), took[2].micros(), "us p50")(atMost(2.5))); err != nil {
		return err
	}
	return t.Emit(shorter("op round trip, stream", 0, took[1].micros(), took[2].micros(), "us p50")(atMost(20)))
}

// match asks for keys; the answer does not matter.
func (l *link) match(ctx context.Context, first, keys int) error {
	q := connector.Query{Tokens: keys*blockTokens + 1}
	for i := range keys {
		q.Keys = append(q.Keys, key(first+i))
	}
	_, err := l.scheduler.Match(ctx, []connector.Query{q})
	return err
}

// echo answers messages until the other end is closed.
func echo(c net.Conn) {
	defer c.Close()
	var message [64]byte
	for {
		n, err := c.Read(message[:])
		if err != nil {
			return
		}
		if _, err := c.Write(message[:n]); err != nil {
			return
		}
	}
}

func socketPair() (a, b net.Conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	var conns [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socketpair")
		if conns[i], err = net.FileConn(f); err != nil {
			return nil, nil, err
		}
		if err := f.Close(); err != nil {
			return nil, nil, err
		}
	}
	return conns[0], conns[1], nil
}
