package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/multiconnector"
)

// powerColumns are those of the table of docs/powers.md.
func powerColumns() []string {
	return []string{"power", "interface", "bit", "side", "proto value", "Multi", "staged", "agent", "vLLM shim", "simulator", "suite"}
}

// verdicts are the possible beginnings of a cell that says what a part of kvport does with a power.
func verdicts() []string { return []string{"used", "passed on", "masked", "refused", "not used"} }

// powerFacts are what the code says about the powers.
type powerFacts struct {
	powers    []connector.Power
	multi     connector.Capability // passed on
	simulated connector.Capability
	suite     map[connector.Capability]string // the rules that cases check
	python    string                          // the shim's source
	proto     map[string]string               // the values of the enum Capability, by number
}

func readPowerFacts(t *testing.T) *powerFacts {
	t.Helper()
	f := &powerFacts{powers: connector.Powers(), multi: multiconnector.Powers, suite: map[connector.Capability]string{}, proto: map[string]string{}}
	source, err := os.ReadFile("../verify/simulate/world.go") // Powers lists what a run has met
	require.NoError(t, err)
	for i := range f.powers {
		p := &f.powers[i]
		if regexp.MustCompile(`\{"` + strings.TrimSuffix(p.Name, "s") + `s\b`).Match(source) {
			f.simulated |= p.Bit
		}
		var rules []string
		for _, c := range Cases() {
			if c.Needs == p.Bit {
				rules = append(rules, c.Rule)
			}
		}
		slices.Sort(rules)
		f.suite[p.Bit] = strings.Join(slices.Compact(rules), ", ")
	}
	proto, err := os.ReadFile("../proto/kvport/v1/plugin.proto")
	require.NoError(t, err)
	for _, m := range regexp.MustCompile(`(CAPABILITY_[A-Z]+) = (\d+);`).FindAllStringSubmatch(string(proto), -1) {
		f.proto[m[2]] = m[1]
	}
	files, err := filepath.Glob("../python/kvport_vllm/*.py")
	require.NoError(t, err)
	for _, file := range files {
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		f.python += string(b)
	}
	return f
}

// constant is the name of a power's bit in package connector.
func constant(p *connector.Power) string { return "Can" + strings.ToUpper(p.Name[:1]) + p.Name[1:] }

// readPowers gives the rows of the table in a page, by power and column.
func readPowers(page string) (rows map[string]map[string]string, wrong []string) {
	rows = map[string]map[string]string{}
	columns := powerColumns()
	for line := range strings.Lines(page) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "|-") {
			continue
		}
		row := map[string]string{}
		for i, cell := range cells {
			if cell = strings.TrimSpace(cell); i < len(columns) {
				row[columns[i]] = cell
			}
		}
		if len(cells) != len(columns) {
			wrong = append(wrong, fmt.Sprintf("%s: %d cells, want %d", row["power"], len(cells), len(columns)))
		}
		rows[row["power"]] = row
	}
	delete(rows, "power") // the head
	return rows, wrong
}

// checkPowers says what is wrong with the table.
func checkPowers(page string, f *powerFacts) (wrong []string) {
	rows, wrong := readPowers(page)
	for i := range f.powers {
		p := &f.powers[i]
		row := rows[p.Name]
		if row == nil {
			wrong = append(wrong, p.Name+": there is no row")
			continue
		}
		delete(rows, p.Name)
		for _, problem := range f.check(p, row) {
			wrong = append(wrong, p.Name+": "+problem)
		}
	}
	for name := range rows {
		wrong = append(wrong, name+": is not a power")
	}
	slices.Sort(wrong)
	return wrong
}

// check compares one row with the code.
func (f *powerFacts) check(p *connector.Power, row map[string]string) (wrong []string) {
	columns := powerColumns()
	for _, column := range columns {
		if row[column] == "" {
			wrong = append(wrong, "the cell "+column+" is blank")
		}
	}
	number := strconv.Itoa(p.Number())
	side, multi, simulator := "scheduler", "masked", "not used"
	if p.Worker {
		side = "worker"
	}
	if f.multi&p.Bit != 0 {
		multi = "passed on"
	}
	if f.simulated&p.Bit != 0 {
		simulator = "used"
	}
	for column, want := range map[string]string{
		"interface": "`" + p.Interface.Name() + "`", "bit": fmt.Sprintf("`%s` 1<<%d", constant(p), p.Number()-1), "side": side,
		"proto value": fmt.Sprintf("`%s` = %s", f.proto[number], number), "suite": f.suite[p.Bit],
	} {
		if row[column] != want {
			wrong = append(wrong, fmt.Sprintf("the cell %s is %q, the code says %q", column, row[column], want))
		}
	}
	for _, column := range columns[slices.Index(columns, "Multi"):slices.Index(columns, "suite")] {
		verdict, _, reasoned := strings.Cut(row[column], ": ")
		want := map[string]string{"Multi": multi, "simulator": simulator}[column]
		switch {
		case !slices.Contains(verdicts(), verdict) || !reasoned:
			wrong = append(wrong, fmt.Sprintf("the cell %s is %q, want one of %q, a colon, and how or why", column, row[column], verdicts()))
		case want != "" && verdict != want:
			wrong = append(wrong, fmt.Sprintf("the cell %s says %q, the code %q", column, verdict, want))
		}
	}
	for _, name := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(row["vLLM shim"], -1) {
		if !strings.Contains(f.python, "def "+name[1]+"(") {
			wrong = append(wrong, fmt.Sprintf("the vLLM shim has no %s", name[1]))
		}
	}
	return wrong
}

// TestPowersTable: docs/powers.md says for every power what the code does with it.
func TestPowersTable(t *testing.T) {
	page, err := os.ReadFile("../docs/powers.md")
	require.NoError(t, err)
	facts := readPowerFacts(t)
	require.Empty(t, checkPowers(string(page), facts))
	require.Len(t, facts.proto, len(facts.powers)+1, "every proto value but 0 is a power")
}

// TestPowersTableIsStrict: a power without a row, a blank cell and cells that the code does not bear out are found.
func TestPowersTableIsStrict(t *testing.T) {
	b, err := os.ReadFile("../docs/powers.md")
	require.NoError(t, err)
	page, facts := string(b), readPowerFacts(t)
	row := regexp.MustCompile(`(?m)^\| lease \|.*$`).FindString(page)
	require.NotEmpty(t, row)
	cells := strings.Split(row, "|")
	for i, column := range powerColumns() {
		blank := slices.Clone(cells)
		blank[i+1] = " "
		require.NotEmpty(t, checkPowers(strings.Replace(page, row, strings.Join(blank, "|"), 1), facts), "a blank %s", column)
	}
	for what, change := range map[string][2]string{
		"another verdict":     {"| passed on: a hold", "| masked: a hold"},
		"no verdict":          {"| passed on: a hold", "| a hold"},
		"another bit":         {"`CanLease` 1<<6", "`CanLease` 1<<7"},
		"a rule without case": {"LEASE-02", "LEASE-03"},
		"no such hook":        {"`reset_cache`", "`reset_caches`"},
		"a power that is not": {"| lease |", "| leases |"},
		"a cell too many":     {"| lease |", "| lease | |"},
	} {
		require.Contains(t, page, change[0], what)
		require.NotEmpty(t, checkPowers(strings.Replace(page, change[0], change[1], 1), facts), what)
	}
	facts.powers = append(facts.powers, connector.Power{Bit: 1 << 8, Name: "place", Interface: facts.powers[0].Interface})
	require.Equal(t, []string{"place: there is no row"}, checkPowers(page, facts))
}
