package agent

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
)

// keyring turns an engine's block hashes into keys. It remembers: a waiting request asks
// with the same hashes again and again.
type keyring struct {
	space  connector.KeySpace
	hashes string

	back *recall // nil: nobody asks for hashes of keys

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

// remember notes whose keys are going to be saved, before step makes keys of hashes.
func (k *keyring) remember(s *connector.Step) {
	if k.back == nil {
		return
	}
	for i := range s.Computed {
		for _, b := range s.Computed[i].Blocks {
			if b.Key != (connector.BlockKey{}) {
				k.back.add(k.of(b.Key), b.Key)
			}
		}
	}
}

// recall finds the hash of a key that was saved. It remembers the last half to whole of its limit,
// more than a Store's watch does (sdk): what it has forgotten, others have too.
type recall struct {
	mu           sync.Mutex
	fresh, older map[connector.BlockKey]connector.BlockKey
}

// maxRecalled bounds each half of what is recalled.
const maxRecalled = 1 << 17

func newRecall() *recall { return &recall{fresh: map[connector.BlockKey]connector.BlockKey{}} }

func (r *recall) add(key, hash connector.BlockKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.fresh) >= maxRecalled {
		r.older, r.fresh = r.fresh, map[connector.BlockKey]connector.BlockKey{}
	}
	r.fresh[key] = hash
}

// hashes turns keys into hashes and leaves out those that it does not know.
func (r *recall) hashes(keys []connector.BlockKey) []connector.BlockKey {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]connector.BlockKey, 0, len(keys))
	for _, k := range keys {
		hash, ok := r.fresh[k]
		if !ok {
			hash, ok = r.older[k]
		}
		if ok {
			out = append(out, hash)
		}
	}
	return out
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
