package sdk

import (
	"encoding/json"
	"fmt"
	"math/big"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/invopop/jsonschema"

	"github.com/kvport/kvport/connector"
)

// The reflector drops the parts of a `jsonschema` tag that it does not understand, and ends a description
// at a comma. Nobody notices either until a limit has no effect, so this file reads the tags again.

// keywords lists the words before = in a tag that the reflector knows, by the type of the field; "" is any
// type.
func keywords() map[string][]string {
	numbers := []string{"multipleOf", "minimum", "maximum", "exclusiveMaximum", "exclusiveMinimum", "default", "example", "enum"}
	return map[string][]string{
		"":        {"title", "description", "type", "anchor", "oneof_required", "anyof_required", "oneof_ref", "oneof_type", "anyof_ref", "anyof_type"},
		"string":  {"minLength", "maxLength", "pattern", "format", "readOnly", "writeOnly", "default", "example", "enum"},
		"integer": numbers,
		"number":  numbers,
		"array":   {"minItems", "maxItems", "uniqueItems", "default", "format", "pattern", "enum"},
		"boolean": {"default"},
	}
}

// tagged walks the fields of a config and calls do with each that has a property in the schema.
func tagged(t reflect.Type, schema *jsonschema.Schema, path string, do func(f *taggedField) error) error {
	t, schema = innermost(t, schema)
	if t.Kind() != reflect.Struct || schema == nil || schema.Properties == nil {
		return nil
	}
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous && name == "" {
			if err := tagged(f.Type, schema, path, do); err != nil {
				return err
			}
			continue
		}
		if name == "" {
			name = f.Name
		}
		property, ok := schema.Properties.Get(name)
		if !ok {
			continue
		}
		if err := do(&taggedField{f, property, join(path, name)}); err != nil {
			return err
		}
		if err := tagged(f.Type, property, join(path, name), do); err != nil {
			return err
		}
	}
	return nil
}

// innermost is the element type of nested lists and pointers.
func innermost(t reflect.Type, schema *jsonschema.Schema) (reflect.Type, *jsonschema.Schema) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice || t.Kind() == reflect.Array {
		if t.Kind() != reflect.Pointer && schema != nil {
			schema = schema.Items
		}
		t = t.Elem()
	}
	return t, schema
}

// taggedField is a field of a config and what the schema says about it.
type taggedField struct {
	reflect.StructField
	schema *jsonschema.Schema
	path   string
}

// parts are the parts of the tag. A comma ends a part, unless a backslash precedes it or the text after it
// can only be more of a description.
func (f *taggedField) parts() []string {
	var parts []string
	for part := range strings.SplitSeq(f.Tag.Get("jsonschema"), ",") {
		last := len(parts) - 1
		switch {
		case last >= 0 && strings.HasSuffix(parts[last], `\`):
			parts[last] = strings.TrimSuffix(parts[last], `\`) + "," + part
		case last >= 0 && strings.HasPrefix(parts[last], "description=") && isText(part):
			parts[last] += "," + part
		default:
			parts = append(parts, part)
		}
	}
	return parts
}

// isText reports whether a part of a tag is text, and not a keyword, known or misspelt.
func isText(part string) bool {
	word, _, valued := strings.Cut(part, "=")
	bare := []string{"", "-", "required", "nullable"}
	return strings.ContainsAny(word, " .;:") || !valued && !slices.Contains(bare, part)
}

// describeFields gives each property its whole description.
func describeFields(t reflect.Type, schema *jsonschema.Schema) {
	_ = tagged(t, schema, "", func(f *taggedField) error {
		for _, part := range f.parts() {
			if text, is := strings.CutPrefix(part, "description="); is {
				f.schema.Description = text
			}
		}
		return nil
	})
}

// checkTags refuses tags that the reflector would drop. The author of the connector must fix such an error.
func checkTags(t reflect.Type, schema *jsonschema.Schema) error {
	return tagged(t, schema, "", func(f *taggedField) error {
		for _, part := range f.parts() {
			word, value, valued := strings.Cut(part, "=")
			if !valued && slices.Contains([]string{"", "-", "required", "nullable"}, word) {
				continue
			}
			if err := f.check(word, value); err != nil {
				return fmt.Errorf("jsonschema tag of field %s: %q: %w: %w", f.path, part, err, connector.ErrIncompatible)
			}
		}
		return nil
	})
}

// kinds lists the schema types whose keywords a field may have; an empty list means all.
func (f *taggedField) kinds() []string {
	kinds := []string{""}
	for s := f.schema; s != nil; s = s.Items {
		switch {
		case isDuration(f.Type):
			return append(kinds, "string")
		case s.Type == "" || s.Type == "object":
			return nil
		}
		kinds = append(kinds, s.Type)
	}
	return kinds
}

func (f *taggedField) check(word, value string) error {
	all, known := keywords(), []string{}
	kinds := f.kinds()
	for kind, words := range all {
		if kinds == nil || slices.Contains(kinds, kind) {
			known = append(known, words...)
		}
	}
	if !slices.Contains(known, word) {
		for kind, words := range all {
			if slices.Contains(words, word) && kind != "" {
				return fmt.Errorf("%s is not for a field of type %s", word, f.Type)
			}
		}
		slices.Sort(known)
		return fmt.Errorf("%w; write a comma inside a text as \\\\,", unknownField(word, word, slices.Compact(known)))
	}
	return f.checkValue(word, value)
}

// checkValue requires numbers where the reflector reads numbers.
func (f *taggedField) checkValue(word, value string) error {
	numeric := f.schema.Type == "integer" || f.schema.Type == "number"
	switch {
	case isDuration(f.Type) && word == "default":
		_, err := nanoseconds(value)
		return err
	case slices.Contains([]string{"minLength", "maxLength", "minItems", "maxItems"}, word):
		if _, err := strconv.ParseUint(value, 10, 64); err != nil {
			return fmt.Errorf("must be a number of 0 or more")
		}
	case slices.Contains([]string{"multipleOf", "minimum", "maximum", "exclusiveMaximum", "exclusiveMinimum"}, word), numeric && (word == "default" || word == "enum"):
		if _, ok := new(big.Float).SetString(value); !ok {
			return fmt.Errorf("must be a number")
		}
	case f.schema.Type == "boolean" && word == "default" && value != "true" && value != "false":
		return fmt.Errorf("must be true or false")
	}
	return nil
}

// Durations are strings such as "250ms", as in kvport's own settings; a number still counts nanoseconds.

func isDuration(t reflect.Type) bool {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	return t == reflect.TypeFor[time.Duration]()
}

// durationSchema is the schema of a duration; the reflector reads its tag like that of a string.
func durationSchema(t reflect.Type) *jsonschema.Schema {
	if t == reflect.TypeFor[time.Duration]() {
		return &jsonschema.Schema{Type: "string"}
	}
	return nil
}

// openDurations lets properties of durations be numbers, too.
func openDurations(t reflect.Type, schema *jsonschema.Schema) {
	_ = tagged(t, schema, "", func(f *taggedField) error {
		s := f.schema
		for s.Items != nil {
			s = s.Items
		}
		if isDuration(f.Type) && s.Type == "string" {
			s.Type, s.OneOf = "", []*jsonschema.Schema{{Type: "string"}, {Type: "integer"}}
		}
		return nil
	})
}

func nanoseconds(text string) (int64, error) {
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return n, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0, fmt.Errorf("must be a duration such as 250ms, 5s or 1h")
	}
	return int64(d), nil
}

// withDurations turns the durations in a config into numbers, which encoding/json then reads.
func withDurations(raw json.RawMessage, t reflect.Type, path string) (json.RawMessage, error) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	var text string
	switch {
	case t == reflect.TypeFor[time.Duration]() && json.Unmarshal(raw, &text) == nil:
		n, err := nanoseconds(text)
		if err != nil {
			return nil, fmt.Errorf("%s is %q, %w", path, text, err)
		}
		return strconv.AppendInt(nil, n, 10), nil
	case t.Kind() == reflect.Slice && items(raw) != nil:
		list := items(raw)
		for i := range list {
			var err error
			if list[i], err = withDurations(list[i], t.Elem(), fmt.Sprintf("%s[%d]", path, i)); err != nil {
				return nil, err
			}
		}
		return json.Marshal(list)
	case t.Kind() == reflect.Struct && fields(raw) != nil && hasDuration(t, nil):
		members := fields(raw)
		if err := memberDurations(members, t, path); err != nil {
			return nil, err
		}
		return json.Marshal(members)
	}
	return raw, nil
}

// memberDurations is withDurations for the fields of a struct.
func memberDurations(members map[string]json.RawMessage, t reflect.Type, path string) error {
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous && name == "" && f.Type.Kind() == reflect.Struct {
			if err := memberDurations(members, f.Type, path); err != nil {
				return err
			}
			continue
		}
		if name == "" {
			name = f.Name
		}
		if value, present := members[name]; present {
			var err error
			if members[name], err = withDurations(value, f.Type, join(path, name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// hasDuration reports whether a type contains a duration. Other types need no conversion.
func hasDuration(t reflect.Type, above []reflect.Type) bool {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || slices.Contains(above, t) {
		return t == reflect.TypeFor[time.Duration]()
	}
	for f := range t.Fields() {
		if hasDuration(f.Type, append(above, t)) {
			return true
		}
	}
	return false
}
