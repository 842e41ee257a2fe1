package tokenizer

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/kvport/kvport/engine/gguf"
)

// none is the id of a token that the vocabulary does not have.
const none = -1

// Token types; the numbers are the format's.
const (
	typeControl     = 3
	typeUserDefined = 4
	typeUnused      = 5
)

// vocabulary is a byte-level BPE vocabulary.
type vocabulary struct {
	values   []string // in the byte alphabet, special tokens as they are
	types    []int32
	ids      map[string]int32
	merges   map[[2]int32]merge
	alphabet [256]int32 // token of each byte, or none
}

// merge joins two tokens into id; the lowest rank goes first.
type merge struct{ rank, id int32 }

func readVocabulary(f *gguf.File) (*vocabulary, error) {
	v := &vocabulary{}
	var err error
	if v.values, err = f.Strings("tokenizer.ggml.tokens"); err != nil {
		return nil, err
	}
	merges, err := f.Strings("tokenizer.ggml.merges")
	if err != nil {
		return nil, err
	}
	if v.types, err = f.Ints("tokenizer.ggml.token_type"); err != nil {
		return nil, err
	}
	if len(v.types) != len(v.values) {
		return nil, fmt.Errorf("tokenizer.ggml.token_type has %d entries, tokens %d: %w", len(v.types), len(v.values), gguf.ErrFormat)
	}
	v.ids = make(map[string]int32, len(v.values))
	for id, text := range slices.Backward(v.values) { // of equal texts the lowest id counts
		v.ids[text] = int32(id)
	}
	for b := range v.alphabet {
		v.alphabet[b] = v.id(string(runeOf(byte(b))))
	}
	return v, v.readMerges(merges)
}

// readMerges reads lines of two tokens, the first line first.
func (v *vocabulary) readMerges(lines []string) error {
	v.merges = make(map[[2]int32]merge, len(lines))
	for rank, line := range lines {
		left, right, ok := strings.Cut(line, " ")
		if !ok {
			return fmt.Errorf("tokenizer.ggml.merges[%d] is %q, want two tokens: %w", rank, line, gguf.ErrFormat)
		}
		pair := [2]int32{v.id(left), v.id(right)}
		id := v.id(left + right)
		if _, twice := v.merges[pair]; !twice && pair[0] != none && pair[1] != none && id != none {
			v.merges[pair] = merge{rank: int32(rank), id: id}
		}
	}
	return nil
}

func (v *vocabulary) id(text string) int32 {
	if id, ok := v.ids[text]; ok {
		return id
	}
	return none
}

// special matches the tokens of the given types in a text, the longest first; nil if there are none.
func (v *vocabulary) special(types ...int32) *regexp.Regexp {
	var texts []string
	for id, text := range v.values {
		if text != "" && slices.Contains(types, v.types[id]) {
			texts = append(texts, regexp.QuoteMeta(text))
		}
	}
	if texts == nil {
		return nil
	}
	slices.SortFunc(texts, func(a, b string) int { return len(b) - len(a) })
	return regexp.MustCompile(strings.Join(texts, "|"))
}

// decode gives the bytes of every token, nil for those without text.
func (v *vocabulary) decode() [][]byte {
	out := make([][]byte, len(v.values))
	for i, text := range v.values {
		switch v.types[i] {
		case typeControl, typeUnused:
		case typeUserDefined:
			out[i] = []byte(text)
		default:
			out[i] = make([]byte, 0, len(text))
			for _, r := range text {
				out[i] = append(out[i], byteOf(r))
			}
		}
	}
	return out
}

// runeOf is GPT-2's byte alphabet: printable bytes are themselves, the others count up from 256.
func runeOf(b byte) rune {
	switch {
	case b <= 0x20:
		return rune(b) + 0x100
	case b >= 0x7f && b <= 0xa0:
		return rune(b) - 0x7f + 0x121
	case b == 0xad:
		return 0x143
	}
	return rune(b)
}

// byteOf undoes runeOf.
func byteOf(r rune) byte {
	switch {
	case r == 0x143:
		return 0xad
	case r >= 0x121 && r <= 0x142:
		return byte(r - 0x121 + 0x7f)
	}
	return byte(r) // 0x100 to 0x120 stand for 0 to 0x20
}

// token reads a token id from metadata; a missing key gives none.
func (v *vocabulary) token(f *gguf.File, key string) (int32, error) {
	n, err := f.Uint(key)
	switch {
	case errors.Is(err, gguf.ErrMissing):
		return none, nil
	case err != nil:
		return none, err
	case n >= uint64(len(v.values)):
		return none, fmt.Errorf("%s is %d, the vocabulary has %d: %w", key, n, len(v.values), gguf.ErrFormat)
	}
	return int32(n), nil
}

// text is a token as it is written, or empty for none.
func (v *vocabulary) text(token int32) string {
	if token == none {
		return ""
	}
	return v.values[token]
}
