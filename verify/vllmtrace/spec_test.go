package vllmtrace

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// specRow is one line of the table of invariants.
type specRow struct {
	number                 int
	text, duty, check, why string
}

func specRows(t *testing.T) []specRow {
	t.Helper()
	data, err := os.ReadFile("../../docs/spec/vllm-invariants.md")
	require.NoError(t, err)
	var rows []specRow
	for line := range strings.Lines(string(data)) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) < 7 {
			continue
		}
		n, err := strconv.Atoi(strings.TrimSpace(cells[1]))
		if err != nil {
			continue // a heading
		}
		require.Len(t, cells, 7, line)
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		rows = append(rows, specRow{n, cells[2], cells[3], cells[4], cells[5]})
	}
	return rows
}

// The table lists all 68 invariants, and says "invN" exactly where there is a check.
func TestTableEqualsCode(t *testing.T) {
	rules := map[string]int{}
	for _, r := range Rules() {
		rules[r.Name] = r.Number
	}
	rows := specRows(t)
	require.Len(t, rows, 68)
	here, elsewhere, nowhere := 0, 0, 0
	for i, r := range rows {
		require.Equal(t, i+1, r.number)
		require.NotEmpty(t, r.text)
		require.Contains(t, []string{"engine", "shim", "host", "plugin", "contract"}, r.duty, r.number)
		switch {
		case strings.HasPrefix(r.check, "inv"):
			require.Equal(t, r.number, rules[r.check], "row %d names %s", r.number, r.check)
			delete(rules, r.check)
			here++
		case r.check == "-":
			require.NotEmpty(t, r.why, "row %d: why is it not checked?", r.number)
			nowhere++
		default:
			requireTest(t, r)
			elsewhere++
		}
	}
	require.Empty(t, rules, "checks that the table does not name")
	t.Logf("68 invariants: %d checked on sequences of calls, %d by other tests, %d not checkable yet", here, elsewhere, nowhere)
}

// The page says of every call that can be read what becomes of it, and the shim does something for it.
func TestEveryCallIsDocumented(t *testing.T) {
	data, err := os.ReadFile("../../docs/spec/vllm-invariants.md")
	require.NoError(t, err)
	page := map[Kind]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| .+ \\|$").FindAllStringSubmatch(string(data), -1) {
		page[Kind(m[1])] = true
	}
	code, handled := map[Kind]bool{}, (&Shim{}).handlers()
	for _, side := range []Side{SchedulerSide, WorkerSide} {
		for kind := range decodersOf(side) {
			code[kind] = true
			require.NotNil(t, handled[kind], kind)
		}
	}
	require.Equal(t, code, page)
	t.Logf("%d kinds of calls", len(page))
}

// requireTest makes sure that the test which a row names exists.
func requireTest(t *testing.T, r specRow) {
	t.Helper()
	folder, name, ok := strings.Cut(r.check, " ")
	require.True(t, ok, "row %d: %q, want a folder and a test", r.number, r.check)
	paths, err := filepath.Glob(filepath.Join("../..", folder, "*_test.go"))
	require.NoError(t, err)
	found := false
	for _, p := range paths {
		data, err := os.ReadFile(p)
		require.NoError(t, err)
		found = found || regexp.MustCompile(`(?m)^func `+name+`\(`).Match(data)
	}
	require.True(t, found, "row %d: no %s in %s", r.number, name, folder)
}
