package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/engine/model/kernel"
	"github.com/kvport/kvport/host"
)

// The requests whose throughput is measured with and without the sandbox. Every second one is a hit; the others are saved.
const (
	sandboxRequests = 8
	sandboxAtOnce   = 4
	sandboxAnswer   = 8 // tokens
)

// sandboxed compares engines whose plugin is at trust level staged, one's in the sandbox and the other's outside: the first token of
// a prompt that is in shared storage, and requests that load and save.
func (b *bench) sandboxed(ctx context.Context) (err error) {
	name := fmt.Sprintf("first token of a hit, %d tokens, sandbox : without", b.prompt)
	dir, err := os.MkdirTemp(b.Dir, "kvport-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	m, err := b.load(b.Threads, kernel.Auto)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	prompt := tokensOf(b.prompt+1, 3, m.Spec().Vocab)
	var runners []*runner
	for i, sandbox := range []host.SandboxMode{host.SandboxAuto, host.SandboxOff} {
		r, err := b.newRunner(ctx, m, stored{role: "kv_both", dir: filepath.Join(dir, fmt.Sprint(i)), trust: host.TrustStaged, sandbox: sandbox})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, r.Close(context.WithoutCancel(ctx))) }()
		if state := r.Health().Host.Sandbox; (state == "off") != (i == 1) {
			return b.Emit(absent(name, "there is no sandbox: "+fmt.Sprint(r.Health().Host.SandboxLacks)))
		}
		if err := b.store(ctx, r, prompt); err != nil {
			return err
		}
		runners = append(runners, r)
	}
	bytes := blockBytes(m) * int64(b.prompt/blockTokens)
	err = b.pair(ctx, name, bytes, runners, func(r *runner, _ int) (time.Duration, error) { return b.firstToken(ctx, r, prompt) })
	if err != nil {
		return err
	}
	return b.pair(ctx, fmt.Sprintf("%d requests, %d at a time, sandbox : without", sandboxRequests, sandboxAtOnce), bytes*sandboxRequests/2, runners,
		func(r *runner, round int) (time.Duration, error) { return crowd(ctx, r, m, crowdOf{prompt, round}) })
}

// crowdOf is what a crowd asks: a prompt that is stored, and others that nobody has seen before a round.
type crowdOf struct {
	hit   []int32
	round int
}

// drawn is a text of four blocks that no other round or request has.
func drawn(round, request uint64, vocab int) []int32 {
	rng := rand.New(rand.NewPCG(round, request))
	text := make([]int32, 4*blockTokens)
	for i := range text {
		text[i] = rng.Int32N(int32(vocab))
	}
	return text
}

// crowd is the time of some requests together.
func crowd(ctx context.Context, r *runner, m model.Model, of crowdOf) (time.Duration, error) {
	begin := time.Now()
	var g errgroup.Group
	g.SetLimit(sandboxAtOnce)
	for i := range sandboxRequests {
		prompt := of.hit
		if i%2 == 1 {
			prompt = drawn(uint64(of.round), uint64(i), m.Spec().Vocab)
		}
		g.Go(func() error {
			_, _, external, err := r.generate(ctx, prompt, sandboxAnswer)
			if err == nil && (external > 0) != (i%2 == 0) {
				err = fmt.Errorf("%d tokens of request %d came from storage", external, i)
			}
			return err
		})
	}
	err := g.Wait()
	return time.Since(begin), err
}
