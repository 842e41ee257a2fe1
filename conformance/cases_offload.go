package conformance

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/kvport/kvport/connector"
)

// offloadCase is a case of a connector with tiers, whose config has the fields of OFF-01.
func offloadCase(id, rule, text string, body func(*rig)) Case {
	return Case{ID: id, Rule: rule, Text: text, Profiles: []Profile{Offload}, Run: rigged(0, false, body)}
}

func offloadCases() []Case {
	acknowledged := offloadCase("offload-acknowledged", "OFF-05", "More is saved at once than memory holds: what the answer does not name is offered.", offloadAcknowledged)
	acknowledged.Optional = true // not at trust level staged
	return []Case{
		offloadCase("offload-config", "OFF-01", "Sizes of the tiers that contradict each other are refused; the policies are known.", offloadConfig),
		offloadCase("offload-bound", "OFF-02", "Three times what memory holds is saved: no more than it holds is offered.", offloadBound),
		offloadCase("offload-disk-bound", "OFF-02", "Twenty times what the disk tier holds is saved: the folder stays within disk_bytes.", offloadDiskBound),
		offloadCase("offload-newest", "OFF-03", "Memory is full: what was saved last is offered, what was saved first is not.", offloadNewest),
		offloadCase("offload-hot", "OFF-03", "A block that is loaded all the time stays, whatever else is saved, with every policy.", offloadHot),
		offloadCase("offload-policies", "OFF-03", "With every policy, what is offered is right while blocks come and go.", offloadPolicies),
		offloadCase("offload-pinned", "OFF-04", "Blocks are loaded while others push them out: each load is whole or fails.", offloadPinned),
		acknowledged,
		offloadCase("offload-spill", "OFF-06", "What memory gave up is offered from disk, and right.", offloadSpill),
		offloadCase("offload-restart", "OFF-06", "The next life of the engine finds what is on disk.", offloadRestart),
		offloadCase("offload-lookups", "OFF-07", "Matches of what is on disk push nothing out of memory.", offloadLookups),
		offloadCase("offload-threshold", "OFF-08", "With store_threshold 2 a block is declined once, then stored.", offloadThreshold),
		offloadCase("offload-quota", "OFF-09", "A tenant over its quota is told so; another is not concerned.", offloadQuota),
		offloadCase("offload-ttl", "OFF-10", "A block whose time is over is neither offered nor loaded, from memory or disk.", offloadTTL),
		offloadCase("offload-reset", "OFF-11", "A Reset empties both tiers.", offloadReset),
		offloadCase("offload-damaged", "OFF-12", "Bits are flipped all over the folder: loads are right or fail, and saves mend it.", offloadDamaged),
		offloadCase("offload-cut", "OFF-12", "Files of the folder are cut short before the engine's next life: the same.", offloadCut),
		offloadCase("offload-pieces", "OFF-13", "With block_size of two blocks, hits come in twos.", offloadPieces),
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
		return nil // what was evicted meanwhile is no error
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
