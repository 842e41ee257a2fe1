package mac

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// assembly gives the loop of each function of the generated assembly that has one: its instructions, each with its operands.
func assembly(t *testing.T) map[string][][]string {
	t.Helper()
	text, err := os.ReadFile("absorb_amd64.s")
	require.NoError(t, err)
	functions := map[string][][]string{}
	for _, part := range strings.Split(string(text), "TEXT ·")[1:] {
		name, body, _ := strings.Cut(part, "(SB)")
		before, loop, found := strings.Cut(body, "loop:\n")
		if !found {
			continue
		}
		loop, after, found := strings.Cut(loop, "JNZ loop")
		require.True(t, found, "%s: its loop ends", name)
		require.NotContains(t, before+after, "(SI)", "%s: reads the source outside of its loop", name)
		for line := range strings.Lines(loop) {
			if fields := strings.FieldsFunc(line, func(r rune) bool { return strings.ContainsRune(" ,\t\n", r) }); len(fields) > 0 {
				functions[name] = append(functions[name], fields)
			}
		}
	}
	return functions
}

// TestAssemblyReadsOnce: each loop that copies loads each half of a block once, into a register of its own, from which it both absorbs
// and writes it. No other instruction reads memory, so what is absorbed is what is written.
func TestAssemblyReadsOnce(t *testing.T) {
	halves := map[string][]string{
		"copyLane": {"(SI)", "(SI)(BX*1)"}, "copyPair": {"(SI)", "32(SI)"}, "copyPairPast": {"(SI)", "32(SI)"}, "stream": {"(SI)", "32(SI)"},
	}
	all := assembly(t)
	require.ElementsMatch(t, []string{"absorbLane", "absorbPair", "copyLane", "copyPair", "copyPairPast", "stream"}, keys(all), "another function needs a line here")
	for name, want := range halves {
		loads, stores, others := moves(all[name])
		require.Len(t, loads, 2, "%s: each half is loaded once", name)
		require.Len(t, stores, 2, "%s: each half is written once", name)
		var absorbed []string
		for i, load := range loads {
			store := stores[i]
			require.Equal(t, want[i], load[1], name)
			require.Equal(t, load[2], store[1], "%s: what was read is written", name)
			require.Equal(t, load[1], strings.ReplaceAll(store[2], "R8", "SI"), "%s: to the same place", name)
		}
		require.NotEqual(t, loads[0][2], loads[1][2], name)
		for _, in := range others {
			require.NotContains(t, strings.Join(in, " "), "(", "%s: only moves touch memory", name)
			require.Contains(t, []string{"VAESENC", "VPXOR", "ADDQ", "DECQ"}, in[0], name)
			require.NotContains(t, []string{loads[0][2], loads[1][2]}, in[len(in)-1], "%s: %v changes what was read", name, in)
			if in[1] == loads[0][2] || in[1] == loads[1][2] {
				absorbed = append(absorbed, in[1])
			}
		}
		if name != "stream" {
			require.Equal(t, []string{loads[0][2], loads[1][2]}, absorbed, "%s: what was read is absorbed", name)
		}
	}
}

// moves are the instructions that load a register, those that store one, and the others.
func moves(loop [][]string) (loads, stores, others [][]string) {
	register := regexp.MustCompile(`^[XY][0-9]+$`)
	for _, in := range loop {
		switch move := in[0] == "VMOVDQU" || in[0] == "VMOVNTDQ"; {
		case move && register.MatchString(in[len(in)-1]):
			loads = append(loads, in)
		case move:
			stores = append(stores, in)
		default:
			others = append(others, in)
		}
	}
	return loads, stores, others
}

func keys(m map[string][][]string) (names []string) {
	for name := range m {
		names = append(names, name)
	}
	return names
}
