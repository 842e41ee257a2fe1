package bench

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/kvport/kvport/engine/model/kernel"
	"github.com/kvport/kvport/internal/mac"
)

// decoding measures the time between tokens of one request while blocks are loaded without end, beside that of a request that is alone, and
// beside one while as many bytes are copied without end.
func (p *placed) decoding(ctx context.Context) (err error) {
	const at = 32 // blocks that one load brings
	b := &bench{EngineOptions: EngineOptions{Model: p.Model, Threads: p.Threads, Quick: p.Quick, Emit: p.Emit}}
	m, err := b.load(p.Threads, kernel.Auto)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	r, err := b.newRunner(ctx, m, stored{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close(context.WithoutCancel(ctx))) }()
	prompt, tokens, rounds := tokensOf(65, 3, m.Spec().Vocab), 32, 15
	if p.Quick {
		tokens, rounds = 4, 1
	}
	var loads, copies atomic.Int64
	besides := []func() error{
		func() error { return nil },
		func() error { loads.Add(at); return p.load(p.somewhere(at), at) },
		func() error { copies.Add(at); p.slots.in(p.somewhere(at), at, mac.CopyPast); return nil },
	}
	gaps := make([][]float64, len(besides)) // of each way, by round, in ms
	var spent [3]float64
	for round := range rounds + 1 { // the first round touches memory
		for way, beside := range besides {
			gap, err := decoded{r, prompt, tokens}.beside(ctx, way > 0, beside)
			if err != nil {
				return err
			}
			if round > 0 {
				gaps[way] = append(gaps[way], gap)
				spent[way] += gap * float64(tokens-1) / 1e3
			}
		}
	}
	rate := func(blocks *atomic.Int64, way int) float64 {
		return float64(blocks.Load()*int64(rounds)/int64(rounds+1)*p.shape.block()) / spent[way] / 1e9
	}
	name := fmt.Sprintf("ITL beside %s of %d x %s without end", "%s", at, p.shape.name)
	return errors.Join(
		p.beside(fmt.Sprintf(name, "loads"), 0, compared{"ms", gaps[1], gaps[0], budget{}}),
		p.beside(fmt.Sprintf(name, "copies"), 0, compared{"ms", gaps[2], gaps[0], budget{}}),
		p.Emit(faster(fmt.Sprintf("loads of %d x %s beside decoding : copies beside it", at, p.shape.name), p.shape.block(), rate(&loads, 1), rate(&copies, 2), "GB/s")(budget{})),
	)
}

// decoded is a request of an engine.
type decoded struct {
	engine *runner
	prompt []int32
	tokens int
}

// beside has the request generate tokens while something is done without end, if busy, and gives the time between them in ms.
func (d decoded) beside(ctx context.Context, busy bool, do func() error) (gap float64, err error) {
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for busy {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			if err := do(); err != nil {
				ended <- err
				return
			}
		}
		ended <- nil
	}()
	_, rest, _, err := d.engine.generate(ctx, d.prompt, d.tokens)
	close(stop)
	return ms(rest) / float64(d.tokens-1), errors.Join(err, <-ended)
}
