package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/kvport/kvport/verify/fixture"
)

// comparedShapes are the blocks that other people's stores are compared with, as in Store, and how many of them are moved at once.
func comparedShapes(quick bool) map[string][]int {
	if quick {
		return map[string][]int{"48 KB": {1}}
	}
	return map[string][]int{"1.41 MiB": {1, 8}, "8 MiB": {1, 4}}
}

// peers measures other people's stores beside ours: loads, of which the host reads what the plugin has placed, and saves. Ours have digests, and theirs have
// none.
func (p *placed) peers(ctx context.Context) error {
	batches := comparedShapes(p.Quick)[p.shape.name]
	if !p.Peers || len(batches) == 0 {
		return nil
	}
	have, err := readPeers(p.PeersDir)
	if err != nil {
		return err
	}
	list, err := fixtures()
	if err != nil {
		return err
	}
	f, err := list.Typical(fixture.Tier)
	if err != nil {
		return err
	}
	for _, r := range f.Memory().Rivals {
		at, there := have[r.Name]
		if !there {
			at.Absent = notInstalled
		}
		for _, n := range batches {
			why := at.Absent
			if why == "" {
				if why, err = p.against(ctx, &r, at, n); err != nil {
					return fmt.Errorf("%s: %w", r.Name, err)
				}
			}
			if why != "" {
				if err := p.Emit(absent(fmt.Sprintf("%d x %s : %s", n, p.shape.name, r.Name), why)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// against takes turns with a rival that moves n blocks at once. why says what is missing.
func (p *placed) against(ctx context.Context, r *fixture.Rival, at installed, n int) (why string, err error) {
	dir, err := os.MkdirTemp("", "kvport-peer-")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	theirs, err := startRival(ctx, r.Name, at, dir)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, theirs.Close()) }()
	blocks := p.layout.Blocks / n * n
	if _, err := theirs.ask("open", p.shape.segments, p.shape.bytes, blocks, n); err != nil {
		return reason(err)
	}
	for range 2 * blocks / n { // theirs is full then, as ours is
		if _, err := theirs.ask("store"); err != nil {
			return reason(err)
		}
	}
	for first := 0; first < p.layout.Blocks; first += 32 { // earlier saves may have replaced them
		if err := p.keep(first, min(32, p.layout.Blocks-first)); err != nil {
			return "", err
		}
	}
	for _, way := range []struct {
		name, theirs string
		ours         func(at, n int) error
	}{{"load", "load", p.load}, {"save", "store", p.save}} {
		c := compared{unit: "us"}
		if r.Placed > 0 {
			c.budget = atLeast(r.Placed)
		}
		name := fmt.Sprintf("%s of %d x %s, in turns : %s", way.name, n, p.shape.name, r.Name)
		c.value, c.limit, err = p.duel(ctx, n, way.ours, func() (float64, error) { return theirs.ask(way.theirs) })
		if err != nil {
			why, err := reason(err)
			if err != nil {
				return "", err
			}
			if err := p.Emit(absent(name, why)); err != nil {
				return "", err
			}
			continue
		}
		if err := p.beside(name, p.shape.block()*int64(n), c); err != nil {
			return "", err
		}
	}
	return "", nil
}

// duel is what ours and theirs take in each round, in microseconds. The first round does not count.
func (p *placed) duel(ctx context.Context, n int, ours func(at, n int) error, theirs func() (seconds float64, err error)) (value, limit []float64, err error) {
	for round := range p.rounds() + 1 {
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		began := time.Now()
		if err := ours(p.somewhere(n), n); err != nil {
			return nil, nil, err
		}
		took := micros(time.Since(began))
		seconds, err := theirs()
		if err != nil {
			return nil, nil, err
		}
		if round > 0 {
			value, limit = append(value, took), append(limit, seconds*1e6)
		}
	}
	return value, limit, nil
}
