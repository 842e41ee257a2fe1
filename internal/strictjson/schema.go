package strictjson

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/invopop/jsonschema"
	validator "github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
)

// Schema is the JSON Schema of the struct that of points to. Names come from `json` tags; texts, defaults and limits from
// `jsonschema` tags. What its fields are set to is their default, too.
func (o Options) Schema(of any) *jsonschema.Schema {
	v := reflect.ValueOf(of).Elem()
	schema := o.reflect(v.Type())
	describeDefaults(schema, v)
	return schema
}

// describeDefaults puts into a schema what the fields of a struct are set to.
func describeDefaults(schema *jsonschema.Schema, v reflect.Value) {
	for _, f := range fieldsOf(v.Type()) {
		value, err := v.FieldByIndexErr(f.index)
		property, is := schema.Properties.Get(f.name)
		switch {
		case err != nil || !is || value.IsZero():
		case value.Type() == reflect.TypeFor[time.Duration]():
			property.Default = fmt.Sprint(value)
		case property.Properties != nil && value.Kind() == reflect.Struct:
			describeDefaults(property, value)
		case property.Default == nil:
			property.Default = value.Interface()
		}
	}
}

func (o Options) reflect(t reflect.Type) *jsonschema.Schema {
	r := &jsonschema.Reflector{Anonymous: true, DoNotReference: true, RequiredFromJSONSchemaTags: true, Mapper: mapped}
	schema := r.ReflectFromType(t)
	describeFields(t, schema)
	o.openDurations(t, schema)
	return schema
}

// Decode fills into, a pointer to a struct, from a value. What the value does not have stays as it is. Errors are of type
// *Error: fields that are unknown, or have another type; then those that are missing or outside of the limits that
// their tags say.
func (o Options) Decode(v *Value, into any) error {
	if err := o.decode(v, reflect.ValueOf(into).Elem()); err != nil {
		return err
	}
	return v.conforms(o.reflect(reflect.TypeOf(into).Elem()), o.Foreign)
}

// SetDefaults gives the fields of the struct that into points to the defaults of their tags. Tags that mean nothing are
// an error: they are the author's to mend.
func (o Options) SetDefaults(into any) error {
	t := reflect.TypeOf(into).Elem()
	schema := o.reflect(t)
	if err := checkTags(t, schema); err != nil {
		return err
	}
	defaults, err := json.Marshal(defaultsOf(schema))
	if err != nil {
		return fmt.Errorf("default in a jsonschema tag: %w", err)
	}
	v, err := Parse(defaults)
	if err == nil {
		err = o.decode(v, reflect.ValueOf(into).Elem())
	}
	if wrong, is := errors.AsType[*Error](err); is {
		return fmt.Errorf("default in a jsonschema tag: %s", wrong.Field())
	}
	return nil
}

// defaultsOf collects the defaults of a schema as an object of the same shape.
func defaultsOf(schema *jsonschema.Schema) map[string]json.RawMessage {
	out := map[string]json.RawMessage{}
	for p := schema.Properties.Oldest(); p != nil; p = p.Next() {
		var value json.RawMessage
		var err error
		switch {
		case p.Value.Default != nil:
			value, err = json.Marshal(p.Value.Default)
		case p.Value.Properties != nil:
			if inner := defaultsOf(p.Value); len(inner) > 0 {
				value, err = json.Marshal(inner)
			}
		}
		if err == nil && value != nil {
			out[p.Key] = value
		}
	}
	return out
}

// conforms checks what a schema says beyond names and types: minimum, maximum, enum, pattern and the like.
func (v *Value) conforms(schema *jsonschema.Schema, foreign func(string) bool) error {
	compiled, err := compile(schema)
	if err != nil {
		return fmt.Errorf("schema: %w", err)
	}
	instance := v.instance()
	if object, is := instance.(map[string]any); is && foreign != nil {
		maps.DeleteFunc(object, func(name string, _ any) bool { return !known(schema, name) && foreign(name) })
	}
	violation, is := errors.AsType[*validator.ValidationError](compiled.Validate(instance))
	if !is {
		return nil
	}
	var first error
	where := len(v.text)
	for _, leaf := range leaves(violation) {
		if at, what := v.violation(leaf); first == nil || at.start < where {
			first, where = at.Errorf("%s", what), at.start
		}
	}
	return first
}

func compile(schema *jsonschema.Schema) (*validator.Schema, error) {
	text, err := json.Marshal(schema)
	if err != nil {
		return nil, err
	}
	doc, err := validator.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	const name = "config.json"
	compiler := validator.NewCompiler()
	if err := compiler.AddResource(name, doc); err != nil {
		return nil, err
	}
	return compiler.Compile(name)
}

func known(schema *jsonschema.Schema, name string) bool {
	_, is := schema.Properties.Get(name)
	return is
}

// leaves are the violations that have no others as their cause.
func leaves(v *validator.ValidationError) []*validator.ValidationError {
	if len(v.Causes) == 0 {
		return []*validator.ValidationError{v}
	}
	var all []*validator.ValidationError
	for _, cause := range v.Causes {
		all = append(all, leaves(cause)...)
	}
	return all
}

// violation says which value violates the schema, and how.
func (v *Value) violation(e *validator.ValidationError) (at *Value, what string) {
	at = v
	for _, name := range e.InstanceLocation {
		if i, err := strconv.Atoi(name); err == nil && i < len(at.items) {
			at = at.items[i]
		} else if inner := at.fields[name]; inner != nil {
			at = inner
		}
	}
	switch k := e.ErrorKind.(type) {
	case *kind.Required:
		missing := *at
		missing.path = join(at.path, k.Missing[0])
		return &missing, "is missing"
	case *kind.Type:
		return at, fmt.Sprintf("must be %s, not %s", named(k.Want[0]), at.what())
	case *kind.Enum:
		return at, fmt.Sprintf("is %s, must be %s", at.shown(), alternatives(k.Want))
	case *kind.MinLength:
		return at, fmt.Sprintf("is %s, must have %d characters or more", at.shown(), k.Want)
	case *kind.Minimum:
		return at, fmt.Sprintf("is %s, must be at least %s", at.shown(), k.Want.RatString())
	case *kind.Maximum:
		return at, fmt.Sprintf("is %s, must be at most %s", at.shown(), k.Want.RatString())
	case *kind.ExclusiveMinimum:
		return at, fmt.Sprintf("is %s, must be more than %s", at.shown(), k.Want.RatString())
	}
	_, reason, found := strings.Cut(e.Error(), "': ")
	if !found {
		reason = e.Error()
	}
	return at, reason
}

// alternatives lists values as a sentence does.
func alternatives(values []any) string {
	shown := make([]string, len(values))
	for i, value := range values {
		text, _ := json.Marshal(value) // of a schema that was JSON
		shown[i] = string(text)
	}
	last := len(shown) - 1
	if last > 0 {
		return strings.Join(shown[:last], ", ") + " or " + shown[last]
	}
	return strings.Join(shown, "")
}

// The reflector drops what it does not understand of a `jsonschema` tag, and ends a description at a comma. Both
// are noticed by nobody until a limit does not hold, so tags are read once more here.

// keywords are the words before = in a tag that the reflector knows, by the type of the field; "" is any type.
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
		name = cmp.Or(name, f.Name)
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

// innermost is what lists and pointers are of.
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

// parts are the parts of the tag. A comma ends one, unless it follows a backslash, or what comes next can
// only continue a description.
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

// isText reports whether a part of a tag is no keyword, known or misspelt.
func isText(part string) bool {
	word, _, valued := strings.Cut(part, "=")
	bare := []string{"", "-", "required", "nullable"}
	return strings.ContainsAny(word, " .;:") || !valued && !slices.Contains(bare, part)
}

// describeFields gives properties the whole of their description.
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

// checkTags refuses tags that would be dropped: an error is the author's to mend.
func checkTags(t reflect.Type, schema *jsonschema.Schema) error {
	return tagged(t, schema, "", func(f *taggedField) error {
		for _, part := range f.parts() {
			word, value, valued := strings.Cut(part, "=")
			if !valued && slices.Contains([]string{"", "-", "required", "nullable"}, word) {
				continue
			}
			if err := f.check(word, value); err != nil {
				return fmt.Errorf("jsonschema tag of field %s: %q: %w", f.path, part, err)
			}
		}
		return nil
	})
}

// kinds are the schema types whose keywords a field may have; none: all.
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
		return fmt.Errorf("%w; write a comma inside of a text as \\\\,", Unknown(word, slices.Compact(known)))
	}
	return f.checkValue(word, value)
}

// checkValue requires numbers where the reflector reads numbers.
func (f *taggedField) checkValue(word, value string) error {
	numeric := f.schema.Type == "integer" || f.schema.Type == "number"
	switch {
	case isDuration(f.Type) && word == "default":
		return checkDuration(value)
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

func checkDuration(value string) error {
	_, number := ConfigNumber([]byte(value))
	if _, err := time.ParseDuration(value); err != nil && !number {
		return fmt.Errorf("must be a duration such as 250ms, 5s or 1h")
	}
	return nil
}

func isDuration(t reflect.Type) bool {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	return t == reflect.TypeFor[time.Duration]()
}

// mapped is the schema of a duration and of a value; the reflector reads the tag of a duration as that of a string.
func mapped(t reflect.Type) *jsonschema.Schema {
	switch t {
	case reflect.TypeFor[time.Duration]():
		return &jsonschema.Schema{Type: "string"}
	case reflect.TypeFor[Value]():
		return &jsonschema.Schema{}
	}
	return nil
}

// openDurations lets properties of durations be numbers, too.
func (o Options) openDurations(t reflect.Type, schema *jsonschema.Schema) {
	_ = tagged(t, schema, "", func(f *taggedField) error {
		s := f.schema
		for s.Items != nil {
			s = s.Items
		}
		if isDuration(f.Type) && s.Type == "string" {
			s.Type, s.OneOf = "", []*jsonschema.Schema{{Type: "string"}, {Type: "integer"}}
			if o.Seconds {
				s.OneOf[1].Type, s.ExclusiveMinimum, s.Maximum = "number", "0", "86400"
			}
		}
		return nil
	})
}

// AcceptTexts adds to a schema that numbers may be texts of numbers, and numbers of bytes have a unit, as the decoder takes
// them. What it checks itself are the numbers that it made of them.
func AcceptTexts(schema *jsonschema.Schema) {
	acceptTexts(schema, "")
}

func acceptTexts(s *jsonschema.Schema, name string) {
	if s.Type == "integer" || s.Type == "number" {
		pattern := `^\s*-?[0-9.]+([eE][-+]?[0-9]+)?\s*$`
		if s.Extras["unit"] == "bytes" || slices.Contains(strings.Split(name, "_"), "bytes") {
			pattern = `^\s*-?[0-9.]+([eE][-+]?[0-9]+)?\s*([kKmMgGtT][iI]?[bB])?\s*$`
		}
		s.AnyOf = append(s.AnyOf, &jsonschema.Schema{Type: s.Type}, &jsonschema.Schema{Type: "string", Pattern: pattern})
		s.Type = ""
	}
	if s.Items != nil {
		acceptTexts(s.Items, name)
	}
	if !slices.ContainsFunc(s.OneOf, func(one *jsonschema.Schema) bool { return one.Type == "string" }) {
		for _, one := range s.OneOf {
			acceptTexts(one, name)
		}
	}
	if s.Properties == nil {
		return
	}
	for p := s.Properties.Oldest(); p != nil; p = p.Next() {
		acceptTexts(p.Value, p.Key)
	}
}
