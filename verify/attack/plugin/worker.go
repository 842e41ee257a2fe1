package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/sdk"
)

// attacking puts sides that do wrong in front of right ones.
func attacking(p connector.Plugin) connector.Plugin {
	scheduling, right := p.Scheduler, p.Worker
	p.Scheduler = func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
		c, err := sdk.DecodeConfig[config](raw)
		if err != nil {
			return nil, err
		}
		s, err := scheduling(ctx, env, raw)
		if err != nil {
			return nil, err
		}
		switch c.Mode {
		case "many", "negative":
			return &liar{Scheduler: s, negative: c.Mode == "negative"}, nil
		case "events":
			return &reporter{Scheduler: s, keys: make([]connector.BlockKey, 1)}, nil
		}
		return s, nil
	}
	describe := p.Describe
	p.Capabilities |= connector.CanEvents
	p.Describe = func(ctx context.Context, raw json.RawMessage) (connector.Info, error) {
		info, err := describe(ctx, raw)
		if c, wrong := sdk.DecodeConfig[config](raw); wrong == nil && c.Mode == "events" {
			info.Capabilities |= connector.CanEvents
		}
		return info, err
	}
	p.Worker = func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
		c, err := sdk.DecodeConfig[config](raw)
		if err != nil {
			return nil, err
		}
		w, err := right(ctx, env, raw)
		if err != nil {
			return nil, err
		}
		return &worker{Worker: w, config: c, env: env}, nil
	}
	return p
}

// liar says that it has numbers of tokens that cannot be.
type liar struct {
	connector.Scheduler
	negative bool
}

// Match implements connector.Scheduler.
func (l *liar) Match(ctx context.Context, queries []connector.Query) ([]connector.Match, error) {
	matches, err := l.Scheduler.Match(ctx, queries)
	for i := range matches {
		matches[i].Tokens = queries[i].Tokens + 16_000
		if l.negative {
			matches[i].Tokens = -1 << 40
		}
	}
	return matches, err
}

// reporter reports without end that it has the blocks that it was asked for, in a new place each time.
type reporter struct {
	connector.Scheduler

	mu   sync.Mutex
	keys []connector.BlockKey
	seq  uint64
}

// reports is how many events it has at once, as many as a plugin may.
const reports = 4096

// Match implements connector.Scheduler.
func (r *reporter) Match(ctx context.Context, queries []connector.Query) ([]connector.Match, error) {
	r.mu.Lock()
	for i := range queries {
		if len(queries[i].Keys) > 0 {
			r.keys = slices.Clone(queries[i].Keys)
		}
	}
	r.mu.Unlock()
	return r.Scheduler.Match(ctx, queries)
}

// Events implements connector.EventSource.
func (r *reporter) Events(context.Context) ([]connector.BlockEvent, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var events []connector.BlockEvent
	for range reports {
		r.seq++
		events = append(events, connector.BlockEvent{Seq: r.seq, Kind: connector.BlocksStored, Keys: r.keys, Medium: strconv.FormatUint(r.seq, 36), Scope: connector.ScopeEngine})
	}
	return events, nil
}

type worker struct {
	connector.Worker
	config
	env connector.Env
}

// Save implements connector.Worker.
func (w *worker) Save(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	if cache := shared("memfd:kvport-cache"); len(cache) > 0 && w.Mode == "all" {
		was := cache[0][0]
		cache[0][0]++ // it might be anything
		cache[0][0] = was
		_ = report(&w.config, "cache: writes its own mapping of the cache")
	}
	return w.Worker.Save(ctx, t, kv)
}

// Load implements connector.Worker.
func (w *worker) Load(ctx context.Context, t *connector.Transfer, kv *connector.KV) error {
	switch w.Mode {
	case "silent": // it says that it has loaded
		return nil
	case "die":
		os.Exit(3)
	case "hang":
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	case "fence":
		hideFence()
		os.Exit(3)
	case "elsewhere":
		return &connector.BlockError{Blocks: []connector.BlockID{-1, 1 << 30}, Err: connector.ErrGone}
	}
	err := w.Worker.Load(ctx, t, kv)
	for _, b := range t.Blocks {
		w.tamper(kv, b)
	}
	switch w.Mode {
	case "late":
		go w.scribble(ctx, kv, t.Blocks)
	case "everywhere":
		go everywhere()
	}
	return err
}

// tamper changes a block that is loaded.
func (w *worker) tamper(kv *connector.KV, b connector.Block) {
	segments := kv.Segments(b.Group)
	layers := make([]int, 0, len(segments))
	digests := -1
	for _, s := range segments {
		if kv.Layout().Segments[s].Layer == connector.DigestLayer {
			digests = s
		} else {
			layers = append(layers, s)
		}
	}
	switch w.Mode {
	case "junk", "forge", "forge-name":
		for _, s := range layers {
			noise(kv.View(s, b.ID))
		}
	case "bit":
		view := kv.View(layers[len(layers)-1], b.ID)
		view[len(view)-1] ^= 1
	case "layers":
		x, y := kv.View(layers[0], b.ID), kv.View(layers[1], b.ID)
		for i := range min(len(x), len(y)) {
			x[i], y[i] = y[i], x[i]
		}
	case "header":
		clear(kv.View(digests, b.ID)[:digestHeader])
	case "zero":
		for _, s := range segments {
			clear(kv.View(s, b.ID))
		}
	}
	if w.Mode != "forge" && w.Mode != "forge-name" {
		return
	}
	name := append([]byte(nil), kv.View(digests, b.ID)[:digestHeader]...)
	if err := digest.New(digest.XXH3(), w.env.Model, w.env.Shape, connector.Shard{Rank: w.env.Rank, World: w.env.World}).Make(kv, b); err != nil {
		w.env.Log.Error("cannot forge", "error", err)
	}
	if w.Mode == "forge-name" { // as if the ring's key had made it
		copy(kv.View(digests, b.ID), name)
	}
}

// digestHeader is what precedes a block's digests.
const digestHeader = 16

func noise(b []byte) {
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
}

// scribble goes on with writing after the call has returned.
func (w *worker) scribble(ctx context.Context, kv *connector.KV, blocks []connector.Block) {
	ctx = context.WithoutCancel(ctx)
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end) && ctx.Err() == nil; {
		for _, b := range blocks {
			for _, s := range kv.Segments(b.Group) {
				noise(kv.View(s, b.ID))
			}
		}
	}
}

// everywhere writes to all memory that others share with it, again and again.
func everywhere() {
	all := shared("memfd:kvport")
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); {
		for _, memory := range all {
			noise(memory)
		}
	}
}

// shared is the memory that it has mapped, may write and shares with others under names that begin in a certain way.
func shared(name string) (all [][]byte) {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(maps)) {
		var from, to uintptr
		if n, _ := fmt.Sscanf(line, "%x-%x rw-s", &from, &to); n == 2 && strings.Contains(line, name) {
			all = append(all, unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&from))), to-from))
		}
	}
	return all
}

// hideFence parks every descriptor that it has in a message that nobody reads, in a process that nobody waits for.
func hideFence() {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return
	}
	for fd := 3; fd < 64; fd++ {
		_ = unix.Sendmsg(pair[0], []byte("x"), unix.UnixRights(fd), nil, 0)
	}
	_ = leave(pair[1], false)
	_ = leave(pair[1], true)
}
