package tokenizer

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvport/kvport/engine/gguf"
	bpe "github.com/ollama/ollama/tokenizer"
)

// pretokenizer is the regular expression by which text is split before merging, for each value of
// tokenizer.ggml.pre that we know. Each matches every character: the library's way of chaining several
// expressions repeats text after the second gap (ollama 0.17.4), so smollm's two (first every digit alone,
// then GPT-2's on what lies between) are written as one here.
func pretokenizer(name string) (string, bool) {
	switch name {
	case "smollm":
		return `\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+`, true
	case "gpt-2", "default", "":
		return `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`, true
	}
	return "", false
}

// FromGGUF reads the tokenizer and the chat template of a model file. The file is not needed once it
// returns. Errors name the metadata key and wrap gguf.ErrMissing or gguf.ErrFormat.
func FromGGUF(f *gguf.File) (Tokenizer, error) {
	t, err := readVocabulary(f)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	source, err := f.String("tokenizer.chat_template")
	if errors.Is(err, gguf.ErrMissing) {
		return t, nil
	}
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	if t.template, err = parseTemplate(source, t.text(t.bos), t.text(t.eos)); err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	return t, nil
}

// none is the id of a token that the vocabulary does not have.
const none = -1

// pair is a byte-level BPE. The library recognises the vocabulary's special tokens always, so there is
// one encoder with them and one without.
type pair struct {
	plain, special bpe.BytePairEncoding
	values         []string
	bytes          [][]byte
	bos, eos       int32
	addBOS         bool
	stops          []int32
	template       *template
}

func readVocabulary(f *gguf.File) (*pair, error) {
	if model, err := f.String("tokenizer.ggml.model"); err != nil || model != "gpt2" {
		return nil, errors.Join(err, fmt.Errorf("tokenizer.ggml.model is %q, only gpt2 (byte-level BPE) is supported: %w", model, gguf.ErrFormat))
	}
	pre, err := f.String("tokenizer.ggml.pre")
	if err != nil && !errors.Is(err, gguf.ErrMissing) {
		return nil, err
	}
	expression, ok := pretokenizer(pre)
	if !ok {
		return nil, fmt.Errorf("tokenizer.ggml.pre %q is not supported: %w", pre, gguf.ErrFormat)
	}
	t := &pair{}
	if t.values, err = f.Strings("tokenizer.ggml.tokens"); err != nil {
		return nil, err
	}
	merges, err := f.Strings("tokenizer.ggml.merges")
	if err != nil {
		return nil, err
	}
	types, err := f.Ints("tokenizer.ggml.token_type")
	if err != nil {
		return nil, err
	}
	if len(types) != len(t.values) {
		return nil, fmt.Errorf("tokenizer.ggml.token_type has %d entries, tokens %d: %w", len(types), len(t.values), gguf.ErrFormat)
	}
	if err := t.readSpecial(f); err != nil {
		return nil, err
	}
	t.decode(types)
	plain := slices.Clone(types)
	for i, kind := range plain {
		if kind == bpe.TOKEN_TYPE_CONTROL {
			plain[i] = bpe.TOKEN_TYPE_UNUSED
		}
	}
	encoder := func(types []int32) bpe.BytePairEncoding {
		return bpe.NewBytePairEncoding(&bpe.Vocabulary{Values: t.values, Types: types, Merges: merges}, expression)
	}
	t.plain, t.special = encoder(plain), encoder(types)
	return t, nil
}

// readSpecial finds the tokens that begin and end a text.
func (t *pair) readSpecial(f *gguf.File) (err error) {
	id := func(key string) int32 {
		n, e := f.Uint(key)
		if errors.Is(e, gguf.ErrMissing) {
			return none
		}
		if e == nil && n >= uint64(len(t.values)) {
			e = fmt.Errorf("%s is %d, the vocabulary has %d: %w", key, n, len(t.values), gguf.ErrFormat)
		}
		if e != nil {
			err = errors.Join(err, e)
			return none
		}
		return int32(n)
	}
	t.bos, t.eos = id("tokenizer.ggml.bos_token_id"), id("tokenizer.ggml.eos_token_id")
	for _, stop := range []int32{t.eos, id("tokenizer.ggml.eot_token_id")} {
		if stop != none && !slices.Contains(t.stops, stop) {
			t.stops = append(t.stops, stop)
		}
	}
	if add, e := f.Bool("tokenizer.ggml.add_bos_token"); e == nil {
		t.addBOS = add && t.bos != none
	}
	return err
}

// decode finds the bytes of every token. In the vocabulary a byte is written as a printable character.
func (t *pair) decode(types []int32) {
	t.bytes = make([][]byte, len(t.values))
	for i, v := range t.values {
		switch types[i] {
		case bpe.TOKEN_TYPE_CONTROL, bpe.TOKEN_TYPE_UNUSED:
			continue
		case bpe.TOKEN_TYPE_USER_DEFINED:
			t.bytes[i] = []byte(v)
			continue
		}
		text := make([]byte, 0, len(v))
		for _, r := range v {
			text = append(text, byteOf(r))
		}
		t.bytes[i] = text
	}
}

// byteOf undoes GPT-2's byte alphabet: printable bytes are themselves, the others come from 256 upwards.
func byteOf(r rune) byte {
	switch {
	case r == 0x143:
		return 0xad
	case r >= 0x121 && r <= 0x142:
		return byte(r - 0x121 + 0x7f)
	}
	return byte(r) // 0x100 to 0x120 stand for 0 to 0x20
}

// Encode implements [Tokenizer].
func (t *pair) Encode(text string, special bool) ([]int32, error) {
	encoder := &t.plain
	if special {
		encoder = &t.special
	}
	ids, err := encoder.Encode(text, false)
	if err != nil {
		return nil, fmt.Errorf("tokenize: %w", err)
	}
	if t.addBOS && (len(ids) == 0 || ids[0] != t.bos) {
		ids = append([]int32{t.bos}, ids...)
	}
	return ids, nil
}

// Bytes implements [Tokenizer].
func (t *pair) Bytes(token int32) []byte {
	if token < 0 || int(token) >= len(t.bytes) {
		return nil
	}
	return t.bytes[token]
}

// Stops implements [Tokenizer].
func (t *pair) Stops() []int32 { return slices.Clone(t.stops) }

// Chat implements [Tokenizer].
func (t *pair) Chat(messages []Message) (string, error) {
	if t.template == nil {
		return "", errors.New("chat: the model file has no chat template (tokenizer.chat_template); send a plain completion instead")
	}
	return t.template.render(messages)
}

func (t *pair) text(token int32) string {
	if token == none {
		return ""
	}
	return t.values[token]
}
