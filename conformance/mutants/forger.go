package mutants

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/internal/keyring"
)

// ForgerConfig is the config of a plugin made by Forger.
type ForgerConfig struct {
	Of     json.RawMessage `json:"of"`               // the right connector's
	Saves  bool            `json:"saves,omitempty"`  // a writer at the other end: it forges what it saves
	Loads  bool            `json:"loads,omitempty"`  // a reader: it forges what it has loaded
	Seed   uint64          `json:"seed,omitempty"`   // of what is forged
	Record string          `json:"record,omitempty"` // file that gets a line for each forged block: how it must be counted, a tab, and what it is
}

// Forger is a right connector in the hands of somebody who forges every second block that moves through it. He
// knows all that a plugin is told (connector.Env, its link keys too), the digests that the host makes, and every block that
// has passed. He lacks the ring of keys that digests are made with.
func Forger(right connector.Plugin) connector.Plugin {
	forged := right
	forged.Schema = json.RawMessage(`{"type":"object"}`)
	forged.Capabilities &^= connector.CanLayers // of a save layer by layer he has not seen the digests yet
	forged.Describe = func(ctx context.Context, raw json.RawMessage) (connector.Info, error) {
		c, err := forgerConfig(raw)
		if err != nil {
			return connector.Info{}, err
		}
		return right.Describe(ctx, c.Of)
	}
	forged.Scheduler = func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
		c, err := forgerConfig(raw)
		if err != nil {
			return nil, err
		}
		return right.Scheduler(ctx, env, c.Of)
	}
	forged.Worker = func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
		c, err := forgerConfig(raw)
		if err != nil {
			return nil, err
		}
		w, err := right.Worker(ctx, env, c.Of)
		if err != nil {
			return nil, err
		}
		return &forgingWorker{Worker: w, config: c, forger: newForger(&env, c.Seed)}, nil
	}
	return forged
}

func forgerConfig(raw json.RawMessage) (c ForgerConfig, err error) {
	if err := json.Unmarshal(raw, &c); err != nil {
		return c, fmt.Errorf("config of a forger: %w: %w", err, connector.ErrIncompatible)
	}
	return c, nil
}

// forgingWorker forges what it moves. Only its Save and Load can be used.
type forgingWorker struct {
	connector.Worker
	config ForgerConfig

	mu     sync.Mutex
	forger *forger
}

// Save implements connector.Worker: what is sent is a copy, in which some blocks are forged.
func (w *forgingWorker) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	if !w.config.Saves {
		return w.Worker.Save(ctx, t, kv)
	}
	part, copied, err := copyOf(t, kv)
	if err != nil {
		return err
	}
	if err := w.forge(part, copied); err != nil {
		return err
	}
	if err := w.Worker.Save(ctx, part, copied); err != nil {
		return fmt.Errorf("the copy of %s: %v: %w", t.Request, err, connector.ErrGone) //nolint:errorlint // it names blocks of the copy
	}
	return nil
}

// Load implements connector.Worker: what has arrived is forged in the engine's cache.
func (w *forgingWorker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	err := w.Worker.Load(ctx, t, kv)
	if err != nil || !w.config.Loads {
		return err
	}
	return w.forge(t, kv)
}

// forge forges every second full block of a transfer, and writes down how.
func (w *forgingWorker) forge(t *connector.Transfer, kv *connector.KV) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	var lines bytes.Buffer
	for _, b := range t.Blocks {
		if b.Key == (connector.BlockKey{}) {
			continue
		}
		f, err := w.forger.next(kv, b)
		if err != nil {
			return err
		}
		if f != nil {
			fmt.Fprintf(&lines, "%s\t%s\n", f.reason, f.name)
		}
	}
	if w.config.Record == "" || lines.Len() == 0 {
		return nil
	}
	record, err := os.OpenFile(w.config.Record, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = record.Write(lines.Bytes())
	return errors.Join(err, record.Close())
}

// copyOf is a transfer of copies of its blocks, in memory that has room for no others.
func copyOf(t *connector.Transfer, kv *connector.KV) (*connector.Transfer, *connector.KV, error) {
	layout := *kv.Layout()
	layout.Blocks, layout.Segments = len(t.Blocks), slices.Clone(layout.Segments)
	size := int64(0)
	for i := range layout.Segments {
		s := &layout.Segments[i]
		s.Region, s.Offset, s.BlockStride = 0, size, s.Bytes
		size += s.Bytes * int64(layout.Blocks)
	}
	copied, err := connector.NewKV(layout, [][]byte{make([]byte, size)})
	if err != nil {
		return nil, nil, err
	}
	part := *t
	part.Blocks = slices.Clone(t.Blocks)
	for i := range part.Blocks {
		b := &part.Blocks[i]
		for _, s := range kv.Segments(b.Group) {
			copy(copied.View(s, connector.BlockID(i)), kv.View(s, b.ID))
		}
		b.ID = connector.BlockID(i)
	}
	return &part, copied, nil
}

// forger makes blocks that a host must not believe.
type forger struct {
	rng         *rand.Rand
	link, plain *digest.Hasher // with the link key; without a key
	seen        int
	other       [][]byte // a block that has passed, by segment
}

func newForger(env *connector.Env, seed uint64) *forger {
	shard := connector.Shard{Rank: env.Rank, World: env.World}
	return &forger{
		rng:   rand.New(rand.NewPCG(seed, uint64(env.Rank))),
		link:  digest.New(digest.Keyed(keyring.Fixed(keyring.Of(env.LinkKey)), nil), env.Model, env.Shape, shard),
		plain: digest.New(digest.XXH3(), env.Model, env.Shape, shard),
	}
}

// forgery is one kind of a forged block.
type forgery struct {
	name, reason string // the reason is corrupt, foreign_key or edition
	make         func(f *forger, p *forged) error
}

// forged is a block that is being forged.
type forged struct {
	kv     *connector.KV
	block  connector.Block
	data   []int  // segments of KV
	stored []byte // the digests
}

// digestHeader is the length of what precedes a block's digests, and names their key.
const digestHeader = 16

// again makes the block's digests with another key. With named they get the header of the host's.
func (p *forged) again(h *digest.Hasher, named bool) error {
	head := bytes.Clone(p.stored[:digestHeader])
	err := h.Make(p.kv, p.block)
	if named {
		copy(p.stored, head)
	}
	return err
}

func forgeries() []forgery {
	return []forgery{
		{"changed", "corrupt", func(*forger, *forged) error { return nil }},
		{"digests made again with the link key", "foreign_key", func(f *forger, p *forged) error { return p.again(f.link, false) }},
		{"digests made again with the link key, under the name of the host's", "corrupt", func(f *forger, p *forged) error { return p.again(f.link, true) }},
		{"downgraded to digests without a key", "edition", func(f *forger, p *forged) error { return p.again(f.plain, false) }},
		{"digests without a key, under the name of the host's", "corrupt", func(f *forger, p *forged) error { return p.again(f.plain, true) }},
		{"another block, replayed with its digests", "corrupt", func(f *forger, p *forged) error {
			for i, s := range p.kv.Segments(p.block.Group) {
				copy(p.kv.View(s, p.block.ID), f.other[i])
			}
			return nil
		}},
		{"digests guessed", "corrupt", func(f *forger, p *forged) error {
			for i := range p.stored[digestHeader:] {
				p.stored[digestHeader+i] = byte(f.rng.Uint32())
			}
			return nil
		}},
		{"a header of zeros", "corrupt", func(_ *forger, p *forged) error { clear(p.stored[:digestHeader]); return nil }},
		{"layers exchanged, with their digests", "corrupt", func(_ *forger, p *forged) error {
			a, b := p.kv.View(p.data[0], p.block.ID), p.kv.View(p.data[1], p.block.ID)
			for i := range min(len(a), len(b)) {
				a[i], b[i] = b[i], a[i]
			}
			sums := p.stored[digestHeader:]
			for i := range digest.Size {
				sums[i], sums[digest.Size+i] = sums[digest.Size+i], sums[i]
			}
			return nil
		}},
	}
}

// next forges a block, unless it is one of those that are left alone and remembered.
func (f *forger) next(kv *connector.KV, b connector.Block) (*forgery, error) {
	p := &forged{kv: kv, block: b}
	for _, s := range kv.Segments(b.Group) {
		if kv.Layout().Segments[s].Layer == connector.DigestLayer {
			p.stored = kv.View(s, b.ID)
		} else {
			p.data = append(p.data, s)
		}
	}
	if f.seen++; f.seen%2 == 1 || len(p.stored) < digestHeader || len(p.data) < 2 {
		f.other = nil
		for _, s := range kv.Segments(b.Group) {
			f.other = append(f.other, bytes.Clone(kv.View(s, b.ID)))
		}
		return nil, nil
	}
	all := forgeries()
	kind := &all[f.seen/2%len(all)]
	view := kv.View(p.data[f.rng.IntN(len(p.data))], b.ID)
	view[f.rng.IntN(len(view))] ^= 1 << f.rng.IntN(8)
	return kind, kind.make(f, p)
}
