package sdk

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/agnivade/levenshtein"
	"github.com/invopop/jsonschema"
	validator "github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/strictjson"
)

// SchemaOf is the JSON Schema of a config struct. Field names come from `json` tags; a field's text,
// default and limits from `jsonschema` tags:
//
//	Path string `json:"shared_storage_path" jsonschema:"required,description=folder of the blocks"`
//	Max  int64  `json:"max_bytes" jsonschema:"default=0,minimum=0,description=size cap; 0 means none"`
//
// A comma inside of a description needs no escape where no keyword can follow it; elsewhere it is written \\, in a
// tag. A time.Duration is a text such as "250ms", in its default too.
//
// It is what --manifest prints and what [DecodeConfig] enforces. C is a struct that does not contain
// itself.
func SchemaOf[C any]() json.RawMessage {
	data, err := json.Marshal(reflectConfig[C]())
	if err != nil { // a default that JSON cannot express; DecodeConfig reports it
		return nil
	}
	return data
}

// DecodeConfig reads a kv_connector_extra_config strictly. No config at all is an empty object.
// Fields that are absent get their default; an unknown, missing or ill-typed one, or one outside the
// limits of its tag, is an error that names it and wraps ErrIncompatible; which config it is about the
// host adds. A number may be a string of one ("14579", "1e9"), and where a field's name says bytes, of a
// size ("10GiB"). A tag with a
// keyword or value that means nothing is an error, too: it would not hold. If *C or C has a method Validate() error it is called last.
func DecodeConfig[C any](raw json.RawMessage) (C, error) {
	var c C
	if err := checkTags(reflect.TypeFor[C](), reflectConfig[C]()); err != nil {
		return c, &configError{err}
	}
	if err := decodeConfig(raw, reflectConfig[C](), &c); err != nil {
		return c, &configError{err}
	}
	return c, nil
}

// configError is an error of a config: it is ErrIncompatible and does not say so, since the field that
// it names says more.
type configError struct{ err error }

func (e *configError) Error() string {
	return strings.TrimSuffix(e.err.Error(), ": "+connector.ErrIncompatible.Error())
}

func (e *configError) Unwrap() []error { return []error{e.err, connector.ErrIncompatible} }

func reflectConfig[C any]() *jsonschema.Schema {
	r := &jsonschema.Reflector{Anonymous: true, DoNotReference: true, RequiredFromJSONSchemaTags: true, Mapper: durationSchema}
	schema := r.ReflectFromType(reflect.TypeFor[C]())
	describeFields(reflect.TypeFor[C](), schema)
	openDurations(reflect.TypeFor[C](), schema)
	return schema
}

func decodeConfig(raw json.RawMessage, schema *jsonschema.Schema, into any) error {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 {
		raw = json.RawMessage("{}")
	}
	if err := checkSyntax(raw); err != nil {
		return err
	}
	if err := checkFields(raw, schema); err != nil {
		return err
	}
	raw, err := plainNumbers(raw, schema, "")
	if err != nil {
		return err
	}
	defaults, err := json.Marshal(defaultsOf(schema))
	if err != nil {
		return fmt.Errorf("default in a jsonschema tag: %w", err)
	}
	if defaults, err = withDurations(defaults, reflect.TypeOf(into), ""); err != nil {
		return fmt.Errorf("default in a jsonschema tag: %w", err)
	}
	if err := json.Unmarshal(defaults, into); err != nil {
		return fmt.Errorf("default in a jsonschema tag: %w", describe(err))
	}
	plain, err := withDurations(raw, reflect.TypeOf(into), "")
	if err != nil {
		return err
	}
	if err := json.Unmarshal(plain, into); err != nil {
		return describe(err)
	}
	if err := checkLimits(raw, schema); err != nil {
		return err
	}
	if v, ok := into.(interface{ Validate() error }); ok {
		return v.Validate()
	}
	return nil
}

// checkSyntax wants one JSON object and says where it stops being one.
func checkSyntax(raw []byte) error {
	var object map[string]json.RawMessage
	err := json.Unmarshal(raw, &object)
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		return fmt.Errorf("bad JSON at byte %d: %w", syntax.Offset, err)
	case errors.As(err, &kind):
		return fmt.Errorf("is a JSON %s, want an object", kind.Value)
	case err == nil && object == nil:
		return errors.New("is null, want an object")
	}
	return err
}

// checkFields refuses fields that the schema lacks, and wants those it requires. A misspelt name comes
// first: it is why another one is missing. Unlike encoding/json it minds the case of names.
func checkFields(raw json.RawMessage, schema *jsonschema.Schema) error {
	if err := walk(raw, schema, "", known); err != nil {
		return err
	}
	return walk(raw, schema, "", complete)
}

// object is a JSON object of a config and what the schema says of it.
type object struct {
	path   string
	fields map[string]json.RawMessage
	schema *jsonschema.Schema
}

// walk calls check for every object of a config, from the outside in.
func walk(raw json.RawMessage, schema *jsonschema.Schema, path string, check func(*object) error) error {
	if schema.Items != nil {
		for i, item := range items(raw) {
			if err := walk(item, schema.Items, fmt.Sprintf("%s[%d]", path, i), check); err != nil {
				return err
			}
		}
		return nil
	}
	o := &object{path: path, fields: fields(raw), schema: schema}
	if schema.Properties == nil || o.fields == nil {
		return nil
	}
	if err := check(o); err != nil {
		return err
	}
	for p := schema.Properties.Oldest(); p != nil; p = p.Next() {
		if value, present := o.fields[p.Key]; present {
			if err := walk(value, p.Value, join(path, p.Key), check); err != nil {
				return err
			}
		}
	}
	return nil
}

// known refuses a field that the schema lacks.
func known(o *object) error {
	var names []string
	for p := o.schema.Properties.Oldest(); p != nil; p = p.Next() {
		names = append(names, p.Key)
	}
	for _, name := range slices.Sorted(maps.Keys(o.fields)) {
		if !slices.Contains(names, name) {
			return unknownField(join(o.path, name), name, names)
		}
	}
	return nil
}

// complete wants the fields that the schema requires.
func complete(o *object) error {
	for _, name := range o.schema.Required {
		if _, present := o.fields[name]; !present {
			return fmt.Errorf("%s is missing", join(o.path, name))
		}
	}
	return nil
}

// plainNumbers writes the numbers of a config as Go reads them: those in strings without their quotes, whole
// ones without exponents, and sizes in bytes.
func plainNumbers(raw json.RawMessage, schema *jsonschema.Schema, path string) (json.RawMessage, error) {
	switch {
	case schema.Type == "integer":
		return plainWhole(raw, path)
	case schema.Type == "number":
		return plainNumber(raw, path)
	case schema.Items != nil:
		list := items(raw)
		for i := range list {
			var err error
			if list[i], err = plainNumbers(list[i], schema.Items, fmt.Sprintf("%s[%d]", path, i)); err != nil {
				return nil, err
			}
		}
		if len(list) > 0 {
			return json.Marshal(list)
		}
	case schema.Properties != nil:
		object := fields(raw)
		for name, value := range object {
			property, _ := schema.Properties.Get(name)
			var err error
			if object[name], err = plainNumbers(value, property, join(path, name)); err != nil {
				return nil, err
			}
		}
		if len(object) > 0 {
			return json.Marshal(object)
		}
	}
	return raw, nil
}

// plainWhole leaves what is neither number nor string to the decoder, which names its type.
func plainWhole(raw json.RawMessage, path string) (json.RawMessage, error) {
	name := path[strings.LastIndexByte(path, '.')+1:]
	if b := bytes.TrimSpace(raw); len(b) == 0 || !strings.ContainsRune("\"-0123456789", rune(b[0])) {
		return raw, nil
	}
	n, err := strictjson.ConfigWhole(raw, slices.Contains(strings.Split(name, "_"), "bytes"))
	if err != nil {
		return nil, fmt.Errorf("%s is %s, which %w", path, clip(raw), err)
	}
	return strconv.AppendInt(nil, n, 10), nil
}

func plainNumber(raw json.RawMessage, path string) (json.RawMessage, error) {
	text, ok := strictjson.ConfigNumber(raw)
	if b := bytes.TrimSpace(raw); !ok && len(b) > 0 && b[0] == '"' {
		return nil, fmt.Errorf("%s is %s, which is no number", path, clip(raw))
	}
	if !ok {
		return raw, nil
	}
	return json.RawMessage(text), nil
}

// clip shortens a value, so that a message stays a line.
func clip(raw json.RawMessage) string {
	const most = 80
	text := string(bytes.TrimSpace(raw))
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "..."
	}
	return text
}

// items are the elements of a JSON array; none if it is something else, which decoding reports.
func items(raw json.RawMessage) []json.RawMessage {
	var list []json.RawMessage
	_ = json.Unmarshal(raw, &list)
	return list
}

// fields are the members of a JSON object; nil if it is something else, which decoding reports.
func fields(raw json.RawMessage) map[string]json.RawMessage {
	var object map[string]json.RawMessage
	_ = json.Unmarshal(raw, &object)
	return object
}

func unknownField(path, name string, known []string) error {
	best, distance := "", 1+max(2, len(name)/3)
	for _, k := range known {
		if d := levenshtein.ComputeDistance(strings.ToLower(name), strings.ToLower(k)); d < distance {
			best, distance = k, d
		}
	}
	if best != "" {
		return fmt.Errorf("unknown field %q, did you mean %q?", path, best)
	}
	const most = 16 // so that a message stays a line
	if len(known) > most {
		return fmt.Errorf("unknown field %q, known are %s and %d more: kvport plugins describe lists them", path, strings.Join(known[:most], ", "), len(known)-most)
	}
	return fmt.Errorf("unknown field %q, known are %s", path, strings.Join(known, ", "))
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

// checkLimits enforces what else the schema says: minimum, maximum, enum, pattern and the like.
func checkLimits(raw []byte, schema *jsonschema.Schema) error {
	text, err := json.Marshal(schema)
	if err != nil {
		return fmt.Errorf("schema: %w", err)
	}
	doc, err := validator.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return fmt.Errorf("schema: %w", err)
	}
	const name = "config.json"
	compiler := validator.NewCompiler()
	if err := compiler.AddResource(name, doc); err != nil {
		return fmt.Errorf("schema: %w", err)
	}
	compiled, err := compiler.Compile(name)
	if err != nil {
		return fmt.Errorf("schema: %w", err)
	}
	instance, err := validator.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return err
	}
	return firstViolation(compiled.Validate(instance))
}

// firstViolation turns the validator's tree of errors into one line that names the field.
func firstViolation(err error) error {
	var v *validator.ValidationError
	if !errors.As(err, &v) {
		return err
	}
	for len(v.Causes) > 0 {
		v = v.Causes[0]
	}
	_, reason, found := strings.Cut(v.Error(), "': ")
	if !found {
		reason = v.Error()
	}
	return fmt.Errorf("%s: %s", strings.Join(v.InstanceLocation, "."), reason)
}

// describe says in words what encoding/json found.
func describe(err error) error {
	var kind *json.UnmarshalTypeError
	if errors.As(err, &kind) && kind.Field != "" {
		return fmt.Errorf("%s is a JSON %s, want %s", kind.Field, kind.Value, kind.Type)
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("bad JSON: it ends too early")
	}
	return err
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}
