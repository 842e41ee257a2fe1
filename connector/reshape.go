package connector

import (
	"context"
	"fmt"
)

// A Reshaper loads from an engine whose blocks have another size or that has another number of ranks
// (capability CanReshape, on the worker side). Both engines have the same Base.
type Reshaper interface {
	// Reshape is Load with the ticket of an engine with another Shape. It reads whole blocks of one rank of
	// that engine, digests included, into landing memory of the host, which checks them and cuts them to fit
	// its own: kv is that memory, with the layout of the other engine, and the tokens, keys and blocks of t are
	// those of the other engine, too. Block.ID says where in kv a block goes; its key, and its place in the
	// prompt, say which one it is. Reshape writes nothing else (rule RESHAPE-03). A *BlockError names the
	// blocks that are not there (RESHAPE-05). ErrIncompatible means that the blocks of that rank are not as kv
	// says, and then Reshape has written nothing (RESHAPE-04).
	//
	// A load takes several calls, one after the other, and any rank's worker may get them. They are for one
	// Query, and so are counted as one by the other engine: see Source.Last.
	Reshape(ctx context.Context, t *Transfer, from Source, kv *KV) error
}

// Source says whose blocks a Reshape reads.
type Source struct {
	Rank, World int  // of the engine that the ticket comes from
	Last        bool // the load's last call: when it has read, the hold is consumed (rule RESHAPE-06)
}

// Cut describes how the blocks of one segment of one rank can be cut.
type Cut struct {
	BlockTokens   int
	Bytes         int64 // of a block
	Planes, Heads int   // as in Segment
	Rank, World   int
}

// CutOf is the cut of a segment for one rank. Errors wrap ErrIncompatible.
func (l *Layout) CutOf(segment, rank, world int) (Cut, error) {
	s := &l.Segments[segment]
	c := Cut{BlockTokens: l.Groups[s.Group].BlockTokens, Bytes: s.Bytes, Planes: s.Planes, Heads: s.Heads, Rank: rank, World: world}
	if err := c.validate(); err != nil {
		return Cut{}, fmt.Errorf("segments[%d]: %w", segment, err)
	}
	return c, nil
}

func (c *Cut) validate() error {
	const most = 1 << 20
	for _, n := range []int{c.BlockTokens, c.Planes, c.Heads, c.World} {
		if n <= 0 || n > most {
			return fmt.Errorf("blocks of %d tokens, %d planes and %d heads on %d ranks cannot be cut: %w", c.BlockTokens, c.Planes, c.Heads, c.World, ErrIncompatible)
		}
	}
	if c.Rank < 0 || c.Rank >= c.World {
		return fmt.Errorf("rank %d of %d: %w", c.Rank, c.World, ErrIncompatible)
	}
	if c.Bytes <= 0 || c.Bytes%int64(c.Planes) != 0 || c.Bytes/int64(c.Planes)%int64(c.BlockTokens) != 0 || c.Bytes/int64(c.Planes*c.BlockTokens)%int64(c.Heads) != 0 {
		return fmt.Errorf("%d bytes do not divide into %d planes of %d tokens of %d heads: %w", c.Bytes, c.Planes, c.BlockTokens, c.Heads, ErrIncompatible)
	}
	return nil
}

// headBytes is the size of one head of one token in one plane.
func (c *Cut) headBytes() int64 { return c.Bytes / int64(c.Planes) / int64(c.BlockTokens*c.Heads) }

// Fits returns an error unless the two cuts are the same content cut in two ways: their totals must be
// equal, and one block size must be a multiple of the other. Errors wrap ErrIncompatible (rule RESHAPE-04).
func (c *Cut) Fits(o *Cut) error {
	if err := o.validate(); err != nil {
		return err
	}
	switch {
	case c.Planes != o.Planes || c.headBytes() != o.headBytes():
		return fmt.Errorf("%d planes with heads of %d bytes there, %d with %d here: %w", o.Planes, o.headBytes(), c.Planes, c.headBytes(), ErrIncompatible)
	case c.Heads*c.World != o.Heads*o.World:
		return fmt.Errorf("%d heads on each of %d ranks there, %d on %d here: %w", o.Heads, o.World, c.Heads, c.World, ErrIncompatible)
	case c.BlockTokens%o.BlockTokens != 0 && o.BlockTokens%c.BlockTokens != 0:
		return fmt.Errorf("blocks of %d tokens there, of %d here, and neither is a multiple of the other: %w", o.BlockTokens, c.BlockTokens, ErrIncompatible)
	}
	return nil
}

// Meets reports whether two ranks have heads in common. The cuts must fit each other.
func (c *Cut) Meets(o *Cut) bool {
	from, to := c.heads(o)
	return from < to
}

// heads is the range of heads, counted over all ranks, that both have.
func (c *Cut) heads(o *Cut) (from, to int) {
	return max(c.Rank*c.Heads, o.Rank*o.Heads), min((c.Rank+1)*c.Heads, (o.Rank+1)*o.Heads)
}

// Piece is a range of bytes that a block here and a block there have in common.
type Piece struct {
	Here, There int // places of the blocks in the prompt, from 0
	At, From    int64
	Len         int64 // bytes, at offset At of the block here and at offset From of the block there
}

// Pieces calls yield for everything that the rank of c, here, and the rank of o, there, have in common in
// the tokens [from, to), plane by plane and in order. It merges pieces that are adjacent on both sides. The
// cuts must fit each other.
func (c *Cut) Pieces(o *Cut, from, to int, yield func(Piece)) {
	first, end := c.heads(o)
	if first >= end {
		return
	}
	head := c.headBytes()
	size := int64(end-first) * head
	var last Piece
	for plane := range c.Planes {
		for token := from; token < to; token++ {
			p := Piece{
				Here: token / c.BlockTokens, There: token / o.BlockTokens, Len: size,
				At: c.offset(plane, token%c.BlockTokens, first-c.Rank*c.Heads), From: o.offset(plane, token%o.BlockTokens, first-o.Rank*o.Heads),
			}
			if p.Here == last.Here && p.There == last.There && p.At == last.At+last.Len && p.From == last.From+last.Len {
				last.Len += p.Len
				continue
			}
			if last.Len > 0 {
				yield(last)
			}
			last = p
		}
	}
	if last.Len > 0 {
		yield(last)
	}
}

// offset is where a head of a token begins in a block.
func (c *Cut) offset(plane, token, head int) int64 {
	return (int64(plane*c.BlockTokens+token)*int64(c.Heads) + int64(head)) * c.headBytes()
}
