package agent

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk/host"
)

// keyring turns an engine's block hashes into keys (ADR 0031). It remembers: a waiting request asks
// with the same hashes again and again.
type keyring struct {
	space  connector.KeySpace
	hashes string

	mu    sync.Mutex
	known map[connector.BlockKey]connector.BlockKey
}

// maxKnown bounds what a keyring remembers: 64 bytes each.
const maxKnown = 1 << 16

func newKeyring(space connector.KeySpace, hashes string) *keyring {
	return &keyring{space: space, hashes: hashes, known: map[connector.BlockKey]connector.BlockKey{}}
}

// of is the key of a hash; a partial block has none, and gets none.
func (k *keyring) of(hash connector.BlockKey) connector.BlockKey {
	if hash == (connector.BlockKey{}) {
		return hash
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	key, ok := k.known[hash]
	if !ok {
		if len(k.known) >= maxKnown {
			clear(k.known)
		}
		key = k.space.Foreign(k.hashes, hash[:])
		k.known[hash] = key
	}
	return key
}

func (k *keyring) query(q *connector.Query) {
	for i, h := range q.Keys {
		q.Keys[i] = k.of(h)
	}
}

func (k *keyring) blocks(blocks []connector.Block) {
	for i := range blocks {
		blocks[i].Key = k.of(blocks[i].Key)
	}
}

func (k *keyring) step(s *connector.Step) {
	for i := range s.Arrived {
		k.query(&s.Arrived[i])
	}
	for _, list := range [][]connector.Transfer{s.Admitted, s.Computed} {
		for i := range list {
			k.blocks(list[i].Blocks)
		}
	}
	for i := range s.Ended {
		k.blocks(s.Ended[i].Blocks)
	}
}

// strong are the ways of hashing that are cryptographic and give the same in every process.
func strong() []string {
	return []string{"sha256", "sha256_cbor", "sha512", "blake2b", "blake3"}
}

// checkHashes refuses hashes by which two prompts could share a block that is not theirs, or no two
// processes would share any (rule AGENT-06). A name is ENGINE/WAY, such as vllm/sha256_cbor.
func checkHashes(name string, s *host.Settings) error {
	if s.AllowWeakHashes {
		return nil
	}
	engine, way, ok := strings.Cut(name, "/")
	if ok && engine != "" && slices.Contains(strong(), way) {
		return nil
	}
	return fmt.Errorf("attach.hashes is %q: block hashes must be cryptographic and the same in every process, want ENGINE/ one of %s (vLLM: --prefix-caching-hash-algo sha256_cbor, and PYTHONHASHSEED set); kvport.allow_weak_hashes accepts others: %w",
		name, strings.Join(strong(), ", "), connector.ErrIncompatible)
}
