package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"

	"github.com/zeebo/xxh3"

	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/tcp"
)

// pipeWindow is how many frames are sent at once where a transfer has many.
const pipeWindow = 8

// pipes compares blocks sent over pipe/tcp with the same bytes over a plain TCP connection.
func (s *store) pipes(ctx context.Context) error {
	for _, sh := range storeShapes() {
		for _, digests := range []bool{false, true} {
			if err := s.pipe(ctx, sh, digests); err != nil {
				return fmt.Errorf("pipe over tcp, %s: %w", sh.name, err)
			}
		}
	}
	return nil
}

// pipe is one size.
func (s *store) pipe(ctx context.Context, sh shape, digests bool) (err error) {
	ours, err := openEnds(ctx, &tcp.Network{NoDigest: !digests}, sh, cacheBytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ours.close()) }()
	plain, err := openPlain(ctx, sh, digests, cacheBytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plain.close()) }()
	from := newBlocks(s.bytes(sh), sh)
	took, err := s.turns(setup{}).measure(ctx,
		func(n int) error { return ours.send(ctx, from.step(n)) },
		func(n int) error { return plain.send(from.step(n + from.steps/2)) })
	if err != nil {
		return err
	}
	suffix := ""
	if digests {
		suffix = "+digest"
	}
	bytes := sh.block() * int64(sh.batch)
	return s.Emit(faster("pipe, tcp"+suffix+" "+sh.name, bytes, took[0].speed(bytes), took[1].speed(bytes), "GB/s")(atLeast(0.8)))
}

// blocks are blocks in memory, each in segments.
type blocks struct {
	all   [][][]byte
	batch int
	steps int
}

func newBlocks(bytes int64, sh shape) *blocks {
	b := &blocks{batch: sh.batch, steps: max(int(bytes/sh.block())/sh.batch, 2)}
	memory := make([]byte, int64(b.steps*b.batch)*sh.block())
	fill(memory)
	for block := range slices.Chunk(memory, int(sh.block())) {
		b.all = append(b.all, slices.Collect(slices.Chunk(block, int(sh.bytes))))
	}
	return b
}

// step is the blocks of one transfer.
func (b *blocks) step(n int) [][][]byte { return b.all[n%b.steps*b.batch:][:b.batch] }

// ends are both ends of a pipe; done is the end of the goroutine that receives.
type ends struct {
	listener pipe.Listener
	out, in  pipe.Link
	done     chan error
}

// openEnds makes a pipe that ends in the given number of bytes of memory.
func openEnds(ctx context.Context, network pipe.Network, sh shape, bytes int64) (_ *ends, err error) {
	p := &ends{done: make(chan error, 1)}
	if p.listener, err = network.Listen(ctx); err != nil {
		return nil, err
	}
	if p.out, err = network.Dial(ctx, p.listener.Address()); err != nil {
		return nil, errors.Join(err, p.listener.Close())
	}
	if p.in, err = p.listener.Accept(ctx); err != nil {
		return nil, errors.Join(err, p.out.Close(), p.listener.Close())
	}
	to := newBlocks(bytes, sh)
	go func() {
		for n := 0; ; n++ {
			block := to.all[n%len(to.all)] // its spans are the pipe's to shorten
			if err := p.in.In.Recv(context.Background(), func([]byte, int) ([][]byte, error) { return slices.Clone(block), nil }); err != nil {
				p.done <- err
				return
			}
		}
	}()
	return p, nil
}

// send sends blocks, several at a time, until all are received.
func (p *ends) send(ctx context.Context, blocks [][][]byte) error {
	if len(blocks) == 1 {
		return p.out.Out.Send(ctx, nil, blocks[0])
	}
	errs := make([]error, min(pipeWindow, len(blocks)))
	var wg sync.WaitGroup
	for worker := range errs {
		wg.Go(func() {
			for i := worker; i < len(blocks) && errs[worker] == nil; i += len(errs) {
				errs[worker] = p.out.Out.Send(ctx, nil, blocks[i])
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (p *ends) close() error {
	err := errors.Join(p.out.Close(), p.in.Close(), p.listener.Close())
	if end := <-p.done; !errors.Is(end, pipe.ErrClosed) {
		err = errors.Join(err, end)
	}
	return err
}

// plainTCP is the limit of a pipe: segments written with one call for each block, read to where they belong,
// and a byte that says that they are there; with digests one XXH3 pass at each end.
type plainTCP struct {
	out, in net.Conn
	batch   int
	digests bool
	sums    [2]uint64
	done    chan error
}

func openPlain(ctx context.Context, sh shape, digests bool, bytes int64) (_ *plainTCP, err error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, listener.Close()) }()
	p := &plainTCP{batch: sh.batch, digests: digests, done: make(chan error, 1)}
	if p.out, err = new(net.Dialer).DialContext(ctx, "tcp", listener.Addr().String()); err != nil {
		return nil, err
	}
	if p.in, err = listener.Accept(); err != nil {
		return nil, errors.Join(err, p.out.Close())
	}
	go func() { p.done <- p.receive(newBlocks(bytes, sh)) }()
	return p, nil
}

// hash is the pass over a block at one end.
func (p *plainTCP) hash(end int, block [][]byte) {
	if p.digests {
		for _, part := range block {
			p.sums[end] ^= xxh3.Hash128(part).Lo
		}
	}
}

func (p *plainTCP) receive(to *blocks) error {
	for n := 0; ; n++ {
		for _, block := range to.step(n) {
			for _, part := range block {
				if _, err := io.ReadFull(p.in, part); errors.Is(err, io.EOF) {
					return nil
				} else if err != nil {
					return err
				}
			}
			p.hash(1, block)
		}
		if _, err := p.in.Write([]byte{1}); err != nil {
			return err
		}
	}
}

func (p *plainTCP) send(blocks [][][]byte) error {
	for _, block := range blocks {
		p.hash(0, block)
		parts := net.Buffers(slices.Clone(block))
		if _, err := parts.WriteTo(p.out); err != nil {
			return err
		}
	}
	_, err := io.ReadFull(p.out, make([]byte, 1))
	return err
}

func (p *plainTCP) close() error {
	err := p.out.Close()
	return errors.Join(err, <-p.done, p.in.Close())
}
