package fault

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRegistry compares the points in the code with the table of docs/failpoints.md. Each is in
// one place only, so that a count of hits means something.
func TestRegistry(t *testing.T) {
	root := filepath.Join("..", "..")
	found := map[string]string{} // name -> Point or Crash
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != root && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || path == filepath.Join(root, "internal", "fault")) {
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(node ast.Node) bool {
			name, kind := point(node)
			if kind == "" {
				return true
			}
			require.NotEmpty(t, name, "%s: the name of a point must be a literal", path)
			require.NotContains(t, found, name, "%s: the point %s is in two places", path, name)
			found[name] = kind
			return true
		})
		return nil
	})
	require.NoError(t, err)
	require.NotEmpty(t, found)

	data, err := os.ReadFile(filepath.Join(root, "docs", "failpoints.md"))
	require.NoError(t, err)
	documented := map[string]string{}
	for line := range strings.Lines(string(data)) {
		cells := strings.Split(line, "|")
		if len(cells) < 5 || !strings.HasPrefix(cells[1], " `") {
			continue
		}
		kind := map[string]string{"yes": "Point", "no": "Crash"}[strings.TrimSpace(cells[3])]
		documented[strings.Trim(cells[1], " `")] = kind
	}
	require.Equal(t, documented, found)
	t.Logf("%d failpoints", len(found))
}

// point reads a call of Point or Crash.
func point(node ast.Node) (name, kind string) {
	call, ok := node.(*ast.CallExpr)
	if !ok {
		return "", ""
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || len(call.Args) != 1 {
		return "", ""
	}
	pkg, ok := sel.X.(*ast.Ident)
	if !ok || pkg.Name != "fault" || sel.Sel.Name != "Point" && sel.Sel.Name != "Crash" {
		return "", ""
	}
	if lit, ok := call.Args[0].(*ast.BasicLit); ok && lit.Kind == token.STRING {
		name, _ = strconv.Unquote(lit.Value)
	}
	return name, sel.Sel.Name
}
