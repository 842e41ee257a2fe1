package connector

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
)

// No way to print a secret, or what has one in it, shows a byte of it.
func TestSecretIsHidden(t *testing.T) {
	s := Secret("do not show this key to anybody!")
	env := Env{Engine: "e", LinkKey: s, RouterKey: s}
	var out bytes.Buffer
	for _, v := range []any{s, &s, env, &env, []Secret{s}, map[string]Secret{"k": s}} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "% x"} {
			fmt.Fprintf(&out, verb, v)
		}
		fmt.Fprint(&out, v)
		raw, err := json.Marshal(struct{ V any }{v})
		if err == nil { // Env has what JSON cannot express
			out.Write(raw)
		}
		slog.New(slog.NewTextHandler(&out, nil)).Info("m", "v", v)
		slog.New(slog.NewJSONHandler(&out, nil)).Info("m", "v", v)
	}
	for _, form := range []string{"do not", "646f206e6f74", "646F206E6F74", "100 111 32", "64 6f 20", "ZG8gbm90", "0x64, 0x6f"} {
		require.NotContains(t, out.String(), form)
	}
	require.Contains(t, out.String(), hidden)
	require.Len(t, []byte(s), 32)
}
