package connector

import (
	"fmt"
	"log/slog"
)

// Secret is a key. It prints, logs and marshals as a placeholder, on its own and inside other values.
// Convert it to []byte to get its bytes.
type Secret []byte

// hidden is shown instead of a Secret.
const hidden = "[secret]"

// Format implements fmt.Formatter, for all verbs.
func (Secret) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(hidden)) }

// LogValue implements slog.LogValuer.
func (Secret) LogValue() slog.Value { return slog.StringValue(hidden) }

// MarshalText implements encoding.TextMarshaler.
func (Secret) MarshalText() ([]byte, error) { return []byte(hidden), nil }
