package kvevents

import (
	"bytes"
	"fmt"

	"github.com/vmihailenco/msgpack/v5"
)

// Append encodes a batch as vLLM does and appends it to b. Errors say what no batch may have.
func (batch *Batch) Append(b []byte) ([]byte, error) {
	out := bytes.NewBuffer(b)
	e := encoder{msgpack.NewEncoder(out)}
	e.array(3)
	e.float(batch.Time)
	e.array(len(batch.Events))
	for i := range batch.Events {
		if err := e.event(&batch.Events[i]); err != nil {
			return nil, fmt.Errorf("event %d: %w", i, err)
		}
	}
	e.int(0) // the data parallel rank
	return out.Bytes(), nil
}

// Text is a text as a value of Event.Extra.
func Text(s string) string {
	var out bytes.Buffer
	encoder{msgpack.NewEncoder(&out)}.text(s)
	return out.String()
}

// encoder writes to memory, which does not fail.
type encoder struct{ e *msgpack.Encoder }

func (e encoder) array(n int)     { _ = e.e.EncodeArrayLen(n) }
func (e encoder) object(n int)    { _ = e.e.EncodeMapLen(n) }
func (e encoder) text(s string)   { _ = e.e.EncodeString(s) }
func (e encoder) int(n int64)     { _ = e.e.EncodeInt(n) }
func (e encoder) float(f float64) { _ = e.e.EncodeFloat64(f) }
func (e encoder) null()           { _ = e.e.EncodeNil() }

// textOrNull writes a text, or null where it is empty.
func (e encoder) textOrNull(s string) {
	if s == "" {
		e.null()
		return
	}
	e.text(s)
}

func (e encoder) hash(h Hash) {
	switch {
	case h.IsZero():
		e.null()
	case h.number:
		_ = e.e.EncodeUint(h.value())
	default:
		_ = e.e.EncodeBytes([]byte(h.text))
	}
}

func (e encoder) hashes(list []Hash) {
	e.array(len(list))
	for _, h := range list {
		e.hash(h)
	}
}

// event writes one event as a map that begins with its type.
func (e encoder) event(ev *Event) error {
	optional := 0
	if ev.Group >= 0 {
		optional++
	}
	if ev.Locality != "" {
		optional++
	}
	switch ev.Kind {
	case Cleared:
		e.head("AllBlocksCleared", 0)
	case Removed:
		e.head("BlockRemoved", 2+optional)
		e.text("block_hashes")
		e.hashes(ev.Hashes)
		e.text("medium")
		e.textOrNull(ev.Medium)
		e.optional(ev)
	case Stored:
		if ev.Extra != nil && len(ev.Extra) != len(ev.Hashes) {
			return fmt.Errorf("%d blocks have %d entries of extra keys", len(ev.Hashes), len(ev.Extra))
		}
		e.stored(ev, optional)
	default:
		return fmt.Errorf("kind %d is unknown", ev.Kind)
	}
	return nil
}

func (e encoder) head(tag string, fields int) {
	e.object(1 + fields)
	e.text("type")
	e.text(tag)
}

// optional writes the fields that only some events have.
func (e encoder) optional(ev *Event) {
	if ev.Group >= 0 {
		e.text("group_idx")
		e.int(int64(ev.Group))
	}
	if ev.Locality != "" {
		e.text("locality")
		e.text(ev.Locality)
	}
}

func (e encoder) stored(ev *Event, optional int) {
	if ev.Extra != nil {
		optional++
	}
	e.head("BlockStored", 7+optional)
	e.text("block_hashes")
	e.hashes(ev.Hashes)
	e.text("parent_block_hash")
	e.hash(ev.Parent)
	e.text("token_ids")
	e.array(len(ev.Tokens))
	for _, t := range ev.Tokens {
		e.int(int64(t))
	}
	e.text("block_size")
	e.int(int64(ev.BlockSize))
	e.text("lora_id")
	e.null()
	e.text("medium")
	e.textOrNull(ev.Medium)
	e.text("lora_name")
	e.textOrNull(ev.LoRAName)
	if ev.Extra != nil {
		e.text("extra_keys")
		e.extra(ev.Extra)
	}
	e.optional(ev)
}

func (e encoder) extra(list [][]string) {
	e.array(len(list))
	for _, values := range list {
		if values == nil {
			e.null()
			continue
		}
		e.array(len(values))
		for _, v := range values {
			if v == "" { // it is not known
				e.null()
				continue
			}
			_, _ = e.e.Writer().Write([]byte(v))
		}
	}
}
