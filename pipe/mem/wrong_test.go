package mem_test

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/mem"
	"github.com/kvport/kvport/pipe/pipetest"
)

// wrong is a pipe in memory with one fault.
type wrong struct {
	*mem.Pipe
	send func(p *mem.Pipe, ctx context.Context, header []byte, spans [][]byte) error
	recv func(p *mem.Pipe, ctx context.Context, place pipe.Place) error
}

func (w *wrong) Send(ctx context.Context, header []byte, spans [][]byte) error {
	if w.send != nil {
		return w.send(w.Pipe, ctx, header, spans)
	}
	return w.Pipe.Send(ctx, header, spans)
}

func (w *wrong) Recv(ctx context.Context, place pipe.Place) error {
	if w.recv != nil {
		return w.recv(w.Pipe, ctx, place)
	}
	return w.Pipe.Recv(ctx, place)
}

// fault is one wrong pipe and the case that finds it.
type fault struct {
	caseName string
	w        wrong
	limit    int
}

func wrongSenders() map[string]fault {
	var mu sync.Mutex
	var held *[2][]byte
	return map[string]fault{
		"reorders": {caseName: "order", w: wrong{send: func(p *mem.Pipe, ctx context.Context, header []byte, spans [][]byte) error {
			mu.Lock()
			defer mu.Unlock()
			f := [2][]byte{append([]byte(nil), header...), make([]byte, pipe.Size(spans))}
			pipe.Copy([][]byte{f[1]}, spans)
			if held == nil {
				held = &f
				return nil
			}
			first := *held
			held = nil
			if err := p.Send(ctx, f[0], [][]byte{f[1]}); err != nil {
				return err
			}
			return p.Send(ctx, first[0], [][]byte{first[1]})
		}}},
		"delivers twice": {caseName: "order", w: wrong{send: func(p *mem.Pipe, ctx context.Context, header []byte, spans [][]byte) error {
			if err := p.Send(ctx, header, spans); err != nil {
				return err
			}
			return p.Send(ctx, header, spans)
		}}},
		"tears": {caseName: "bytes", w: wrong{send: func(p *mem.Pipe, ctx context.Context, header []byte, spans [][]byte) error {
			if len(spans) > 1 {
				spans = spans[:len(spans)-1]
			}
			return p.Send(ctx, header, spans)
		}}},
	}
}

func wrongReceivers() map[string]fault {
	return map[string]fault{
		"is not bounded": {caseName: "back-pressure", limit: 1 << 30},
		"ignores a wrong room": {caseName: "wrong-room", w: wrong{recv: func(p *mem.Pipe, ctx context.Context, place pipe.Place) error {
			header, payload, err := pipe.Receive(ctx, p)
			if err != nil {
				return err
			}
			spans, err := place(header, len(payload))
			pipe.Copy(spans, [][]byte{payload})
			return err
		}}},
		"loses the frame behind a refused one": {caseName: "refused-frame", w: wrong{recv: func(p *mem.Pipe, ctx context.Context, place pipe.Place) error {
			err := p.Recv(ctx, place)
			if err != nil && ctx.Err() == nil {
				_, _, _ = pipe.Receive(ctx, p)
			}
			return err
		}}},
		"loses a frame when a Recv is cancelled": {caseName: "cancelled-recv", w: wrong{recv: func(p *mem.Pipe, ctx context.Context, place pipe.Place) error {
			err := p.Recv(ctx, place)
			if err != nil && ctx.Err() != nil {
				go func() {
					later, cancel := context.WithTimeout(context.Background(), time.Second)
					defer cancel()
					_, _, _ = pipe.Receive(later, p)
				}()
			}
			return err
		}}},
	}
}

// TestWrongPipes: each fault is found by the case that is named for it.
func TestWrongPipes(t *testing.T) {
	all := wrongSenders()
	maps.Copy(all, wrongReceivers())
	for name, m := range all {
		t.Run(fmt.Sprintf("%s/%s", m.caseName, name), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			h := pipetest.Harness{Bound: 8 << 20, Open: func(pipetest.T) pipetest.Ends {
				w := m.w
				w.Pipe = mem.New(max(m.limit, 1<<20))
				return pipetest.Ends{Out: &w, In: &w}
			}}
			failed := pipetest.Failed(ctx, func(r pipetest.T) {
				for _, c := range pipetest.Cases() {
					if c.Name == m.caseName {
						c.Run(r, h)
					}
				}
			})
			require.True(t, failed, "nobody noticed")
		})
	}
}
