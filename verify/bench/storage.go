package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
)

// storage compares one file for each block, through the shared storage plugin, with plain files.
func (t *transfer) storage(ctx context.Context) error {
	for _, s := range shapes()[2:] {
		if err := t.files(ctx, s); err != nil {
			return fmt.Errorf("shared storage, %s: %w", s.name, err)
		}
	}
	return nil
}

// files is one size. Every round saves a new block, since one that is stored is not written again.
func (t *transfer) files(ctx context.Context, s shape) (err error) {
	at, err := t.emptyStore()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(at.dir)) }()
	if err := at.warm(ctx); err != nil {
		return err
	}
	l, err := openLink(ctx, linkOptions{binary: at.binary, config: at.config, shape: s, bytes: 16 * s.block()})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	f := &files{link: l, dir: at.dir, peer: t.Peer}
	if f.hasPeer, err = t.Peer.has(t.Emit, "safetensors "+s.name, "save", f.name(0), s.segments, s.bytes); err != nil {
		return err
	}
	rounds := turns{few: 30, budget: 1}
	if t.Quick {
		rounds.few = 2
	}
	for _, way := range []struct {
		name        string
		ours, plain func(*connector.Transfer, int) error
	}{
		{"save", func(b *connector.Transfer, _ int) error { return l.save(ctx, b) }, f.write},
		{"load", func(b *connector.Transfer, _ int) error { return l.load(ctx, b) }, f.read},
	} {
		f.took = nil
		took, err := rounds.measure(ctx,
			func(n int) error { return way.ours(l.transfer(n, n), n) },
			func(n int) error { return way.plain(l.transfer(n, n), n) },
			func(n int) error { return f.ask(way.name, n) })
		if err != nil {
			return err
		}
		if way.name == "save" {
			continue // the time is that of the system's write-back, whoever writes
		}
		if err := t.emitFiles(way.name, s, took, f.took); err != nil {
			return err
		}
	}
	return nil
}

// storeFolder is a store with a folder of its own.
type storeFolder struct {
	binary, dir string
	config      json.RawMessage
}

func (t *transfer) emptyStore() (*storeFolder, error) {
	store, err := typicalStore()
	if err != nil {
		return nil, err
	}
	at := &storeFolder{}
	if at.binary, err = store.find(t.PluginPath); err != nil {
		return nil, err
	}
	if at.dir, err = os.MkdirTemp(t.Dir, "kvport-bench-"); err != nil {
		return nil, err
	}
	if at.config, err = store.config(at.dir); err != nil {
		return nil, errors.Join(err, os.RemoveAll(at.dir))
	}
	return at, nil
}

// warm stores many small blocks, so that the store's folders are there.
func (f *storeFolder) warm(ctx context.Context) (err error) {
	l, err := openLink(ctx, linkOptions{binary: f.binary, config: f.config, shape: shape{"warm", 1, 64, 1000}, bytes: 1})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	return l.save(ctx, l.transfer(0, 0))
}

func (t *transfer) emitFiles(name string, s shape, all []took, peer took) error {
	ours, bytes := all[0].speed(s.block()), s.block()
	if err := t.Emit(faster("file "+name+" "+s.name, bytes, ours, all[1].speed(bytes), "GB/s")(budget{})); err != nil {
		return err
	}
	if len(peer) == 0 {
		return nil
	}
	slices.Sort(peer)
	return t.Emit(faster("file "+name+" "+s.name+" : safetensors", bytes, ours, peer.speed(bytes), "GB/s")(atLeast(1)))
}

// files writes blocks as plain files.
type files struct {
	link    *link
	dir     string
	peer    *Peer
	hasPeer bool
	took    took // the peer's
}

func (f *files) name(n int) string { return filepath.Join(f.dir, strconv.Itoa(n)) }

func (f *files) parts(t *connector.Transfer) (parts [][]byte) {
	f.link.each(t, func(part []byte) { parts = append(parts, part) })
	return parts
}

func (f *files) write(t *connector.Transfer, n int) error {
	file, err := os.Create(f.name(n) + ".tmp")
	if err != nil {
		return err
	}
	wrote, err := unix.Writev(int(file.Fd()), f.parts(t))
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	if int64(wrote) != f.link.shape.block() {
		return fmt.Errorf("wrote %d bytes of %d", wrote, f.link.shape.block())
	}
	return os.Rename(f.name(n)+".tmp", f.name(n))
}

func (f *files) read(t *connector.Transfer, n int) error {
	file, err := os.Open(f.name(n))
	if err != nil {
		return err
	}
	got, err := unix.Preadv(int(file.Fd()), f.parts(t), 0)
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	if int64(got) != f.link.shape.block() {
		return fmt.Errorf("read %d bytes of %d", got, f.link.shape.block())
	}
	return nil
}

// ask has the peer do the same; it measures itself.
func (f *files) ask(name string, n int) error {
	if !f.hasPeer {
		return nil
	}
	seconds, err := f.peer.ask(name, f.name(n)+".safetensors", f.link.shape.segments, f.link.shape.bytes)
	f.took = append(f.took, time.Duration(seconds*float64(time.Second)))
	return err
}

// lookup asks the shared storage plugin for 32 keys that it has.
func (t *transfer) lookup(ctx context.Context) (err error) {
	at, err := t.emptyStore()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(at.dir)) }()
	const keys = 32
	l, err := openLink(ctx, linkOptions{binary: at.binary, config: at.config, shape: shape{"lookup", 1, 4096, keys}, bytes: 1})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	if err := l.save(ctx, l.transfer(0, 0)); err != nil {
		return err
	}
	took, err := t.turns().measure(ctx, func(int) error { return l.match(ctx, 0, keys) }, func(int) error { return l.match(ctx, 0, 1) })
	if err != nil {
		return err
	}
	return t.Emit(shorter("lookup of 32 keys, warm", 0, took[0].micros(), took[1].micros(), "us p50")(atMost(100)))
}

// restart kills a plugin again and again and waits until its host has another.
func (t *transfer) restart(ctx context.Context) (err error) {
	h, closeHost, err := t.openHost(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeHost()) }()
	kills := 100
	if t.Quick {
		kills = 2
	}
	var restarts, starts took
	for range kills {
		begin := time.Now()
		if err := killed(ctx, h); err != nil {
			return err
		}
		restarts = append(restarts, time.Since(begin))
		begin = time.Now()
		p, err := host.Launch(ctx, t.memory, patient())
		if err != nil {
			return err
		}
		starts = append(starts, time.Since(begin))
		if err := p.Close(ctx); err != nil {
			return err
		}
	}
	slices.Sort(restarts)
	slices.Sort(starts)
	p99 := func(t took) float64 { return float64(t.quantile(0.99)) / float64(time.Millisecond) }
	return t.Emit(shorter("plugin restart after kill -9", 0, p99(restarts), p99(starts), "ms p99")(atMost(500)))
}

// openHost opens a host with the memory plugin and a breaker that does not mind.
func (t *transfer) openHost(ctx context.Context) (*host.Host, func() error, error) {
	arg, err := json.Marshal(struct {
		Connector string `json:"kv_connector"`
		Role      string `json:"kv_role"`
		Path      string `json:"kv_connector_module_path"`
		Settings  any    `json:"kvport"`
	}{memoryName, "kv_both", t.memory, breakerSettings()})
	if err != nil {
		return nil, nil, err
	}
	config, err := host.ParseConfig(string(arg))
	if err != nil {
		return nil, nil, err
	}
	l := &link{shape: shape{"restart", 1, 4096, 1}, blocks: 16}
	layout, size := l.layout(true)
	region, err := host.NewRegion(size)
	if err != nil {
		return nil, nil, err
	}
	h, err := host.Open(ctx, config, host.Engine{
		Model: connector.NewFingerprint("bench"), Shape: connector.NewFingerprint("bench"), Layout: layout, Ranks: []*host.Region{region},
	}, host.Options{Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
	if err != nil {
		return nil, nil, errors.Join(err, region.Close())
	}
	return h, func() error { return errors.Join(h.Close(context.WithoutCancel(ctx)), region.Close()) }, nil
}

// breakerSettings are host settings under which any number of deaths is fine.
func breakerSettings() any {
	type breaker struct {
		Deaths int    `json:"deaths"`
		Max    string `json:"backoff_max"`
	}
	return struct {
		Breaker breaker `json:"breaker"`
	}{breaker{math.MaxInt32, "10ms"}}
}

// killed kills a host's plugin and returns when another is ready.
func killed(ctx context.Context, h *host.Host) error {
	old := h.Health().PID
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		return fmt.Errorf("kill plugin %d: %w", old, err)
	}
	tick := time.NewTicker(200 * time.Microsecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		if now := h.Health(); now.State == "ready" && now.PID != old {
			return nil
		}
	}
}
