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
