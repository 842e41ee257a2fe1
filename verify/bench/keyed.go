package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/engine/model/kernel"
	"github.com/kvport/kvport/host"
)

// savingSteps is how many steps are measured at a time of a request whose blocks are saved.
const savingSteps = 32

// keyed compares engines whose digests are keyed with ones whose digests are XXH3-128: the first token of a prompt that is in
// shared storage, and steps of a request whose blocks are saved as they are computed.
func (b *bench) keyed(ctx context.Context) (err error) {
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
	for _, kind := range []host.Digest{host.DigestKeyed, host.DigestXXH3} {
		own := filepath.Join(dir, string(kind))
		if err := os.Mkdir(own, 0o700); err != nil {
			return err
		}
		r, err := b.newRunner(ctx, m, stored{role: "kv_both", dir: own, digest: kind})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, r.Close(context.WithoutCancel(ctx))) }()
		if err := b.store(ctx, r, prompt); err != nil {
			return err
		}
		runners = append(runners, r)
	}
	bytes := blockBytes(m)
	err = b.pair(ctx, fmt.Sprintf("first token of a hit, %d tokens, keyed : XXH3-128", b.prompt), bytes*int64(b.prompt/blockTokens), runners,
		func(r *runner, _ int) (time.Duration, error) { return b.firstToken(ctx, r, prompt) })
	if err != nil {
		return err
	}
	return b.pair(ctx, "step with saves, keyed : XXH3-128", bytes*savingSteps/blockTokens, runners,
		func(r *runner, round int) (time.Duration, error) { return saving(ctx, r, m, round) })
}

// saving is the time of a step of a request that nobody has seen, whose blocks are saved meanwhile.
func saving(ctx context.Context, r *runner, m model.Model, round int) (time.Duration, error) {
	_, rest, external, err := r.generate(ctx, tokensOf(blockTokens, 1000+round, m.Spec().Vocab), savingSteps+1)
	if err == nil && external > 0 {
		err = fmt.Errorf("%d tokens came from storage", external)
	}
	return rest / savingSteps, err
}

// pair has two engines take turns, and emits the time of the first beside that of the second, the ratio of the second's to the first's, and
// between what the ratio of all rounds is said to be.
func (b *bench) pair(ctx context.Context, name string, bytes int64, runners []*runner, run func(r *runner, round int) (time.Duration, error)) error {
	times := make([]took, len(runners))
	var ways []func(int) error
	for i, r := range runners {
		ways = append(ways, func(round int) error {
			t, err := run(r, round)
			if round > 0 {
				times[i] = append(times[i], t)
			}
			return err
		})
	}
	t := turns{few: 41, budget: 4 * time.Second}
	if b.Quick {
		t = turns{few: 2, budget: 1}
	}
	if _, err := t.rounds(ctx, ways...); err != nil {
		return err
	}
	ratios := make([]float64, len(times[0]))
	for round := range ratios {
		ratios[round] = float64(times[1][round]) / float64(times[0][round])
	}
	low, median, high := medianInterval(ratios)
	for _, all := range times {
		slices.Sort(all)
	}
	row := shorter(name, bytes, times[0].millis(), times[1].millis(), "ms")(budget{})
	return b.Emit.all(row.Between(median, low, high))
}
