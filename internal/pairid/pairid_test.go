package pairid

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	unique    = "0123456789abcdef0123456789abcdef"
	signature = "fedcba9876543210fedcba9876543210"
	text      = "___prefill_addr_10.0.0.1:14579___decode_addr_[fe80::1]:21001_" + unique
)

func TestParse(t *testing.T) {
	want := Pair{Text: text, Prefill: "10.0.0.1:14579", Decode: "[fe80::1]:21001", Unique: unique}
	for _, id := range []string{text, text + "-" + unique + "-0", "cmpl-" + text + "-0", "cmpl-" + text + "-0-a9a2cbf5", "chatcmpl-" + text + "-a9a2cbf5", "0_cmpl-" + text + "-0-a9a2cbf5"} {
		p, ok := Parse(id)
		require.True(t, ok, id)
		require.Equal(t, want, p)
	}
	want.Signature = signature
	for _, id := range []string{text + "_" + signature, "cmpl-" + text + "_" + signature + "-0-a9a2cbf5"} {
		p, ok := Parse(id)
		require.True(t, ok, id)
		require.Equal(t, want, p)
	}
	made, ok := New("10.0.0.1:14579", "[fe80::1]:21001", unique)
	require.True(t, ok)
	require.Equal(t, text, made)
}

// TestParseNothingElse: nothing may be before, between or behind the parts, and there is one way to write each of them.
func TestParseNothingElse(t *testing.T) {
	for what, id := range map[string]string{
		"nothing":                     "",
		"the prefix alone":            Prefix,
		"of somebody else":            "cmpl-42",
		"upper case":                  strings.ToUpper(text),
		"a digit in upper case":       text[:len(text)-1] + "F",
		"a signature in upper case":   text + "_" + strings.ToUpper(signature),
		"something before":            "x" + text,
		"another prefix":              "cmpl-cmpl-" + text,
		"a number alone":              "0_" + text,
		"two numbers":                 "0_0_cmpl-" + text,
		"a space before":              " " + text,
		"a path before":               "/" + text,
		"a line before":               "x\n" + text,
		"a line behind":               text + "\n",
		"a line behind with more":     text + "-0\nx",
		"a zero byte":                 text + "\x00",
		"a digit more":                text + "0",
		"a digit less":                text[:len(text)-1],
		"a digit less, signed":        text + "_" + signature[1:],
		"a digit more, signed":        text + "_" + signature + "0",
		"two signatures":              text + "_" + signature + "_" + signature,
		"an empty signature":          text + "_",
		"an empty suffix":             text + "-",
		"a suffix that is none":       text + "-0_" + signature,
		"a suffix with another id":    text + "-" + text,
		"two ids":                     text + text,
		"an id in an address":         strings.Replace(text, "10.0.0.1", Prefix+"10.0.0.1", 1),
		"an address in an address":    strings.Replace(text, "10.0.0.1", "10.0.0.9:1___decode_addr_10.0.0.1", 1),
		"a third address":             strings.Replace(text, "_"+unique, "___decode_addr_10.0.0.9:1_"+unique, 1),
		"percent-encoded underscores": strings.ReplaceAll(text, "_", "%5f"),
		"a percent-encoded colon":     strings.Replace(text, ":14579", "%3a14579", 1),
		"a percent-encoded digit":     strings.Replace(text, "10.0.0.1", "%31%30.0.0.1", 1),
		"a user":                      strings.Replace(text, "10.0.0.1", "a@10.0.0.1", 1),
		"a scheme":                    strings.Replace(text, "10.0.0.1", "http://10.0.0.1", 1),
		"a path":                      strings.Replace(text, ":14579", ":14579/x", 1),
		"a zone":                      strings.Replace(text, "fe80::1", "fe80::1%eth0", 1),
		"full-width digits":           strings.Replace(text, "10.0.0.1", "\uff110.0.0.1", 1),
		"a host of other letters":     strings.Replace(text, "10.0.0.1", "d\u00e9code", 1),
		"no host":                     strings.Replace(text, "10.0.0.1", "", 1),
		"a long host":                 strings.Replace(text, "10.0.0.1", strings.Repeat("h", 254), 1),
		"no brackets":                 strings.Replace(text, "[fe80::1]", "fe80::1", 1),
		"brackets around IPv4":        strings.Replace(text, "10.0.0.1", "[10.0.0.1]", 1),
		"brackets around nothing":     strings.Replace(text, "fe80::1", "::::", 1),
		"no port":                     strings.Replace(text, ":14579", "", 1),
		"port 0":                      strings.Replace(text, ":14579", ":0", 1),
		"a port with a zero before":   strings.Replace(text, ":14579", ":014579", 1),
		"a port above all":            strings.Replace(text, ":14579", ":65536", 1),
		"a port with a sign":          strings.Replace(text, ":14579", ":+1", 1),
	} {
		p, ok := Parse(id)
		require.False(t, ok, "%s: %q", what, id)
		require.Equal(t, Pair{}, p)
	}
	for _, bad := range [][3]string{
		{"a_b:1", "b:2", unique}, {"a:1___decode_addr_b:2", "b:2", unique}, {"a:1", "b:2_" + unique, unique}, {"a:1", "b:2", unique + "_" + signature}, {"a:1", "b:2", unique + "-0"}, {"a:1", "b:2", ""}, {"", "", unique},
	} {
		_, ok := New(bad[0], bad[1], bad[2])
		require.False(t, ok, bad)
	}
}

// TestProblem: what is wrong with an id is said in a line of bounded length, and names the part that is.
func TestProblem(t *testing.T) {
	require.Empty(t, Problem(text))
	require.Empty(t, Problem("cmpl-"+text+"_"+signature+"-0"))
	for id, says := range map[string]string{
		"":                                  "it has no ___decode_addr_",
		Prefix + "10.0.0.1:14579_" + unique: "it has no ___decode_addr_",
		strings.Replace(text, "10.0.0.1", "prefill_1", 1):                      `the address of its prefill engine is "prefill_1:14579", want HOST:PORT`,
		strings.Replace(text, "[fe80::1]", "decode_1.local", 1):                `the address of its decode engine is "decode_1.local:21001", want HOST:PORT`,
		strings.Replace(text, "[fe80::1]", "decode_1", 1) + "_" + signature:    `the address of its decode engine is "decode_1:21001", want`,
		"cmpl-" + strings.Replace(text, "fe80::1", "fe80::1%eth0", 1) + "-0-a": `the address of its decode engine is "[fe80::1%eth0]:21001", want`,
		strings.Replace(text, ":21001", "", 1):                                 "the address of its decode engine is ",
		strings.Replace(text, "[fe80::1]:21001", "decode", 1):                  `the address of its decode engine is "decode", want`,
		strings.Replace(text, ":14579", ":070000", 1):                          `the address of its prefill engine is "10.0.0.1:070000", want`,
		strings.Replace(text, "10.0.0.1", "d\u00e9code\n", 1):                  `the address of its prefill engine is "d\u00e9code\n:14579", want`,
		text[:len(text)-1]: "what is before or behind its addresses",
		"x" + text:         "what is before or behind its addresses",
		text + "_":         "what is before or behind its addresses",
	} {
		require.True(t, strings.HasPrefix(Problem(id), says), "%q: %s", id, Problem(id))
	}
	require.Less(t, len(Problem(strings.Replace(text, "10.0.0.1", strings.Repeat("\x00", 1<<16), 1))), 512)
}

func TestIsAddress(t *testing.T) {
	for _, good := range []string{"10.0.0.1:14579", "[fe80::1]:1", "decode-0.decode.svc:65535"} {
		require.True(t, IsAddress(good), good)
	}
	for _, bad := range []string{"", "10.0.0.1", "decode_0:1", "[fe80::1%eth0]:1", "[10.0.0.1]:1", "a:http", "a:0", "a:65536", "a:1\n", " a:1", "d\u00e9:1", strings.Repeat("h", 254) + ":1"} {
		require.False(t, IsAddress(bad), bad)
	}
}

// FuzzParse: whatever is read is what was written, and says it again.
func FuzzParse(f *testing.F) {
	f.Add(text)
	f.Add("cmpl-" + text + "_" + signature + "-0-a9a2cbf5")
	f.Add("___prefill_addr_a:1___decode_addr_b:2_" + unique)
	strange := regexp.MustCompile(`[^0-9A-Za-z.:\[\]_\-]`)
	f.Fuzz(func(t *testing.T, id string) {
		p, ok := Parse(id)
		if !ok {
			require.Equal(t, Pair{}, p)
			problem := Problem(id)
			require.NotEmpty(t, problem)
			require.Less(t, len(problem), 1024)
			require.NotContains(t, problem, "\n")
			return
		}
		require.Empty(t, Problem(id))
		require.True(t, IsAddress(p.Prefill) && IsAddress(p.Decode))
		require.False(t, strange.MatchString(id))
		again, ok := New(p.Prefill, p.Decode, p.Unique)
		require.True(t, ok)
		require.Equal(t, p.Text, again)
		require.Equal(t, 1, strings.Count(id, Prefix), "it names one pair")
		behind, signed := id[strings.Index(id, p.Text)+len(p.Text):], "_"+p.Signature
		require.Equal(t, p.Signature != "", strings.HasPrefix(behind, "_"))
		if p.Signature != "" {
			require.True(t, strings.HasPrefix(behind, signed))
		}
	})
}
