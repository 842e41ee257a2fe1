package kvindex

import (
	"hash/maphash"
	"math/bits"

	"github.com/kvport/kvport/engine/kvevents"
)

// mix is a keyed step of a chain: what comes out depends on all of both.
func (x *Index) mix(state, next uint64) uint64 {
	high, low := bits.Mul64(state^x.secret[0], next^x.secret[1])
	return high ^ low
}

// extend is the hash of a prefix and the tokens behind it.
func (x *Index) extend(prefix uint64, tokens []int32) uint64 {
	for _, t := range tokens {
		prefix = x.mix(prefix, uint64(uint32(t))+1)
	}
	return nonzero(prefix)
}

// depend is the hash of a prefix and of what the next block depends on apart from tokens.
func (x *Index) depend(prefix uint64, values []string) uint64 {
	for _, v := range values {
		prefix = x.mix(prefix, maphash.String(x.seed, v))
	}
	return prefix
}

// root is the hash of nothing, under an adapter if there is one.
func (x *Index) root(adapter string) uint64 {
	prefix := x.mix(0, 0)
	if adapter != "" {
		prefix = x.depend(prefix, []string{kvevents.Text(adapter)})
	}
	return prefix
}

// key is the place of an engine's hash in the tables. An engine chooses its hashes, but not their places.
func (x *Index) key(h kvevents.Hash) uint64 {
	var buf [64]byte
	return nonzero(maphash.Bytes(x.seed, h.AppendTo(buf[:0])))
}

// withoutAdapter is what a block depends on apart from tokens and its adapter: vLLM names the adapter first.
func withoutAdapter(values []string, adapter string) []string {
	if adapter != "" && len(values) > 0 && values[0] == kvevents.Text(adapter) {
		return values[1:]
	}
	return values
}
