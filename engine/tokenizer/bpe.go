package tokenizer

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/kvport/kvport/engine/gguf"
)

// FromGGUF reads the tokenizer and the chat template of a model file. The file is not needed once it
// returns. Errors name the metadata key and wrap gguf.ErrMissing or gguf.ErrFormat.
func FromGGUF(f *gguf.File) (Tokenizer, error) {
	t, err := newBPE(f)
	if err != nil {
		return nil, fmt.Errorf("tokenizer: %w", err)
	}
	return t, nil
}

// bpe is a byte-level BPE: text is cut at special tokens, then into words, and in each word the pair of
// neighbours with the lowest rank is merged, the leftmost of equals, until no pair is left. Bytes that
// the vocabulary lacks are left out, as in llama.cpp.
//
// It is our own because ollama's (0.17.4) gave other ids than llama.cpp: it repeats text when it splits
// by more than one expression and merges equals in any order.
type bpe struct {
	*vocabulary
	words       words
	plain, full *regexp.Regexp // special tokens in text: only user-defined ones, all
	controls    controls       // the others
	bytes       [][]byte
	bos         int32
	addBOS      bool
	stops       []int32
	template    *template // nil if the model has none
}

func newBPE(f *gguf.File) (*bpe, error) {
	kind, err := f.String("tokenizer.ggml.model")
	if err != nil {
		return nil, err
	}
	if kind != "gpt2" {
		return nil, fmt.Errorf("tokenizer.ggml.model is %q, only gpt2 (byte-level BPE) is supported: %w", kind, gguf.ErrFormat)
	}
	pre, err := f.String("tokenizer.ggml.pre")
	if err != nil && !errors.Is(err, gguf.ErrMissing) {
		return nil, err
	}
	t := &bpe{}
	if t.words, err = newWords(pre); err != nil {
		return nil, err
	}
	if t.vocabulary, err = readVocabulary(f); err != nil {
		return nil, err
	}
	t.bytes = t.decode()
	t.plain, t.full = t.special(typeUserDefined), t.special(typeUserDefined, typeControl)
	t.controls = controls{spelled: t.special(typeControl), texts: t.texts(typeControl)}
	return t, t.readSpecial(f)
}

// readSpecial reads which tokens begin and end a text, and the chat template, which writes them.
func (t *bpe) readSpecial(f *gguf.File) error {
	bos, err1 := t.token(f, "tokenizer.ggml.bos_token_id")
	eos, err2 := t.token(f, "tokenizer.ggml.eos_token_id")
	eot, err3 := t.token(f, "tokenizer.ggml.eot_token_id")
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	t.bos = bos
	for _, stop := range []int32{eos, eot} {
		if stop != none && !slices.Contains(t.stops, stop) {
			t.stops = append(t.stops, stop)
		}
	}
	add, err := f.Bool("tokenizer.ggml.add_bos_token")
	if err != nil && !errors.Is(err, gguf.ErrMissing) {
		return err
	}
	t.addBOS = add && bos != none
	source, err := f.String("tokenizer.chat_template")
	if errors.Is(err, gguf.ErrMissing) {
		return nil
	}
	if err != nil {
		return err
	}
	t.template, err = parseTemplate(source, t.text(bos), t.text(eos))
	return err
}

// Encode implements [Tokenizer].
func (t *bpe) Encode(text string, special bool) ([]int32, error) {
	expression := t.plain
	if special {
		expression = t.full
	}
	return t.begin(t.split(nil, text, expression)), nil
}

// split appends the ids of text whose special tokens match an expression, which may be nil.
func (t *bpe) split(ids []int32, text string, expression *regexp.Regexp) []int32 {
	at := 0
	if expression != nil {
		for _, found := range expression.FindAllStringIndex(text, -1) {
			ids = t.encode(ids, text[at:found[0]])
			ids = append(ids, t.id(text[found[0]:found[1]]))
			at = found[1]
		}
	}
	return t.encode(ids, text[at:])
}

// begin puts the BOS in front that the model expects.
func (t *bpe) begin(ids []int32) []int32 {
	if t.addBOS && (len(ids) == 0 || ids[0] != t.bos) {
		ids = append([]int32{t.bos}, ids...)
	}
	return ids
}

// EncodeChat implements [Tokenizer].
func (t *bpe) EncodeChat(chat *Chat) ([]int32, error) {
	var ids []int32
	text := chat.text
	at, from := 0, 0 // what has no ids yet, and where the next special token may begin
	for t.full != nil {
		found := t.full.FindStringIndex(text[from:])
		if found == nil {
			break
		}
		begin, end := from+found[0], from+found[1]
		if chat.mark != "" && strings.HasSuffix(text[:begin], chat.mark) {
			_, size := utf8.DecodeRuneInString(text[begin:])
			from = begin + size
			continue
		}
		ids = t.split(ids, chat.plain(text[at:begin]), t.plain)
		ids = append(ids, t.id(text[begin:end]))
		at, from = end, end
	}
	return t.begin(t.split(ids, chat.plain(text[at:]), t.plain)), nil
}

// encode appends the ids of text without special tokens.
func (t *bpe) encode(ids []int32, text string) []int32 {
	for len(text) > 0 {
		n := t.words.next(text)
		ids = t.merge(ids, text[:n])
		text = text[n:]
	}
	return ids
}

// part is a token of a word under work, in a list by position.
type part struct{ id, previous, next int32 }

// candidate is a merge that was possible when it was found.
type candidate struct {
	merge
	left, right     int32 // positions
	leftID, rightID int32
}

// before says which of two merges is done first: the lower rank, the leftmost of equals.
func (c candidate) before(d candidate) bool {
	return c.rank < d.rank || c.rank == d.rank && c.left < d.left
}

// candidates is a binary heap: no element comes before its parent.
type candidates []candidate

func (c *candidates) push(x candidate) {
	h := append(*c, x)
	for i := len(h) - 1; i > 0 && h[i].before(h[(i-1)/2]); i = (i - 1) / 2 {
		h[i], h[(i-1)/2] = h[(i-1)/2], h[i]
	}
	*c = h
}

// pop removes the first.
func (c *candidates) pop() candidate {
	h := *c
	first, last := h[0], len(h)-1
	h[0] = h[last]
	h = h[:last]
	for i := 0; 2*i+1 < last; {
		child := 2*i + 1
		if child+1 < last && h[child+1].before(h[child]) {
			child++
		}
		if !h[child].before(h[i]) {
			break
		}
		h[i], h[child] = h[child], h[i]
		i = child
	}
	*c = h
	return first
}

// merge appends the ids of one word.
func (t *bpe) merge(ids []int32, word string) []int32 {
	parts := make([]part, len(word))
	for i := range parts {
		parts[i] = part{id: t.alphabet[word[i]], previous: int32(i) - 1, next: int32(i) + 1}
	}
	parts[len(parts)-1].next = none
	var found candidates
	look := func(left, right int32) {
		if left == none || right == none {
			return
		}
		a, b := parts[left].id, parts[right].id
		if m, ok := t.merges[[2]int32{a, b}]; ok {
			found.push(candidate{m, left, right, a, b})
		}
	}
	for i := range parts {
		look(int32(i), parts[i].next)
	}
	for len(found) > 0 {
		c := found.pop()
		left, right := &parts[c.left], &parts[c.right]
		if left.id != c.leftID || right.id != c.rightID || left.next != c.right {
			continue // one of them is part of something else by now
		}
		left.id, left.next, right.id = c.id, right.next, none
		if left.next != none {
			parts[left.next].previous = c.left
		}
		look(left.previous, c.left)
		look(c.left, left.next)
	}
	for at := int32(0); at != none; at = parts[at].next {
		if parts[at].id != none {
			ids = append(ids, parts[at].id)
		}
	}
	return ids
}

// Bytes implements [Tokenizer].
func (t *bpe) Bytes(token int32) []byte {
	if token < 0 || int(token) >= len(t.bytes) {
		return nil
	}
	return t.bytes[token]
}

// Stops implements [Tokenizer].
func (t *bpe) Stops() []int32 { return slices.Clone(t.stops) }

// Chat implements [Tokenizer].
func (t *bpe) Chat(messages []Message) (*Chat, error) {
	if t.template == nil {
		return nil, errors.New("chat: the model file has no chat template (tokenizer.chat_template); send a plain completion instead")
	}
	mark, err := unused(messages)
	if err != nil {
		return nil, err
	}
	marked := slices.Clone(messages)
	for i := range marked {
		marked[i].Role = t.controls.disarm(marked[i].Role, mark)
		marked[i].Content = t.controls.disarm(marked[i].Content, mark)
	}
	text, err := t.template.render(marked)
	return &Chat{text: text, mark: mark}, err
}

// unused is a character that no message has. Unicode reserves 32 for uses like this one.
func unused(messages []Message) (string, error) {
	const first, last = '\ufdd0', '\ufdef'
	for r := first; r <= last; r++ {
		if !slices.ContainsFunc(messages, func(m Message) bool { return strings.ContainsRune(m.Role+m.Content, r) }) {
			return string(r), nil
		}
	}
	return "", errors.New("chat: the messages have every one of the characters U+FDD0 to U+FDEF, which are no text")
}

// controls are the control tokens of a vocabulary, as text.
type controls struct {
	spelled *regexp.Regexp // nil if there are none
	texts   []string
}

// disarm puts a mark before whatever of a message's text spells a control token, or may do so together with what follows it.
func (c *controls) disarm(text, mark string) string {
	var b strings.Builder
	at := 0
	for _, begin := range c.begins(text) {
		b.WriteString(text[at:begin] + mark)
		at = begin
	}
	return b.String() + text[at:]
}

// begins are the places where a control token begins in text, or the beginning of one at its end.
func (c *controls) begins(text string) (places []int) {
	if c.spelled == nil {
		return nil
	}
	for from := 0; ; {
		found := c.spelled.FindStringIndex(text[from:])
		if found == nil {
			break
		}
		begin := from + found[0]
		_, size := utf8.DecodeRuneInString(text[begin:])
		places, from = append(places, begin), begin+size
	}
	longest := len(slices.MaxFunc(c.texts, func(a, b string) int { return len(a) - len(b) }))
	for i := max(0, len(text)-longest+1); i < len(text); i++ {
		if slices.ContainsFunc(c.texts, func(t string) bool { return strings.HasPrefix(t, text[i:]) }) {
			places = append(places, i)
		}
	}
	slices.Sort(places)
	return slices.Compact(places)
}

// words splits text into the pieces that are merged for themselves.
type words struct {
	expression *regexp.Regexp
	digits     bool // a digit is a word, and text on either side of it does not see across
}

// space is Unicode white space; \s is only ASCII in Go.
const space = `\t-\r \x{85}\p{Z}`

// newWords knows the splitters by tokenizer.ggml.pre. GPT-2's expression ends in \s+(?!\S)|\s+: of white
// space before a word all but the last character. Go has no look-ahead; next does that part.
func newWords(pre string) (words, error) {
	const start, end = `^(?:'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|`, `| ?[^` + space + `\p{L}\p{N}]+|[` + space + `]+)`
	switch pre {
	case "smollm":
		return words{regexp.MustCompile(start + `\p{N}` + end), true}, nil
	case "gpt-2", "default", "":
		return words{regexp.MustCompile(start + ` ?\p{N}+` + end), false}, nil
	}
	return words{}, fmt.Errorf("tokenizer.ggml.pre %q is not supported: %w", pre, gguf.ErrFormat)
}

// next is the length of the first word of text.
func (w words) next(text string) int {
	found := w.expression.FindStringIndex(text)
	if found == nil {
		return 1 // cannot be: every character is in one of the classes
	}
	n := found[1]
	last, size := utf8.DecodeLastRuneInString(text[:n])
	follower, _ := utf8.DecodeRuneInString(text[n:])
	if !unicode.IsSpace(last) || n == size || n == len(text) || w.digits && unicode.IsNumber(follower) {
		return n
	}
	return n - size
}

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
	texts := v.texts(types...)
	if texts == nil {
		return nil
	}
	for i, text := range texts {
		texts[i] = regexp.QuoteMeta(text)
	}
	slices.SortFunc(texts, func(a, b string) int { return len(b) - len(a) })
	return regexp.MustCompile(strings.Join(texts, "|"))
}

// texts are the tokens of the given types that have a text.
func (v *vocabulary) texts(types ...int32) (texts []string) {
	for id, text := range v.values {
		if text != "" && slices.Contains(types, v.types[id]) {
			texts = append(texts, text)
		}
	}
	return texts
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
