package archtest

import (
	"go/ast"
	"go/token"
	"strings"
)

func checkFileLength(t *Tree, p *Policy, report reporter) {
	for _, f := range t.Files {
		if !f.Generated && f.Lines > p.FileLines {
			report(f.Path, f.Lines, "%d lines, at most %d", f.Lines, p.FileLines)
		}
	}
}

// eachFunc calls visit for every declared function that is not generated.
func (t *Tree) eachFunc(visit func(f *File, fn *ast.FuncDecl)) {
	for _, f := range t.Files {
		if f.Generated {
			continue
		}
		for _, decl := range f.AST.Decls {
			if fn, ok := decl.(*ast.FuncDecl); ok {
				visit(f, fn)
			}
		}
	}
}

func checkFunctionLength(t *Tree, p *Policy, report reporter) {
	t.eachFunc(func(f *File, fn *ast.FuncDecl) {
		if lines := t.fset.Position(fn.End()).Line - t.line(fn.Type) + 1; lines > p.FunctionLines {
			report(f.Path, t.line(fn), "%s has %d lines, at most %d", fn.Name.Name, lines, p.FunctionLines)
		}
	})
}

func checkComplexity(t *Tree, p *Policy, report reporter) {
	t.eachFunc(func(f *File, fn *ast.FuncDecl) {
		if n := complexity(fn); n > p.Complexity {
			report(f.Path, t.line(fn), "%s has cyclomatic complexity %d, at most %d", fn.Name.Name, n, p.Complexity)
		}
	})
}

// complexity is McCabe's number: one, and one more for every branch; closures count for the
// function they stand in.
func complexity(fn *ast.FuncDecl) int {
	n := 1
	ast.Inspect(fn, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.IfStmt, *ast.ForStmt, *ast.RangeStmt:
			n++
		case *ast.CaseClause:
			if node.List != nil {
				n++
			}
		case *ast.CommClause:
			if node.Comm != nil {
				n++
			}
		case *ast.BinaryExpr:
			if node.Op == token.LAND || node.Op == token.LOR {
				n++
			}
		}
		return true
	})
	return n
}

func checkParameters(t *Tree, p *Policy, report reporter) {
	for _, f := range t.Files {
		if f.Generated {
			continue
		}
		ast.Inspect(f.AST, func(node ast.Node) bool {
			if fn, ok := node.(*ast.FuncType); ok && fn.Params.NumFields() > p.Parameters {
				report(f.Path, t.line(fn), "%d parameters, at most %d", fn.Params.NumFields(), p.Parameters)
			}
			return true
		})
	}
}

func checkInterfaces(t *Tree, p *Policy, report reporter) {
	packages := t.packages(func(f *File) bool { return f.Public() && !f.Generated })
	for _, folder := range sortedKeys(packages) {
		limit := p.PublicMethods
		if underAny(folder, p.Core) {
			limit = p.Methods
		}
		declared := interfaces(packages[folder])
		for _, f := range packages[folder] {
			eachType(f, func(spec *ast.TypeSpec) {
				if n := methods(declared, spec.Name.Name); n > limit {
					report(f.Path, t.line(spec), "interface %s has %d methods, at most %d", spec.Name.Name, n, limit)
				}
			})
		}
	}
}

// eachType calls visit for every type declared at the top of a file.
func eachType(f *File, visit func(*ast.TypeSpec)) {
	for _, decl := range f.AST.Decls {
		if gen, ok := decl.(*ast.GenDecl); ok && gen.Tok == token.TYPE {
			for _, spec := range gen.Specs {
				visit(spec.(*ast.TypeSpec)) //nolint:forcetypeassert // go/ast: a type declaration holds nothing else
			}
		}
	}
}

// interfaces are the interface types a package declares, by name.
func interfaces(files []*File) map[string]*ast.InterfaceType {
	found := map[string]*ast.InterfaceType{}
	for _, f := range files {
		eachType(f, func(spec *ast.TypeSpec) {
			if i, ok := spec.Type.(*ast.InterfaceType); ok {
				found[spec.Name.Name] = i
			}
		})
	}
	return found
}

// methods counts an interface's methods with those of embedded interfaces of the same package; one
// embedded from elsewhere counts as one method.
func methods(declared map[string]*ast.InterfaceType, name string) int {
	i, ok := declared[name]
	if !ok {
		return 0
	}
	n := 0
	for _, field := range i.Methods.List {
		switch embedded := field.Type.(type) {
		case *ast.FuncType:
			n += len(field.Names)
		case *ast.Ident:
			n += methods(declared, embedded.Name)
		case *ast.SelectorExpr:
			n++
		}
	}
	return n
}

func checkBudgets(t *Tree, p *Policy, report reporter) {
	for _, b := range p.Budgets {
		sums := map[string]int{} // by folder for patterns, in one sum otherwise
		for _, f := range t.Files {
			if unit, ok := b.unit(f.Folder); ok && !f.Test && !f.Generated {
				sums[unit] += f.Lines
			}
		}
		for _, unit := range sortedKeys(sums) {
			if sums[unit] > b.Lines {
				report(unit, 0, "%s: %d lines, at most %d", b.Name, sums[unit], b.Lines)
			}
		}
	}
}

// unit is the folder under which the lines of a folder are summed up.
func (b Budget) unit(folder string) (string, bool) {
	if underAny(folder, b.Except) {
		return "", false
	}
	for _, pattern := range b.Folders {
		star, ok := rowMatches(pattern, folder)
		switch {
		case ok && star != "":
			return strings.ReplaceAll(pattern, "*", star), true
		case ok:
			return b.Folders[0], true
		}
	}
	return "", false
}
