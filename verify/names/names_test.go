package names

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const renew = "run go run ./verify/names/write at the root of the repository"

func read(t *testing.T, path ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(path...))
	require.NoError(t, err)
	return string(text)
}

func list(t *testing.T, text string) []Name {
	t.Helper()
	names, err := Parse(text)
	require.NoError(t, err)
	return names
}

// testdata/names.txt is what the code has.
func TestNamesAreCurrent(t *testing.T) {
	t.Parallel()
	now, err := Collect(t.Context(), filepath.Join("..", ".."))
	require.NoError(t, err)
	golden := list(t, read(t, "testdata", "names.txt"))
	require.Equal(t, Format(now), Format(golden), renew)
	perSection := map[string]int{}
	for _, n := range now {
		perSection[n.Section]++
	}
	for _, section := range []string{"acceptance", "case", "config", "exit code", "flag", "go", "log", "metric", "mutant", "plugin", "proto", "rule"} {
		require.Positive(t, perSection[section], section)
	}
	t.Logf("%d names: %v", len(now), perSection)
}

// Nothing that had a name before the redesign is lost or changed but by name.
func TestNothingIsLost(t *testing.T) {
	t.Parallel()
	before, now := list(t, read(t, "testdata", "before.txt")), list(t, read(t, "testdata", "names.txt"))
	differences, added := Compare(before, now, Renames())
	accepted, err := ParseAccepted(read(t, "testdata", "accepted.txt"))
	require.NoError(t, err)
	wrong := Unaccounted(differences, accepted, Renames(), read(t, "..", "..", "CHANGELOG.md"))
	require.Empty(t, wrong, "%d problems:\n%s\nKeep the name, or add a row to verify/names/testdata/accepted.txt and the name to CHANGELOG.md.", len(wrong), strings.Join(wrong, "\n"))
	t.Logf("%d names before, %d now: %d lost or changed, all accepted by %d rows; %d new:\n%s", len(before), len(now), len(differences), len(accepted), len(added), Format(added))
}

// A loss, a change, and a row without cause are noticed. What moved with its folder or its type is no difference.
func TestDifferencesAreNoticed(t *testing.T) {
	t.Parallel()
	table := []Rename{{Old: "sdk/host", New: "host"}, {Old: "internal/acceptance", New: "verify/acceptance"}, {Old: "bench", New: "verify/bench"}, {Old: "host.Settings", New: "host.Config"}}
	before := list(t, "go\tsdk/host.Open\tfunc(*sdk/host.Settings) (sdk/host.SettingsOf, error)\ngo\tsdk/host.Settings.Role\tfield int\n"+
		"acceptance\tgo test ./sdk/host ./internal/acceptance -run TestX; bin/kvport bench store\nflag\tkvport serve --port\tint default 8000\nlog\tplugin\n")
	moved := list(t, "go\thost.Open\tfunc(*host.Config) (host.SettingsOf, error)\ngo\thost.Config.Role\tfield int\n"+
		"acceptance\tgo test ./host ./verify/acceptance -run TestX; bin/kvport bench store\nflag\tkvport serve --port\tint default 8000\nlog\tplugin\nlog\tnew\n")
	differences, added := Compare(before, moved, table)
	require.Empty(t, differences)
	require.Equal(t, []Name{{Section: "log", Name: "new"}}, added)
	require.Equal(t, []string{
		"sdk/host is renamed, but CHANGELOG.md does not have `sdk/host`", "host.Settings is renamed, but CHANGELOG.md does not have `host.Settings`",
	}, Unaccounted(nil, nil, table, "sdk/host, host.Settings"))

	changed := slices.Clone(moved[1:])
	changed[2].Detail = "int default 80"
	differences, _ = Compare(before, changed, table)
	require.Len(t, differences, 2)
	accept := func(rows, changelog string) []string {
		accepted, err := ParseAccepted(rows)
		require.NoError(t, err)
		return Unaccounted(differences, accepted, nil, changelog)
	}
	require.Equal(t, []string{"go\thost.Open is lost (func(*host.Config) (host.SettingsOf, error))", `flag	kvport serve --port was "int default 8000", is "int default 80"`}, accept("", ""))
	rows := "go\thost.*\thost.Start\nflag\tkvport serve --port\tthe same, 80 by default\n"
	require.Empty(t, accept(rows, "`host.Open` is gone; `kvport serve --port` is 80."))
	require.Equal(t, []string{"flag\tkvport serve --port is accepted as a difference, but CHANGELOG.md does not have `kvport serve --port`"}, accept(rows, "`host.Open` is gone; --port is 80."))
	require.Equal(t, []string{"log\tplugin is accepted as a difference and is none"}, accept(rows+"log\tplugin\tconnector\n", "`host.Open`, `kvport serve --port`, `plugin`"))
	_, err := ParseAccepted("flag\tkvport serve --port\n")
	require.ErrorIs(t, err, errForm)
}

// A folder that moved is not in its old place any more.
func TestRenames(t *testing.T) {
	t.Parallel()
	for _, r := range Renames() {
		require.NotEmpty(t, r.Why, r.Old)
		if !r.ofGo() {
			require.NoDirExists(t, filepath.Join("..", "..", r.Old))
		}
	}
}

// What a public package exports is listed as importers see it, a type of an internal package by its alias.
func TestExportedNames(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	for name, text := range map[string]string{
		"go.mod": "module " + module + "\n\ngo 1.26\n",
		"host/internal/config/config.go": "package config\n\ntype Settings struct { Peers []string; secret int }\n\n" +
			"func (s *Settings) Equal(other *Settings) bool { return s.secret == other.secret }\n",
		"host/host.go": "package host\n\nimport \"" + module + "/host/internal/config\"\n\n// Config is exported.\ntype Config = config.Settings\n\n" +
			"type base struct { Name string }\n\n// Host is exported.\ntype Host struct { base; own int }\n\n// Role is exported.\ntype Role uint8\n\nconst RoleBoth Role = 1 << 1\n\n" +
			"// Open is exported.\nfunc Open(c *config.Settings, run func(name string) error) (h *Host, err error) { return nil, nil }\n",
	} {
		require.NoError(t, os.MkdirAll(filepath.Join(folder, filepath.Dir(name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600))
	}
	names, err := goNames(t.Context(), folder)
	require.NoError(t, err)
	slices.SortFunc(names, func(a, b Name) int { return strings.Compare(a.Name, b.Name) })
	require.Equal(t, []Name{
		{"go", "host.Config", "type struct"},
		{"go", "host.Config.Equal", "*func(*host.Config) bool"},
		{"go", "host.Config.Peers", "field []string"},
		{"go", "host.Host", "type struct"},
		{"go", "host.Host.Name", "field string"},
		{"go", "host.Open", "func(*host.Config, func(string) error) (*host.Host, error)"},
		{"go", "host.Role", "type uint8"},
		{"go", "host.RoleBoth", "const host.Role = 2"},
	}, names)
}

// Every kind of log call gives its keys, and calls of other packages give none.
func TestLogKeys(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	source := `package p
func f() {
	log.Info("text", "one", 1, "two", "value")
	log.With("three", 3).ErrorContext(ctx, "text", "err", err)
	slog.Log(ctx, level, "text", slog.String("four", x), "five", 5)
	attrs := []any{"six", 6}
	log.Warn("text", append(attrs, "seven", 7)...)
	http.Error(w, "text", 404)
}
`
	require.NoError(t, os.WriteFile(filepath.Join(folder, "p.go"), []byte(source), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "p_test.go"), []byte("package p\nfunc g() { log.Info(\"text\", \"test\", 1) }\n"), 0o600))
	names, err := sourceNames(t.Context(), folder)
	require.NoError(t, err)
	var keys []string
	for _, n := range names {
		keys = append(keys, n.Name)
	}
	require.ElementsMatch(t, []string{"one", "two", "three", "error", "four", "five", "six", "seven"}, keys)
	var out strings.Builder
	require.NoError(t, WriteLines(&out, folder))
	require.Regexp(t, `(?m)^ +9 +1 +2 +0 +0 +total$`, out.String())
}
