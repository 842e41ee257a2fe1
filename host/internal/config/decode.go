package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/agnivade/levenshtein"

	"github.com/kvport/kvport/internal/strictjson"
)

// Field is one key of a JSON object and what to do with its value.
type Field struct {
	Name string
	Set  func(json.RawMessage) error
}

// Object gives each value of a JSON object to its field. Names must match exactly, case
// included. A key without a field is an error unless accept says that it may stay.
func Object(raw json.RawMessage, fields []Field, accept func(string, json.RawMessage) (bool, error)) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return fmt.Errorf("must be a JSON object, not %s", kindOf(raw))
	}
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return err
		}
		key, _ := t.(string)
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return err
		}
		known := true
		if i := indexOf(fields, key); i >= 0 {
			err = fields[i].Set(value)
		} else if known = accept != nil; known {
			known, err = accept(key, value)
		}
		switch {
		case err != nil:
			return FieldError(key, err)
		case !known:
			return fmt.Errorf("unknown field %s%s", Quote(key), didYouMean(key, names(fields)))
		}
	}
	return nil
}

// nested is an error below a field, so that fields can be joined with dots.
type nested struct {
	path string
	err  error
}

func (e *nested) Error() string { return e.path + ": " + e.err.Error() }
func (e *nested) Unwrap() error { return e.err }

// FieldError says at which key an error is. The keys of nested objects are joined with dots.
func FieldError(key string, err error) error {
	if n, ok := errors.AsType[*nested](err); ok {
		return &nested{path: key + "." + n.path, err: n.err}
	}
	return &nested{path: key, err: err}
}

func indexOf(fields []Field, name string) int {
	for i := range fields {
		if fields[i].Name == name {
			return i
		}
	}
	return -1
}

func names(fields []Field) []string {
	out := make([]string, len(fields))
	for i := range fields {
		out[i] = fields[i].Name
	}
	return out
}

// didYouMean suggests the nearest of the known names, if one is near.
func didYouMean(name string, known []string) string {
	best := Nearest(name, known, len(name)/3+2)
	if best == "" {
		return ""
	}
	return fmt.Sprintf(", did you mean %q?", best)
}

// Nearest is the known name with the fewest letters changed, if these are fewer than limit.
func Nearest(name string, known []string, limit int) (best string) {
	const longest = 64 // comparing is quadratic
	for _, k := range known {
		if len(name) > longest {
			break
		}
		if d := levenshtein.ComputeDistance(name, k); d < limit {
			best, limit = k, d
		}
	}
	return best
}

// longestQuote is how many bytes of a value stand in a message, so that it stays a line.
const longestQuote = 80

// Quote is strconv.Quote, shortened.
func Quote(s string) string {
	if len(s) > longestQuote {
		return strconv.Quote(s[:longestQuote]) + "..."
	}
	return strconv.Quote(s)
}

// shorten is a JSON value, shortened.
func shorten(s string) string {
	if len(s) > longestQuote {
		return strings.ToValidUTF8(s[:longestQuote], "") + "..."
	}
	return s
}

func kindOf(raw json.RawMessage) string {
	switch b := bytes.TrimSpace(raw); {
	case len(b) == 0:
		return "nothing"
	case b[0] == '{':
		return "an object"
	case b[0] == '[':
		return "an array"
	case b[0] == '"':
		return "a string"
	case b[0] == 't', b[0] == 'f':
		return "a boolean"
	case b[0] == 'n':
		return "null"
	default:
		return "a number"
	}
}

// As decodes a value that begins with one of some characters; want says what it must be.
func As[T any](raw json.RawMessage, want string, prefixes string) (T, error) {
	var v T
	b := bytes.TrimSpace(raw)
	if len(b) == 0 || !bytes.ContainsRune([]byte(prefixes), rune(b[0])) {
		return v, fmt.Errorf("must be %s, not %s", want, kindOf(raw))
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return v, fmt.Errorf("must be %s", want)
	}
	return v, nil
}

// Text reads a string.
func Text(to *string) func(json.RawMessage) error {
	return func(raw json.RawMessage) (err error) {
		*to, err = As[string](raw, "a string", `"`)
		return err
	}
}

// Bool reads true or false.
func Bool(to *bool) func(json.RawMessage) error {
	return func(raw json.RawMessage) (err error) {
		*to, err = As[bool](raw, "true or false", "tf")
		return err
	}
}

// Whole reads a whole number, which may be a string of one; inBytes, of a size such as "10GiB".
func Whole(raw json.RawMessage, inBytes bool) (int64, error) {
	want := "a whole number"
	if inBytes {
		want = "a number of bytes"
	}
	b := bytes.TrimSpace(raw)
	if len(b) == 0 || !bytes.ContainsRune([]byte(`"-0123456789`), rune(b[0])) {
		return 0, fmt.Errorf("must be %s, not %s", want, kindOf(raw))
	}
	n, err := strictjson.ConfigWhole(b, inBytes)
	if err != nil {
		return 0, fmt.Errorf("must be %s: %s %w", want, shorten(string(b)), err)
	}
	return n, nil
}

// Positive reads a positive whole number.
func Positive(to *int) func(json.RawMessage) error {
	return func(raw json.RawMessage) error { return setPositive(to, raw, false) }
}

// Size reads a positive number of bytes.
func Size(to *int) func(json.RawMessage) error {
	return func(raw json.RawMessage) error { return setPositive(to, raw, true) }
}

func setPositive(to *int, raw json.RawMessage, inBytes bool) error {
	n, err := Whole(raw, inBytes)
	if err != nil {
		return err
	}
	if n <= 0 || int64(int(n)) != n {
		return fmt.Errorf("is %d, must be positive", n)
	}
	*to = int(n)
	return nil
}

// Texts reads an array of strings.
func Texts(to *[]string) func(json.RawMessage) error {
	return func(raw json.RawMessage) error {
		list, err := As[[]json.RawMessage](raw, "an array of strings", "[")
		if err != nil {
			return err
		}
		for i, item := range list {
			var s string
			if err := Text(&s)(item); err != nil {
				return fmt.Errorf("[%d] %w", i, err)
			}
			*to = append(*to, s)
		}
		return nil
	}
}

// OneOf reads one of some strings.
func OneOf[S ~string](to *S, values ...S) func(json.RawMessage) error {
	return func(raw json.RawMessage) error {
		var s string
		if err := Text(&s)(raw); err != nil {
			return err
		}
		for _, v := range values {
			if string(v) == s {
				*to = v
				return nil
			}
		}
		return fmt.Errorf("is %s, want %s", Quote(s), alternatives(values))
	}
}

// alternatives lists values as a sentence does.
func alternatives[S ~string](values []S) string {
	quoted := make([]string, len(values))
	for i, v := range values {
		quoted[i] = strconv.Quote(string(v))
	}
	return strings.Join(quoted, " or ")
}

// RawObject keeps an object as it is.
func RawObject(to *json.RawMessage) func(json.RawMessage) error {
	return func(raw json.RawMessage) error {
		if b := bytes.TrimSpace(raw); len(b) == 0 || b[0] != '{' {
			return fmt.Errorf("must be a JSON object, not %s", kindOf(raw))
		}
		*to = bytes.Clone(raw)
		return nil
	}
}

// Duration reads "250ms" or a number of seconds.
func Duration(to *time.Duration) func(json.RawMessage) error {
	const want = `a duration such as "250ms", or a number of seconds`
	return func(raw json.RawMessage) error {
		var d time.Duration
		if b := bytes.TrimSpace(raw); len(b) > 0 && b[0] == '"' {
			var s string
			if err := Text(&s)(raw); err != nil {
				return err
			}
			var err error
			if number, ok := strictjson.ConfigNumber(raw); ok {
				return Duration(to)(json.RawMessage(number))
			}
			if d, err = time.ParseDuration(s); err != nil {
				return fmt.Errorf("%s is not %s", Quote(s), want)
			}
		} else {
			seconds, err := As[float64](raw, want, "-0123456789")
			if err != nil {
				return err
			}
			d = time.Duration(seconds * float64(time.Second))
		}
		if d <= 0 || d > 24*time.Hour {
			return fmt.Errorf("is %s, must be positive and at most 24h", d)
		}
		*to = d
		return nil
	}
}

// Check refuses what encoding/json would let pass or explain badly: no value, several values,
// keys given twice, bad syntax without a position.
func Check(data []byte) error {
	if len(bytes.TrimSpace(data)) == 0 {
		return errors.New("is empty, must be a JSON object")
	}
	if bytes.HasPrefix(data, []byte("\xef\xbb\xbf")) {
		return errors.New("begins with a byte order mark (EF BB BF): save it as UTF-8 without one")
	}
	var syntax *json.SyntaxError
	if err := json.Unmarshal(data, new(json.RawMessage)); errors.As(err, &syntax) {
		offset, hint := explain(data, syntax.Offset)
		line, column := position(data, offset)
		return fmt.Errorf("line %d, column %d: %s%w", line, column, hint, err)
	} else if err != nil {
		return err
	}
	return checkKeys(data)
}

// explain gives the place of a mistake in JSON that was noticed at the byte before offset, and a hint if it is one that
// other languages allow.
func explain(data []byte, offset int64) (at int64, hint string) {
	if offset < 1 || offset > int64(len(data)) {
		return offset, ""
	}
	switch data[offset-1] {
	case '\'':
		return offset, "single quotes are not JSON, write double quotes: "
	case '}', ']':
		before := bytes.TrimRight(data[:offset-1], " \t\r\n")
		if bytes.HasSuffix(before, []byte(",")) {
			return int64(len(before)), "JSON has no comma behind the last item: "
		}
	}
	return offset, ""
}

// checkKeys finds keys that an object has twice: readers disagree which of them counts.
func checkKeys(data []byte) error {
	type frame struct {
		keys map[string]bool // nil in an array
		key  bool            // the next token is a key
	}
	var stack []frame
	dec := json.NewDecoder(bytes.NewReader(data))
	for {
		t, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		top := len(stack) - 1
		if s, ok := t.(string); ok && top >= 0 && stack[top].keys != nil && stack[top].key {
			if stack[top].keys[s] {
				line, column := position(data, dec.InputOffset())
				return fmt.Errorf("line %d, column %d: field %s is given twice", line, column, Quote(s))
			}
			stack[top].keys[s], stack[top].key = true, false
			continue
		}
		switch t {
		case json.Delim('{'):
			stack = append(stack, frame{keys: map[string]bool{}, key: true})
			continue
		case json.Delim('['):
			stack = append(stack, frame{})
			continue
		case json.Delim('}'), json.Delim(']'):
			stack, top = stack[:top], top-1
		}
		if top >= 0 {
			stack[top].key = true
		}
	}
}

// position gives line and column, from 1, of the byte before offset.
func position(data []byte, offset int64) (line, column int) {
	before := data[:min(max(offset-1, 0), int64(len(data)))]
	return bytes.Count(before, []byte("\n")) + 1, len(before) - bytes.LastIndexByte(before, '\n')
}
