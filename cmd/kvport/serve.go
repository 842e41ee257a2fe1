package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/kvport/kvport/engine"
	"github.com/kvport/kvport/engine/gguf"
	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/engine/model/kernel"
	"github.com/kvport/kvport/engine/model/sim"
	"github.com/kvport/kvport/engine/server"
	"github.com/kvport/kvport/engine/tokenizer"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/machine"
)

type serveFlags struct {
	listenFlags
	model, servedName string
	dtype             string
	threads           int
	blockSize         int
	numBlocks         int
	maxModelLen       int
	maxBatchedTokens  int
	maxSeqs           int
	prefixCaching     bool
	weightCache       bool
	tensorParallel    int
	cacheQueryRate    int
	cacheQueryAll     bool
	transferConfig    string
	eventsConfig      string
	pluginPath        []string
	logLevel          string
	routers           []string
	registerAddress   string
	registerGroup     string
	registerCA        string
}

// Limits of flags that no model and no machine has a say in.
const (
	defaultBlockSize = 16
	maxThreads       = 1 << 10
	maxBatch         = 1 << 20 // tokens of a step
	maxSequences     = 1 << 12 // of a step
	maxRequests      = 256     // at once
	maxQueryRate     = 1 << 20 // cache queries a second
)

func newServe() *cobra.Command {
	f := &serveFlags{}
	cmd := &cobra.Command{
		Use:   "serve --model FILE|tiny-random|sim",
		Short: "Serve a model over OpenAI's HTTP API",
		Args:  modelByFlag,
		RunE:  func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.model, "model", "", "GGUF file; or tiny-random or sim, two models that need none (sim:groups=2,window=64,stride=blocks,... chooses what its cache is like)")
	flags.StringVar(&f.servedName, "served-model-name", "", "name of the model in the API (default the file's name)")
	flags.StringVar(&f.dtype, "dtype", "f16", "precision of weights: f16 or f32")
	flags.IntVar(&f.threads, "threads", 0, "threads that compute (default one for each CPU)")
	flags.IntVar(&f.blockSize, "block-size", defaultBlockSize, "tokens of a KV block")
	flags.IntVar(&f.numBlocks, "num-blocks", 0, "blocks of the KV cache (default from memory)")
	flags.IntVar(&f.maxModelLen, "max-model-len", 0, "tokens of prompt and answer together (default what the model can)")
	flags.IntVar(&f.maxBatchedTokens, "max-num-batched-tokens", 0, "tokens of one step at most (default 512)")
	flags.IntVar(&f.maxSeqs, "max-num-seqs", 0, "sequences of one step at most (default 16)")
	flags.BoolVar(&f.weightCache, "weight-cache", true, "keep packed weights in the user's cache folder, for a quick start the next time")
	flags.BoolVar(&f.prefixCaching, "enable-prefix-caching", true, "reuse the KV of prompts that start alike")
	flags.IntVar(&f.tensorParallel, "tensor-parallel-size", 1, "ranks, each with its share of the KV heads, a cache and a connector session of its own")
	flags.IntVar(&f.cacheQueryRate, "cache-query-rate", 100, "cache queries a second that each API key may ask; without keys, all clients together; 0 answers none")
	flags.BoolVar(&f.cacheQueryAll, "cache-query-unsalted", false, "answer cache queries without a cache_salt though there are several API keys: each of them learns which prompts the others' requests have left in the cache")
	flags.StringVar(&f.transferConfig, "kv-transfer-config", "", "connector as JSON, or @FILE with it")
	flags.StringVar(&f.eventsConfig, "kv-events-config", "", "where to publish which KV blocks there are, as JSON with vLLM's fields, or @FILE with it")
	flags.StringSliceVar(&f.routers, "register", nil, "URLs of kvport route --register, http://, https:// or unix://; the engine tells them where it is, signed with the ticket key, and that it ends")
	flags.StringVar(&f.registerAddress, "register-address", "", "with --register: HOST:PORT at which routers reach this server (default --host and --port; the address towards the router if --host is no single one)")
	flags.StringVar(&f.registerGroup, "register-group", "", "with --register: the replica to which the engine belongs; for routers with --mode replica, which make pairs only within one")
	flags.StringVar(&f.registerCA, "register-ca-file", "", "with --register https://...: file with the CAs of routers' certificates, in PEM (default those of the system)")
	addPluginPath(flags, &f.pluginPath)
	f.add(cmd, 8000)
	addLogLevel(cmd, &f.logLevel)
	return cmd
}

// modelByFlag refuses arguments. vLLM takes the model as one.
func modelByFlag(_ *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("serve takes no argument %q: give the model as --model %s", args[0], args[0])
}

func (f *serveFlags) run(cmd *cobra.Command) error {
	if err := f.check(); err != nil {
		return err
	}
	if err := setLog(cmd.ErrOrStderr(), f.logLevel); err != nil {
		return err
	}
	transfer, err := f.transfer(cmd.Flags().Changed("kv-transfer-config"))
	if err != nil {
		return err
	}
	events, err := f.events(cmd.Flags().Changed("kv-events-config"))
	if err != nil {
		return err
	}
	l, keys, err := f.listen()
	if err != nil {
		return err
	}
	registry := newRegistry()
	t := newFront(l, &f.listenFlags, keys, registry)
	defer t.close()
	m, tok, err := load(cmd.Context(), f.open)
	if err != nil {
		return unlessEnded(cmd.Context(), err)
	}
	defer m.Close()
	if err := f.checkSizes(m); err != nil {
		return err
	}
	config := f.config(m, tok, transfer, registry)
	place, stop, err := f.publish(&config, events)
	if err != nil {
		return err
	}
	defer stop()
	e, err := engine.New(cmd.Context(), config)
	if err != nil {
		return unlessEnded(cmd.Context(), err)
	}
	if err := cmd.Context().Err(); err != nil {
		ctx, cancel := context.WithTimeout(context.Background(), closeTime)
		defer cancel()
		return unlessEnded(cmd.Context(), errors.Join(err, e.Close(ctx)))
	}
	s, err := server.New(f.server(server.Config{
		Engine: e, Tokenizer: tok, ModelName: f.name(m), Log: slog.Default(), Metrics: registry, Gatherer: registry,
		Key: t.keyCheck(), Events: place, SharedKeys: func() bool { return !f.cacheQueryAll && t.sharedKeys() },
	}, transfer))
	if err != nil {
		return fail(errors.Join(err, e.Close(cmd.Context())))
	}
	info := e.Info()
	slog.Info("serving", "model", f.name(m), "blocks", info.NumBlocks, "block_size", info.BlockSize,
		"max_model_len", info.MaxModelLen, "connector", info.Connector, "version", buildVersion())
	a, leave, err := f.announced(l, transfer, s)
	if err != nil {
		return errors.Join(err, e.Close(cmd.Context()))
	}
	defer leave()
	deadline, err := t.serve(cmd.Context(), cmd, a)
	return f.end(e, deadline, err)
}

// server adds to the config of the HTTP server what the flags say.
func (f *serveFlags) server(c server.Config, transfer *host.Config) server.Config {
	c.MaxInFlight, c.CacheQueryRate = f.inFlight(maxRequests), f.cacheQueryRate
	if c.CacheQueryRate == 0 {
		c.CacheQueryRate = -1
	}
	if transfer != nil {
		c.EngineID = transfer.EngineID
	}
	return c
}

// announced is the API that tells the routers of --register where it is; the API itself without any. leave ends that.
func (f *serveFlags) announced(l *net.TCPListener, transfer *host.Config, s api) (a api, leave func(), err error) {
	if len(f.routers) == 0 {
		return s, func() {}, nil
	}
	in, err := f.registered(l, transfer, s)
	if err != nil {
		return nil, nil, err
	}
	return in, in.close, nil
}

// end closes the engine after the server, which has ended with err.
func (f *serveFlags) end(e *engine.Engine, deadline time.Time, err error) error {
	ctx, cancel := context.WithTimeout(context.Background(), max(closeTime, time.Until(deadline)))
	defer cancel()
	closed := e.Close(ctx)
	if err == nil || errors.Is(err, errCutOff) { // otherwise the exit code is that of the server's error
		closed = f.closed(closed)
	}
	return fail(errors.Join(err, closed))
}

// errGivenUp says that a connector did not end its transfers in time after a signal.
var errGivenUp = errors.New("transfers of the connector were given up")

// closed explains the error of an engine's Close if it is that the connector did not end in time.
func (f *serveFlags) closed(err error) error {
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("%w: they had not ended in --drain-timeout %s, or in kvport.deadlines.drain: %w", errGivenUp, f.drainTimeout, err)
}

// load opens a model. When ctx ends it does not wait any longer: the process ends, and the model with it.
func load(ctx context.Context, open func() (model.Model, tokenizer.Tokenizer, error)) (model.Model, tokenizer.Tokenizer, error) {
	type opened struct {
		m   model.Model
		tok tokenizer.Tokenizer
		err error
	}
	done := make(chan opened, 1)
	go func() {
		m, tok, err := open()
		done <- opened{m, tok, err}
	}()
	select {
	case o := <-done:
		return o.m, o.tok, o.err
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	}
}

// unlessEnded is the error of a start, or none if ctx has ended: the end was asked for, and whatever failed
// then did so because of that.
func unlessEnded(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	slog.Info("ended while starting")
	slog.Debug("what the end of the start broke off", "err", err)
	return nil
}

// check refuses flags that cannot work, before anything is loaded.
func (f *serveFlags) check() error {
	switch {
	case f.model == "":
		return errors.New("--model is required: a GGUF file, tiny-random or sim")
	case f.dtype != "f16" && f.dtype != "f32":
		return fmt.Errorf("--dtype is %q, want f16 or f32", f.dtype)
	case f.tensorParallel < 1:
		return fmt.Errorf("--tensor-parallel-size is %d, want at least 1", f.tensorParallel)
	case f.blockSize < 1:
		return fmt.Errorf("--block-size is %d, want at least 1", f.blockSize)
	case f.maxModelLen == 1:
		return errors.New("--max-model-len is 1, want at least 2: a prompt and an answer")
	}
	if err := f.checkRegister(); err != nil {
		return err
	}
	for _, n := range []struct {
		flag        string
		value, most int
	}{
		{"threads", f.threads, maxThreads},
		{"num-blocks", f.numBlocks, math.MaxInt32}, // of a block id
		{"max-model-len", f.maxModelLen, math.MaxInt},
		{"max-num-batched-tokens", f.maxBatchedTokens, maxBatch},
		{"max-num-seqs", f.maxSeqs, maxSequences},
		{"cache-query-rate", f.cacheQueryRate, maxQueryRate},
	} {
		if n.value < 0 {
			return fmt.Errorf("--%s is %d, want a positive number", n.flag, n.value)
		}
		if n.value > n.most {
			return fmt.Errorf("--%s is %d, want at most %d", n.flag, n.value, n.most)
		}
	}
	return nil
}

// transfer reads --kv-transfer-config; nil if the flag is not given. Given as an empty string it is
// an error like any other bad config.
func (f *serveFlags) transfer(given bool) (*host.Config, error) {
	if !given {
		return nil, nil
	}
	c, err := host.ParseConfig(f.transferConfig)
	if err != nil {
		return nil, err
	}
	c.SandboxedBy(host.Self)
	for _, w := range c.Warnings {
		slog.Warn("kv-transfer-config: " + w)
	}
	if c.EngineID == "" { // made here, since it is also told to consumers
		var id [16]byte
		_, _ = rand.Read(id[:]) // never fails, says its documentation
		c.EngineID = hex.EncodeToString(id[:])
	}
	return c, nil
}

// events reads --kv-events-config; nil: nothing is published. Given as an empty string it is an error.
func (f *serveFlags) events(given bool) (*kvevents.Config, error) {
	if !given {
		return nil, nil
	}
	data := []byte(f.eventsConfig)
	if path, isFile := strings.CutPrefix(f.eventsConfig, "@"); isFile {
		var err error
		if data, err = host.ReadFile(path, maxConfig); err != nil {
			return nil, fmt.Errorf("--kv-events-config: %w", err)
		}
	}
	c, err := kvevents.ParseConfig(data)
	switch {
	case err != nil:
		return nil, fmt.Errorf("--%w", err)
	case !c.Enable:
		return nil, nil
	case !f.prefixCaching:
		return nil, errors.New("--kv-events-config: there are no events with --enable-prefix-caching=false")
	}
	return c, nil
}

// publish opens the publisher of an engine's events, if there is a config, and says where it is.
func (f *serveFlags) publish(engine *engine.Config, c *kvevents.Config) (place *kvevents.Place, stop func(), err error) {
	if c == nil {
		return nil, func() {}, nil
	}
	p, err := kvevents.NewPublisher(*c, slog.Default(), engine.Metrics)
	if err != nil {
		return nil, nil, fmt.Errorf("--%w", err)
	}
	at := p.Place()
	engine.Events = p
	slog.Info("KV events are published", "endpoint", at.Endpoint, "replay_endpoint", at.ReplayEndpoint)
	return &at, func() {
		if err := p.Close(); err != nil {
			slog.Warn("KV events", "err", err)
		}
	}, nil
}

// kind is the model without the options that sim takes behind a colon.
func (f *serveFlags) kind() string {
	if strings.HasPrefix(f.model, "sim:") {
		return "sim"
	}
	return f.model
}

// open loads the model and its tokenizer.
func (f *serveFlags) open() (model.Model, tokenizer.Tokenizer, error) {
	options := model.Options{Threads: f.threads, Ranks: f.tensorParallel, DType: model.F16, Log: slog.Default()}
	if f.dtype == "f32" {
		options.DType = model.F32
	}
	switch f.kind() {
	case "sim":
		_, text, _ := strings.Cut(f.model, ":")
		o, err := sim.ParseOptions(text)
		if err != nil {
			return nil, nil, fmt.Errorf("--model: %w", err)
		}
		o.Ranks = f.tensorParallel
		m, err := sim.New(o)
		return m, tokenizer.Bytes(), err
	case "tiny-random":
		m, err := model.Tiny(0, options)
		return m, tokenizer.Bytes(), err
	}
	file, err := gguf.Open(f.model)
	if err != nil {
		return nil, nil, fmt.Errorf("--model: %w", noFile(f.model, err))
	}
	tok, err := tokenizer.FromGGUF(file)
	if err = errors.Join(err, file.Close()); err != nil {
		return nil, nil, fmt.Errorf("--model %s: %w", f.model, err)
	}
	if f.weightCache {
		options.Images = weightImages()
	}
	m, err := model.Load(f.model, options)
	if err != nil {
		return nil, nil, fmt.Errorf("--model %s: %w", f.model, err)
	}
	return m, tok, nil
}

// noFile says to those who give the name of a repository, as vLLM takes it, what kvport takes.
func noFile(path string, err error) error {
	if !errors.Is(err, os.ErrNotExist) || strings.HasSuffix(path, ".gguf") {
		return err
	}
	return fmt.Errorf("%w; want a GGUF file, sim or tiny-random: names of repositories are not looked up", err)
}

// weightImages is where packed weights are kept; nowhere if this user has no cache folder.
func weightImages() kernel.Images {
	dir, err := os.UserCacheDir()
	if err != nil {
		return kernel.Images{}
	}
	return kernel.Images{Dir: filepath.Join(dir, "kvport")}
}

// name is what clients call the model.
func (f *serveFlags) name(m model.Model) string {
	switch {
	case f.servedName != "":
		return f.servedName
	case f.kind() == "sim" || f.model == "tiny-random":
		return f.kind()
	}
	if base := strings.TrimSuffix(filepath.Base(f.model), ".gguf"); base != "" {
		return base
	}
	return m.Spec().Name
}

func (f *serveFlags) config(m model.Model, tok tokenizer.Tokenizer, transfer *host.Config, metrics prometheus.Registerer) engine.Config {
	c := engine.Config{
		Model: m, Tokenizer: tok,
		BlockSize: f.blockSize, NumBlocks: f.numBlocks, MaxModelLen: f.maxModelLen,
		MaxBatchedTokens: f.maxBatchedTokens, MaxSeqs: f.maxSeqs, PrefixCaching: f.prefixCaching,
		Connector: transfer, PluginPath: pluginFolders(f.pluginPath), Log: slog.Default(), Metrics: metrics,
	}
	if c.NumBlocks == 0 {
		c.NumBlocks = blocksInMemory(m, f.blockSize, f.maxModelLen)
	}
	return c
}

// The default size of the KV cache: enough for some long sequences, as far as a share of the free
// memory allows. All of it is allocated at start, and often several engines share a machine.
const (
	cacheSequences = 4
	cacheLimit     = 1 << 30 // bytes
	cacheShare     = 4       // a fourth of what is available
)

// blocksInMemory is the default of --num-blocks.
func blocksInMemory(m model.Model, blockSize, maxModelLen int) int {
	if maxModelLen == 0 || maxModelLen > m.Spec().MaxTokens {
		maxModelLen = m.Spec().MaxTokens
	}
	layout, block := host.WithDigests(m.Layout(blockSize, 1))
	block *= int64(max(1, m.Spec().Ranks))
	wanted := cacheSequences * len(layout.Groups) * ((maxModelLen + blockSize - 1) / blockSize)
	budget := int64(cacheLimit)
	if available, known := machine.Memory("/", "MemAvailable"); known {
		budget = min(budget, available/cacheShare)
	}
	return max(1, int(min(int64(wanted), budget/max(1, block))))
}

// poolBytes is a lower bound of what the engine keeps about a block in addition to its content, in bytes.
const poolBytes = 64

// checkSizes refuses sizes that the model or this machine cannot have.
func (f *serveFlags) checkSizes(m model.Model) error {
	limit := m.Spec().MaxTokens
	if f.maxModelLen > 0 {
		limit = min(limit, f.maxModelLen)
	}
	if limit = max(limit, defaultBlockSize); f.blockSize > limit {
		return fmt.Errorf("--block-size is %d, want 1 to %d: no sequence is longer", f.blockSize, limit)
	}
	if f.numBlocks == 0 {
		return nil
	}
	layout, block := host.WithDigests(m.Layout(f.blockSize, 1))
	groups := len(layout.Groups)
	if f.numBlocks/groups*f.blockSize < 2 {
		return fmt.Errorf("--num-blocks is %d, which holds no sequence of 2 tokens: want at least %d", f.numBlocks, (1+f.blockSize)/f.blockSize*groups)
	}
	block = max(1, block)*int64(max(1, m.Spec().Ranks)) + poolBytes
	memory, known := machine.Memory("/", "MemTotal")
	if most := memory / block; known && int64(f.numBlocks) > most {
		return fmt.Errorf("--num-blocks is %d, at %d bytes each more than this machine has memory for: want at most %d", f.numBlocks, block, most)
	}
	return nil
}
