package bench

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvport/kvport/sdk/host"
)

// offloadConfig is the config of OffloadingConnector.
type offloadConfig struct {
	Blocks int `json:"num_cpu_blocks"`
}

// offloads compares save and load through the offloading plugin with plain copies. Without the plugin
// there is no row.
func (t *transfer) offloads(ctx context.Context) error {
	binary, err := host.Find(t.PluginPath, "OffloadingConnector")
	if err != nil {
		return nil //nolint:nilerr // it is not built: nothing to measure
	}
	for _, s := range []shape{{"1.41 MiB", 32, 46202, 1}, {"8 MiB", 32, 256 << 10, 1}, {"1.41 MiB x 16", 32, 46202, 16}} {
		for _, digests := range []bool{false, true} {
			if err := t.offload(ctx, binary.Path, s, digests); err != nil {
				return fmt.Errorf("offloading of %s blocks: %w", s.name, err)
			}
		}
	}
	return nil
}

// offload is one size. Every save is of a block that memory does not have: it takes the place of the one
// that was used longest ago.
func (t *transfer) offload(ctx context.Context, binary string, s shape, digests bool) (err error) {
	o := linkOptions{binary: binary, shape: s, digests: digests}
	if t.Quick {
		o.bytes = 1
	}
	blocks := max(int(cacheBytes/s.block()), 4*s.batch)
	o.config = offloadConfig{blocks}
	l, err := openLink(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	slab := make([]byte, int64(l.blocks)*s.block())
	fill(slab)
	next := 0
	save := func(n int) error {
		next += s.batch
		return l.save(ctx, l.transfer(n, next))
	}
	for n := range blocks / s.batch { // every page of both ends has been touched
		if err := save(n); err != nil {
			return err
		}
	}
	p := &plain{link: l, slab: slab}
	saves, err := t.turns().measure(ctx, save, func(n int) error { p.save(n); return nil })
	if err != nil {
		return err
	}
	// Loads walk over what was saved last.
	stored := max(1, min(next, blocks)/s.batch-1)
	last := next
	loads, err := t.turns().measure(ctx, func(n int) error {
		at := n % stored
		return l.load(ctx, l.transfer(last/s.batch-1-at, last-at*s.batch))
	}, func(n int) error { p.load(n); return nil })
	if err != nil {
		return err
	}
	suffix := ""
	if digests {
		suffix = "+digest"
	}
	bytes := s.block() * int64(s.batch)
	if err := t.Emit(faster("offload save"+suffix+" "+s.name, bytes, saves[0].speed(bytes), saves[1].speed(bytes), "GB/s")(atLeast(0.9))); err != nil {
		return err
	}
	return t.Emit(faster("offload load"+suffix+" "+s.name, bytes, loads[0].speed(bytes), loads[1].speed(bytes), "GB/s")(atLeast(0.9)))
}
