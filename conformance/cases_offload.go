package conformance

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
)

// offloadCase is a case of a connector with tiers, whose config has the fields of OFF-01.
func offloadCase(id, rule, text string, body func(*rig)) Case {
	return Case{ID: id, Rule: rule, Text: text, Profiles: []Profile{Offload}, Run: rigged(0, false, body)}
}

func offloadCases() []Case {
	acknowledged := offloadCase("offload-acknowledged", "OFF-05", "One save has more blocks than memory holds: those that the answer does not name are offered.", offloadAcknowledged)
	acknowledged.Optional = true // not at trust level staged
	return []Case{
		offloadCase("offload-config", "OFF-01", "Sizes of the tiers that contradict each other are refused; the policies are known.", offloadConfig),
		offloadCase("offload-bound", "OFF-02", "Three times as much as memory holds is saved: no more than it holds is offered.", offloadBound),
		offloadCase("offload-disk-bound", "OFF-02", "Twenty times as much as the disk tier holds is saved: the folder stays within disk_bytes.", offloadDiskBound),
		offloadCase("offload-newest", "OFF-03", "Memory is full: what was saved last is offered, what was saved first is not.", offloadNewest),
		offloadCase("offload-hot", "OFF-03", "With every policy, a block that is loaded all the time stays, whatever else is saved.", offloadHot),
		offloadCase("offload-policies", "OFF-03", "With every policy, what is offered is right while blocks come and go.", offloadPolicies),
		offloadCase("offload-pinned", "OFF-04", "Blocks are loaded while others push them out: each load is whole or fails.", offloadPinned),
		acknowledged,
		offloadCase("offload-spill", "OFF-06", "What memory has evicted is offered from disk, and loaded right.", offloadSpill),
		offloadCase("offload-restart", "OFF-06", "The next life of the engine finds what is on disk.", offloadRestart),
		offloadCase("offload-lookups", "OFF-07", "Matches of what is on disk push nothing out of memory.", offloadLookups),
		offloadCase("offload-threshold", "OFF-08", "With store_threshold 2, a block is declined once and then stored.", offloadThreshold),
		offloadCase("offload-quota", "OFF-09", "A tenant over its quota is told so; another tenant is not affected.", offloadQuota),
		offloadCase("offload-ttl", "OFF-10", "A block whose time is over is neither offered nor loaded, from memory or disk.", offloadTTL),
		offloadCase("offload-reset", "OFF-11", "A Reset empties both tiers.", offloadReset),
		offloadCase("offload-damaged", "OFF-12", "Bits are flipped all over the folder: each load is right or fails, and later saves repair the blocks.", offloadDamaged),
		offloadCase("offload-cut", "OFF-12", "Files of the folder are cut short before the engine's next life: each load is right or fails, and later saves repair the blocks.", offloadCut),
		offloadCase("offload-pieces", "OFF-13", "With a block_size of two blocks, blocks are offered in pairs.", offloadPieces),
	}
}

// smallTier is how many blocks the memory of these cases holds.
const smallTier = 8

// policies are the values of eviction_policy.
func policies() []string { return []string{"lru", "arc", "s3fifo"} }

// tierFields are the parts of the config that a case sets.
type tierFields struct {
	Blocks    int    `json:"num_cpu_blocks,omitempty"`
	Bytes     int64  `json:"cpu_bytes_to_use,omitempty"`
	Policy    string `json:"eviction_policy,omitempty"`
	Piece     int    `json:"block_size,omitempty"`
	Threshold int    `json:"store_threshold,omitempty"`
	TTL       int    `json:"ttl_seconds,omitempty"`
	Quota     int64  `json:"tenant_bytes,omitempty"`
	DiskPath  string `json:"disk_path,omitempty"`
	DiskBytes int64  `json:"disk_bytes,omitempty"`
	DiskAdmit int    `json:"disk_admit_after,omitempty"`
}

// onDisk adds a disk tier for n blocks that takes every block.
func (r *rig) onDisk(f tierFields, n int64) tierFields {
	f.DiskPath, f.DiskAdmit = filepath.Join(r.folder(), "tier"), 1
	l := interleaved(slots)
	f.DiskBytes = 16<<10 + n*(l.BlockBytes(0)+256)
	return f
}

func (r *rig) tierConfig(f tierFields) json.RawMessage {
	b, err := json.Marshal(f)
	r.must(err, "config")
	return b
}

// tiers opens an engine whose connector has this config.
func (r *rig) tiers(f tierFields) *engine {
	r.Helper()
	e := r.tiered(f)
	e.openAll()
	return e
}

// tiered is an engine whose connector has this config, and whose sides are not open yet.
func (r *rig) tiered(f tierFields) *engine {
	r.Helper()
	config := r.tierConfig(f)
	e := r.closed(setup{config: config})
	e.config = config
	return e
}

// saveEach saves n prompts of one block, one at a time, and gives their keys.
func (e *engine) saveEach(n int) []connector.BlockKey {
	e.Helper()
	var all []connector.BlockKey
	for range n {
		keys := e.keys(1)
		e.save(blocks(0, keys...)...)
		all = append(all, keys...)
	}
	return all
}

// offered is how many of the prompts of one block are offered.
func (e *engine) offered(keys []connector.BlockKey) (n int) {
	e.Helper()
	for _, k := range keys {
		n += e.match(k)
	}
	return n
}

// loadsRight loads a block that may be gone; what it loads must be right.
func (e *engine) loadsRight(k connector.BlockKey) bool {
	e.Helper()
	to := blocks(20, k)
	e.wipe(0, to...)
	if e.load(to...) != nil {
		return false
	}
	e.holds(to...)
	return true
}

// within waits until ok, a short while at most.
func (e *engine) within(what string, ok func() bool) {
	e.Helper()
	for end := time.Now().Add(soon); !ok(); e.pause(askAgain) {
		if time.Now().After(end) {
			e.Errorf("%s: not within %v", what, soon)
			return
		}
	}
}

func offloadConfig(r *rig) {
	inst := r.start(1, 4096)
	for what, f := range map[string]tierFields{
		"both sizes of the memory": {Blocks: 8, Bytes: 1 << 20},
		"disk_bytes without disk":  {Blocks: 8, DiskBytes: 1 << 20},
		"a policy nobody knows":    {Blocks: 8, Policy: "random"},
		"a negative size":          {Blocks: -1},
	} {
		_, err := inst.Describe(r.Context(), r.tierConfig(f))
		if !errors.Is(err, connector.ErrIncompatible) {
			r.Errorf("a config with %s: error %v, want ErrIncompatible", what, err)
		}
	}
	for _, p := range policies() {
		_, err := inst.Describe(r.Context(), r.tierConfig(tierFields{Blocks: 8, Policy: p, Threshold: 2, TTL: 60, Quota: 1 << 20}))
		r.must(err, "describe with policy %s", p)
	}
}

func offloadBound(r *rig) {
	e := r.tiers(tierFields{Blocks: smallTier})
	keys := e.saveEach(3 * smallTier)
	n := e.offered(keys)
	if n > smallTier || n == 0 {
		e.Errorf("%d blocks are offered, memory holds %d", n, smallTier)
	}
}

func offloadDiskBound(r *rig) {
	f := r.onDisk(tierFields{Blocks: smallTier}, 2*smallTier)
	e := r.tiers(f)
	for range 40 {
		keys := e.saveEach(smallTier)
		e.within("the newest block is offered", func() bool { return e.match(keys[smallTier-1]) == 1 })
		if size := e.folderBytes(); size > f.DiskBytes {
			e.Errorf("the folder has %d bytes, disk_bytes is %d", size, f.DiskBytes)
			return
		}
	}
}

// folderBytes is the size of all files of the backend.
func (r *rig) folderBytes() (total int64) {
	for _, path := range r.tierFiles() {
		if st, err := os.Stat(path); err == nil {
			total += st.Size()
		}
	}
	return total
}

func (r *rig) tierFiles() (files []string) {
	err := filepath.WalkDir(r.folder(), func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			files = append(files, path)
		}
		return nil // a file that was evicted meanwhile is not an error
	})
	r.must(err, "list the folder")
	return files
}

func offloadNewest(r *rig) {
	for _, p := range policies()[:2] {
		e := r.tiers(tierFields{Blocks: smallTier, Policy: p})
		keys := e.saveEach(2 * smallTier)
		r.equal(1, e.match(keys[len(keys)-1]), "%s: the last block offered", p)
		r.equal(0, e.match(keys[0]), "%s: the first block offered", p)
		e.closeAll()
	}
}

func offloadHot(r *rig) {
	for _, p := range policies() {
		e := r.tiers(tierFields{Blocks: 2 * smallTier, Policy: p})
		hot := e.saveEach(1)[0]
		for range 8 * smallTier {
			for range 3 {
				if !e.loadsRight(hot) {
					e.Errorf("%s: a block that is loaded all the time is gone", p)
					return
				}
			}
			e.saveEach(1)
		}
		e.closeAll()
	}
}

func offloadPolicies(r *rig) {
	for _, p := range policies() {
		e := r.tiers(tierFields{Blocks: smallTier, Policy: p})
		var keys []connector.BlockKey
		loaded := 0
		for range 60 {
			keys = append(keys, e.saveEach(1)...)
			k := keys[len(keys)-1-r.rand.IntN(min(len(keys), 12))]
			offered := e.match(k) == 1
			got := e.loadsRight(k)
			if got != offered {
				e.Errorf("%s: a block is offered: %v, and loaded: %v", p, offered, got)
			}
			if got {
				loaded++
			}
		}
		if loaded == 0 {
			e.Errorf("%s: not one of 60 loads found its block", p)
		}
		e.closeAll()
	}
}

func offloadPinned(r *rig) {
	const loaders, rounds = 3, 60
	e := r.tiers(tierFields{Blocks: smallTier})
	hot := e.keys(2)
	e.save(blocks(0, hot...)...)
	fresh := make([][]connector.BlockKey, rounds)
	for i := range fresh {
		fresh[i] = e.keys(2)
	}
	var wg sync.WaitGroup
	errs := make([]error, loaders)
	var loading atomic.Int64
	loading.Store(loaders)
	for n := range loaders {
		to := blocks(8+2*n, hot...)
		t := transfer(to)
		wg.Go(func() {
			defer loading.Add(-1)
			for range rounds {
				e.wipe(0, to...)
				if err := e.moveRank(r.Context(), 0, &t, false); r.torn(err) {
					errs[n] = err
					return
				} else if err != nil {
					continue // pushed out: that is no fault
				}
				for _, b := range to {
					if d := e.differs(b); d != "" {
						errs[n] = errors.New(d)
						return
					}
				}
			}
		})
	}
	for i := 0; i < rounds || loading.Load() > 0; i++ { // others come in as long as somebody loads
		from := blocks(2, fresh[i%rounds]...)
		e.fill(from...)
		t := transfer(from)
		r.must(e.moveRank(r.Context(), 0, &t, true), "save")
		again := transfer(blocks(0, hot...))
		r.must(e.moveRank(r.Context(), 0, &again, true), "save again what was pushed out")
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			r.Errorf("%v", err)
		}
	}
}

func offloadAcknowledged(r *rig) {
	if r.isStaged() {
		r.Skipf("landing memory divides a save into several")
	}
	e := r.tiers(tierFields{Blocks: 2})
	keys := e.keys(5)
	from := blocks(0, keys...)
	e.fill(from...)
	err := e.saveOnly(r.Context(), transfer(from))
	stored := len(keys)
	var failed *connector.BlockError
	switch {
	case errors.As(err, &failed):
		for _, id := range failed.Blocks {
			stored = min(stored, int(id)) // block i lies in slot i
		}
		if !errors.Is(err, connector.ErrDeclined) {
			r.Errorf("error %q, want ErrDeclined", err)
		}
	case err != nil:
		stored = 0
	}
	if n := e.match(keys...); n < stored {
		r.Errorf("%d blocks were acknowledged, %d are offered", stored, n)
	}
	for _, k := range keys[:stored] {
		if !e.loadsRight(k) {
			r.Errorf("a block that was acknowledged cannot be loaded")
			return
		}
	}
}

func offloadSpill(r *rig) {
	e := r.tiers(r.onDisk(tierFields{Blocks: smallTier}, 8*smallTier))
	var keys []connector.BlockKey
	for range 4 * smallTier { // not faster than the disk: what waits too long may be dropped
		keys = append(keys, e.saveEach(1)...)
		e.pause(askAgain)
	}
	r.equal(len(keys), e.offered(keys), "blocks offered from memory and disk")
	for _, k := range keys {
		if !e.loadsRight(k) {
			r.Errorf("a block on disk cannot be loaded")
			return
		}
	}
}

func offloadRestart(r *rig) {
	f := r.onDisk(tierFields{Blocks: smallTier}, 8*smallTier)
	e := r.tiers(f)
	keys := e.saveEach(smallTier)
	e.closeAll()
	r.must(e.inst.Close(), "end the connector")

	next := r.tiered(f)
	next.env.Model, next.env.Shape = e.env.Model, e.env.Shape
	next.openAll()
	next.within("all blocks are offered to the next life", func() bool { return next.offered(keys) == len(keys) })
	for _, k := range keys {
		if !next.loadsRight(k) {
			r.Errorf("a block on disk cannot be loaded in the next life")
			return
		}
	}
}

func offloadLookups(r *rig) {
	e := r.tiers(r.onDisk(tierFields{Blocks: smallTier}, 8*smallTier))
	var cold []connector.BlockKey
	for range smallTier {
		cold = append(cold, e.saveEach(1)...)
		e.pause(askAgain)
	}
	for range smallTier { // now cold is on disk only
		e.saveEach(1)
		e.pause(askAgain)
	}
	hot := e.saveEach(smallTier)
	for range 3 {
		e.offered(cold)
		e.pause(askAgain)
	}
	// The folder goes, and with it what is not in memory.
	for _, path := range r.tierFiles() {
		r.must(os.Truncate(path, 0), "cut a file")
	}
	for _, k := range hot {
		if !e.loadsRight(k) {
			r.Errorf("a lookup has pushed a block out of memory")
			return
		}
	}
}

// declined checks that a save fails as declined, for exactly these blocks.
func (e *engine) declined(err error, bs []connector.Block) {
	e.Helper()
	ids := make([]connector.BlockID, len(bs))
	for i, b := range bs {
		ids[i] = b.ID
	}
	e.failed(err, ids...)
	if err != nil && !errors.Is(err, connector.ErrDeclined) {
		e.Errorf("error %q, want ErrDeclined", err)
	}
}

func offloadThreshold(r *rig) {
	e := r.tiers(tierFields{Blocks: 2 * smallTier, Threshold: 2})
	keys := e.keys(3)
	from := blocks(0, keys...)
	e.fill(from...)
	e.declined(e.saveOnly(r.Context(), transfer(from)), from)
	r.equal(0, e.match(keys...), "blocks offered after they were declined")
	r.must(e.saveOnly(r.Context(), transfer(from)), "save for the second time")
	r.equal(len(keys), e.match(keys...), "blocks offered after the second save")
	e.whole(keys, 8)
}

func offloadQuota(r *rig) {
	l := interleaved(slots)
	e := r.tiers(tierFields{Blocks: 2 * smallTier, Quota: 4 * l.BlockBytes(0)})
	save := func(tenant uint64, n int) ([]connector.BlockKey, []connector.Block, error) {
		keys := e.keys(n)
		from := blocks(0, keys...)
		e.fill(from...)
		t := transfer(from)
		t.Tenant = tenant
		return keys, from, e.moveRank(r.Context(), 0, &t, true)
	}
	first, _, err := save(1, 4)
	r.must(err, "save within the quota")
	over, from, err := save(1, 2)
	e.declined(err, from)
	r.equal(0, e.match(over...), "blocks offered beyond the quota")
	other, _, err := save(2, 4)
	r.must(err, "save of another tenant")
	for _, keys := range [][]connector.BlockKey{first, other} {
		r.equal(4, e.match(keys...), "blocks offered within the quota")
		e.whole(keys, 8)
	}
}

func offloadTTL(r *rig) {
	const ttl = 1
	f := r.onDisk(tierFields{Blocks: smallTier, TTL: ttl}, 8*smallTier)
	e := r.tiers(f)
	keys := e.saveEach(4)
	r.equal(4, e.offered(keys), "blocks offered before their time is over")
	e.pause(ttl*time.Second + 200*time.Millisecond)
	r.equal(0, e.offered(keys), "blocks offered after their time")
	e.saveEach(2 * smallTier) // so that memory has given up what it had
	r.equal(0, e.offered(keys), "blocks offered after their time from disk")
	if slices.ContainsFunc(keys, e.loadsRight) {
		r.Errorf("a block whose time is over is loaded")
		return
	}
	again := blocks(0, keys...)
	e.fill(again...)
	r.must(e.saveOnly(r.Context(), transfer(again)), "save again")
	r.equal(4, e.match(keys...), "blocks offered after they were saved again")
	e.whole(keys, 8)
}

func offloadReset(r *rig) {
	f := r.onDisk(tierFields{Blocks: smallTier}, 8*smallTier)
	e := r.tiers(f)
	keys := e.saveEach(3 * smallTier)
	resetter, ok := connector.As[connector.Resetter](e.scheduler)
	if !ok {
		r.Errorf("the scheduler side cannot reset")
		return
	}
	emptied, err := resetter.Reset(r.Context())
	r.must(err, "reset")
	if !emptied {
		r.Errorf("a reset has not emptied the tiers")
	}
	r.equal(0, e.offered(keys), "blocks offered after a reset")
	more := e.saveEach(2)
	r.equal(2, e.offered(more), "blocks offered that were saved after a reset")
	e.closeAll()
	r.must(e.inst.Close(), "end the connector")
	next := r.tiered(f)
	next.env.Model, next.env.Shape = e.env.Model, e.env.Shape
	next.openAll()
	r.equal(0, next.offered(keys), "blocks offered to the next life after a reset")
}

// flip changes one bit in every 64 bytes of a file.
func flip(data []byte) []byte {
	for i := 40; i < len(data); i += 64 {
		data[i] ^= 0x10
	}
	return data
}

func offloadDamaged(r *rig) {
	e := r.tiers(r.onDisk(tierFields{Blocks: smallTier}, 8*smallTier))
	var keys []connector.BlockKey
	for range 3 * smallTier {
		keys = append(keys, e.saveEach(1)...)
		e.pause(askAgain)
	}
	r.must(edit(r.tierFiles(), flip), "damage the files")
	lost := 0
	for _, k := range keys {
		if !e.loadsRight(k) {
			lost++
		}
	}
	if lost == 0 {
		r.Errorf("no load met the damage: every block was loaded")
	}
	e.mendedTier(keys)
}

// mendedTier saves blocks again, as a host does with what it computed, and checks that they are loaded right.
func (e *engine) mendedTier(keys []connector.BlockKey) {
	e.Helper()
	for _, k := range keys[len(keys)-smallTier:] {
		e.save(blocks(0, k)...)
		if !e.loadsRight(k) {
			e.Errorf("a block that was saved after the damage cannot be loaded")
			return
		}
	}
}

func offloadCut(r *rig) {
	f := r.onDisk(tierFields{Blocks: smallTier}, 8*smallTier)
	e := r.tiers(f)
	keys := e.saveEach(smallTier)
	e.closeAll()
	r.must(e.inst.Close(), "end the connector")
	r.must(edit(r.tierFiles(), func(data []byte) []byte { return data[:len(data)*3/4-7] }), "cut the files")

	next := r.tiered(f)
	next.env.Model, next.env.Shape = e.env.Model, e.env.Shape
	next.openAll()
	for _, k := range keys {
		next.loadsRight(k)
	}
	next.mendedTier(keys)
}

func offloadPieces(r *rig) {
	e := r.tiers(tierFields{Blocks: 2 * smallTier, Piece: 2 * blockTokens})
	keys := e.keys(5)
	e.save(blocks(0, keys...)...)
	r.equal(4, e.match(keys...), "blocks offered of five, in pieces of two")
	r.equal(2, e.match(keys[:3]...), "blocks offered of three, in pieces of two")
	e.whole(keys[:4], 8)
	odd := r.tiered(tierFields{Blocks: smallTier, Piece: blockTokens + 1})
	s, err := odd.inst.Scheduler(r.Context(), odd.env, odd.config)
	e.refuses("a block_size that is not a multiple of the engine's", "scheduler", s, err)
}
