package main

import (
	"bufio"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/host"
)

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
	if available := availableMemory(); available > 0 {
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
	memory := meminfo("MemTotal")
	if memory == 0 {
		memory = math.MaxInt64
	}
	if most := memory / block; int64(f.numBlocks) > most {
		return fmt.Errorf("--num-blocks is %d, at %d bytes each more than this machine has memory for: want at most %d", f.numBlocks, block, most)
	}
	return nil
}

// availableMemory is what the kernel says could be allocated without swapping; 0 if it does not say.
func availableMemory() int64 { return meminfo("MemAvailable") }

// meminfo is a value of /proc/meminfo in bytes; 0 if it is not there.
func meminfo(name string) int64 {
	file, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		rest, found := strings.CutPrefix(lines.Text(), name+":")
		if !found {
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		if err != nil {
			return 0
		}
		return kib << 10
	}
	return 0
}
