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
	memory, register := regexp.MustCompile(`\(`), regexp.MustCompile(`^[XY][0-9]+$`)
	for name, want := range halves {
		var loaded, into, stored, to, absorbed []string
		for _, in := range all[name] {
			op, last := in[0], in[len(in)-1]
			switch {
			case op == "VMOVDQU" && register.MatchString(last):
				loaded, into = append(loaded, in[1]), append(into, last)
			case op == "VMOVDQU" || op == "VMOVNTDQ":
				stored, to = append(stored, in[1]), append(to, last)
			default:
				require.NotRegexp(t, memory, strings.Join(in, " "), "%s: only moves touch memory", name)
				if op == "VAESENC" && (in[1] == "X10" || in[1] == "X11" || in[1] == "Y10" || in[1] == "Y11") {
					absorbed = append(absorbed, in[1])
				}
				require.True(t, op == "VAESENC" || op == "ADDQ" || op == "DECQ" || op == "VPXOR", "%s: %v", name, in)
				if op[0] == 'V' {
					require.NotContains(t, into, last, "%s: %v changes what was read", name, in)
				}
			}
		}
		require.Equal(t, want, loaded, "%s: each half is loaded once", name)
		require.NotEqual(t, into[0], into[1], name)
		require.Equal(t, into, stored, "%s: what was read is written", name)
		require.Equal(t, want, []string{strings.ReplaceAll(to[0], "R8", "SI"), strings.ReplaceAll(to[1], "R8", "SI")}, "%s: to the same place", name)
		if name != "stream" {
			require.Equal(t, into, absorbed, "%s: and absorbed", name)
		}
	}
}

func keys(m map[string][][]string) (names []string) {
	for name := range m {
		names = append(names, name)
	}
	return names
}
