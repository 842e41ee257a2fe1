// Package tokenizer turns text into token ids and back: a byte-level BPE read from GGUF metadata, or plain bytes.
package tokenizer

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
	// Chat renders messages with the model's chat template, ready for Encode with special set, ending with the opening of the assistant's turn.
	Chat(messages []Message) (string, error)
}
