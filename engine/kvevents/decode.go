package kvevents

import (
	"bytes"
	"errors"
	"fmt"
	"math"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// ErrFormat says that a payload is no batch of events, or exceeds a limit.
var ErrFormat = errors.New("no KV events")

// The limits of a batch, in addition to that of its message.
const (
	maxEvents    = 1 << 16
	maxValues    = 1 << 18 // hashes and extra keys of all events: each takes more memory than bytes on the wire
	maxHashes    = 1 << 16 // of an event
	maxHash      = 256     // bytes
	maxTokens    = 1 << 21 // of an event
	maxBlockSize = 1 << 16
	maxGroups    = 1 << 16
	maxText      = 1 << 10 // bytes
	maxExtra     = 64      // values of a block that are kept
	maxValue     = 1 << 12 // bytes of such a value
	maxFields    = 64      // of an event
	maxDepth     = 16      // of what is not known
)

// Decode reads the events of a batch. It keeps nothing of the payload. What no reader needs is passed over, and so are
// fields and events that it does not know, since later versions may have more of them. Errors wrap ErrFormat.
func Decode(payload []byte) ([]Event, error) {
	r := bytes.NewReader(payload)
	d := &decoder{payload: payload, r: r, d: msgpack.NewDecoder(r)}
	var list []Event
	n := d.array("the batch", 1<<10)
	if d.err == nil && n < 2 {
		d.fail("the batch has %d values, want time and events", n)
	}
	d.skip(maxDepth) // its time
	events := d.array("the list of events", maxEvents)
	for i := 0; i < events && d.err == nil; i++ {
		if ev, known := d.event(); known && d.err == nil {
			list = append(list, ev)
		}
	}
	for i := 2; i < n && d.err == nil; i++ {
		d.skip(maxDepth)
	}
	if d.err == nil && r.Len() > 0 {
		d.fail("%d bytes follow the batch", r.Len())
	}
	if d.err != nil {
		return nil, d.err
	}
	return list, nil
}

// decoder reads values. The first error sticks, and what is read afterwards is zero.
type decoder struct {
	payload []byte
	r       *bytes.Reader
	d       *msgpack.Decoder
	values  int // hashes and extra keys so far
	err     error
}

func (d *decoder) fail(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf("%w: %s", ErrFormat, fmt.Sprintf(format, args...))
	}
}

// check notes an error of the library. Its errors are those of input that is cut short.
func (d *decoder) check(what string, err error) {
	if err != nil {
		d.fail("%s: %v", what, err)
	}
}

// code is the first byte of the next value.
func (d *decoder) code() byte {
	if d.err != nil {
		return 0
	}
	c, err := d.d.PeekCode()
	if err != nil {
		d.fail("it ends too soon")
	}
	return c
}

// null takes a null, if one is next.
func (d *decoder) null() bool {
	if d.code() != msgpcode.Nil || d.err != nil {
		return false
	}
	d.check("null", d.d.DecodeNil())
	return true
}

// array begins an array of at most that many values, each of which has a byte at least.
func (d *decoder) array(what string, most int) int {
	c := d.code()
	if d.err == nil && !msgpcode.IsFixedArray(c) && c != msgpcode.Array16 && c != msgpcode.Array32 {
		d.fail("%s is no array", what)
	}
	if d.err != nil {
		return 0
	}
	n, err := d.d.DecodeArrayLen()
	d.check(what, err)
	if d.err == nil && (n < 0 || n > most || n > d.r.Len()) {
		d.fail("%s has %d values, want at most %d", what, n, min(most, d.r.Len()))
	}
	if d.err != nil {
		return 0
	}
	return n
}

// costly is array, of values that all count together.
func (d *decoder) costly(what string, most int) int {
	n := d.array(what, most)
	if d.values += n; d.values > maxValues {
		d.fail("the events have over %d hashes and extra keys", maxValues)
	}
	return n
}

func (d *decoder) int(what string, low, high int64) int64 {
	c := d.code()
	if d.err == nil && !isInt(c) {
		d.fail("%s is no whole number", what)
	}
	if d.err != nil {
		return 0
	}
	n, err := d.d.DecodeInt64()
	d.check(what, err)
	if d.err == nil && (n < low || n > high) {
		d.fail("%s is %d, want %d to %d", what, n, low, high)
	}
	if d.err != nil {
		return 0
	}
	return n
}

// isInt reports whether a value of that code is a whole number.
func isInt(c byte) bool {
	return msgpcode.IsFixedNum(c) || c >= msgpcode.Uint8 && c <= msgpcode.Int64
}

// text reads a short text; null gives an empty one.
func (d *decoder) text(what string) string {
	if d.null() {
		return ""
	}
	if c := d.code(); d.err == nil && !msgpcode.IsString(c) {
		d.fail("%s is no text", what)
	}
	return string(d.bytes(what, maxText))
}

// bytes reads a text or some bytes.
func (d *decoder) bytes(what string, most int) []byte {
	if d.err != nil {
		return nil
	}
	n, err := d.d.DecodeBytesLen()
	d.check(what, err)
	if d.err == nil && (n < 0 || n > most || n > d.r.Len()) {
		d.fail("%s has %d bytes, want at most %d", what, n, min(most, d.r.Len()))
	}
	if d.err != nil {
		return nil
	}
	b := make([]byte, n)
	d.check(what, d.d.ReadFull(b))
	return b
}

// hash reads a hash; null gives none.
func (d *decoder) hash(what string) Hash {
	if d.null() {
		return Hash{}
	}
	c := d.code()
	switch {
	case d.err != nil:
		return Hash{}
	case c == msgpcode.Uint64:
		n, err := d.d.DecodeUint64()
		d.check(what, err)
		return NumberHash(n)
	case isInt(c): // Python's own hashes may be negative
		return NumberHash(uint64(d.int(what, math.MinInt64, math.MaxInt64)))
	case msgpcode.IsString(c) || msgpcode.IsBin(c):
		b := d.bytes(what, maxHash)
		if len(b) == 0 {
			d.fail("%s is empty", what)
		}
		return BytesHash(b)
	}
	d.fail("%s is neither a number nor bytes", what)
	return Hash{}
}

func (d *decoder) hashes() []Hash {
	n := d.costly("block_hashes", maxHashes)
	list := make([]Hash, 0, n)
	for i := 0; i < n && d.err == nil; i++ {
		h := d.hash("a block's hash")
		if d.err == nil && h.IsZero() {
			d.fail("a block has no hash")
		}
		list = append(list, h)
	}
	return list
}

// event reads one event. It is not known if its type is not.
func (d *decoder) event() (ev Event, known bool) {
	c := d.code()
	if d.err == nil && !msgpcode.IsFixedMap(c) && c != msgpcode.Map16 && c != msgpcode.Map32 {
		d.fail("an event is no map with a type")
	}
	if d.err != nil {
		return ev, false
	}
	n, err := d.d.DecodeMapLen()
	d.check("an event", err)
	if d.err == nil && (n < 1 || n > maxFields) {
		d.fail("an event has %d fields, want 1 to %d", n, maxFields)
	}
	ev.Group = -1
	for i := 0; i < n && d.err == nil; i++ {
		d.field(&ev, d.text("the name of a field"))
	}
	d.consistent(&ev)
	return ev, ev.Kind != 0
}

// field reads one field of an event.
func (d *decoder) field(ev *Event, name string) {
	switch name {
	case "type":
		ev.Kind = kinds()[d.text(name)]
	case "block_hashes":
		ev.Hashes = d.hashes()
	case "medium":
		ev.Medium = d.text(name)
	case "locality":
		ev.Locality = d.text(name)
	case "group_idx":
		if !d.null() {
			ev.Group = int(d.int(name, 0, maxGroups))
		}
	case "parent_block_hash":
		ev.Parent = d.hash(name)
	case "token_ids":
		ev.Tokens = d.tokens()
	case "block_size":
		ev.BlockSize = int(d.int(name, 0, maxBlockSize))
	case "lora_name":
		ev.LoRAName = d.text(name)
	case "extra_keys":
		ev.Extra = d.extra()
	default:
		d.skip(maxDepth)
	}
}

// kinds are the types of events by their names.
func kinds() map[string]Kind {
	return map[string]Kind{"BlockStored": Stored, "BlockRemoved": Removed, "AllBlocksCleared": Cleared}
}

// consistent refuses an event whose fields do not belong together.
func (d *decoder) consistent(ev *Event) {
	switch {
	case d.err != nil || ev.Kind != Stored:
	case ev.Extra != nil && len(ev.Extra) != len(ev.Hashes):
		d.fail("extra_keys has %d entries for %d blocks", len(ev.Extra), len(ev.Hashes))
	case len(ev.Tokens) > 0 && ev.BlockSize == 0:
		d.fail("blocks with tokens have block_size 0")
	}
}

func (d *decoder) tokens() []int32 {
	n := d.array("token_ids", maxTokens)
	list := make([]int32, 0, n)
	for i := 0; i < n && d.err == nil; i++ {
		list = append(list, int32(d.int("a token's id", 0, math.MaxInt32)))
	}
	return list
}

func (d *decoder) extra() [][]string {
	if d.null() {
		return nil
	}
	n := d.costly("extra_keys", maxHashes)
	list := make([][]string, 0, n)
	for i := 0; i < n && d.err == nil; i++ {
		if d.null() {
			list = append(list, nil)
			continue
		}
		list = append(list, d.extraOf())
	}
	return list
}

// extraOf reads the extra keys of a block. Clients choose some of them, such as cache_salt: what is too long or too many
// costs the block its place and not the batch.
func (d *decoder) extraOf() []string {
	n := d.costly("the extra keys of a block", maxHashes)
	whole := n <= maxExtra
	values := make([]string, 0, min(n, maxExtra))
	for i := 0; i < n && d.err == nil; i++ {
		value := d.raw()
		if whole = whole && value != ""; whole {
			values = append(values, value)
		}
	}
	if !whole {
		return []string{""}
	}
	return values
}

// raw takes a value as it stands; one that is too long becomes empty.
func (d *decoder) raw() string {
	start := len(d.payload) - d.r.Len()
	d.skip(maxDepth)
	end := len(d.payload) - d.r.Len()
	if d.err != nil || end-start > maxValue {
		return ""
	}
	return string(d.payload[start:end])
}

// skip passes over a value whose values are nested at most that deep.
func (d *decoder) skip(depth int) {
	c := d.code()
	switch {
	case d.err != nil:
	case depth == 0:
		d.fail("values are nested too deeply")
	case msgpcode.IsFixedArray(c), c == msgpcode.Array16, c == msgpcode.Array32:
		for n := d.array("a value", math.MaxInt32); n > 0 && d.err == nil; n-- {
			d.skip(depth - 1)
		}
	case msgpcode.IsFixedMap(c), c == msgpcode.Map16, c == msgpcode.Map32:
		n, err := d.d.DecodeMapLen()
		d.check("a value", err)
		for n *= 2; n > 0 && d.err == nil; n-- {
			d.skip(depth - 1)
		}
	case msgpcode.IsString(c) || msgpcode.IsBin(c):
		d.bytes("a value", math.MaxInt32)
	default:
		d.check("a value", d.d.Skip()) // it has no others within it
	}
}
