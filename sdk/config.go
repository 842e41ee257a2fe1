package sdk

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"

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
// What an option bounds of what a connector keeps, the tag jsonschema_extras says: "bounds=blocks" or "bounds=bytes" of all blocks of a tier,
// "bounds=tenant_bytes" of those of one tenant, "bounds=seconds" after which a block must not be found any more. Profile bounded of package
// conformance sets such options (rule BOUND-01).
//
// It is what --manifest prints and what [DecodeConfig] enforces. C is a struct that does not contain
// itself.
func SchemaOf[C any]() json.RawMessage {
	data, err := json.Marshal(strictjson.Options{}.Schema(new(C)))
	if err != nil { // a default that JSON cannot express; DecodeConfig reports it
		return nil
	}
	return data
}

// DecodeConfig reads a kv_connector_extra_config strictly. No config at all is an empty object.
// Fields that are absent get their default. A field that is unknown, missing, given twice, of another type or outside the
// limits of its tag is an error that names it and wraps ErrIncompatible; which config it is about the
// host adds. A number may be a string of one ("14579", "1e9"), and where a field's name says bytes, of a
// size ("10GiB"). A tag with a keyword or value that means nothing is an error, too: it would not hold.
// If *C or C has a method Validate() error it is called last.
func DecodeConfig[C any](raw json.RawMessage) (C, error) {
	var c C
	if err := decodeConfig(raw, &c); err != nil {
		return c, &configError{err}
	}
	return c, nil
}

func decodeConfig(raw json.RawMessage, into any) error {
	var options strictjson.Options
	if err := options.SetDefaults(into); err != nil {
		return err
	}
	if len(bytes.TrimSpace(raw)) == 0 {
		raw = json.RawMessage("{}")
	}
	v, err := strictjson.Parse(raw)
	if err != nil {
		return err
	}
	err = options.Decode(v, into)
	if wrong, is := errors.AsType[*strictjson.Error](err); is {
		return errors.New(wrong.Field()) // the operator wrote a larger text, in which this one has another line
	}
	if err != nil {
		return err
	}
	if v, ok := into.(interface{ Validate() error }); ok {
		return v.Validate()
	}
	return nil
}

// configError is an error of a config: it is ErrIncompatible and does not say so, since the field that
// it names says more.
type configError struct{ err error }

func (e *configError) Error() string {
	return strings.TrimSuffix(e.err.Error(), ": "+connector.ErrIncompatible.Error())
}

func (e *configError) Unwrap() []error { return []error{e.err, connector.ErrIncompatible} }
