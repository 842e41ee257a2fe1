package bench

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/digest"
)

const blockTokens = 16

// shape is the size of a block and of its parts.
type shape struct {
	name     string
	segments int
	bytes    int64 // of a segment
	batch    int   // blocks of one transfer
}

func (s shape) block() int64 { return int64(s.segments) * s.bytes }

// link is a plugin process with both its sides open, and the cache it serves.
type link struct {
	process   *host.Process
	scheduler connector.Scheduler
	worker    connector.Worker
	region    *host.Region
	arena     *host.Arena // nil: none
	kv        *connector.KV
	hasher    *digest.Hasher // nil: no digests
	shape     shape
	blocks    int
}

// cacheBytes is how much memory a walk over all blocks touches: more than any cache holds.
const cacheBytes = 192 << 20

// linkOptions say what a link is to.
type linkOptions struct {
	binary  string
	config  any
	shape   shape
	digests bool
	bytes   int64  // of the cache; 0: cacheBytes
	arena   bool   // the connector gets the memory that it asks for
	life    string // of the same shape with another life nothing is found in a store that outlives the process

	engine      string         // its id; empty: bench
	role        connector.Role // 0: both
	noRing      bool           // messages go over the stream
	environment []string       // names of variables that the plugin gets
}

// settle fills in what was left out.
func (o *linkOptions) settle() {
	if o.bytes == 0 {
		o.bytes = cacheBytes
	}
	if o.engine == "" {
		o.engine = "bench"
	}
	if o.role == 0 {
		o.role = connector.RoleBoth
	}
}

func openLink(ctx context.Context, o linkOptions) (_ *link, err error) {
	o.settle()
	l := &link{shape: o.shape, blocks: max(int(o.bytes/o.shape.block()), 2*o.shape.batch)}
	l.blocks = l.blocks / o.shape.batch * o.shape.batch
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	layout, size := l.layout(o.digests)
	if l.region, err = host.NewRegion(size); err != nil {
		return nil, err
	}
	fill(l.region.Bytes())
	if l.kv, err = connector.NewKV(layout, [][]byte{l.region.Bytes()}); err != nil {
		return nil, err
	}
	env := connector.Env{
		Engine: o.engine, Epoch: 1, Role: o.role, World: 1, Layout: layout,
		Model: connector.NewFingerprint("bench", o.life), Shape: connector.NewFingerprint("bench", o.shape.name), Log: slog.New(slog.DiscardHandler),
		LinkKey: linkKey(),
	}
	if o.digests {
		l.hasher = hashing(env.Model, env.Shape, true)
	}
	raw, err := json.Marshal(o.config)
	if err != nil {
		return nil, err
	}
	options := patient()
	options.NoRing = o.noRing
	options.Regions, options.Environment = []*host.Region{l.region}, o.environment
	if o.arena {
		if l.arena, err = host.NewArena(); err != nil {
			return nil, err
		}
		options.Arena = l.arena
	}
	if l.process, err = host.Launch(ctx, o.binary, options); err != nil {
		return nil, err
	}
	if env.Arena, err = l.fit(ctx, raw, &layout); err != nil {
		return nil, err
	}
	if l.scheduler, err = l.process.OpenScheduler(ctx, env, raw); err != nil {
		return nil, err
	}
	l.worker, err = l.process.OpenWorker(ctx, env, raw)
	return l, err
}

// fit gives the connector the arena that it asks for, if it is to have one.
func (l *link) fit(ctx context.Context, config json.RawMessage, layout *connector.Layout) ([]byte, error) {
	if l.arena == nil {
		return nil, nil
	}
	info, err := l.process.Describe(ctx, config)
	if err != nil {
		return nil, err
	}
	size := info.ArenaSize(layout, 1)
	if size == 0 {
		return nil, nil
	}
	if err := l.arena.Fit(size); err != nil {
		return nil, err
	}
	return l.arena.Bytes(), nil
}

// patient launches plugins that nobody watches: a busy machine is no fault.
func patient() host.LaunchOptions {
	return host.LaunchOptions{Handshake: time.Minute, Heartbeat: host.Heartbeat{Interval: time.Hour, Limit: time.Minute}}
}

func (l *link) layout(digests bool) (connector.Layout, int64) {
	layout := connector.Layout{
		Name: "bench", Blocks: l.blocks,
		Groups: []connector.Group{{BlockTokens: blockTokens, Policy: connector.PolicyAll}},
	}
	for i := range l.shape.segments {
		layout.Segments = append(layout.Segments, connector.Segment{
			Layer: i, Offset: int64(i*l.blocks) * l.shape.bytes, BlockStride: l.shape.bytes, Bytes: l.shape.bytes,
		})
	}
	if digests {
		return host.WithDigests(layout)
	}
	return layout, int64(l.blocks) * l.shape.block()
}

// fill writes numbers, so that no page is the zero page and no two blocks are equal.
func fill(b []byte) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], uint64(i)*0x9e3779b97f4a7c15)
	}
}

func (l *link) close() error {
	var errs []error
	if l.worker != nil {
		errs = append(errs, l.worker.Close())
	}
	if l.scheduler != nil {
		errs = append(errs, l.scheduler.Close())
	}
	if l.process != nil {
		errs = append(errs, l.process.Close(context.Background()))
	}
	if l.region != nil {
		errs = append(errs, l.region.Close())
	}
	if l.arena != nil {
		errs = append(errs, l.arena.Close())
	}
	return errors.Join(errs...)
}

// key is the key of content number n.
func key(n int) connector.BlockKey {
	var k connector.BlockKey
	binary.LittleEndian.PutUint64(k[:], uint64(n)+1)
	return k
}

// transfer is turn n of a walk over the cache: batch blocks whose keys begin with number first.
func (l *link) transfer(n, first int) *connector.Transfer {
	batch := l.shape.batch
	at := n * batch % l.blocks
	t := &connector.Transfer{Request: "bench", Tokens: batch * blockTokens}
	for i := range batch {
		t.Blocks = append(t.Blocks, connector.Block{ID: connector.BlockID(at + i), Key: key(first + i)})
	}
	return t
}

// each calls f with every part of a transfer's blocks but the digests.
func (l *link) each(t *connector.Transfer, f func(part []byte)) {
	for _, b := range t.Blocks {
		for s := range l.shape.segments {
			f(l.kv.View(s, b.ID))
		}
	}
}

// digests makes or checks the digests of a transfer's blocks, if the link has any.
func (l *link) digests(t *connector.Transfer, check bool) error {
	if l.hasher == nil {
		return nil
	}
	for _, b := range t.Blocks {
		work := l.hasher.Make
		if check {
			work = l.hasher.Check
		}
		if err := work(l.kv, b); err != nil {
			return err
		}
	}
	return nil
}

// save does what a host does: digests while the bytes are hot, then the plugin.
func (l *link) save(ctx context.Context, t *connector.Transfer) error {
	if err := l.digests(t, false); err != nil {
		return err
	}
	return l.worker.Save(ctx, t, nil)
}

func (l *link) load(ctx context.Context, t *connector.Transfer) error {
	if err := l.worker.Load(ctx, t, nil); err != nil {
		return err
	}
	return l.digests(t, true)
}

// selfLink makes a folder with a link of that name to a kvport binary.
func selfLink(self, name string) (path string, remove func() error, err error) {
	dir, err := os.MkdirTemp("", "kvport-bench-")
	if err != nil {
		return "", nil, err
	}
	path = filepath.Join(dir, name)
	if err := os.Symlink(self, path); err != nil {
		return "", nil, errors.Join(fmt.Errorf("process of the benchmark: %w", err), os.RemoveAll(dir))
	}
	return path, func() error { return os.RemoveAll(dir) }, nil
}

// linkKey is what both ends of a measurement have. It protects nothing: what goes from one to the other is
// made up.
func linkKey() connector.Secret {
	f := connector.NewFingerprint("bench link key")
	return f[:]
}
