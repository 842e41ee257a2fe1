// Package strictjson reads JSON configs strictly: what a config says that no reader knows is an error that names it.
package strictjson

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"regexp"
	"strconv"
	"strings"
)

// Value is a JSON value that knows where it stands: errors about it name its field, line and column. A field of this
// type takes a value as it is, to be decoded later.
type Value struct {
	path   string
	text   []byte // the whole document
	start  int    // of the value in text
	end    int
	names  []string // of an object, in their order
	fields map[string]*Value
	items  []*Value
	plain  json.RawMessage // the number that a text stands for, once it was decoded as one; else nil
}

// Error is a mistake in a JSON text.
type Error struct {
	Path         string // of the field, such as kvport.deadlines.save; empty: the whole text
	Line, Column int    // from 1; the column counts bytes
	Err          error
}

// Error is the message with line and column.
func (e *Error) Error() string {
	return fmt.Sprintf("line %d, column %d: %s", e.Line, e.Column, e.Field())
}

// Field is the message without line and column, for texts that their author does not see as they are decoded.
func (e *Error) Field() string {
	if e.Path == "" {
		return e.Err.Error()
	}
	return e.Path + ": " + e.Err.Error()
}

// Unwrap is what is wrong.
func (e *Error) Unwrap() error { return e.Err }

// Parse reads the one JSON value of a text. It refuses what encoding/json lets pass or explains badly: no value, several
// values, keys that are given twice. Errors are of type *Error.
func Parse(text []byte) (*Value, error) {
	whole := &Value{text: text}
	if len(bytes.TrimSpace(text)) == 0 {
		return nil, whole.Errorf("is empty, must be a JSON object")
	}
	if bytes.HasPrefix(text, []byte("\xef\xbb\xbf")) {
		return nil, whole.Errorf("begins with a byte order mark (EF BB BF): save it as UTF-8 without one")
	}
	if err := json.Unmarshal(text, new(json.RawMessage)); err != nil {
		var hint string
		if syntax, is := errors.AsType[*json.SyntaxError](err); is {
			whole.start, hint = explain(text, int(syntax.Offset))
		}
		return nil, whole.Errorf("bad JSON: %s%w", hint, err)
	}
	p := &parser{text: text, decoder: json.NewDecoder(bytes.NewReader(text))}
	return p.value("")
}

// explain gives the place of a mistake that was noticed at the byte before offset, and a hint if it is one that other
// languages allow.
func explain(text []byte, offset int) (at int, hint string) {
	at = max(offset-1, 0)
	if offset < 1 || offset > len(text) {
		return at, ""
	}
	switch text[at] {
	case '\'':
		return at, "single quotes are not JSON, write double quotes: "
	case '}', ']':
		before := bytes.TrimRight(text[:at], " \t\r\n")
		if bytes.HasSuffix(before, []byte(",")) {
			return len(before) - 1, "JSON has no comma behind the last item: "
		}
	}
	return at, ""
}

// parser makes values of a text whose syntax was checked.
type parser struct {
	text    []byte
	decoder *json.Decoder
}

// next reads a token and says where it begins.
func (p *parser) next() (token json.Token, start int, err error) {
	start = int(p.decoder.InputOffset())
	for start < len(p.text) && strings.IndexByte(" \t\r\n,:", p.text[start]) >= 0 {
		start++
	}
	p.decoder.UseNumber()
	token, err = p.decoder.Token()
	return token, start, err
}

func (p *parser) value(path string) (*Value, error) {
	token, start, err := p.next()
	if err != nil {
		return nil, err
	}
	v := &Value{path: path, text: p.text, start: start}
	switch token {
	case json.Delim('{'):
		v.fields = map[string]*Value{}
		err = p.object(v)
	case json.Delim('['):
		err = p.array(v)
	}
	v.end = int(p.decoder.InputOffset())
	return v, err
}

func (p *parser) object(v *Value) error {
	for p.decoder.More() {
		token, start, err := p.next()
		if err != nil {
			return err
		}
		name, _ := token.(string)
		if v.fields[name] != nil {
			twice := &Value{path: v.path, text: v.text, start: start}
			return twice.Errorf("field %s is given twice", Quote(name)) // readers disagree which of them counts
		}
		v.names = append(v.names, name)
		if v.fields[name], err = p.value(join(v.path, name)); err != nil {
			return err
		}
	}
	_, _, err := p.next()
	return err
}

func (p *parser) array(v *Value) error {
	for p.decoder.More() {
		item, err := p.value(fmt.Sprintf("%s[%d]", v.path, len(v.items)))
		if err != nil {
			return err
		}
		v.items = append(v.items, item)
	}
	_, _, err := p.next()
	return err
}

// Raw is the text of the value.
func (v *Value) Raw() json.RawMessage { return bytes.Clone(v.text[v.start:v.end]) }

// Field is a field of an object; nil where there is none.
func (v *Value) Field(name string) *Value { return v.fields[name] }

// Names are the names of an object's fields in their order.
func (v *Value) Names() []string { return v.names }

// Errorf is an error about the value: *Error.
func (v *Value) Errorf(format string, args ...any) error {
	before := v.text[:min(v.start, len(v.text))]
	return &Error{
		Path: v.path, Line: bytes.Count(before, []byte("\n")) + 1, Column: len(before) - bytes.LastIndexByte(before, '\n'),
		Err: fmt.Errorf(format, args...),
	}
}

// kind is the first byte of a value, with 0 for numbers.
func (v *Value) kind() byte {
	switch b := v.text[v.start]; b {
	case '{', '[', '"', 'n':
		return b
	case 't', 'f':
		return 't'
	}
	return '0'
}

// IsNull reports whether the value is null.
func (v *Value) IsNull() bool { return v.kind() == 'n' }

// what says in words which kind of value it is.
func (v *Value) what() string {
	return map[byte]string{'{': "an object", '[': "an array", '"': "a string", 't': "a boolean", 'n': "null", '0': "a number"}[v.kind()]
}

// shown is a value in a message, which stays a line.
func (v *Value) shown() string {
	raw := v.Raw()
	if len(raw) > longest {
		return strings.ToValidUTF8(string(raw[:longest]), "") + "..."
	}
	return string(raw)
}

// instance is the value as the validator of schemas takes it, with numbers for the texts that stand for numbers.
func (v *Value) instance() any {
	switch v.kind() {
	case '{':
		object := make(map[string]any, len(v.fields))
		for name, field := range v.fields {
			object[name] = field.instance()
		}
		return object
	case '[':
		array := make([]any, len(v.items))
		for i, item := range v.items {
			array[i] = item.instance()
		}
		return array
	}
	raw := v.text[v.start:v.end]
	if v.plain != nil {
		raw = v.plain
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var plain any
	_ = d.Decode(&plain) // its syntax was checked
	return plain
}

// longest is how many bytes of a name or a value a message has.
const longest = 80

// Quote is strconv.Quote, shortened: a message stays a line.
func Quote(s string) string {
	if len(s) > longest {
		return strconv.Quote(s[:longest]) + "..."
	}
	return strconv.Quote(s)
}

// ordinary matches a name that a path contains unquoted.
var ordinary = regexp.MustCompile(`^[\pL\pN_./-]{1,80}$`)

func join(path, name string) string {
	if !ordinary.MatchString(name) {
		name = Quote(name)
	}
	if path == "" {
		return name
	}
	return path + "." + name
}

// maxNumber bounds the text of a number in a config, so that none is rounded by numberBits.
const (
	maxNumber  = 64
	numberBits = 512
)

// errNotWhole says what a whole number in a config may look like.
var errNotWhole = errors.New(`is no whole number`)

// ConfigNumber is the text of a JSON number that raw is, or that raw is a string of: people write ports and
// sizes as "14579" and "1e9". It is false for everything else.
func ConfigNumber(raw []byte) (text string, ok bool) {
	raw = bytes.TrimSpace(raw)
	if len(raw) > 0 && raw[0] == '"' {
		if json.Unmarshal(raw, &text) != nil {
			return "", false
		}
	} else {
		text = string(raw)
	}
	text = strings.TrimSpace(text)
	isNumber := text != "" && strings.ContainsRune("-0123456789", rune(text[0])) && json.Valid([]byte(text))
	return text, isNumber && len(text) <= maxNumber
}

// ConfigWhole reads a whole number of a config: 10, 1e1, "10" or "1e1"; a number of bytes may have a unit, as in
// "10GB" or "10GiB". Nothing is rounded: what is not whole, or more than an int64 holds, is an error.
func ConfigWhole(raw []byte, inBytes bool) (int64, error) {
	text, ok := ConfigNumber(raw)
	unit := int64(1)
	if !ok && inBytes && json.Unmarshal(raw, &text) == nil {
		text, unit = cutUnit(strings.TrimSpace(text))
		text, ok = ConfigNumber([]byte(text))
	}
	if !ok {
		if inBytes {
			return 0, fmt.Errorf(`%w and no size such as "10GiB"`, errNotWhole)
		}
		return 0, errNotWhole
	}
	f, _, err := big.ParseFloat(text, 10, numberBits, big.ToNearestEven)
	if err != nil {
		return 0, errNotWhole
	}
	n, exact := f.Mul(f, new(big.Float).SetInt64(unit)).Int64()
	if exact != big.Exact {
		if f.IsInt() {
			return 0, errors.New("is too large")
		}
		return 0, errNotWhole
	}
	return n, nil
}

// cutUnit takes the unit of a size off its text. KB and so on are powers of 1000, KiB and so on of 1024. An
// unknown unit stays in the text, which then does not parse as a number.
func cutUnit(text string) (number string, unit int64) {
	lower := strings.ToLower(text)
	decimal, binary := int64(1), int64(1)
	for _, letter := range "kmgt" {
		decimal, binary = decimal*1000, binary*1024
		for suffix, size := range map[string]int64{string(letter) + "b": decimal, string(letter) + "ib": binary} {
			if strings.HasSuffix(lower, suffix) {
				return strings.TrimSpace(text[:len(text)-len(suffix)]), size
			}
		}
	}
	return text, 1
}
