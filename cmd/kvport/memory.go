package main

import (
	"bufio"
	"os"
	"strconv"
	"strings"

	"github.com/kvport/kvport/engine/model"
	"github.com/kvport/kvport/sdk/host"
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

// availableMemory is what the kernel says could be allocated without swapping; 0 if it does not say.
func availableMemory() int64 {
	file, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		rest, found := strings.CutPrefix(lines.Text(), "MemAvailable:")
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
