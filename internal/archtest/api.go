package archtest

import (
	"bytes"
	"go/ast"
	"go/token"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// checkLeaks keeps the types of internal packages out of the exported API of public ones: strangers
// could neither name nor make them.
func checkLeaks(t *Tree, _ *Policy, report reporter) {
	for _, f := range t.Files {
		if !f.Public() || f.Generated {
			continue
		}
		names := importNames(f)
		for _, decl := range f.AST.Decls {
			for _, typ := range exportedTypes(decl) {
				eachSelector(typ, func(sel *ast.SelectorExpr) {
					folder, local := t.local(qualifier(sel, names))
					if local && strings.Contains("/"+folder+"/", "/internal/") {
						report(f.Path, t.line(sel), "exported API mentions %s of the internal package %s", sel.Sel.Name, folder)
					}
				})
			}
		}
	}
}

// exportedTypes are the type expressions of a declaration that other packages see.
func exportedTypes(decl ast.Decl) []ast.Node {
	var types []ast.Node
	switch decl := decl.(type) {
	case *ast.FuncDecl:
		if exportedFunc(decl) {
			types = append(types, decl.Type)
		}
	case *ast.GenDecl:
		for _, spec := range decl.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				if spec.Name.IsExported() {
					types = append(types, spec.Type)
				}
			case *ast.ValueSpec:
				if spec.Type != nil && slices.ContainsFunc(spec.Names, (*ast.Ident).IsExported) {
					types = append(types, spec.Type)
				}
			}
		}
	}
	return types
}

// eachSelector calls visit for every pkg.Name in a type, unexported struct fields apart.
func eachSelector(typ ast.Node, visit func(*ast.SelectorExpr)) {
	ast.Inspect(typ, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.StructType:
			for _, field := range node.Fields.List {
				if len(field.Names) == 0 || slices.ContainsFunc(field.Names, (*ast.Ident).IsExported) {
					eachSelector(field.Type, visit)
				}
			}
			return false
		case *ast.SelectorExpr:
			visit(node)
		}
		return true
	})
}

// checkNames keeps the names of connectors where connectors are: everything else, tests, suites and examples too, must treat
// them alike and find what it has to know in fixtures.
func checkNames(t *Tree, p *Policy, report reporter) {
	homes := t.connectorNames() // name to the folder names that declare it
	for _, file := range sortedKeys(t.Texts) {
		if !t.code(file) {
			continue
		}
		named := t.namesIn(file, homes)
		allowed := p.Names[file]
		if len(named) < allowed {
			report(file, 0, "names connectors in %d lines, and %s allows %d: lower it", len(named), policyFile, allowed)
		}
		if len(named) <= allowed {
			continue
		}
		for _, line := range sortedKeys(named) {
			report(file, line, "names the connector %q, which belongs to connectors/%s: read fixtures instead", named[line], homes[named[line]][0])
		}
	}
	for folder := range t.packages(func(f *File) bool { return !f.Test && under(f.Folder, "connectors") }) {
		x := strings.Split(folder, "/")[1]
		if x == "internal" { // what several connectors share has no name
			continue
		}
		if !slices.ContainsFunc(sortedKeys(homes), func(name string) bool { return slices.Contains(homes[name], x) }) {
			report(folder, 0, "declares no connector name that this rule can see: write Name in a Plugin literal")
		}
	}
}

// code reports whether a text file is code that is written by hand. What lies in testdata is data.
func (t *Tree) code(file string) bool {
	if !slices.Contains([]string{".go", ".py", ".sh"}, path.Ext(file)) && path.Base(file) != "Makefile" {
		return false
	}
	if strings.Contains("/"+file, "/testdata/") {
		return false
	}
	return !slices.ContainsFunc(t.Files, func(f *File) bool { return f.Path == file && f.Generated })
}

// namesIn are the lines of a file that name a connector away from its home, with the name.
func (t *Tree) namesIn(file string, homes map[string][]string) map[int]string {
	named := map[int]string{}
	for name, folders := range homes {
		if slices.ContainsFunc(folders, func(x string) bool { return under(file, "connectors/"+x) || under(file, "plugins/"+x) }) {
			continue
		}
		pattern := nameIn(name)
		if !pattern.Match(t.Texts[file]) {
			continue
		}
		for i, line := range bytes.Split(t.Texts[file], []byte("\n")) {
			if pattern.Match(line) {
				named[i+1] = name
			}
		}
	}
	return named
}

// nameIn finds a connector's name in a line: as a word where it says that it is one, otherwise
// only as a whole string.
func nameIn(name string) *regexp.Regexp {
	if strings.Contains(name, "Connector") {
		return regexp.MustCompile(`\b` + regexp.QuoteMeta(name) + `\b`)
	}
	return regexp.MustCompile(regexp.QuoteMeta(strconv.Quote(name)))
}

// connectorNames finds the names that connectors declare: Name and Aliases of every literal of a
// declaring type in connectors/X and plugins/X, written as strings or as constants.
func (t *Tree) connectorNames() map[string][]string {
	homes := map[string][]string{}
	packages := t.packages(func(f *File) bool {
		return !f.Test && (strings.HasPrefix(f.Folder, "connectors/") || strings.HasPrefix(f.Folder, "plugins/"))
	})
	for _, folder := range sortedKeys(packages) {
		x := strings.Split(folder, "/")[1]
		constants := stringConstants(packages[folder])
		for _, f := range packages[folder] {
			ast.Inspect(f.AST, func(node ast.Node) bool {
				if lit, ok := node.(*ast.CompositeLit); ok && slices.Contains(declaring, typeName(lit.Type)) {
					for _, name := range declaredNames(lit, constants) {
						if !slices.Contains(homes[name], x) {
							homes[name] = append(homes[name], x)
						}
					}
				}
				return true
			})
		}
	}
	return homes
}

// declaredNames are the strings in the fields Name and Aliases of such a literal.
func declaredNames(lit *ast.CompositeLit, constants map[string]string) []string {
	var names []string
	for _, element := range lit.Elts {
		kv, ok := element.(*ast.KeyValueExpr)
		if !ok || !isIdent(kv.Key, "Name") && !isIdent(kv.Key, "Aliases") {
			continue
		}
		ast.Inspect(kv.Value, func(node ast.Node) bool {
			switch node := node.(type) {
			case *ast.BasicLit:
				if s, err := strconv.Unquote(node.Value); err == nil {
					names = append(names, s)
				}
			case *ast.Ident:
				if s, ok := constants[node.Name]; ok {
					names = append(names, s)
				}
			}
			return true
		})
	}
	return names
}

// typeName is the last part of a type's name.
func typeName(typ ast.Expr) string {
	switch typ := typ.(type) {
	case *ast.Ident:
		return typ.Name
	case *ast.SelectorExpr:
		return typ.Sel.Name
	}
	return ""
}

// stringConstants are a package's constants with a literal string, by name.
func stringConstants(files []*File) map[string]string {
	constants := map[string]string{}
	for _, f := range files {
		for _, decl := range f.AST.Decls {
			gen, ok := decl.(*ast.GenDecl)
			if !ok || gen.Tok != token.CONST {
				continue
			}
			for _, spec := range gen.Specs {
				value := spec.(*ast.ValueSpec) //nolint:forcetypeassert // go/ast: a constant declaration holds nothing else
				for i, name := range value.Names {
					if i < len(value.Values) {
						addString(constants, name.Name, value.Values[i])
					}
				}
			}
		}
	}
	return constants
}

func addString(constants map[string]string, name string, value ast.Expr) {
	if lit, ok := value.(*ast.BasicLit); ok && lit.Kind == token.STRING {
		if s, err := strconv.Unquote(lit.Value); err == nil {
			constants[name] = s
		}
	}
}

// machinePath is an absolute path that exists on one machine only.
var machinePath = regexp.MustCompile("(?:^|[\\s\"'`(=:,<])/(?:work|farm|home|root)/")

// checkMachinePaths reads every text file, not only Go.
func checkMachinePaths(t *Tree, _ *Policy, report reporter) {
	for _, name := range sortedKeys(t.Texts) {
		for i, line := range bytes.Split(t.Texts[name], []byte("\n")) {
			if machinePath.Match(line) {
				report(name, i+1, "absolute path of one machine: %s", bytes.TrimSpace(line[:min(len(line), 120)]))
			}
		}
	}
}
