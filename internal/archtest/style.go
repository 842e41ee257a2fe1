package archtest

import (
	"go/ast"
	"go/token"
	"path"
	"strings"
)

func checkInit(t *Tree, _ *Policy, report reporter) {
	t.eachFunc(func(f *File, fn *ast.FuncDecl) {
		if fn.Recv == nil && fn.Name.Name == "init" {
			report(f.Path, t.line(fn), "no init functions: build values where they are used")
		}
	})
}

func checkPanic(t *Tree, p *Policy, report reporter) {
	for _, f := range t.Files {
		if f.Test || f.Generated || f.Main() || underAny(f.Folder, p.Panics) {
			continue
		}
		ast.Inspect(f.AST, func(node ast.Node) bool {
			if call, ok := node.(*ast.CallExpr); ok && isIdent(call.Fun, "panic") {
				report(f.Path, t.line(call), "no panic in a library: return an error")
			}
			return true
		})
	}
}

func checkSleep(t *Tree, _ *Policy, report reporter) {
	for _, f := range t.Files {
		if !f.Test {
			continue
		}
		clock := importNames(f)
		ast.Inspect(f.AST, func(node ast.Node) bool {
			sel, ok := node.(*ast.SelectorExpr)
			if ok && sel.Sel.Name == "Sleep" && qualifier(sel, clock) == "time" {
				report(f.Path, t.line(sel), "no time.Sleep in tests: use testing/synctest, a channel or a deadline")
			}
			return true
		})
	}
}

func checkUntypedMaps(t *Tree, p *Policy, report reporter) {
	for _, f := range t.Files {
		if f.Test || f.Generated || underAny(f.Path, p.Untyped) {
			continue
		}
		ast.Inspect(f.AST, func(node ast.Node) bool {
			if m, ok := node.(*ast.MapType); ok && isIdent(m.Key, "string") && isAny(m.Value) {
				report(f.Path, t.line(m), "map[string]any outside the JSON edge: declare a struct")
			}
			return true
		})
	}
}

// checkDocs requires a doc comment on every package that is not a command, and on everything exported
// in it: functions, types and their methods, constants, variables, methods of interfaces.
func checkDocs(t *Tree, _ *Policy, report reporter) {
	packages := t.packages(func(f *File) bool { return !f.Test && !f.Generated && !f.Main() })
	for _, folder := range sortedKeys(packages) {
		documented := false
		for _, f := range packages[folder] {
			documented = documented || f.AST.Doc != nil
			for _, decl := range f.AST.Decls {
				checkDeclDoc(decl, func(name *ast.Ident) {
					report(f.Path, t.line(name), "exported %s has no doc comment", name.Name)
				})
			}
		}
		if !documented {
			report(packages[folder][0].Path, 1, "package %s has no package comment", path.Base(folder))
		}
	}
}

// checkDeclDoc calls missing for every exported name of a declaration that has no comment.
func checkDeclDoc(decl ast.Decl, missing func(*ast.Ident)) {
	switch decl := decl.(type) {
	case *ast.FuncDecl:
		if exportedFunc(decl) && decl.Doc == nil {
			missing(decl.Name)
		}
	case *ast.GenDecl:
		for _, spec := range decl.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				if spec.Name.IsExported() {
					checkTypeDoc(spec, decl, missing)
				}
			case *ast.ValueSpec: // a group's comment speaks for all of it
				for _, name := range spec.Names {
					if name.IsExported() && spec.Doc == nil && spec.Comment == nil && decl.Doc == nil {
						missing(name)
					}
				}
			}
		}
	}
}

func checkTypeDoc(spec *ast.TypeSpec, decl *ast.GenDecl, missing func(*ast.Ident)) {
	if spec.Doc == nil && spec.Comment == nil && (decl.Doc == nil || decl.Lparen.IsValid()) {
		missing(spec.Name)
	}
	i, ok := spec.Type.(*ast.InterfaceType)
	if !ok {
		return
	}
	for _, field := range i.Methods.List {
		for _, name := range field.Names {
			if name.IsExported() && field.Doc == nil && field.Comment == nil {
				missing(name)
			}
		}
	}
}

// exportedFunc reports whether other packages can call the function: its name is exported, and so
// is its receiver's type.
func exportedFunc(fn *ast.FuncDecl) bool {
	if !fn.Name.IsExported() {
		return false
	}
	if fn.Recv == nil || len(fn.Recv.List) == 0 {
		return true
	}
	receiver := ""
	ast.Inspect(fn.Recv.List[0].Type, func(node ast.Node) bool {
		if id, ok := node.(*ast.Ident); ok && receiver == "" {
			receiver = id.Name
		}
		return receiver == ""
	})
	return token.IsExported(receiver)
}

func isIdent(e ast.Expr, name string) bool {
	id, ok := e.(*ast.Ident)
	return ok && id.Name == name
}

func isAny(e ast.Expr) bool {
	i, ok := e.(*ast.InterfaceType)
	return isIdent(e, "any") || ok && i.Methods.NumFields() == 0
}

// importNames maps the names under which a file knows its imports to their paths. Where the file
// gives no name, it is the last element of the path, or the one before a major version.
func importNames(f *File) map[string]string {
	names := map[string]string{}
	for _, spec := range f.AST.Imports {
		imported := importPath(spec)
		name := path.Base(imported)
		if strings.HasPrefix(name, "v") && strings.Trim(name, "v0123456789") == "" {
			name = path.Base(path.Dir(imported))
		}
		if spec.Name != nil {
			name = spec.Name.Name
		}
		names[name] = imported
	}
	return names
}

// qualifier is the import path of the package that a selector names, or empty.
func qualifier(sel *ast.SelectorExpr, names map[string]string) string {
	if id, ok := sel.X.(*ast.Ident); ok {
		return names[id.Name]
	}
	return ""
}

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
