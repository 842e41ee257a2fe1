package strictjson

import (
	"cmp"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agnivade/levenshtein"
)

// Options are what differs between configs.
type Options struct {
	// Seconds: a duration that is given as a number counts seconds, and each is positive and at most a day. Without it a
	// number counts nanoseconds.
	Seconds bool
	// Foreign reports fields of the outermost object that are skipped, since they are of another system.
	Foreign func(name string) bool
}

// decode fills into from a value. Fields that are absent stay as they are.
func (o Options) decode(v *Value, into reflect.Value) error {
	t := into.Type()
	switch {
	case t == reflect.TypeFor[Value]():
		into.Set(reflect.ValueOf(*v))
		return nil
	case t.Kind() == reflect.Pointer:
		return o.pointer(v, into)
	case t == reflect.TypeFor[time.Duration]():
		return o.duration(v, into)
	case readsItself(t):
		return standard(v, into)
	}
	switch kind := t.Kind(); {
	case kind == reflect.Struct:
		return o.object(v, into)
	case kind == reflect.Slice:
		return o.slice(v, into)
	case isInteger(t):
		return whole(v, into, false)
	case kind == reflect.Float32 || kind == reflect.Float64:
		return number(v, into)
	}
	return standard(v, into)
}

func (o Options) pointer(v *Value, into reflect.Value) error {
	if v.IsNull() {
		into.SetZero()
		return nil
	}
	if into.IsNil() {
		into.Set(reflect.New(into.Type().Elem()))
	}
	return o.decode(v, into.Elem())
}

// object fills a struct. Unlike encoding/json it minds the case of names.
func (o Options) object(v *Value, into reflect.Value) error {
	if v.kind() != '{' {
		return v.Errorf("must be an object, not %s", v.what())
	}
	fields := fieldsOf(into.Type())
	inner := o
	inner.Foreign = nil
	for _, name := range v.names {
		value := v.fields[name]
		i := indexOf(fields, name)
		var err error
		switch {
		case i >= 0 && fields[i].inBytes:
			err = whole(value, target(into, fields[i].index), true)
		case i >= 0:
			err = inner.decode(value, target(into, fields[i].index))
		case o.Foreign == nil || !o.Foreign(name):
			known := make([]string, len(fields))
			for i := range fields {
				known[i] = fields[i].name
			}
			at := *value
			at.path = v.path
			err = at.Errorf("%w", Unknown(name, known))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// field is a field of a struct that JSON has a name for.
type field struct {
	name    string
	index   []int
	inBytes bool // a size, which may have a unit
}

// fieldsOf are the fields of a struct, with those of the structs that it embeds.
func fieldsOf(t reflect.Type) []field {
	var fields []field
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		inner := f.Type
		if inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		switch {
		case name == "-" || f.Tag.Get("jsonschema") == "-":
		case f.Anonymous && name == "" && inner.Kind() == reflect.Struct:
			for _, sub := range fieldsOf(inner) {
				sub.index = slices.Concat(f.Index, sub.index)
				if indexOf(fields, sub.name) < 0 {
					fields = append(fields, sub)
				}
			}
		case f.IsExported():
			name = cmp.Or(name, f.Name)
			inBytes := slices.Contains(strings.Split(name, "_"), "bytes") || f.Tag.Get("jsonschema_extras") == "unit=bytes"
			fields = slices.DeleteFunc(fields, func(embedded field) bool { return embedded.name == name }) // it is hidden
			fields = append(fields, field{name, f.Index, inBytes && isInteger(inner)})
		}
	}
	return fields
}

func indexOf(fields []field, name string) int {
	return slices.IndexFunc(fields, func(f field) bool { return f.name == name })
}

func isInteger(t reflect.Type) bool {
	return t.Kind() >= reflect.Int && t.Kind() <= reflect.Uint64 && !readsItself(t)
}

// readsItself reports whether a type has a method for that.
func readsItself(t reflect.Type) bool {
	p := reflect.PointerTo(t)
	return p.Implements(reflect.TypeFor[json.Unmarshaler]()) || p.Implements(reflect.TypeFor[encoding.TextUnmarshaler]())
}

// target is a field of a struct; pointers on the way to it are made.
func target(in reflect.Value, index []int) reflect.Value {
	for i, at := range index {
		if i > 0 && in.Kind() == reflect.Pointer {
			if in.IsNil() {
				in.Set(reflect.New(in.Type().Elem()))
			}
			in = in.Elem()
		}
		in = in.Field(at)
	}
	return in
}

func (o Options) slice(v *Value, into reflect.Value) error {
	switch {
	case v.IsNull():
		into.SetZero()
		return nil
	case into.Type().Elem().Kind() == reflect.Uint8: // bytes, which JSON has in base64
		return standard(v, into)
	case v.kind() != '[':
		return v.Errorf("must be an array, not %s", v.what())
	}
	list := reflect.MakeSlice(into.Type(), len(v.items), len(v.items))
	for i, item := range v.items {
		if err := o.decode(item, list.Index(i)); err != nil {
			return err
		}
	}
	into.Set(list)
	return nil
}

// whole reads a whole number, which may be a text of one; inBytes, of a size such as "10GiB".
func whole(v *Value, into reflect.Value, inBytes bool) error {
	if into.Kind() == reflect.Pointer {
		if v.IsNull() {
			into.SetZero()
			return nil
		}
		into.Set(reflect.New(into.Type().Elem()))
		into = into.Elem()
	}
	want := "a whole number"
	if inBytes {
		want = "a number of bytes"
	}
	if k := v.kind(); k != '0' && k != '"' {
		return v.Errorf("must be %s, not %s", want, v.what())
	}
	n, err := ConfigWhole(v.text[v.start:v.end], inBytes)
	if err != nil {
		return v.Errorf("must be %s: %s %w", want, v.shown(), err)
	}
	v.plain = strconv.AppendInt(nil, n, 10)
	switch {
	case into.CanInt() && !into.OverflowInt(n):
		into.SetInt(n)
	case into.CanUint() && n >= 0 && !into.OverflowUint(uint64(n)):
		into.SetUint(uint64(n))
	case n < 0:
		return v.Errorf("is %d, must not be negative", n)
	default:
		return v.Errorf("must be %s: %s is too large", want, v.shown())
	}
	return nil
}

func number(v *Value, into reflect.Value) error {
	if k := v.kind(); k != '0' && k != '"' {
		return v.Errorf("must be a number, not %s", v.what())
	}
	text, ok := ConfigNumber(v.text[v.start:v.end])
	if !ok {
		return v.Errorf("must be a number: %s is none", v.shown())
	}
	f, err := strconv.ParseFloat(text, into.Type().Bits())
	if err != nil {
		return v.Errorf("must be a number: %s is too large", v.shown())
	}
	v.plain = json.RawMessage(text)
	into.SetFloat(f)
	return nil
}

// duration reads a text such as "250ms", or a number.
func (o Options) duration(v *Value, into reflect.Value) error {
	want := `a duration such as "250ms"`
	if o.Seconds {
		want += ", or a number of seconds"
	}
	raw := v.text[v.start:v.end]
	if k := v.kind(); k != '0' && k != '"' {
		return v.Errorf("must be %s, not %s", want, v.what())
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		if d, err := time.ParseDuration(text); err == nil {
			into.SetInt(int64(d))
			if o.Seconds {
				v.plain = strconv.AppendFloat(nil, d.Seconds(), 'g', -1, 64)
			}
			return nil
		}
	}
	if _, ok := ConfigNumber(raw); !ok {
		return v.Errorf("must be %s: %s is none", want, v.shown())
	}
	if !o.Seconds {
		return whole(v, into, false)
	}
	var seconds float64
	if err := number(v, reflect.ValueOf(&seconds).Elem()); err != nil {
		return err
	}
	into.SetInt(int64(seconds * float64(time.Second)))
	if into.Int() == 0 {
		v.plain = json.RawMessage("0") // so that a part of a nanosecond is not positive
	}
	return nil
}

// standard leaves a value to encoding/json.
func standard(v *Value, into reflect.Value) error {
	wants := map[reflect.Kind]string{reflect.String: `"`, reflect.Bool: "t", reflect.Map: "{"}
	if want, plain := wants[into.Kind()]; plain && !v.IsNull() && v.kind() != want[0] && !readsItself(into.Type()) {
		return v.Errorf("must be %s, not %s", named(into.Kind().String()), v.what())
	}
	err := json.Unmarshal(v.text[v.start:v.end], into.Addr().Interface())
	if wrong, is := errors.AsType[*json.UnmarshalTypeError](err); is {
		return v.Errorf("has a JSON %s where it must have %s", wrong.Value, wrong.Type)
	}
	if err != nil {
		return v.Errorf("%w", err)
	}
	return nil
}

// named is what a type of Go or of a schema is called in a message.
func named(kind string) string {
	names := map[string]string{
		"string": "a string", "bool": "true or false", "boolean": "true or false", "map": "an object", "object": "an object", "array": "an array",
		"integer": "a whole number", "number": "a number", "null": "null",
	}
	return cmp.Or(names[kind], kind)
}

// Unknown says that a name is none of those that are known, and which one it may have meant.
func Unknown(name string, known []string) error {
	if near := Nearest(name, known, 1+max(2, len(name)/3)); near != "" {
		return fmt.Errorf("unknown field %s, did you mean %q?", Quote(name), near)
	}
	const most = 16 // so that a message stays a line
	if len(known) > most {
		return fmt.Errorf("unknown field %s, known are %s and %d more: kvport schema lists them", Quote(name), strings.Join(known[:most], ", "), len(known)-most)
	}
	return fmt.Errorf("unknown field %s, known are %s", Quote(name), strings.Join(known, ", "))
}

// Nearest is the known name that has the fewest letters changed, if these are fewer than a limit; else it is empty. Case
// does not matter.
func Nearest(name string, known []string, limit int) (nearest string) {
	if len(name) > longest { // comparing is quadratic
		return ""
	}
	for _, k := range known {
		if d := levenshtein.ComputeDistance(strings.ToLower(name), strings.ToLower(k)); d < limit {
			nearest, limit = k, d
		}
	}
	return nearest
}
