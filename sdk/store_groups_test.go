package sdk

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// groupsEnv has one group of full attention and one of a window of two blocks, on two ranks.
func groupsEnv(rank int) connector.Env {
	env := testEnv(rank, 2)
	env.Layout.Groups = append(env.Layout.Groups, connector.Group{BlockTokens: 4, Policy: connector.PolicyTrailing, Trailing: 2})
	env.Layout.Segments[1].Group = 1
	return env
}

func groupsPlugin(m *memory) connector.Plugin {
	return FromStore(Definition{Name: "Memory", Version: "1", Scope: connector.ScopeEngine, Groups: true},
		func(context.Context, connector.Env, noConfig) (connector.Store, error) { return m, nil })
}

// groupKey is where the store has a rank's part of a block.
func groupKey(env *connector.Env, k connector.BlockKey, group, rank int) connector.StoreKey {
	return connector.NewStoreKey(k, env.Shape, uint16(group), connector.Shard{Rank: rank, World: 2})
}

// longest tries all prefixes and counts the blocks behind first.
func (m *memory) longest(env *connector.Env, keys []connector.BlockKey, first int) int {
	for end := len(keys); end > first; end-- {
		whole := true
		for i := first; i < end; i++ {
			for part := range 4 {
				needed := part/2 == 0 || i >= end-2
				whole = whole && (!needed || m.data[groupKey(env, keys[i], part/2, part%2)] != nil)
			}
		}
		if whole {
			return end - first
		}
	}
	return 0
}

// A match is the longest prefix after which every group can continue, on every rank. The test compares it
// with the one found by trying all prefixes.
func TestStoreGroups(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	m := newMemory()
	var lookups atomic.Int32
	m.before = func(string, int) error { lookups.Add(1); return nil }
	env := groupsEnv(0)
	s, err := groupsPlugin(m).Scheduler(t.Context(), env, nil)
	require.NoError(t, err)
	defer s.Close()
	found := map[int]int{}
	for range 300 {
		keys := make([]connector.BlockKey, 1+rng.IntN(9))
		holes := rng.IntN(4)
		for i := range keys {
			keys[i] = connector.BlockKey{byte(rng.Int()), byte(rng.Int()), byte(rng.Int()), 1}
			for part := range 4 {
				if holes == 0 || rng.IntN(12) >= holes {
					m.data[groupKey(&env, keys[i], part/2, part%2)] = [][]byte{{1}}
				}
			}
		}
		first := rng.IntN(len(keys) + 1)
		want := m.longest(&env, keys, first) * 4
		lookups.Store(0)
		q := connector.Query{Request: "r", Tokens: len(keys)*4 + 1, Keys: keys, Computed: first * 4}
		got, err := s.Match(t.Context(), []connector.Query{q, {Request: "empty", Tokens: 3}, q})
		require.NoError(t, err)
		require.Equal(t, connector.Match{Tokens: want, Async: want > 0}, got[0])
		require.Equal(t, []connector.Match{{}, got[0]}, got[1:])
		found[want/4]++
		if want == (len(keys)-first)*4 {
			require.LessOrEqual(t, lookups.Load(), int32(1), "everything is there")
		}
	}
	require.Greater(t, len(found), 6)
}

// Blocks of the two groups come back as they were saved although key and id are equal.
func TestStoreKeepsGroupsApart(t *testing.T) {
	m := newMemory()
	env := groupsEnv(1)
	w, err := groupsPlugin(m).Worker(t.Context(), env, nil)
	require.NoError(t, err)
	defer w.Close()
	kv, err := connector.NewKV(env.Layout, [][]byte{make([]byte, 8*testBlock)})
	require.NoError(t, err)
	blocks := []connector.Block{{Key: connector.BlockKey{1}, ID: 3}, {Key: connector.BlockKey{1}, ID: 3, Group: 1}}
	kv.View(0, 3)[5], kv.View(1, 3)[5] = 10, 20
	require.NoError(t, w.Save(t.Context(), &connector.Transfer{Tokens: 4, Blocks: blocks}, kv))
	require.Len(t, m.data, 2)
	kv.View(0, 3)[5], kv.View(1, 3)[5] = 0, 0
	require.NoError(t, w.Load(t.Context(), &connector.Transfer{Tokens: 4, Blocks: blocks}, kv))
	require.Equal(t, []byte{10, 20}, []byte{kv.View(0, 3)[5], kv.View(1, 3)[5]})
}

func TestStoreRefusesUnequalGroups(t *testing.T) {
	env := groupsEnv(0)
	env.Layout.Groups[1].BlockTokens = 8
	_, err := groupsPlugin(newMemory()).Scheduler(t.Context(), env, nil)
	require.ErrorIs(t, err, connector.ErrIncompatible)
	require.ErrorContains(t, err, "blocks of 8 tokens")
	env.Layout.Groups = nil
	_, err = groupsPlugin(newMemory()).Worker(t.Context(), env, nil)
	require.ErrorIs(t, err, connector.ErrIncompatible)
	info, err := groupsPlugin(newMemory()).Describe(t.Context(), nil)
	require.NoError(t, err)
	require.True(t, info.Groups)
}
