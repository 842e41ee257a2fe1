package policy

import "github.com/zeebo/xxh3"

// PieceBytes is the length, in bytes, in which prompts are told apart: about two blocks of 16 tokens of English text.
const PieceBytes = 128

// maxPieces is how many pieces of a prompt count, 1 MiB of text. What follows them counts as not held.
const maxPieces = 8192

// Prompt is what a policy knows about the prompt of a request. The zero value is a prompt without text.
type Prompt struct {
	Client uint64 // whose prompt it is: when too much is remembered, the client that has most forgets first

	pieces []uint64 // chained hashes: equal ones mean that the prompts are equal up to there
	bytes  int
}

// NewPrompt cuts the canonical text of a prompt into pieces. Prompts of other scopes, such as other models or cache
// salts, have nothing in common. The seed is the router's secret, so that no client can make prompts that look alike.
func NewPrompt(seed uint64, scope, text []byte) Prompt {
	p := Prompt{bytes: len(text), pieces: make([]uint64, 0, min(maxPieces, len(text)/PieceBytes))}
	chain := xxh3.HashSeed(scope, seed)
	for len(text) >= PieceBytes && len(p.pieces) < maxPieces {
		chain = xxh3.HashSeed(text[:PieceBytes], chain)
		p.pieces = append(p.pieces, chain)
		text = text[PieceBytes:]
	}
	return p
}

// share is the part of the prompt, 0 to 1, that its first pieces are.
func (p *Prompt) share(pieces int) float64 {
	if p.bytes == 0 {
		return 0
	}
	return float64(pieces) * PieceBytes / float64(p.bytes)
}
