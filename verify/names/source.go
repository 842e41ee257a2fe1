package names

import (
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"regexp"
	"slices"
	"strings"
)

var (
	exitCode  = regexp.MustCompile(`(?m)^\t(exit\w+) += (\d+)`)
	violation = regexp.MustCompile(`(?m)^\t\t\{(\d+), "([^"]+)", "\w+", func`)
)

// sourceNames reads names that only the source contains: keys of log lines, exit codes, and the violations that
// the tests of vllmtrace plant in recorded calls.
func sourceNames(_ context.Context, root string) (list []Name, err error) {
	err = goFiles(root, func(f goFile) error {
		folder := path.Dir(f.path)
		if path.Base(folder) == "vllmtrace" {
			for _, m := range violation.FindAllStringSubmatch(string(f.text), -1) {
				list = append(list, Name{Section: "mutant", Name: "vllmtrace: " + m[1] + ": " + m[2]})
			}
		}
		if f.kind != product {
			return nil
		}
		if folder == "cmd/kvport" {
			for _, m := range exitCode.FindAllStringSubmatch(string(f.text), -1) {
				list = append(list, Name{"exit code", m[1], m[2]})
			}
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), f.path, f.text, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(parsed, func(node ast.Node) bool {
			for _, key := range logKeys(node) {
				list = append(list, Name{Section: "log", Name: key})
			}
			return true
		})
		return nil
	})
	return list, err
}

// messages says which argument of slog's functions is the message; keys and values come behind it.
var messages = map[string]int{
	"Debug": 0, "Info": 0, "Warn": 0, "Error": 0, "DebugContext": 1, "InfoContext": 1, "WarnContext": 1, "ErrorContext": 1,
	"Log": 2, "With": -1,
}

var logKey = regexp.MustCompile(`^"[a-z][a-z0-9_]*"$`)

// logKeys are the keys in a call of slog, or in the list of attributes that one is given.
func logKeys(node ast.Node) (keys []string) {
	pairs := attributes(node)
	for i := 0; i < len(pairs); i++ {
		text := pairs[i]
		if call, ok := text.(*ast.CallExpr); ok && len(call.Args) > 0 && !isIdent(call.Fun, "append") {
			text = call.Args[0] // slog.String("key", value)
		} else {
			i++ // the value
		}
		if lit, ok := text.(*ast.BasicLit); ok && logKey.MatchString(lit.Value) {
			keys = append(keys, strings.Trim(lit.Value, `"`))
		}
	}
	if i := slices.Index(keys, "err"); i >= 0 {
		keys[i] = "error" // as every command writes it
	}
	return keys
}

// attributes are the arguments behind the message, or the elements of a []any or attrs.
func attributes(node ast.Node) []ast.Expr {
	switch node := node.(type) {
	case *ast.CompositeLit:
		if array, ok := node.Type.(*ast.ArrayType); ok && isIdent(array.Elt, "any") {
			return node.Elts
		}
	case *ast.CallExpr:
		at, known := -1, false
		if f, ok := node.Fun.(*ast.SelectorExpr); ok && !isIdent(f.X, "http") && !isIdent(f.X, "status") {
			at, known = messages[f.Sel.Name]
		} else if isIdent(node.Fun, "append") && isIdent(node.Args[0], "attrs") {
			at, known = 0, true
		}
		if known && len(node.Args) > at+1 {
			return node.Args[at+1:]
		}
	}
	return nil
}

func isIdent(e ast.Expr, name string) bool {
	id, ok := e.(*ast.Ident)
	return ok && id.Name == name
}
