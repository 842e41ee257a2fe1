package archtest

import (
	"go/ast"
	"slices"
	"strings"
)

// alone are the folders of the packages that make race leaves out since nothing in them runs at the same time as something else.
func alone(t *Tree) (folders []string) {
	for line := range strings.Lines(string(t.Texts["Makefile"])) {
		if name, list, found := strings.Cut(line, ":="); found && strings.TrimSpace(name) == "ALONE" {
			for word := range strings.FieldsSeq(list) {
				folders = append(folders, strings.TrimPrefix(word, "./"))
			}
		}
	}
	return folders
}

// checkAlone keeps that true: neither they nor their tests start a goroutine, or handle memory in a way that only the race detector's build
// checks, and of this module they import each other and what protoc-gen-go makes.
func checkAlone(t *Tree, _ *Policy, report reporter) {
	folders := alone(t)
	read := map[string]bool{}
	for _, f := range t.Files {
		if !slices.Contains(folders, f.Folder) {
			continue
		}
		read[f.Folder] = true
		ast.Inspect(f.AST, func(n ast.Node) bool {
			if atOnce(n) {
				report(f.Path, t.line(n), "make race has to test %s: something runs at the same time as something else", f.Folder)
			}
			return true
		})
		for _, spec := range f.AST.Imports {
			to, local := t.local(importPath(spec))
			if importPath(spec) == "unsafe" || local && !slices.Contains(folders, to) && !under(to, "proto") {
				report(f.Path, t.line(spec), "make race has to test %s: it imports %s", f.Folder, importPath(spec))
			}
		}
	}
	for _, folder := range folders {
		if !read[folder] {
			report("Makefile", 0, "ALONE names %s, where no package is", folder)
		}
	}
}

// atOnce reports whether a node starts a goroutine, by itself or by a method that does so.
func atOnce(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.GoStmt:
		return true
	case *ast.CallExpr:
		f, is := n.Fun.(*ast.SelectorExpr)
		return is && slices.Contains([]string{"Go", "Parallel", "RunParallel", "AfterFunc"}, f.Sel.Name)
	}
	return false
}
