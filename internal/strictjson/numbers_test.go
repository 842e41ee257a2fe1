package strictjson

import (
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestConfigWhole(t *testing.T) {
	for raw, want := range map[string]int64{
		`10`: 10, `"10"`: 10, `1e1`: 10, `"1e1"`: 10, `" 14579 "`: 14579, `-3`: -3, `0`: 0, `1.0`: 1, `"2.50e2"`: 250, `10e-1`: 1,
		`9223372036854775807`: 1<<63 - 1, `"9223372036854775807"`: 1<<63 - 1, `9007199254740993`: 1<<53 + 1,
	} {
		got, err := ConfigWhole([]byte(raw), false)
		require.NoError(t, err, raw)
		require.Equal(t, want, got, raw)
	}
	for raw, want := range map[string]int64{
		`"10GB"`: 10_000_000_000, `"10GiB"`: 10 << 30, `"1.5 MiB"`: 3 << 19, `"4kib"`: 4096, `"2TB"`: 2e12, `"7"`: 7, `"1e3KB"`: 1_000_000,
	} {
		got, err := ConfigWhole([]byte(raw), true)
		require.NoError(t, err, raw)
		require.Equal(t, want, got, raw)
	}
	for _, raw := range []string{
		`1.5`, `"1.5"`, `1e-400000000`, `1e400000000`, `9223372036854775808`, `"1e19"`, `"10XB"`, `"GB"`, `""`, `"x"`, `true`, `null`, `{}`, `"0x10"`,
		`"1_000"`, `"Inf"`, `"NaN"`, `"9007199254740993.0000000000000000000001"`, `"8EB"`, `"9999999999TB"`, `"0.3KiB"`, `"` + strings.Repeat("1", 65) + `"`,
	} {
		for _, inBytes := range []bool{false, true} {
			_, err := ConfigWhole([]byte(raw), inBytes)
			require.Error(t, err, raw)
		}
	}
	_, err := ConfigWhole([]byte(`"10GB"`), false)
	require.Error(t, err, "a number of tokens has no unit")
}

func FuzzConfigWhole(f *testing.F) {
	f.Add([]byte(`"1e1"`), true)
	f.Add([]byte(`10GiB`), false)
	f.Fuzz(func(t *testing.T, raw []byte, inBytes bool) {
		n, err := ConfigWhole(raw, inBytes)
		if plain, other := strconv.ParseInt(string(raw), 10, 64); other == nil && raw[0] != '+' && raw[0] != '0' && len(raw) < maxNumber && !strings.HasPrefix(string(raw), "-0") {
			require.NoError(t, err)
			require.Equal(t, plain, n)
		}
	})
}
