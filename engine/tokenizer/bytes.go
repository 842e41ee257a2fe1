package tokenizer

import (
	"fmt"
	"strings"
)

// The tokens of [Bytes] beyond the 256 bytes.
const (
	BOS   = 256
	EOS   = 257
	Pad   = 258
	Vocab = 259 // how many tokens there are
)

// Bytes is the tokenizer of the models without a vocabulary: token 0 to 255 is that byte.
func Bytes() Tokenizer { return byteTokenizer{} }

type byteTokenizer struct{}

// Encode implements [Tokenizer]; "<bos>", "<eos>" and "<pad>" are special text. No BOS is added.
func (byteTokenizer) Encode(text string, special bool) ([]int32, error) {
	tokens := make([]int32, 0, len(text))
	for len(text) > 0 {
		if special {
			if token, n := specialByte(text); n > 0 {
				tokens, text = append(tokens, token), text[n:]
				continue
			}
		}
		tokens, text = append(tokens, int32(text[0])), text[1:]
	}
	return tokens, nil
}

// specialByte is the special token that text starts with and its length.
func specialByte(text string) (token int32, n int) {
	for i, name := range [...]string{"<bos>", "<eos>", "<pad>"} {
		if strings.HasPrefix(text, name) {
			return int32(BOS + i), len(name)
		}
	}
	return 0, 0
}

// Bytes implements [Tokenizer].
func (byteTokenizer) Bytes(token int32) []byte {
	if token < 0 || token > 255 {
		return nil
	}
	return []byte{byte(token)}
}

// Stops implements [Tokenizer].
func (byteTokenizer) Stops() []int32 { return []int32{EOS} }

// Chat implements [Tokenizer]: a line for each message, as "role: content". Nothing stands between "assistant:" and an
// answer, since nothing did when it was generated: so the next turn's prompt begins with the tokens of this turn.
func (byteTokenizer) Chat(messages []Message) (string, error) {
	var b strings.Builder
	b.WriteString("<bos>")
	for i, m := range messages {
		if m.Role == "" {
			return "", fmt.Errorf("messages[%d].role is empty", i)
		}
		space := " "
		if m.Role == "assistant" {
			space = ""
		}
		fmt.Fprintf(&b, "%s:%s%s\n", m.Role, space, m.Content)
	}
	b.WriteString("assistant:")
	return b.String(), nil
}
