package router

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strconv"
)

// errFailed says that an instance sent an error event. vLLM does so when it fails after the head of an answer has gone, for example since
// it cannot load the blocks of a prefill instance that has died, and sends [DONE] behind it.
var errFailed = errors.New("the instance sent an error event")

// open takes the next piece of a stream and gives what the client gets of it. Nothing is passed on as long as the answer has
// not begun: until then the request can go elsewhere. errFailed says that it never will.
func (x *exchange) open(piece []byte) ([]byte, error) {
	if x.begun || len(piece) == 0 {
		return piece, nil
	}
	x.held = append(x.held, piece...)
	switch openingOf(x.held) {
	case failure:
		return nil, errFailed
	case greeting:
		return nil, nil
	case content:
	}
	piece, x.held = x.held, nil
	x.begin()
	x.router.pool.answered(x.d, nil, true)
	return piece, nil
}

// opening is what the beginning of a stream says.
type opening uint8

const (
	content  opening = iota // something that the client must see now
	greeting                // only who speaks: nothing is lost if another instance begins again
	failure                 // that there is no answer
)

// openingOf looks at all that has come of a stream so far.
func openingOf(text []byte) opening {
	if len(text) > maxTail || !bytes.HasSuffix(text, []byte("\n")) { // the end of an event is missing
		return content
	}
	for line := range bytes.SplitSeq(text, []byte("\n")) {
		line = bytes.TrimSpace(line)
		switch data := dataOf(line); {
		case len(line) == 0, greets(data):
		case isError(data) && !isRefusal(data):
			return failure
		default:
			return content
		}
	}
	return greeting
}

// dataOf is the data in a line of a stream; nil if it has none.
func dataOf(line []byte) []byte {
	data, is := bytes.CutPrefix(bytes.TrimSpace(line), []byte("data:"))
	if !is {
		return nil
	}
	return bytes.TrimSpace(data)
}

// isError reports whether an event is an error event.
func isError(data []byte) bool { return bytes.HasPrefix(data, []byte(`{"error"`)) }

// isRefusal reports whether an error event has the code of a 4xx status: the request is wrong, and the instance is not.
func isRefusal(data []byte) bool {
	status, err := strconv.Atoi(errorCode(data))
	return err == nil && status >= http.StatusBadRequest && status < http.StatusInternalServerError
}

// greets reports whether an event of a chat says who speaks and nothing else.
func greets(data []byte) bool {
	var chunk struct {
		Choices []struct {
			Delta  map[string]json.RawMessage `json:"delta"`
			Finish *string                    `json:"finish_reason"`
		} `json:"choices"`
	}
	if json.Unmarshal(data, &chunk) != nil || len(chunk.Choices) == 0 {
		return false
	}
	for _, c := range chunk.Choices {
		if c.Finish != nil || c.Delta["role"] == nil {
			return false
		}
		for name, value := range c.Delta {
			if name != "role" && !slices.Contains([]string{`""`, "null", "[]"}, string(value)) {
				return false
			}
		}
	}
	return true
}
