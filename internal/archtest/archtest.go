// Package archtest keeps the architecture of the repository: who may import whom, how big files and
// functions may get, and what may stand where. It reads the files itself instead of asking the build
// system, so that neither build tags nor the test cache can hide a violation.
//
// [Load] reads a tree, [Tree.Check] applies every rule under a [Policy]; [Kvport] is the policy of
// this repository and the only place to change when the architecture changes.
package archtest

import (
	"cmp"
	"fmt"
	"go/ast"
	"slices"
	"strings"
)

// Violation is one place that breaks a rule.
type Violation struct {
	File string // slash-separated, relative to the root of the tree
	Line int    // 0 when the rule is about a whole folder or the policy itself
	Rule string
	Text string // what is wrong and what is allowed
}

// String is the violation as compilers print errors, so that editors can jump to it.
func (v Violation) String() string {
	return fmt.Sprintf("%s:%d: %s: %s", v.File, v.Line, v.Rule, v.Text)
}

// rule checks one thing over a whole tree.
type rule struct {
	name  string
	check func(t *Tree, p *Policy, report reporter)
}

// reporter takes a violation of the running rule. Line 0 means the whole file or folder.
type reporter func(file string, line int, format string, args ...any)

// rules lists every rule. The name is what a violation shows.
func rules() []rule {
	return []rule{
		{"import", checkImports},
		{"heavy import", checkHeavy},
		{"standard library only", checkStdOnly},
		{"import table", checkTable},
		{"module", checkModules},
		{"file length", checkFileLength},
		{"function length", checkFunctionLength},
		{"complexity", checkComplexity},
		{"parameters", checkParameters},
		{"interface size", checkInterfaces},
		{"budget", checkBudgets},
		{"init", checkInit},
		{"panic", checkPanic},
		{"sleep in test", checkSleep},
		{"untyped map", checkUntypedMaps},
		{"doc comment", checkDocs},
		{"internal type", checkLeaks},
		{"connector name", checkNames},
		{"machine path", checkMachinePaths},
		{"plain words", checkWords},
	}
}

// Check applies every rule and returns what breaks them, ordered by place.
func (t *Tree) Check(p *Policy) []Violation {
	var found []Violation
	for _, r := range rules() {
		r.check(t, p, func(file string, line int, format string, args ...any) {
			found = append(found, Violation{File: file, Line: line, Rule: r.name, Text: fmt.Sprintf(format, args...)})
		})
	}
	slices.SortStableFunc(found, func(a, b Violation) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Rule, b.Rule))
	})
	return found
}

// line is the line a node starts at.
func (t *Tree) line(n ast.Node) int { return t.fset.Position(n.Pos()).Line }

// under reports whether folder is base or lies below it.
func under(folder, base string) bool {
	return folder == base || strings.HasPrefix(folder, base+"/")
}

// underAny is under for several bases.
func underAny(folder string, bases []string) bool {
	return slices.ContainsFunc(bases, func(b string) bool { return under(folder, b) })
}
