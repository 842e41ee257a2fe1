package connector

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// hashFields is the key derivation written again, from its description.
func hashFields(fields ...any) [32]byte {
	var b []byte
	for _, f := range fields {
		switch f := f.(type) {
		case string:
			b = append(binary.LittleEndian.AppendUint64(b, uint64(len(f))), f...)
		case int:
			b = binary.LittleEndian.AppendUint64(b, uint64(f))
		}
	}
	return sha256.Sum256(b)
}

// Keys are stored on disks and must never change within a version: these are fixed.
func TestKeysAreFixed(t *testing.T) {
	model := NewFingerprint("model", "weights", "f16")
	require.EqualValues(t, hashFields("model", "weights", "f16"), model)
	space := &KeySpace{Model: model, Salt: "tenant", LoRAName: "l", LoRAContent: "c", Multimodal: []string{"img1", "img2"}}
	root := space.Root()
	require.EqualValues(t, hashFields("kvport/root/1", string(model[:]), "tenant", "l", "c", 2, "img1", "img2"), root)
	keys := space.Keys([]int32{1, 2, 3, 4, 5}, 2)
	require.Len(t, keys, 2)
	first := hashFields("kvport/block/1", string(root[:]), "\x01\x00\x00\x00\x02\x00\x00\x00")
	require.EqualValues(t, first, keys[0])
	require.EqualValues(t, hashFields("kvport/block/1", string(first[:]), "\x03\x00\x00\x00\x04\x00\x00\x00"), keys[1])
	require.EqualValues(t, hashFields("kvport/store/1", string(first[:]), string(model[:]), 3, 1, 2, 4, 5),
		NewStoreKey(keys[0], model, 3, Shard{Rank: 1, World: 2, First: 4, Count: 5}))

	require.Equal(t, hex.EncodeToString(first[:]), keys[0].String())
	require.Equal(t, hex.EncodeToString(model[:8]), model.String())
	require.Len(t, NewStoreKey(keys[0], model, 0, Shard{}).String(), 64)
}

// A key depends on the whole prefix and on nothing else.
func TestKeysAreChained(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(1, 5).Draw(t, "block")
		tokens := rapid.SliceOfN(rapid.Int32(), 1, 40).Draw(t, "tokens")
		space := &KeySpace{Salt: rapid.String().Draw(t, "salt"), Secret: rapid.SliceOf(rapid.Byte()).Draw(t, "secret")}
		keys := space.Keys(tokens, size)
		require.Len(t, keys, len(tokens)/size)
		require.Equal(t, keys[:len(keys)/2], space.Keys(tokens[:len(keys)/2*size], size), "of a prefix: a prefix")
		if len(keys) == 0 {
			return
		}
		at := rapid.IntRange(0, len(keys)*size-1).Draw(t, "at")
		tokens[at]++
		changed := space.Keys(tokens, size)
		for i := range keys {
			require.Equal(t, i < at/size, keys[i] == changed[i], "key %d, token %d changed", i, at)
		}
	})
}

// Rules KEY-01 and KEY-02: no field is mistaken for another, and two fields are never mistaken for one.
func TestSpacesNeverShareKeys(t *testing.T) {
	spaces := map[string]*KeySpace{
		"empty":          {},
		"model":          {Model: NewFingerprint("m")},
		"salt":           {Salt: "a"},
		"longer salt":    {Salt: "ab"},
		"name":           {LoRAName: "a"},
		"content":        {LoRAContent: "a"},
		"salt and name":  {Salt: "a", LoRAName: "b"},
		"name, content":  {LoRAName: "a", LoRAContent: "b"},
		"moved border":   {LoRAName: "ab"},
		"one image":      {Multimodal: []string{"ab"}},
		"two images":     {Multimodal: []string{"a", "b"}},
		"other order":    {Multimodal: []string{"b", "a"}},
		"empty image":    {Multimodal: []string{""}},
		"secret":         {Secret: []byte("a")},
		"other secret":   {Secret: []byte("b")},
		"secret as salt": {Salt: "a", Secret: []byte("a")},
	}
	seen := map[BlockKey]string{}
	for name, s := range spaces {
		for what, key := range map[string]BlockKey{"root": s.Root(), "block": s.Keys([]int32{1, 2}, 2)[0]} {
			require.NotContains(t, seen, key, "%s: %s", name, what)
			seen[key] = name
		}
	}
	require.NotEqual(t, NewFingerprint("a", "bc"), NewFingerprint("ab", "c"))
	require.NotEqual(t, NewFingerprint("a"), NewFingerprint("a", ""))
}

// Rule KEY-03.
func TestStoreKeysDiffer(t *testing.T) {
	seen := map[StoreKey]string{}
	for _, shape := range []Fingerprint{{}, NewFingerprint("s")} {
		for n, s := range []Shard{{0, 1, 0, 0}, {0, 2, 0, 0}, {1, 2, 0, 0}, {0, 1, 1, 0}, {0, 1, 0, 1}} {
			for group := range uint16(2) {
				for _, key := range []BlockKey{{1}, {2}} {
					name := fmt.Sprint(shape, n, group, key)
					k := NewStoreKey(key, shape, group, s)
					require.NotContains(t, seen, k, name)
					seen[k] = name
				}
			}
		}
	}
}

func FuzzKeys(f *testing.F) {
	f.Add([]byte{1, 2, 3, 4, 5, 6, 7, 8}, "salt", uint8(1))
	f.Fuzz(func(t *testing.T, raw []byte, salt string, size uint8) {
		tokens := make([]int32, len(raw))
		for i, b := range raw {
			tokens[i] = int32(b) - 100
		}
		space := &KeySpace{Salt: salt}
		block := int(size%16) + 1
		keys := space.Keys(tokens, block)
		require.Len(t, keys, len(tokens)/block)
		parent := space.Root()
		for i, k := range keys {
			parent = space.Next(parent, tokens[i*block:(i+1)*block])
			require.Equal(t, parent, k)
		}
	})
}

func BenchmarkKeys(b *testing.B) {
	space := &KeySpace{Model: NewFingerprint("m")}
	tokens := make([]int32, 1024)
	for b.Loop() {
		space.Keys(tokens, 16)
	}
}

func TestTenants(t *testing.T) {
	require.Zero(t, (*KeySpace)(nil).Tenant())
	require.Zero(t, (&KeySpace{LoRAName: "adapter"}).Tenant())
	a := (&KeySpace{Salt: "a"}).Tenant()
	require.NotZero(t, a)
	require.Equal(t, a, (&KeySpace{Salt: "a", LoRAName: "adapter"}).Tenant(), "a tenant's adapters count together")
	require.NotEqual(t, a, (&KeySpace{Salt: "b"}).Tenant())
	of := func(tenant, salt string) uint64 { return (&KeySpace{Salt: TenantSalt(tenant, salt)}).Tenant() }
	require.Equal(t, of("a", ""), of("a", "session 1"), "a client gets no further quota by further salts")
	require.NotEqual(t, of("a", ""), of("b", ""))
	require.NotEqual(t, of("a", ""), a, "a salt that a client chose is no tenant")
	require.NotEqual(t, a, (&KeySpace{Salt: "a", Secret: []byte("secret")}).Tenant())
}

// Keys of foreign blocks are also stored, so they are fixed here: one by its description and one by its
// bytes.
func TestForeignKeysAreFixed(t *testing.T) {
	space := &KeySpace{Model: NewFingerprint("model", "weights", "f16"), Salt: "tenant"}
	root := space.Root()
	require.EqualValues(t, hashFields("kvport/foreign/1", string(root[:]), "vllm/sha256_cbor", "hash"), space.Foreign("vllm/sha256_cbor", []byte("hash")))
	plain := &KeySpace{}
	require.Equal(t, "7f045b9887d49e0c2590b07a56e196e6defbae139ec11239f5118b2f5b786b23", plain.Foreign("vllm/sha256", make([]byte, 32)).String())
	secret := &KeySpace{Secret: []byte("s")}
	seen := map[BlockKey]bool{}
	for _, s := range []*KeySpace{space, plain, secret} {
		for _, engine := range []string{"vllm/sha256", "vllm/sha256_cbor", "vllm/"} {
			for _, hash := range []string{"", "hash", "sha256hash"} {
				seen[s.Foreign(engine, []byte(hash))] = true
			}
		}
	}
	require.Len(t, seen, 27, "no two share a key")
}

func TestTenantSalt(t *testing.T) {
	seen := map[string]bool{}
	for _, tenant := range []string{"a", "b", "ab"} {
		for _, salt := range []string{"", ":", "a", "a:", ":a", "kvport-tenant:a:"} {
			made := TenantSalt(tenant, salt)
			require.False(t, seen[made], made)
			seen[made] = true
			require.Equal(t, tenant, TenantOf(made))
			require.True(t, IsTenantSalt(made))
		}
	}
	for _, other := range []string{"", "a", "tenant:a:", "kvport-tenant", " kvport-tenant:a:"} {
		require.Empty(t, TenantOf(other))
		require.False(t, IsTenantSalt(other))
	}
	require.Empty(t, TenantOf("kvport-tenant:a"))
	require.True(t, IsTenantSalt("kvport-tenant:a"), "nobody but a router may send what looks so")
}
