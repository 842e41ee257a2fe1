package vllmtrace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// ErrTrace says that a trace is not what this package knows.
var ErrTrace = errors.New("vllmtrace: bad trace")

// maxLine bounds one call of a trace in bytes.
const maxLine = 4 << 20

type line struct {
	At   int64           `json:"t_us"`
	Took int64           `json:"dur_us"`
	Kind Kind            `json:"call"`
	Step int             `json:"step"`
	Args json.RawMessage `json:"args"`
	Ret  json.RawMessage `json:"ret"`
}

// Read parses one side's trace: JSON Lines, one call each. It is strict: an unknown kind of call, an
// unknown field or a missing argument is an error that names the line and wraps ErrTrace.
func Read(r io.Reader, side Side) ([]Call, error) {
	decoders := decodersOf(side)
	scanner := bufio.NewScanner(r)
	scanner.Buffer(nil, maxLine)
	var calls []Call
	for n := 1; scanner.Scan(); n++ {
		c, err := readLine(scanner.Bytes(), decoders)
		if err != nil {
			return nil, fmt.Errorf("%w: %s side, line %d: %w", ErrTrace, side, n, err)
		}
		c.Side = side
		calls = append(calls, c)
	}
	if err := scanner.Err(); err != nil {
		return nil, fmt.Errorf("%w: %s side: %w", ErrTrace, side, err)
	}
	return calls, nil
}

func readLine(text []byte, decoders map[Kind]decoder) (Call, error) {
	l, err := strict[line](text)
	if err != nil {
		return Call{}, err
	}
	decode, ok := decoders[l.Kind]
	switch {
	case !ok:
		return Call{}, fmt.Errorf("unknown call %q", l.Kind)
	case l.At < 0 || l.Took < 0 || l.Step < 0:
		return Call{}, fmt.Errorf("%s: negative time or step", l.Kind)
	}
	body, err := decode(l.Args, l.Ret)
	if err != nil {
		return Call{}, fmt.Errorf("%s: %w", l.Kind, err)
	}
	return Call{
		Kind: l.Kind, Step: l.Step, Body: body,
		At: time.Duration(l.At) * time.Microsecond, Took: time.Duration(l.Took) * time.Microsecond,
	}, nil
}

// decoder makes a Body of a call's arguments and result.
type decoder func(args, ret json.RawMessage) (any, error)

// decodersOf are the calls that a side may see.
func decodersOf(side Side) map[Kind]decoder {
	if side == SchedulerSide {
		return map[Kind]decoder{
			Init: arguments[InitCall], FinishedCount: nothing, SetHandshake: arguments[HandshakeCall],
			NewRequest: arguments[RequestView], Lookup: decodeLookup, Alloc: arguments[AllocCall],
			BuildMeta: decodeMeta, Output: arguments[OutputCall], RequestFinished: decodeFinished,
			Shutdown: nothing,
		}
	}
	return map[Kind]decoder{
		Init: arguments[InitCall], MemPool: nothing, Register: arguments[RegisterCall],
		HostXferOps: arguments[OpsCall], GetHandshake: nothing, Preemptions: arguments[PreemptionsCall],
		Bind: arguments[BindCall], StartLoad: decodeStartLoad, WaitLayer: arguments[WaitLayerCall],
		SaveLayer: arguments[SaveLayerCall], WaitSave: decodeWaitSave, GetFinished: decodeResults,
		TransferResults: decodeResults, LoadErrors: decodeLoadErrors, Clear: nothing, Shutdown: nothing,
	}
}

// strict decodes all of raw and nothing else.
func strict[T any](raw []byte) (T, error) {
	var v T
	if len(raw) == 0 {
		return v, errors.New("argument or result is missing")
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(&v); err != nil {
		return v, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return v, errors.New("text follows")
	}
	return v, nil
}

func nothing(args, ret json.RawMessage) (any, error) {
	if len(args)+len(ret) > 0 {
		return nil, errors.New("arguments or result where none are known")
	}
	return nil, nil
}

func arguments[T any](args, ret json.RawMessage) (any, error) {
	if len(ret) > 0 {
		return nil, errors.New("a result where none is known")
	}
	v, err := strict[T](args)
	return &v, err
}

// tuple decodes a JSON array of exactly as many elements as there are targets.
func tuple(raw json.RawMessage, into ...any) error {
	parts, err := strict[[]json.RawMessage](raw)
	if err != nil {
		return err
	}
	if len(parts) != len(into) {
		return fmt.Errorf("%d elements, want %d", len(parts), len(into))
	}
	for i, p := range parts {
		if err := json.Unmarshal(p, into[i]); err != nil {
			return err
		}
	}
	return nil
}

// UnmarshalJSON implements json.Unmarshaler: [request, [block...], [hash...]].
func (l *LoadRef) UnmarshalJSON(raw []byte) error {
	if err := tuple(raw, &l.Request, &l.Blocks, &l.Hashes); err != nil {
		return fmt.Errorf("load: %w", err)
	}
	if len(l.Blocks) != len(l.Hashes) {
		return fmt.Errorf("load of %d blocks and %d hashes", len(l.Blocks), len(l.Hashes))
	}
	return nil
}

// UnmarshalJSON implements json.Unmarshaler: [request, block, hash].
func (s *SaveRef) UnmarshalJSON(raw []byte) error {
	if err := tuple(raw, &s.Request, &s.Block, &s.Hash); err != nil {
		return fmt.Errorf("save: %w", err)
	}
	return nil
}

func decodeLookup(args, ret json.RawMessage) (any, error) {
	v, err := strict[LookupCall](args)
	if err != nil {
		return nil, err
	}
	var tokens *int
	if err := tuple(ret, &tokens, &v.Async); err != nil {
		return nil, err
	}
	v.Later = tokens == nil
	if tokens != nil {
		v.Tokens = *tokens
	}
	return &v, nil
}

func decodeMeta(args, ret json.RawMessage) (any, error) {
	v, err := strict[MetaCall](args)
	if err != nil {
		return nil, err
	}
	answer, err := strict[struct {
		Loads []LoadRef `json:"loads"`
		Saves []SaveRef `json:"saves"`
	}](ret)
	v.Loads, v.Saves = answer.Loads, answer.Saves
	return &v, err
}

func decodeFinished(args, ret json.RawMessage) (any, error) {
	v, err := strict[FinishedCall](args)
	if err != nil {
		return nil, err
	}
	return &v, tuple(ret, &v.Delay, &v.Params)
}

type byteCount struct {
	Bytes int64 `json:"bytes"`
}

func decodeStartLoad(args, ret json.RawMessage) (any, error) {
	v, err := strict[StartLoadCall](args)
	if err != nil {
		return nil, err
	}
	n, err := strict[byteCount](ret)
	v.Bytes = n.Bytes
	return &v, err
}

func decodeWaitSave(args, ret json.RawMessage) (any, error) {
	v, err := strict[WaitSaveCall](args)
	if err != nil {
		return nil, err
	}
	n, err := strict[byteCount](ret)
	v.Bytes = n.Bytes
	return &v, err
}

func decodeResults(args, ret json.RawMessage) (any, error) {
	v, err := strict[ResultsCall](args)
	if err != nil {
		return nil, err
	}
	if parts, err := strict[[]json.RawMessage](ret); err == nil && len(parts) == 3 {
		return &v, tuple(ret, &v.Sending, &v.Recving, &v.Failed)
	}
	return &v, tuple(ret, &v.Sending, &v.Recving)
}

func decodeLoadErrors(args, ret json.RawMessage) (any, error) {
	if len(args) > 0 && !bytes.Equal(args, []byte("null")) {
		return nil, errors.New("arguments where none are known")
	}
	blocks, err := strict[[]int](ret)
	return &BlocksCall{Blocks: blocks}, err
}
