package apikeys

import (
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/router/admission"
)

const (
	alpha = "alpha-0123456789-abcdefgh"
	beta  = "beta-9876543210-hgfedcba"
)

func hashOf(key string) string {
	hash := sha256.Sum256([]byte(key))
	return hashMark + hex.EncodeToString(hash[:])
}

func mustParse(t *testing.T, text string) *Keys {
	t.Helper()
	k, err := Parse([]byte(text))
	require.NoError(t, err)
	return k
}

func TestParse(t *testing.T) {
	k := mustParse(t, Head+" \r\n\n# whose keys these are\r\nalice "+hashOf(alpha)+
		"\r\n  bob\t"+hashMark+strings.ToUpper(hashOf(beta)[7:])+" salt=alice max_in_flight=4 requests_per_minute=60 tokens_per_minute=1000 admin\n"+
		"route.1 "+hashOf("r")+" router\ngraphs "+hashOf("g")+" metrics")
	require.False(t, k.Old)
	list := k.All()
	require.Len(t, list, k.Len())
	require.Equal(t, hashOf(alpha), hashMark+list[0].ID)
	for i := range list {
		list[i].ID, list[i].hash = "", [sha256.Size]byte{}
	}
	require.Equal(t, []Key{
		{Name: "alice", Tenant: "alice"},
		{Name: "bob", Tenant: "alice", Admin: true, Limits: admission.Limits{InFlight: 4, RequestsPerMinute: 60, TokensPerMinute: 1000}},
		{Name: "route.1", Router: true},
		{Name: "graphs", Tenant: "graphs", Metrics: true},
	}, list)
	require.Equal(t, 1, k.Shared())
	for i, want := range []bool{false, true, true, true} {
		require.Equal(t, want, list[i].Watches(), list[i].Name)
	}
	require.True(t, (*Key)(nil).Watches())
}

// A line that is not understood is refused with its number, and the error shows no key and no hash.
func TestParseRefuses(t *testing.T) {
	const secret = "0123456789abcdef0123456789abcdef"
	line := "alice " + hashOf(alpha)
	for text, want := range map[string]string{
		"":                                               "it has no keys: kvport keys api add makes one",
		" \n\n":                                          "it has no keys",
		Head + "\n# nobody\n":                            "it has no keys",
		"\n" + Head + "\n" + line:                        "line 1: \"" + Head + "\" must be the first line",
		Head + "0\n" + line:                              "line 1: \"" + Head + "\" must be the first line",
		line + "\n":                                      "line 1: this line has a name and a hash: the first line of such a file must be",
		Head + "\n\nalice " + secret:                     "line 3: the second word is no hash, want NAME sha256:HASH",
		Head + "\nalice":                                 "line 2: the second word is no hash",
		Head + "\nalice sha256:" + secret:                "line 2: the hash is not 64 hexadecimal digits",
		Head + "\na:b " + hashOf(alpha):                  "line 2: the name is not 1 to 64 letters",
		Head + "\n" + line + " salt=":                    "line 2: the salt is not 1 to 64 letters",
		Head + "\n" + line + " salt=a:b":                 "line 2: the salt is not 1 to 64 letters",
		Head + "\n" + line + " salt":                     "line 2: the salt is not 1 to 64 letters",
		Head + "\n" + line + " request_per_minute=5":     `line 2: unknown field "request_per_minute", did you mean "requests_per_minute="?`,
		Head + "\n" + line + " rooter":                   `line 2: unknown field "rooter", did you mean "router"?`,
		Head + "\n" + line + " router=true":              `line 2: unknown field "router"`,
		Head + "\n" + line + " router salt=a":            "line 2: router and salt= exclude each other",
		Head + "\n" + line + " salt=a router":            "line 2: router and salt= exclude each other",
		Head + "\n" + line + strings.Repeat(" admin", 2): "line 2: admin appears twice",
		Head + "\n" + line + " max_in_flight=0":          `line 2: max_in_flight is "0", want a whole number from 1`,
		Head + "\n" + line + " max_in_flight=many":       `line 2: max_in_flight is "many"`,
		Head + "\n" + line + " max_in_flight":            `line 2: max_in_flight is ""`,
		Head + "\n" + line + "\n" + line:                 "line 3: the name alice is in the file already",
		Head + "\n" + line + "\nbob " + hashOf(alpha):    "line 3: bob has the same key as alice",
		"k":                            "line 1: the key has 6 bits at most, want 128: kvport keys api add makes one",
		alpha + "\n\nsecret":           "line 3: the key has 36 bits at most, want 128",
		secret[:31]:                    "line 1: the key has 124 bits at most",
		strings.Repeat("1", 38):        "line 1: the key has 126 bits at most",
		strings.Repeat("k", 99):        "line 1: the key has 1 different characters, want 8",
		strings.Repeat("x", maxFile+1): "it is larger than 1048576 bytes",
	} {
		_, err := Parse([]byte(text))
		require.ErrorContains(t, err, want, "%.80s", text)
		require.NotContains(t, err.Error(), secret)
		require.NotContains(t, err.Error(), hashOf(alpha)[7:])
	}
}

// A file of the old form means what it meant: each line is a key, which separates nobody's blocks.
func TestOldForm(t *testing.T) {
	k := mustParse(t, alpha+"\n\n  "+beta+" \r\n"+alpha)
	require.True(t, k.Old)
	require.Equal(t, 2, k.Len())
	require.Equal(t, 2, k.Shared())
	a, b := k.Find("Bearer "+alpha), k.Find("bearer  "+beta+" ")
	require.NotEqual(t, a.Name, b.Name)
	require.NotContains(t, a.Name, "alpha")
	require.True(t, a.Admin)
	salt, err := a.Salt("s")
	require.NoError(t, err)
	require.Equal(t, "s", salt)
	for _, other := range []string{"", "Bearer", "Bearer gamma", "Basic " + alpha, alpha, "Bearer " + alpha[:10]} {
		require.Nil(t, k.Find(other), other)
	}
	mustParse(t, "0123456789abcdef0123456789abcdef")
	mustParse(t, "ABCDEFGHIJKLMNOPQRSTUV")
}

// A client's salt lies inside its tenant's, and nobody gets into a tenant's by naming it.
func TestSalt(t *testing.T) {
	k := mustParse(t, Head+"\nalice "+hashOf("a")+"\nbob "+hashOf("b")+"\nafriend "+hashOf("f")+" salt=alice\nr "+hashOf("r")+" router\n")
	of := func(key, given string) string {
		salt, err := k.Find("Bearer " + key).Salt(given)
		require.NoError(t, err)
		return salt
	}
	require.Equal(t, connector.TenantSalt("alice", ""), of("a", ""))
	require.Equal(t, of("a", "s"), of("f", "s"))
	require.NotEqual(t, of("a", "s"), of("b", "s"))
	require.NotEqual(t, of("a", ""), of("b", of("a", "")), "to name another tenant's salt leads nowhere")
	require.Equal(t, of("a", "s"), of("r", of("a", "s")), "a router says whose request it is")
	require.Empty(t, of("r", ""))

	old := mustParse(t, alpha).Find("Bearer " + alpha)
	_, err := old.Salt(of("a", ""))
	require.ErrorIs(t, err, ErrSalt)
	require.ErrorContains(t, err, "router")
	salt, err := (*Key)(nil).Salt(of("a", ""))
	require.NoError(t, err, "everybody may come in")
	require.Equal(t, of("a", ""), salt)

	most := MaxSalt - len(of("a", ""))
	require.Len(t, of("a", strings.Repeat("s", most)), MaxSalt)
	_, err = k.Find("Bearer a").Salt(strings.Repeat("s", most+1))
	require.ErrorIs(t, err, ErrSalt)
	require.ErrorContains(t, err, "want at most 1004")
}

func TestLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(path, []byte(alpha), 0o600))
	_, err := Load(path)
	require.NoError(t, err)
	for _, mode := range []fs.FileMode{0o640, 0o604, 0o620, 0o644} {
		require.NoError(t, os.Chmod(path, mode))
		_, err = Load(path)
		require.ErrorContains(t, err, "API key file "+path+": mode 0")
		require.ErrorContains(t, err, "lets others read it, use chmod 600")
		_, err = ReadUpstream(path)
		require.ErrorContains(t, err, "lets others read it, use chmod 600")
	}
	_, err = Load(filepath.Dir(path))
	require.ErrorContains(t, err, "it is no regular file")
	_, err = Load(path + "s")
	require.ErrorIs(t, err, fs.ErrNotExist)
}

func TestReadUpstream(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	for text, want := range map[string]string{" k \nother\n": "k", "": "", "\n": "", "a b": "", "é": ""} {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		key, err := ReadUpstream(path)
		require.Equal(t, want, key)
		require.Equal(t, want == "", err != nil)
	}
}

func TestAdd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	first, err := Add(path, "alice")
	require.NoError(t, err)
	second, err := Add(path, "bob", "salt=alice", "max_in_flight=2")
	require.NoError(t, err)
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o600), info.Mode())
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NotContains(t, string(text), first)
	k, err := Load(path)
	require.NoError(t, err)
	require.Equal(t, "alice", k.Find("Bearer "+first).Name)
	require.Equal(t, 2, k.Find("Bearer "+second).Limits.InFlight)
	require.NoError(t, strong(first))
	require.ErrorContains(t, strong("äöüßéèêëàáâ"), "the key has 66 bits at most", "a character is one, whatever bytes it has")

	for name, options := range map[string][]string{"alice": nil, "a:b": nil, "c": {"salt=a:b"}, "d": {"maxinflight=1"}, "e": {"#"}, "f": {"a\nb"}} {
		_, err = Add(path, name, options...)
		require.Error(t, err, name)
		require.NotContains(t, err.Error(), "line 2:")
	}
	after, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(text), string(after))

	require.NoError(t, os.WriteFile(path, []byte(Head), 0o600))
	_, err = Add(path, "alice")
	require.NoError(t, err, "a file without keys yet")
	require.NoError(t, os.WriteFile(path, []byte(alpha+"\n"), 0o600))
	_, err = Add(path, "alice")
	require.ErrorContains(t, err, "it is of the old form, whose lines have no names: make a new file")
}

// Whatever is read, names and tenants can be part of salts and of lines of a log, and one form is not taken for the other.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		alpha, alpha + "\n" + beta, Head + "\n", Head + "\r\nalice " + hashOf(alpha) + " salt=x admin\n# c\nr " + hashOf(beta) + " router max_in_flight=3",
		"alice " + hashOf(alpha), " " + Head,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		k, err := Parse(data)
		if err != nil {
			require.NotContains(t, err.Error(), "\n")
			return
		}
		require.Equal(t, !strings.HasPrefix(string(data), Head), k.Old)
		names, salts := map[string]bool{}, map[string]string{}
		for _, key := range k.All() {
			require.NoError(t, checkName("name", key.Name))
			require.False(t, names[key.Name])
			names[key.Name] = true
			require.Len(t, key.ID, 2*sha256.Size)
			if key.Tenant == "" {
				require.True(t, k.Old || key.Router)
				continue
			}
			salt, err := key.Salt("")
			require.NoError(t, err)
			require.Equal(t, key.Tenant, connector.TenantOf(salt))
			if before, twice := salts[salt]; twice {
				require.Equal(t, before, key.Tenant)
			}
			salts[salt] = key.Tenant
		}
	})
}
