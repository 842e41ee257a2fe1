package router

import (
	"bytes"
	"encoding/json"
	"regexp"
	"strconv"

	"github.com/kvport/kvport/engine/router/admission"
)

// What is assumed of the text of a request, and the highest number that is believed.
const (
	bytesOfToken = 4
	maxEstimate  = 1 << 20 // tokens
)

// estimate is about how many tokens a request costs: those of its prompts and those of its answers.
func (f fields) estimate() (prompt, answer int) {
	text := f["messages"]
	if text == nil {
		text = f["prompt"]
	}
	prompt = len(text) / bytesOfToken
	if inner := bytes.TrimLeft(text, "[ \t\r\n"); len(inner) > 0 && inner[0] >= '0' && inner[0] <= '9' {
		prompt = 1 + bytes.Count(text, []byte(",")) // token ids
	}
	answer = admission.AssumedTokens
	for _, name := range []string{"max_tokens", "max_completion_tokens"} {
		if n, is := f.positive(name); is {
			answer = n
		}
	}
	if n, is := f.positive("n"); is {
		answer *= n
	}
	return min(prompt, maxEstimate), min(answer, maxEstimate)
}

// positive is a field that is a whole number above 0.
func (f fields) positive(name string) (int, bool) {
	var n int
	if json.Unmarshal(f[name], &n) != nil || n <= 0 {
		return 0, false
	}
	return min(n, maxEstimate), true
}

// unknown says that nobody knows what a request cost.
const unknown = -1

// consumption finds out what a request cost, from its answer on its way to the client.
type consumption struct {
	prompt   int    // estimated tokens of the prompt
	unserved bool   // no instance gave an answer
	events   int    // of a stream; each is about a token
	last     []byte // the end of the answer, where its usage is
}

// maxLast is more than an answer's usage and what follows it have, in bytes.
const maxLast = 1 << 10

// write takes a piece of the answer.
func (u *consumption) write(piece []byte) {
	u.events += bytes.Count(piece, []byte("data: "))
	u.last = append(u.last, piece[max(0, len(piece)-maxLast):]...)
	u.last = u.last[max(0, len(u.last)-maxLast):]
}

// totalTokens is in the usage of an answer. Within a text of the answer its quotes would have backslashes.
var totalTokens = regexp.MustCompile(`"total_tokens"\s*:\s*(\d{1,9})\b`)

// tokens is what the request cost: as its usage says, if that can be believed, else as its events do; unknown if
// neither does. Nobody pays for what nobody answered.
func (u *consumption) tokens() int {
	if u.unserved {
		return 0
	}
	if found := totalTokens.FindSubmatch(u.last); found != nil {
		if n, _ := strconv.Atoi(string(found[1])); n <= maxTokens { // digits
			return n
		}
	}
	if u.events == 0 {
		return unknown
	}
	return u.prompt + u.events
}
