package connector

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
)

type (
	// BlockKey is the content address of a full block: a hash chained over its whole prefix.
	BlockKey [32]byte
	// StoreKey is the content address of one shard of one block in one byte layout.
	StoreKey [32]byte
	// Fingerprint is a hash of everything that must be equal on both ends of a transfer.
	Fingerprint [32]byte
)

// String is the key in hex.
func (k BlockKey) String() string { return hex.EncodeToString(k[:]) }

// String is the key in hex.
func (k StoreKey) String() string { return hex.EncodeToString(k[:]) }

// String is the fingerprint's first 8 bytes in hex, enough for messages.
func (f Fingerprint) String() string { return hex.EncodeToString(f[:8]) }

// NewFingerprint hashes named fields. Each is length-prefixed, so no two field lists collide by
// concatenation (rule KEY-01).
func NewFingerprint(domain string, fields ...string) Fingerprint {
	h := sha256.New()
	writeField(h, []byte(domain))
	for _, f := range fields {
		writeField(h, []byte(f))
	}
	return Fingerprint(h.Sum(nil))
}

// KeySpace is everything, apart from token ids, that decides whether two requests may share KV blocks. Two
// spaces that differ in any field never share a key (rule KEY-02).
type KeySpace struct {
	Model       Fingerprint // weights, dtype, rope, adapters
	Salt        string      // tenant or cache_salt of the request
	LoRAName    string
	LoRAContent string   // hash of the adapter's weights
	Multimodal  []string // content ids of images and the like, in prompt order
	Secret      []byte   // tenant secret; when it is set, keys are HMACs and cannot be guessed
}

// Root is the parent of a request's first block.
func (s *KeySpace) Root() BlockKey {
	h := s.hash("kvport/root/1")
	writeField(h, s.Model[:])
	writeField(h, []byte(s.Salt))
	writeField(h, []byte(s.LoRAName))
	writeField(h, []byte(s.LoRAContent))
	writeCount(h, len(s.Multimodal))
	for _, m := range s.Multimodal {
		writeField(h, []byte(m))
	}
	return BlockKey(h.Sum(nil))
}

// Tenant is Transfer.Tenant for requests of this space: 0 if the space is nil or has no salt. All salts of a tenant
// ([TenantSalt]) count together.
func (s *KeySpace) Tenant() uint64 {
	if s == nil || s.Salt == "" {
		return 0
	}
	whose := s.Salt
	if tenant := TenantOf(whose); tenant != "" {
		whose = TenantSalt(tenant, "")
	}
	h := s.hash("kvport/tenant/1")
	writeField(h, []byte(whose))
	return binary.LittleEndian.Uint64(h.Sum(nil)) | 1
}

// Next is the key of the block that holds tokens and follows the block with key parent.
func (s *KeySpace) Next(parent BlockKey, tokens []int32) BlockKey {
	h := s.hash("kvport/block/1")
	writeField(h, parent[:])
	buf := make([]byte, 0, 4*len(tokens))
	for _, t := range tokens {
		buf = binary.LittleEndian.AppendUint32(buf, uint32(t))
	}
	writeField(h, buf)
	return BlockKey(h.Sum(nil))
}

// Keys returns the keys of all full blocks of a prompt, in order.
func (s *KeySpace) Keys(tokens []int32, blockTokens int) []BlockKey {
	keys := make([]BlockKey, 0, len(tokens)/blockTokens)
	parent := s.Root()
	for i := blockTokens; i <= len(tokens); i += blockTokens {
		parent = s.Next(parent, tokens[i-blockTokens:i])
		keys = append(keys, parent)
	}
	return keys
}

// Addresses are the content addresses of a prompt's blocks, in order, in an engine with blocks of that size:
// the keys of its full blocks, and behind them that of the partial last block, if there is one. Engines with
// different block sizes compare addresses to find out whether they have the same prompt (rule RESHAPE-01).
func (s *KeySpace) Addresses(tokens []int32, blockTokens int) []BlockKey {
	list := s.Keys(tokens, blockTokens)
	rest := tokens[len(list)*blockTokens:]
	if len(rest) == 0 {
		return list
	}
	parent := s.Root()
	if len(list) > 0 {
		parent = list[len(list)-1]
	}
	return append(list, s.Next(parent, rest))
}

// Foreign is the key of a full block to which an engine that chains hashes itself gave hash. The argument
// engine names the engine and its way of hashing, such as "vllm/sha256": hashes made in two ways never
// share a key. The space adds model, salt and secret. The engine is responsible for a hash that covers the
// whole prefix and whatever else decides who may share the block.
func (s *KeySpace) Foreign(engine string, hash []byte) BlockKey {
	h := s.hash("kvport/foreign/1")
	root := s.Root()
	writeField(h, root[:])
	writeField(h, []byte(engine))
	writeField(h, hash)
	return BlockKey(h.Sum(nil))
}

func (s *KeySpace) hash(domain string) hash.Hash {
	h := sha256.New()
	if len(s.Secret) > 0 {
		h = hmac.New(sha256.New, s.Secret)
	}
	writeField(h, []byte(domain))
	return h
}

// Shard is one rank's part of a block.
type Shard struct {
	Rank, World  int
	First, Count int // range of the group's segments; Count 0 means all
}

// storeDomain is the first field of a StoreKey; it names the version of what follows.
const storeDomain = "kvport/store/1"

// NewStoreKey derives the key under which a Store keeps one shard of one block (rule KEY-03). It allocates nothing:
// a lookup derives one for every block, group and shard of a prompt.
func NewStoreKey(k BlockKey, shape Fingerprint, group uint16, shard Shard) StoreKey {
	var buf [8 + len(storeDomain) + 8 + len(k) + 8 + len(shape) + 5*8]byte
	b := append(appendCount(buf[:0], len(storeDomain)), storeDomain...)
	b = append(appendCount(b, len(k)), k[:]...)
	b = append(appendCount(b, len(shape)), shape[:]...)
	for _, n := range [...]int{int(group), shard.Rank, shard.World, shard.First, shard.Count} {
		b = appendCount(b, n)
	}
	return StoreKey(sha256.Sum256(b))
}

func appendCount(b []byte, n int) []byte { return binary.LittleEndian.AppendUint64(b, uint64(n)) }

func writeField(h hash.Hash, b []byte) {
	writeCount(h, len(b))
	h.Write(b)
}

func writeCount(h hash.Hash, n int) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(n))
	h.Write(b[:])
}
