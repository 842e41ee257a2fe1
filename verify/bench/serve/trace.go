package serve

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"
)

// TraceOptions say how a trace is played.
type TraceOptions struct {
	Speed       float64 // 2 plays it twice as fast; 0: as it was recorded
	BlockTokens int     // tokens of one of its hash ids, to which its lengths are scaled; 0: 512, as they were recorded
	Requests    int     // as many as are taken from its beginning; 0: all
	Seed        uint64  // of the tokens that hash ids stand for
}

// traceBlock is how many tokens a hash id of a Mooncake trace stands for.
const traceBlock = 512

// traceLine is one request of a trace.
type traceLine struct {
	Timestamp float64 `json:"timestamp"`     // milliseconds
	Input     int     `json:"input_length"`  // tokens
	Output    int     `json:"output_length"` // tokens
	HashIDs   []int64 `json:"hash_ids"`      // one for each block of the prompt: equal ids are equal beginnings
	Prompt    string  `json:"prompt"`        // instead of the hash ids
}

// ReadTrace reads a schedule from JSON Lines, in the form of Mooncake's traces: timestamp in milliseconds, input_length,
// output_length and hash_ids, or prompt with the text itself. Fields that it does not know are skipped: traces have many.
func ReadTrace(r io.Reader, o TraceOptions) ([]Request, error) {
	if o.Speed == 0 {
		o.Speed = 1
	}
	if o.BlockTokens == 0 {
		o.BlockTokens = traceBlock
	}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 64<<20)
	var list []Request
	for n := 1; lines.Scan() && (o.Requests == 0 || len(list) < o.Requests); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		request, err := o.read(lines.Bytes(), len(list))
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		list = append(list, request)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("the trace has no request: %w", io.ErrUnexpectedEOF)
	}
	slices.SortStableFunc(list, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
	first := list[0].At
	for i := range list {
		list[i].At -= first
	}
	return list, nil
}

func (o *TraceOptions) read(data []byte, number int) (Request, error) {
	var line traceLine
	if err := json.Unmarshal(data, &line); err != nil {
		return Request{}, err
	}
	at := time.Duration(line.Timestamp / o.Speed * float64(time.Millisecond))
	r := Request{At: at, Conversation: number, After: -1, MaxTokens: line.Output, Text: line.Prompt}
	switch {
	case line.Output < 1:
		return r, fmt.Errorf("output_length is %d, want at least 1", line.Output)
	case line.Prompt != "":
		return r, nil
	case line.Input < 1 || len(line.HashIDs) != (line.Input+traceBlock-1)/traceBlock:
		return r, fmt.Errorf("%d hash_ids for an input_length of %d, want one for each %d tokens, or a prompt", len(line.HashIDs), line.Input, traceBlock)
	}
	r.MaxTokens = o.scale(line.Output)
	for _, id := range line.HashIDs {
		r.Message = append(r.Message, drawTokens(rand.New(rand.NewPCG(o.Seed, uint64(id))), o.BlockTokens)...)
	}
	r.Message = r.Message[:min(len(r.Message), o.scale(line.Input))]
	return r, nil
}

// scale is a length when a block has fewer tokens than it was recorded with.
func (o *TraceOptions) scale(tokens int) int { return max(1, tokens*o.BlockTokens/traceBlock) }
