package connector

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPieces copies a prompt's content from the ranks of one engine to those of another by pieces, and
// finds every byte where it belongs and nothing anywhere else.
func TestPieces(t *testing.T) {
	rng := rand.New(rand.NewPCG(126, 1))
	for range 500 {
		planes, heads, headBytes := 1+rng.IntN(3), 12, int64(1+rng.IntN(5))
		sizes := [][2]int{{4, 4}, {4, 8}, {12, 3}, {1, 16}, {16, 1}}
		size := sizes[rng.IntN(len(sizes))]
		worlds := []int{1, 2, 3, 4, 6, 12}
		cut := func(blockTokens, rank, world int) *Cut {
			return &Cut{BlockTokens: blockTokens, Planes: planes, Heads: heads / world, Rank: rank, World: world, Bytes: int64(planes*blockTokens*heads/world) * headBytes}
		}
		here, there := worlds[rng.IntN(len(worlds))], worlds[rng.IntN(len(worlds))]
		from := rng.IntN(30)
		to := from + 1 + rng.IntN(30)
		at := func(plane, token, head int, byteOf int64) uint32 {
			return uint32(((plane*64+token)*heads+head)*8+int(byteOf)) + 1
		}
		source := make([][][]uint32, there) // by rank and block
		for rank := range there {
			c := cut(size[1], rank, there)
			for block := range 64 / size[1] {
				content := make([]uint32, c.Bytes)
				for i := range content {
					n := int64(i)
					b, n := n%headBytes, n/headBytes
					head, n := int(n)%c.Heads+rank*c.Heads, n/int64(c.Heads)
					content[i] = at(int(n)/size[1], block*size[1]+int(n)%size[1], head, b)
				}
				source[rank] = append(source[rank], content)
			}
		}
		for rank := range here {
			c := cut(size[0], rank, here)
			got := make([][]uint32, 64/size[0])
			for i := range got {
				got[i] = make([]uint32, c.Bytes)
			}
			for other := range there {
				o := cut(size[1], other, there)
				require.NoError(t, c.Fits(o))
				pieces := 0
				c.Pieces(o, from, to, func(p Piece) {
					pieces++
					require.Positive(t, p.Len)
					for i := range p.Len {
						require.Zero(t, got[p.Here][p.At+i], "written twice")
						got[p.Here][p.At+i] = source[other][p.There][p.From+i]
					}
				})
				require.Equal(t, c.Meets(o), pieces > 0)
			}
			for block := range got {
				for i, have := range got[block] {
					n := int64(i)
					b, n := n%headBytes, n/headBytes
					head, n := int(n)%c.Heads+rank*c.Heads, n/int64(c.Heads)
					token := block*size[0] + int(n)%size[0]
					want := uint32(0)
					if from <= token && token < to {
						want = at(int(n)/size[0], token, head, b)
					}
					require.Equal(t, want, have)
				}
			}
		}
	}
}

// Pieces between equal ranks are as long as the smaller block.
func TestPiecesAreMerged(t *testing.T) {
	c := &Cut{BlockTokens: 32, Planes: 2, Heads: 3, World: 1, Bytes: 2 * 32 * 3 * 8}
	o := &Cut{BlockTokens: 16, Planes: 2, Heads: 3, World: 1, Bytes: 2 * 16 * 3 * 8}
	var got []Piece
	c.Pieces(o, 0, 32, func(p Piece) { got = append(got, p) })
	const half = 16 * 3 * 8
	require.Equal(t, []Piece{{0, 0, 0, 0, half}, {0, 1, half, 0, half}, {0, 0, 2 * half, half, half}, {0, 1, 3 * half, half, half}}, got)
}

func TestWhatDoesNotFit(t *testing.T) {
	valid := func() *Cut { return &Cut{BlockTokens: 8, Planes: 2, Heads: 4, World: 2, Bytes: 2 * 8 * 4 * 16} }
	require.NoError(t, valid().Fits(valid()))
	for name, change := range map[string]func(*Cut){
		"blocks that divide neither way": func(c *Cut) { c.BlockTokens, c.Bytes = 12, 2*12*4*16 },
		"more heads in all":              func(c *Cut) { c.World = 4 },
		"heads on every rank":            func(c *Cut) { c.World, c.Heads, c.Bytes = 3, 3, 2*8*3*16 },
		"other heads":                    func(c *Cut) { c.Bytes *= 2 },
		"one plane":                      func(c *Cut) { c.Planes = 1 },
		"no planes":                      func(c *Cut) { c.Planes = 0 },
		"no heads":                       func(c *Cut) { c.Heads = 0 },
		"negative heads":                 func(c *Cut) { c.Heads = -4 },
		"a rank beyond":                  func(c *Cut) { c.Rank = 2 },
		"bytes that do not divide":       func(c *Cut) { c.Bytes++ },
		"no bytes":                       func(c *Cut) { c.Bytes = 0 },
		"huge":                           func(c *Cut) { c.Heads, c.World = 1<<62, 1<<62 },
	} {
		o := valid()
		change(o)
		require.ErrorIs(t, valid().Fits(o), ErrIncompatible, name)
	}
	l := validLayout()
	_, err := l.CutOf(0, 0, 1)
	require.ErrorIs(t, err, ErrIncompatible, "opaque")
}
