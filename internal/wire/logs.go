package wire

import (
	"encoding/hex"
	"fmt"
	"log/slog"
	"reflect"
	"time"
)

// PlainValue makes the value of a log line one that people can read: JSON has numbers of nanoseconds for a
// duration and a list of numbers for bytes, which keys and fingerprints are.
func PlainValue(v slog.Value) slog.Value {
	switch v.Kind() {
	case slog.KindDuration:
		return slog.StringValue(v.Duration().String())
	case slog.KindAny:
		return plainAny(v)
	default:
		return v
	}
}

func plainAny(v slog.Value) slog.Value {
	switch x := v.Any().(type) {
	case nil, error, slog.Level, *slog.Source, time.Time: // slog knows them
		return v
	case []byte:
		return slog.StringValue(hex.EncodeToString(x))
	case fmt.Stringer:
		if r := reflect.ValueOf(x); r.Kind() == reflect.Pointer && r.IsNil() {
			return v
		}
		return slog.StringValue(x.String())
	default:
		r := reflect.ValueOf(x)
		if k := r.Kind(); (k == reflect.Array || k == reflect.Slice) && r.Type().Elem().Kind() == reflect.Uint8 {
			return slog.StringValue(fmt.Sprintf("%x", x))
		}
		return v
	}
}
