package conformance

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// Rule KEY-01.
func TestFieldsNeverCollide(t *testing.T) {
	prints := map[connector.Fingerprint][]string{}
	for _, fields := range [][]string{
		{},
		{""},
		{"", ""},
		{"a"},
		{"ab"},
		{"a", "b"},
		{"", "ab"},
		{"ab", ""},
		{"a", "", "b"},
		{"a\x00b"},
		{"\x01\x00\x00\x00\x00\x00\x00\x00a"},
		{"a\x01\x00\x00\x00\x00\x00\x00\x00b"},
	} {
		for _, domain := range []string{"d", "da", ""} {
			f := connector.NewFingerprint(domain, fields...)
			require.NotContains(t, prints, f, "%q %q", domain, fields)
			prints[f] = append([]string{domain}, fields...)
			require.Equal(t, f, connector.NewFingerprint(domain, fields...))
		}
	}
	roots := map[connector.BlockKey]bool{}
	for _, s := range []connector.KeySpace{
		{Salt: "ab"},
		{Salt: "a", LoRAName: "b"},
		{LoRAName: "ab"},
		{LoRAName: "a", LoRAContent: "b"},
		{LoRAContent: "ab"},
		{Multimodal: []string{"ab"}},
		{Multimodal: []string{"a", "b"}},
		{Multimodal: []string{"", "ab"}},
		{LoRAContent: "a", Multimodal: []string{"b"}},
	} {
		require.False(t, roots[s.Root()], "%+v", s)
		roots[s.Root()] = true
	}
}

// Rule KEY-02.
func TestKeySpacesNeverShare(t *testing.T) {
	tokens := []int32{1, 2, 3, 4, 5, 6, 7, 8, 9}
	base := connector.KeySpace{Model: connector.NewFingerprint("m"), Salt: "s", LoRAName: "l", LoRAContent: "c", Multimodal: []string{"i"}}
	spaces := map[string]func(*connector.KeySpace){
		"none":    func(*connector.KeySpace) {},
		"model":   func(s *connector.KeySpace) { s.Model[31] ^= 1 },
		"salt":    func(s *connector.KeySpace) { s.Salt = "" },
		"name":    func(s *connector.KeySpace) { s.LoRAName = "m" },
		"content": func(s *connector.KeySpace) { s.LoRAContent = "d" },
		"images":  func(s *connector.KeySpace) { s.Multimodal = []string{"i", "i"} },
		"order":   func(s *connector.KeySpace) { s.Multimodal = []string{"j"} },
		"secret":  func(s *connector.KeySpace) { s.Secret = []byte("x") },
		"other":   func(s *connector.KeySpace) { s.Secret = []byte("y") },
	}
	seen := map[connector.BlockKey]string{}
	for name, change := range spaces {
		s := base
		change(&s)
		keys := s.Keys(tokens, 4)
		require.Len(t, keys, 2, "a partial block has no key")
		require.Equal(t, s.Next(keys[0], tokens[4:8]), keys[1])
		for _, k := range keys {
			require.Empty(t, seen[k], "%s shares with it", name)
			seen[k] = name
		}
	}
	// A key covers the whole prefix, not only its own tokens.
	other := base.Keys([]int32{0, 2, 3, 4, 5, 6, 7, 8}, 4)
	require.NotEqual(t, base.Keys(tokens, 4)[1], other[1])
}

// Rule KEY-03.
func TestStoreKeysNeverShare(t *testing.T) {
	seen := map[connector.StoreKey]bool{}
	for _, k := range []connector.BlockKey{{1}, {2}} {
		for _, shape := range []connector.Fingerprint{{1}, {2}} {
			for group := range uint16(2) {
				for _, shard := range []connector.Shard{
					{World: 1}, {World: 2}, {Rank: 1, World: 2}, {World: 1, First: 1}, {World: 1, Count: 1}, {World: 1, First: 1, Count: 1},
				} {
					sk := connector.NewStoreKey(k, shape, group, shard)
					require.False(t, seen[sk])
					seen[sk] = true
					require.Equal(t, sk, connector.NewStoreKey(k, shape, group, shard))
				}
			}
		}
	}
	require.Len(t, seen, 48)
}

// The pairs of near-keys are near: they share what they say, as long as keys are derived as they are.
func TestNearPairs(t *testing.T) {
	key := func(n uint64) connector.StoreKey {
		return connector.NewStoreKey(nearKey(n), nearShape(), 0, connector.Shard{World: 1})
	}
	for _, pair := range nearPairs() {
		a, b, n := key(pair.a), key(pair.b), 0
		require.NotEqual(t, a, b)
		if _, err := fmt.Sscanf(pair.share, "first %d", &n); err != nil {
			_, err = fmt.Sscanf(pair.share, "last %d", &n)
			require.NoError(t, err)
			slices.Reverse(a[:])
			slices.Reverse(b[:])
		}
		require.GreaterOrEqual(t, n, 7)
		require.Equal(t, a[:n], b[:n], pair.share)
	}
}
