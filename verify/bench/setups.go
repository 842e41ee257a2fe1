package bench

import (
	"context"
	"path/filepath"
	"strconv"
)

// setup is one way to run a connector.
type setup struct {
	name    string
	absent  string // why it cannot be measured here; empty: it can
	dir     string // where its folder is made
	batches bool   // measured with many blocks in one transfer too
	files   bool   // every stored block stays: few rounds
	later   bool   // blocks are written to where they are loaded from after they are acknowledged
	budget  budget
	small   budget // of transfers below smallBytes, if it is another: there the plugin's message weighs (ADR 127)
	config  func(dir string, sh shape) any
	limit   func(ctx context.Context, s *store, l *link, dir string) (limit, error)
	bare    bool // a bare process that copies the same bytes is measured too (ADR 127)
	// second is something else to compare with in the same turns, which is named rival; nil: nothing.
	second func(ctx context.Context, s *store, l *link, dir string) (limit, error)
	rival  string
	slots  int // blocks that it holds in memory besides one walk through the cache, in walks
}

// smallBytes is a transfer whose copy takes no longer than some wakes of processes.
const smallBytes = 4 << 20

// of is the budget of a shape.
func (s *setup) of(sh shape) budget {
	if s.small != (budget{}) && sh.block()*int64(sh.batch) < smallBytes {
		return s.small
	}
	return s.budget
}

// warm is how many steps more than one walk through the cache a store needs to be full.
func (s *setup) warm(l *link) int { return s.slots * l.blocks / l.shape.batch }

// memoryBytes is the size of a memory tier: a walk through the cache fits, with something to spare.
const memoryBytes = cacheBytes + 96<<20

// small is the size of a memory tier over a disk tier: it holds next to nothing.
func small(sh shape) int64 { return 6 * (sh.block() + 4096) }

func gib(bytes int64) string { return strconv.FormatFloat(float64(bytes)/(1<<30), 'f', 4, 64) }

// setups are the ways to run a connector by its name, or why there is none.
func (s *store) setups(name string) (sets []setup, why string) {
	inMemory := setup{batches: true, bare: true, limit: copyLimit, slots: 1}
	withServer := setup{absent: s.why, files: true, budget: atLeast(0.8), small: atLeast(0.5), limit: redisLimit, second: goRedis, rival: "go-redis"}
	address := ""
	if s.server != nil {
		address = "redis://" + s.server.Address
	}
	switch name {
	case "SharedStorageConnector":
		set := setup{name: "shared storage, tmpfs", dir: s.memory, files: true, limit: fileLimit}
		set.config = func(dir string, _ shape) any { return storageConfig{filepath.Join(dir, "kv")} }
		return []setup{set}, ""
	case "OffloadingConnector":
		memory, disk := inMemory, setup{name: "offloading, disk", dir: s.Dir, files: true, later: true, limit: fileLimit}
		memory.name = "offloading, memory"
		memory.config = func(string, shape) any { return offloadConfig{Bytes: memoryBytes} }
		disk.config = func(dir string, sh shape) any {
			return offloadConfig{Bytes: small(sh), Disk: filepath.Join(dir, "kv"), DiskBytes: 1 << 30, Admit: 1}
		}
		return []setup{memory, disk}, ""
	case "AIBrixOffloadingConnectorV1Type1":
		inMemory.name = "aibrix, memory"
		inMemory.config = func(string, shape) any { return aibrixConfig{gib(memoryBytes), "LRU", blockTokens} }
		return []setup{inMemory}, ""
	case "LMCacheConnectorV1":
		memory := inMemory
		memory.name = "lmcache names, memory"
		memory.config = func(string, shape) any { return lmcacheConfig{Chunk: blockTokens, CPU: true, Size: gib(memoryBytes)} }
		withServer.name = "lmcache names, redis"
		withServer.config = func(string, shape) any { return lmcacheConfig{Chunk: blockTokens, URL: address} }
		return []setup{memory, withServer}, ""
	case "RemoteStoreConnector":
		withServer.name = "remote store, redis"
		withServer.config = func(string, shape) any { return remoteConfig{address} }
		return []setup{withServer}, ""
	case "PipeConnector":
		return nil, "what it sends over is measured as pipe, tcp"
	case "P2pNcclConnector":
		return nil, "what it sends over is measured as pipe, tcp, and as ucx"
	case "NixlConnector":
		return nil, "it reads the producer's cache and stores nothing"
	case "MinimalConnector":
		return nil, "an example that keeps blocks on the heap"
	case "MultiConnector":
		return nil, "it stores nothing itself"
	}
	return nil, "kvport bench has no config for it"
}

// The configs, as far as the benchmark needs them.
type (
	offloadConfig struct {
		Bytes     int64  `json:"cpu_bytes_to_use"`
		Workers   int    `json:"workers,omitempty"`
		Disk      string `json:"disk_path,omitempty"`
		DiskBytes int64  `json:"disk_bytes,omitempty"`
		Admit     int    `json:"disk_admit_after,omitempty"`
	}
	aibrixConfig struct {
		Capacity string `json:"AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB"`
		Policy   string `json:"AIBRIX_KV_CACHE_OL_L1_CACHE_EVICTION_POLICY"`
		Chunk    int    `json:"AIBRIX_KV_CACHE_OL_CHUNK_SIZE"`
	}
	lmcacheConfig struct {
		Chunk int    `json:"lmcache.chunk_size"`
		CPU   bool   `json:"lmcache.local_cpu"`
		Size  string `json:"lmcache.max_local_cpu_size,omitempty"`
		URL   string `json:"lmcache.remote_url,omitempty"`
	}
	remoteConfig struct {
		URL string `json:"url"`
	}
)
