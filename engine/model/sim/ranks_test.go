package sim

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/model"
)

// spread is a sequence on the caches of all ranks, with a block table for each group.
type spread struct {
	ranks  []*connector.KV
	tables [][]connector.BlockID
}

// newSpread gives each group blocks of its own, in random order.
func newSpread(t testing.TB, m *Model, rng *rand.Rand, blockTokens, perGroup int) spread {
	groups := m.o.Groups
	s := spread{ranks: newCaches(t, m, blockTokens, perGroup*groups)}
	ids := table(rng, perGroup*groups)
	for g := range groups {
		s.tables = append(s.tables, ids[g*perGroup:(g+1)*perGroup])
	}
	return s
}

// compute runs tokens [from, len) in chunks of a given size and returns their logits.
func (s *spread) compute(t testing.TB, m *Model, tokens []int32, from, chunk int) (all [][]float32) {
	for at := from; at < len(tokens); {
		n := min(chunk, len(tokens)-at)
		c := model.Chunk{Tokens: tokens[at : at+n], Start: at, Blocks: s.tables}
		for range n {
			c.Logits = append(c.Logits, make([]float32, vocab))
		}
		require.NoError(t, m.ForwardRanks(&model.Batch{Chunks: []model.Chunk{c}}, s.ranks))
		all = append(all, c.Logits...)
		at += n
	}
	return all
}

func TestSpreadLogitsDependOnTokensAlone(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 1))
	tokens := prompt(rng, 120)
	for _, ranks := range []int{1, 3} {
		for groups := range 3 {
			o := Options{Ranks: ranks, Groups: groups + 1, Window: 19}
			var want [][]float32
			for _, stride := range Strides() {
				for _, blockTokens := range []int{1, 5, 16, 120} {
					o.Stride = stride
					m := newModel(t, o)
					s := newSpread(t, m, rng, blockTokens, (len(tokens)+blockTokens-1)/blockTokens)
					got := s.compute(t, m, tokens, 0, 1+rng.IntN(len(tokens)))
					if want == nil {
						want = got
					}
					require.Equal(t, want, got, "%d ranks, %d groups, stride %s, blocks of %d", ranks, groups+1, stride, blockTokens)
				}
			}
		}
	}
}

// TestWindow computes on from a prefix of which only the blocks that the policies name are there.
func TestWindow(t *testing.T) {
	rng := rand.New(rand.NewPCG(12, 1))
	tokens := prompt(rng, 90)
	for _, blockTokens := range []int{1, 3, 16} {
		for _, window := range []int{2, 16, 17, 18, 40, 200} {
			m := newModel(t, Options{Groups: 2, Window: window})
			blocks := (len(tokens) + blockTokens - 1) / blockTokens
			s := newSpread(t, m, rng, blockTokens, blocks)
			want := s.compute(t, m, tokens, 0, 90)
			trailing := s.ranks[0].Layout().Groups[1].Trailing
			for from := 1; from < 90; from += 7 {
				for i := range max(0, from/blockTokens-trailing) {
					for _, segment := range s.ranks[0].Segments(1) { // nobody reads it any more
						clear(s.ranks[0].View(segment, s.tables[1][i]))
					}
					s.tables[1][i] = -1
				}
				require.Equal(t, want[from:], s.compute(t, m, tokens, from, 90), "window %d, blocks of %d, from %d", window, blockTokens, from)
			}
			if first := 89 / blockTokens; window <= blockTokens && first > 1 {
				s.tables[1][first-1] = -1
				err := m.Forward(&model.Batch{Chunks: []model.Chunk{{Tokens: tokens[89:], Start: first * blockTokens, Blocks: s.tables}}}, s.ranks[0])
				require.Error(t, err, "a block in reach is gone")
			}
		}
	}
}

// TestEveryWrongByteOnEveryRankShows flips bytes that a decode attends to, on every rank, in every
// group and layout, and none that it does not.
func TestEveryWrongByteOnEveryRankShows(t *testing.T) {
	rng := rand.New(rand.NewPCG(13, 1))
	const n, blockTokens, window = 14, 4, 6
	tokens := prompt(rng, n+1)
	for _, stride := range Strides() {
		m := newModel(t, Options{Layers: 4, BytesPerToken: 16, Ranks: 3, Groups: 2, Window: window, Stride: stride})
		s := newSpread(t, m, rng, blockTokens, 4)
		s.compute(t, m, tokens[:n], 0, n)
		want := s.compute(t, m, tokens, n, 1)
		flips := map[bool]int{}
		for rank, kv := range s.ranks {
			for segment, seg := range kv.Layout().Segments {
				for position := range n {
					width := int(seg.Bytes) / blockTokens
					token := kv.View(segment, s.tables[seg.Group][position/blockTokens])[position%blockTokens*width:][:width]
					reached := seg.Group == 0 || position > n-window
					for i := range token {
						token[i] ^= 1 << rng.IntN(8)
						before := bytes.Clone(token)
						differs := fmt.Sprint(want) != fmt.Sprint(s.compute(t, m, tokens, n, 1))
						require.Equal(t, reached, differs, "%s: rank %d segment %d position %d byte %d", stride, rank, segment, position, i)
						require.Equal(t, before, token)
						s.compute(t, m, tokens[:n], 0, n) // as it was
						flips[reached]++
					}
				}
			}
		}
		require.Equal(t, map[bool]int{true: 3 * 2 * 16 * (n + window - 1), false: 3 * 2 * 16 * (n - window + 1)}, flips)
	}
}

// TestRanksDoNotMatter: as many heads on fewer or more ranks give the same logits.
func TestRanksDoNotMatter(t *testing.T) {
	rng := rand.New(rand.NewPCG(16, 1))
	tokens := prompt(rng, 40)
	for heads, worlds := range map[int][]int{0: {1, 2, 4}, 12: {1, 2, 3, 4, 6, 12}} {
		var want [][]float32
		base := ""
		for _, ranks := range worlds {
			for _, stride := range Strides() {
				m := newModel(t, Options{Heads: heads, Ranks: ranks, Stride: stride})
				s := newSpread(t, m, rng, 8, 5)
				got := s.compute(t, m, tokens, 0, 7)
				if want == nil {
					want, base = got, m.Spec().ByteShape
				}
				require.Equal(t, want, got, "%d heads on %d ranks, stride %s", heads, ranks, stride)
				require.Equal(t, base, m.Spec().ByteShape)
			}
		}
	}
	_, err := New(Options{Heads: 4, Ranks: 3})
	require.ErrorContains(t, err, "heads")
}

func TestRanksHoldDifferentBytes(t *testing.T) {
	rng := rand.New(rand.NewPCG(14, 1))
	m := newModel(t, Options{Ranks: 3})
	s := newSpread(t, m, rng, 8, 2)
	s.compute(t, m, prompt(rng, 16), 0, 16)
	for segment := range s.ranks[0].Layout().Segments {
		for _, id := range s.tables[0] {
			for a := range 3 {
				for b := range a {
					require.NotEqual(t, s.ranks[a].View(segment, id), s.ranks[b].View(segment, id), "ranks %d and %d, layer %d", a, b, segment)
				}
			}
		}
	}
}

// TestStrides checks that no layout writes outside its blocks, and that those of one shape hold the
// same bytes for the same tokens.
func TestStrides(t *testing.T) {
	rng := rand.New(rand.NewPCG(15, 1))
	tokens := prompt(rng, 40)
	content := map[Stride][]byte{}
	for _, stride := range Strides() {
		m := newModel(t, Options{Groups: 2, Window: 1000, Stride: stride})
		l := m.Layout(8, 10)
		memory := bytes.Repeat([]byte{guard}, 1<<20)
		require.NoError(t, l.Validate([]int64{int64(len(memory))}))
		kv, err := connector.NewKV(l, [][]byte{memory})
		require.NoError(t, err)
		s := spread{ranks: []*connector.KV{kv}, tables: [][]connector.BlockID{{0, 2, 4, 6, 8}, {9, 7, 5, 3, 1}}}
		s.compute(t, m, tokens, 0, 7)
		for g, ids := range s.tables {
			for _, id := range ids {
				spans, err := kv.Spans(connector.Block{ID: id, Group: uint16(g)})
				require.NoError(t, err)
				for _, span := range spans {
					content[stride] = append(content[stride], span...)
					for i := range span {
						span[i] = guard
					}
				}
			}
		}
		require.Equal(t, len(memory), bytes.Count(memory, []byte{guard}), "%s wrote outside its blocks", stride)
	}
	require.Equal(t, content[ByLayer], content[ByBlock])
	require.Equal(t, content[ByLayer], content[ByShared])
	require.Len(t, content[ByPlane], len(content[ByLayer]))
	require.NotEqual(t, content[ByLayer], content[ByPlane])
}

func TestParseOptions(t *testing.T) {
	o, err := ParseOptions("groups=2,window=32,stride=planes,layers=6,bytes=32,seed=7")
	require.NoError(t, err)
	require.Equal(t, Options{Groups: 2, Window: 32, Stride: ByPlane, Layers: 6, BytesPerToken: 32, Seed: 7}, o)
	o, err = ParseOptions("")
	require.NoError(t, err)
	require.Zero(t, o)
	for text, says := range map[string]string{
		"heads=x": `heads is "x"`, "heads=65": "heads is 65", "heads=4,bytes=16": "for each of 4 heads",
		"group=2": `no option "group"`, "groups": "groups", "groups=x": `groups is "x"`, "stride=odd": `stride is "odd"`,
		"groups=9": "9 groups for 4 layers", "seed=-1": "seed", "ranks=2": `no option "ranks"`, "groups=2,": "no option",
	} {
		_, err := ParseOptions(text)
		require.ErrorContains(t, err, says, text)
	}
}
