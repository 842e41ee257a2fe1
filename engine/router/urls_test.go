package router

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// What is no URL of an instance is refused with the flag that has it, and with the right one where that is clear.
func TestNewRefuses(t *testing.T) {
	for want, c := range map[string]Config{
		"no decode instance given":                                         {},
		`--decode: "localhost:1" is no URL, want http://localhost:1`:       {Decode: []string{"localhost:1"}},
		`--decode: "127.0.0.1:8002" is no URL, want http://127.0.0.1:8002`: {Decode: []string{"127.0.0.1:8002"}},
		`--decode: "" is no URL, want http://HOST:PORT`:                    {Decode: []string{""}},
		`--decode: "u@h:1" is no URL, want http://HOST:PORT`:               {Decode: []string{"u@h:1"}},
		`--prefill: "ftp://x" is no URL, want http://HOST:PORT`:            {Decode: []string{"http://x"}, Prefill: []string{"ftp://x"}},
		`--prefill: "http://x:y" is no URL, want http://HOST:PORT`:         {Decode: []string{"http://x"}, Prefill: []string{"http://x:y"}},
		`--prefill: "http://X:1/" appears twice`:                           {Decode: []string{"http://x:1"}, Prefill: []string{"http://x:1", "http://X:1/"}},
		`--decode: "http://x:1" appears twice`:                             {Decode: []string{"http://x:1", "http://x:2", "http://x:1"}},
	} {
		_, err := New(c)
		require.EqualError(t, err, want)
	}
}
