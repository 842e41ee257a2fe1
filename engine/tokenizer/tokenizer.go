// Package tokenizer turns text into token ids and back: a byte-level BPE read from GGUF metadata, or plain bytes.
package tokenizer

import (
	"errors"
	"fmt"
	"strings"

	"github.com/nikolalohinski/gonja/v2"
	"github.com/nikolalohinski/gonja/v2/exec"
	"github.com/nikolalohinski/gonja/v2/loaders"
)

// Message is one turn of a chat.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// Tokenizer maps text to token ids. It is safe for concurrent use.
type Tokenizer interface {
	// Encode gives the ids of text, with a leading BOS if the model expects one. Text of special tokens is
	// recognised only if special is set.
	Encode(text string, special bool) ([]int32, error)
	// Bytes is the raw text of one token; a token may hold part of a UTF-8 sequence. Control tokens and unknown
	// ids have no text and give nil. The caller must not change it.
	Bytes(token int32) []byte
	// Stops lists the ids that end a generation.
	Stops() []int32
	// Chat renders messages with the model's chat template, ending with the opening of the assistant's turn.
	Chat(messages []Message) (*Chat, error)
	// EncodeChat gives the ids of a chat that this tokenizer has rendered. A control token that messages spell is
	// text. One that begins in the template's own text and ends in a message is still taken for one.
	EncodeChat(chat *Chat) ([]int32, error)
}

// Chat is a chat as a template has written it.
type Chat struct {
	text string
	mark string // a character before what spells a control token and was said by a message; empty: there is none
}

// String is what the template has written.
func (c *Chat) String() string { return c.plain(c.text) }

// plain is a part of the text without marks.
func (c *Chat) plain(text string) string {
	if c.mark == "" {
		return text
	}
	return strings.ReplaceAll(text, c.mark, "")
}

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

// bosText begins every chat.
const bosText = "<bos>"

// Chat implements [Tokenizer]: a line for each message, as "role: content". Nothing stands between "assistant:" and an
// answer, since nothing did when it was generated: so the next turn's prompt begins with the tokens of this turn.
func (byteTokenizer) Chat(messages []Message) (*Chat, error) {
	var b strings.Builder
	b.WriteString(bosText)
	for i, m := range messages {
		if m.Role == "" {
			return nil, fmt.Errorf("messages[%d].role is empty", i)
		}
		space := " "
		if m.Role == "assistant" {
			space = ""
		}
		fmt.Fprintf(&b, "%s:%s%s\n", m.Role, space, m.Content)
	}
	b.WriteString("assistant:")
	return &Chat{text: b.String()}, nil
}

// EncodeChat implements [Tokenizer].
func (t byteTokenizer) EncodeChat(chat *Chat) ([]int32, error) {
	tokens, err := t.Encode(strings.TrimPrefix(chat.text, bosText), false)
	return append([]int32{BOS}, tokens...), err
}

// template is a model's Jinja chat template.
type template struct {
	jinja    *exec.Template
	bos, eos string
}

// templateName is how the template is called in its own messages.
const templateName = "/chat_template"

// parseTemplate compiles a template. It can reach no file: the loader knows only the template itself.
func parseTemplate(source, bos, eos string) (*template, error) {
	loader, err := loaders.NewMemoryLoader(map[string]string{templateName: source})
	if err != nil {
		return nil, fmt.Errorf("chat template: %w", err)
	}
	jinja, err := exec.NewTemplate(templateName, gonja.DefaultConfig, loader, gonja.DefaultEnvironment)
	if err != nil {
		return nil, fmt.Errorf("chat template: %w", err)
	}
	return &template{jinja: jinja, bos: bos, eos: eos}, nil
}

func (t *template) render(messages []Message) (string, error) {
	list := make([]map[string]string, len(messages))
	for i, m := range messages {
		list[i] = map[string]string{"role": m.Role, "content": m.Content}
	}
	ctx := exec.EmptyContext()
	ctx.Set("messages", list)
	ctx.Set("add_generation_prompt", true)
	ctx.Set("bos_token", t.bos)
	ctx.Set("eos_token", t.eos)
	ctx.Set("raise_exception", func(message string) (string, error) { return "", errors.New(message) })
	text, err := t.jinja.ExecuteToString(ctx)
	if err != nil {
		return "", fmt.Errorf("chat template: %w", err)
	}
	return text, nil
}
