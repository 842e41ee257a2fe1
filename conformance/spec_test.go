package conformance

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
)

// rule is one section of docs/spec.
type rule struct {
	id, sentence string
	fields       map[string]string // owner, why, source, capability, checked by
}

var (
	heading = regexp.MustCompile(`(?m)^### (.+)$`)
	ruleID  = regexp.MustCompile(`^[A-Z]+-\d\d$`)
	field   = regexp.MustCompile(`(?m)^- ([a-z ]+): (.+)$`)
)

func readSpec(t *testing.T) []rule {
	t.Helper()
	files, err := filepath.Glob("../docs/spec/*.md")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	var rules []rule
	for _, f := range files {
		b, err := os.ReadFile(f)
		require.NoError(t, err)
		text := string(b)
		at := heading.FindAllStringSubmatchIndex(text, -1)
		for i, m := range at {
			next := len(text)
			if i+1 < len(at) {
				next = at[i+1][0]
			}
			body := text[m[1]:next]
			r := rule{id: text[m[2]:m[3]], fields: map[string]string{}}
			r.sentence, _, _ = strings.Cut(strings.TrimSpace(body), "\n")
			for _, f := range field.FindAllStringSubmatch(body, -1) {
				require.NotContains(t, r.fields, f[1], r.id)
				r.fields[f[1]] = f[2]
			}
			rules = append(rules, r)
		}
	}
	return rules
}

func TestSpecIsWellFormed(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range readSpec(t) {
		require.Regexp(t, ruleID, r.id)
		require.False(t, seen[r.id], "%s twice", r.id)
		seen[r.id] = true
		require.True(t, strings.HasSuffix(r.sentence, "."), "%s: %q is no sentence", r.id, r.sentence)
		for _, f := range []string{"owner", "why", "source"} {
			require.NotEmpty(t, r.fields[f], "%s has no %s", r.id, f)
		}
		require.Contains(t, []string{"plugin", "connector", "sdk", "host", "engine"}, r.fields["owner"], r.id)
		require.Equal(t, r.fields["owner"] != "plugin", r.fields["checked by"] != "", "%s: a plugin's rule has cases, any other a test", r.id)
		for name := range r.fields {
			require.Contains(t, []string{"owner", "why", "source", "capability", "checked by"}, name, r.id)
		}
	}
	t.Logf("%d rules", len(seen))
}

// The rules that plugins own are exactly those that cases check.
func TestRulesAreCases(t *testing.T) {
	spec := map[string]bool{}
	for _, r := range readSpec(t) {
		if r.fields["owner"] == "plugin" {
			spec[r.id] = true
		}
	}
	checked, ids := map[string]bool{}, map[string]bool{}
	for _, c := range Cases() {
		checked[c.Rule] = true
		require.False(t, ids[c.ID], "case id %s twice", c.ID)
		ids[c.ID] = true
		require.NotEmpty(t, c.Text)
		require.NotEmpty(t, c.Profiles)
		require.NotNil(t, c.Run)
	}
	require.Equal(t, slices.Sorted(maps.Keys(spec)), slices.Sorted(maps.Keys(checked)))
	t.Logf("%d rules of plugins, %d cases", len(spec), len(ids))
}

// What another part owns is checked by a Go test that exists.
func TestOtherRulesHaveTests(t *testing.T) {
	for _, r := range readSpec(t) {
		if r.fields["owner"] == "plugin" {
			continue
		}
		for check := range strings.SplitSeq(r.fields["checked by"], ", ") {
			require.True(t, testExists(t, check), "%s: there is no %s", r.id, check)
		}
	}
}

// testExists reports whether there is a test, named by its folder and its name.
func testExists(t *testing.T, check string) (found bool) {
	t.Helper()
	folder, name, ok := strings.Cut(check, " ")
	require.True(t, ok, "%q, want a folder and a test", check)
	files, err := filepath.Glob(filepath.Join("..", filepath.FromSlash(folder), "*_test.go"))
	require.NoError(t, err)
	for _, f := range files {
		b, err := os.ReadFile(f)
		require.NoError(t, err)
		found = found || strings.Contains(string(b), "func "+name+"(t *testing.T)")
	}
	return found
}

// Rule numbers in code and documents are those of the spec.
func TestCitedRulesExist(t *testing.T) {
	known := map[string]bool{}
	families := map[string]bool{}
	for _, r := range readSpec(t) {
		known[r.id] = true
		family, _, _ := strings.Cut(r.id, "-")
		families[family] = true
	}
	cited := regexp.MustCompile(`\b(` + strings.Join(slices.Sorted(maps.Keys(families)), "|") + `)-\d\d\b`)
	n := 0
	require.NoError(t, filepath.WalkDir("..", func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || d.Name() == ".deps" || d.Name() == "bin") {
			return filepath.SkipDir
		}
		if ext := filepath.Ext(path); d.IsDir() || !slices.Contains([]string{".go", ".proto", ".md"}, ext) {
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, id := range cited.FindAllString(string(b), -1) {
			n++
			if !known[id] {
				t.Errorf("%s names %s, which is not a rule", path, id)
			}
		}
		return nil
	}))
	t.Logf("%d citations", n)
}

// Rule CAP-01: interfaces, bits, enum values and rules are one set.
func TestCapabilitiesAreOneSet(t *testing.T) {
	bits := map[string]connector.Capability{}
	for bit := connector.Capability(1); bit != 0; bit <<= 1 {
		if name := bit.String(); !strings.HasPrefix(name, "bit") {
			bits[name] = bit
		}
	}

	b, err := os.ReadFile("../proto/kvport/v1/plugin.proto")
	require.NoError(t, err)
	enum := map[string]connector.Capability{}
	for _, m := range regexp.MustCompile(`CAPABILITY_([A-Z]+) = (\d+);`).FindAllStringSubmatch(string(b), -1) {
		n, err := strconv.Atoi(m[2])
		require.NoError(t, err)
		if n > 0 {
			enum[strings.ToLower(m[1])] = 1 << (n - 1)
		}
	}
	require.Equal(t, bits, enum)

	interfaces := map[string]connector.Capability{}
	for _, p := range connector.Powers() {
		interfaces[p.Name] = p.Bit
		require.LessOrEqual(t, p.Interface.NumMethod(), 2)
	}
	require.Equal(t, bits, interfaces)

	rules := map[string]connector.Capability{}
	byRule := map[string]string{}
	for _, r := range readSpec(t) {
		if name := r.fields["capability"]; name != "" {
			rules[name], byRule[r.id] = bits[name], name
		}
	}
	require.Equal(t, bits, rules)
	for _, c := range Cases() {
		require.Equal(t, bits[byRule[c.Rule]], c.Needs, "case %s needs what its rule %s is about", c.ID, c.Rule)
	}
}

func TestProfiles(t *testing.T) {
	count := map[Profile]int{}
	for _, c := range Cases() {
		for _, p := range c.Profiles {
			count[p]++
			parsed, err := ParseProfile(string(p))
			require.NoError(t, err)
			require.Equal(t, p, parsed)
		}
		if slices.Contains(c.Profiles, Store) {
			require.Zero(t, c.Needs, "profile store must not want optional powers")
		}
	}
	require.GreaterOrEqual(t, count[Store], 20)
	require.GreaterOrEqual(t, count[Fault], 20)
	require.GreaterOrEqual(t, len(Cases()), 60)
	require.Len(t, count, len(Profiles()))
	_, err := ParseProfile("stroe")
	require.ErrorContains(t, err, `unknown profile "stroe"`)
	t.Log(fmt.Sprint(count))
}

// What docs/spec/reports.md lists is kept from happening by cases and tests that exist, and each profile of
// several connectors has cases in it.
func TestReportsHaveCases(t *testing.T) {
	b, err := os.ReadFile("../docs/spec/reports.md")
	require.NoError(t, err)
	profiles := map[string][]Profile{}
	for _, c := range Cases() {
		profiles[c.ID] = c.Profiles
	}
	named := map[Profile]int{}
	reports := 0
	for _, row := range regexp.MustCompile(`(?m)^\| (\S+#.+?) \| .+? \| (.+?) \| (.+?) \|$`).FindAllStringSubmatch(string(b), -1) {
		reports += strings.Count(row[1], "#")
		for id := range strings.SplitSeq(row[2], ", ") {
			require.Contains(t, profiles, id, row[1])
			for _, p := range profiles[id] {
				named[p]++
			}
		}
		for check := range strings.SplitSeq(strings.ReplaceAll(row[3], "`", ""), ", ") {
			require.True(t, testExists(t, check), "%s: %s", row[1], check)
		}
	}
	require.Len(t, regexp.MustCompile(`\w#\d`).FindAllString(string(b), -1), reports, "a row is not read")
	for _, p := range []Profile{Offload, MultiChildren, Pipe, Buffer, Remote, PDProducer, PDConsumer} {
		require.Positive(t, named[p], p)
	}
	t.Logf("%d reports", reports)
}
