package sample

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// pieces makes tokens of strings: token i is the i-th.
func pieces(list ...string) (func(int32) []byte, []int32) {
	tokens := make([]int32, len(list))
	for i := range list {
		tokens[i] = int32(i)
	}
	return func(t int32) []byte { return []byte(list[t]) }, tokens
}

func TestStream(t *testing.T) {
	for name, c := range map[string]struct {
		tokens, stops []string
		want          []string // text of each push, then of the flush
		stopped       string
	}{
		"as it comes":        {[]string{"a", "bc"}, nil, []string{"a", "bc", ""}, ""},
		"split character":    {[]string{"x\xe2", "\x82", "\xacy"}, nil, []string{"x", "", "€y", ""}, ""},
		"broken character":   {[]string{"\xe2\x82", "y", "\xff"}, nil, []string{"", "\ufffd\ufffdy", "\ufffd", ""}, ""},
		"cut at the end":     {[]string{"a\xf0\x9f", "\x98"}, nil, []string{"a", "", "\ufffd\ufffd\ufffd"}, ""},
		"empty token":        {[]string{"a", "", "b"}, nil, []string{"a", "", "b", ""}, ""},
		"stop in one token":  {[]string{"one END two"}, []string{"END"}, []string{"one ", ""}, "END"},
		"stop over tokens":   {[]string{"one E", "N", "D"}, []string{"END"}, []string{"one ", "", "", ""}, "END"},
		"no stop after all":  {[]string{"one E", "N", "T"}, []string{"END"}, []string{"one ", "", "ENT", ""}, ""},
		"held back to flush": {[]string{"one EN"}, []string{"END"}, []string{"one ", "EN"}, ""},
		"overlapping start":  {[]string{"aaa", "ab"}, []string{"aab"}, []string{"a", "a", ""}, "aab"},
		"first to complete":  {[]string{"abcd"}, []string{"abcd", "bc"}, []string{"a", ""}, "bc"},
		"longest of equals":  {[]string{"xabc"}, []string{"bc", "abc"}, []string{"x", ""}, "abc"},
		"empty stop":         {[]string{"ab"}, []string{""}, []string{"ab", ""}, ""},
		"stop is a sign":     {[]string{"1\xe2\x82", "\xac2"}, []string{"€"}, []string{"1", "", ""}, "€"},
		"newlines":           {[]string{"a\n", "\nb"}, []string{"\n\n"}, []string{"a", "", ""}, "\n\n"},
	} {
		bytes, tokens := pieces(c.tokens...)
		s := NewStream(bytes, c.stops)
		var got []string
		for _, token := range tokens {
			text, stopped := s.Push(token)
			got = append(got, text)
			require.Equal(t, s.Stopped() != "", stopped, name)
		}
		got = append(got, s.Flush())
		require.Equal(t, c.want, got, name)
		require.Equal(t, c.stopped, s.Stopped(), name)
		if c.stopped != "" {
			text, stopped := s.Push(0)
			require.Empty(t, text)
			require.True(t, stopped)
		}
	}
}

// TestStreamDoesNotDependOnTokens: any cutting of the same bytes gives the text before the first stop.
func TestStreamDoesNotDependOnTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		letter := rapid.SampledFrom([]string{"a", "b", "c", "€", "\xe2", "\x82", "é"})
		text := strings.Join(rapid.SliceOfN(letter, 0, 30).Draw(t, "text"), "")
		stops := rapid.SliceOfN(rapid.StringOfN(rapid.SampledFrom([]rune("abc€")), 0, 4, -1), 0, 3).Draw(t, "stops")
		var list []string
		for rest := text; rest != ""; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "token")
			list, rest = append(list, rest[:n]), rest[n:]
		}
		bytes, tokens := pieces(list...)
		s := NewStream(bytes, stops)
		got := ""
		for _, token := range tokens {
			part, stopped := s.Push(token)
			got += part
			if stopped {
				break
			}
		}
		got += s.Flush()
		want, stop := before(text, stops)
		require.Equal(t, want, got)
		require.Equal(t, stop, s.Stopped())
	})
}

// before is the text up to the stop string that completes first, the longest of those.
func before(text string, stops []string) (string, string) {
	for end := range len(text) + 1 {
		found := ""
		for _, stop := range stops {
			if len(stop) > len(found) && strings.HasSuffix(text[:end], stop) {
				found = stop
			}
		}
		if found != "" {
			return string([]rune(text[:end-len(found)])), found
		}
	}
	return string([]rune(text)), ""
}
