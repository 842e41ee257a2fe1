package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/gguf"
	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/engine/model/kernel"
	"github.com/kvport/kvport/host"
)

// EngineOptions say what Engine works with.
type EngineOptions struct {
	Model      string   // GGUF file, or tiny-random
	PluginPath []string // where plugins are looked for
	Dir        string   // folder for stored blocks; empty: the system's for temporary files
	Connector  string   // of LayerWise; empty: the one over pipes. Of Overlap; empty: the one that holds blocks
	Threads    int      // 0: one for each CPU
	Peer       *Peer    // nil: none
	Quick      bool     // a few rounds: to see that it works, not to measure
	Emit       Emit
}

// bench is one run of Engine.
type bench struct {
	EngineOptions
	prompt int // tokens
}

// tiny names the model that needs no file.
const tiny = "tiny-random"

// Engine measures the model and what a connector adds to the engine, and emits a row for each thing as
// soon as it is known.
func Engine(ctx context.Context, o EngineOptions) error {
	if o.Threads == 0 {
		o.Threads = runtime.GOMAXPROCS(0)
	}
	b := &bench{EngineOptions: o, prompt: 512}
	if b.Quick {
		b.prompt = 64
	}
	for _, step := range []func(context.Context) error{b.peak, b.sets, b.decodes, b.peers, b.hit, b.keyed, b.sandboxed, b.step} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) turns() turns {
	if b.Quick {
		return turns{few: 2, budget: 1}
	}
	return turns{few: 9, budget: 4 * time.Second}
}

func (b *bench) load(threads int, isa kernel.ISA) (model.Model, error) {
	o := model.Options{Threads: threads, DType: model.F16, ISA: isa}
	if b.Model == tiny {
		return model.Tiny(1, o)
	}
	return model.Load(b.Model, o)
}

// work is a model with a batch to compute.
type work struct {
	model  model.Model
	region *host.Region
	kv     *connector.KV
	batch  *model.Batch
}

// newWork makes a batch of sequences that have computed start tokens and now compute tokens more each.
func (b *bench) newWork(threads int, isa kernel.ISA, sequences, start, tokens int) (_ *work, err error) {
	w := &work{batch: &model.Batch{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if w.model, err = b.load(threads, isa); err != nil {
		return nil, err
	}
	blocks := (start + tokens + blockTokens - 1) / blockTokens
	layout := w.model.Layout(blockTokens, sequences*blocks)
	l, size := host.WithDigests(layout)
	if w.region, err = host.NewRegion(size); err != nil {
		return nil, err
	}
	if w.kv, err = connector.NewKV(l, [][]byte{w.region.Bytes()}); err != nil {
		return nil, err
	}
	vocab := w.model.Spec().Vocab
	for i := range sequences {
		table := make([]connector.BlockID, blocks)
		for j := range table {
			table[j] = connector.BlockID(i*blocks + j)
		}
		text := tokensOf(start+tokens, i, vocab)
		c := model.Chunk{Tokens: text[start:], Start: start, Blocks: [][]connector.BlockID{table}, Logits: [][]float32{make([]float32, vocab)}}
		w.batch.Chunks = append(w.batch.Chunks, c)
		if start > 0 {
			c.Tokens, c.Start, c.Logits = text[:start], 0, nil
			if err := w.model.Forward(&model.Batch{Chunks: []model.Chunk{c}}, w.kv); err != nil {
				return nil, err
			}
		}
	}
	return w, nil
}

func (w *work) forward(int) error { return w.model.Forward(w.batch, w.kv) }

func (w *work) close() error {
	var errs []error
	if w.model != nil {
		errs = append(errs, w.model.Close())
	}
	if w.region != nil {
		errs = append(errs, w.region.Close())
	}
	return errors.Join(errs...)
}

// tokensOf is a text of n tokens; seeds give different ones.
func tokensOf(n, seed, vocab int) []int32 {
	text := make([]int32, n)
	for i := range text {
		text[i] = int32((i*7919 + seed*104729 + 17) % vocab)
	}
	return text
}

// peak compares prefill with the speed of FMA instructions, both by CPU time on one thread: what else the
// machine does, does not matter.
func (b *bench) peak(ctx context.Context) (err error) {
	name := fmt.Sprintf("prefill %d, 1 thread", b.prompt)
	operations, weights, err := b.cost()
	if err != nil {
		return err
	}
	if weights == 0 {
		return b.Emit(absent(name, b.Model+" has no file"))
	}
	w, err := b.newWork(1, kernel.Auto, 1, 0, b.prompt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	c, err := kernel.New(kernel.Options{Threads: 1})
	if err != nil {
		return err
	}
	defer c.Close()
	const rounds = 10_000_000
	done := 0.0
	t := b.turns()
	t.clock = cpuTime
	took, err := t.measure(ctx, w.forward, func(int) error { done = c.Peak(rounds); return nil })
	if err != nil {
		return err
	}
	speed := operations / took[0].median().Seconds() / 1e9
	return b.Emit(faster(name, weights, speed, done/took[1].median().Seconds()/1e9, "GFLOP/CPU-s")(atLeast(0.45)))
}

// cpuTime is what this process has computed so far.
func cpuTime() time.Duration { return clockTime(unix.CLOCK_PROCESS_CPUTIME_ID) }

// cost reads a model's shape from its file: the floating-point operations of a prompt, and the bytes of
// weights that a step reads. Without a file both are 0.
func (b *bench) cost() (operations float64, weights int64, err error) {
	if b.Model == tiny {
		return 0, 0, nil
	}
	f, err := gguf.Open(b.Model)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	var errs []error
	number := func(name string) float64 {
		n, err := f.Uint("llama." + name)
		errs = append(errs, err)
		return float64(n)
	}
	hidden, feed, layers := number("embedding_length"), number("feed_forward_length"), number("block_count")
	kv := hidden / number("attention.head_count") * number("attention.head_count_kv")
	embedding, err := f.Tensor("token_embd.weight")
	if err := errors.Join(append(errs, err)...); err != nil {
		return 0, 0, err
	}
	vocabulary := float64(embedding.Rows())
	layer := 2*hidden*hidden + 2*hidden*kv + 3*hidden*feed
	n := float64(b.prompt)
	attention := 4 * hidden * n * (n + 1) / 2
	operations = layers*(2*layer*n+attention) + 2*vocabulary*hidden
	return operations, int64(2 * (layers*layer + vocabulary*hidden)), nil
}

// sets compares the instruction sets.
func (b *bench) sets(ctx context.Context) error {
	if s := kernel.Supported(); s[0] != kernel.AVX512 {
		return b.Emit(absent("avx2 and avx512", "this machine runs "+s[0].String()))
	}
	for _, c := range []struct {
		name                     string
		sequences, start, tokens int
	}{
		{fmt.Sprintf("prefill %d", b.prompt), 1, 0, b.prompt}, {"decode batch 1", 1, 128, 1}, {"decode batch 8", 8, 128, 1},
	} {
		if err := b.set(ctx, c.name, c.sequences, c.start, c.tokens); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) set(ctx context.Context, name string, sequences, start, tokens int) (err error) {
	var ways []func(int) error
	for _, isa := range []kernel.ISA{kernel.AVX2, kernel.AVX512} {
		var w *work
		if w, err = b.newWork(1, isa, sequences, start, tokens); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, w.close()) }()
		ways = append(ways, w.forward)
	}
	t := b.turns()
	t.clock = cpuTime
	took, err := t.measure(ctx, ways...)
	if err != nil {
		return err
	}
	n := float64(sequences * tokens)
	return b.Emit(faster(name+", avx2 : avx512", 0, n/took[0].median().Seconds(), n/took[1].median().Seconds(), "token/CPU-s")(atLeast(0.5)))
}

// decodes compares a decode step with reading the weights once.
func (b *bench) decodes(ctx context.Context) error {
	_, weights, err := b.cost()
	if err != nil {
		return err
	}
	for _, n := range []int{1, 8} {
		if err := b.decode(ctx, n, weights); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) decode(ctx context.Context, n int, weights int64) (err error) {
	w, err := b.newWork(b.Threads, kernel.Auto, n, 128, 1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	took, err := b.turns().measure(ctx, w.forward)
	if err != nil {
		return err
	}
	name := fmt.Sprintf("decode batch %d, %d threads", n, b.Threads)
	return b.Emit(faster(name, weights, float64(n)/took[0].median().Seconds(), math.NaN(), "token/s")(budget{}))
}

// peers compares prefill and decode with llama.cpp.
func (b *bench) peers(ctx context.Context) error {
	ok, err := b.Peer.has(b.Emit, "llama.cpp", "prefill", b.prompt)
	if err != nil || !ok {
		return err
	}
	contests := []contest{{fmt.Sprintf("prefill %d : llama.cpp", b.prompt), [3]int{1, 0, b.prompt}, "prefill", b.prompt, 2}}
	for _, n := range []int{1, 8} {
		contests = append(contests, contest{fmt.Sprintf("decode batch %d : llama.cpp", n), [3]int{n, 144, 1}, "decode", n, 0.6})
	}
	for _, c := range contests {
		if err := b.versus(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// contest is something that the peer does too.
type contest struct {
	name     string
	size     [3]int // sequences, their start and the tokens of each
	command  string // for the peer, with its argument
	argument int
	ratio    float64 // the budget
}

// versus takes turns with the peer.
func (b *bench) versus(ctx context.Context, c contest) (err error) {
	w, err := b.newWork(b.Threads, kernel.Auto, c.size[0], c.size[1], c.size[2])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	tokens := float64(c.size[0] * c.size[2])
	var peer []float64
	t := turns{few: 5, budget: 1} // it may be slow: its threads spin, and starve on a busy machine
	took, err := t.measure(ctx, w.forward, func(int) error {
		speed, err := b.Peer.ask(c.command, c.argument)
		peer = append(peer, speed)
		return err
	})
	if err != nil {
		return err
	}
	return b.Emit(faster(c.name, 0, tokens/took[0].median().Seconds(), middle(peer), "token/s")(atLeast(c.ratio)))
}
