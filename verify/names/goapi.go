package names

import (
	"bytes"
	"context"
	"fmt"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
)

const module = "github.com/kvport/kvport"

// public are the folders whose packages authors of connectors, pipes, buffers and engines import.
// Before the redesign host was sdk/host.
var public = []string{
	"connector", "pipe", "pipe/*", "lookupbuffer", "lookupbuffer/*", "multiconnector", "sdk", "sdk/tier", "host", "host/agent", "sdk/host", "sdk/host/agent",
	"conformance", "conformance/*", "native/*", "connectors/*",
}

func isPublic(folder string) bool {
	matches := func(pattern string) bool { ok, _ := path.Match(pattern, folder); return ok }
	return slices.ContainsFunc(public, matches) && path.Base(folder) != "internal"
}

// goNames lists what public packages export, with types, as the compiler wrote it down for importers.
func goNames(ctx context.Context, root string) (list []Name, err error) {
	cmd := exec.CommandContext(ctx, "go", "list", "-export", "-f", "{{.ImportPath}}\t{{.Export}}", "./...")
	cmd.Dir, cmd.Stderr = root, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list in %s: %w", root, err)
	}
	exports := map[string]string{}
	for _, row := range rows(string(out)) {
		exports[row[0]] = row[1]
	}
	packages := importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) {
		data, err := os.ReadFile(exports[path])
		return io.NopCloser(bytes.NewReader(data)), err
	})
	var aliases []Rename
	for importPath := range exports {
		folder := strings.TrimPrefix(importPath, module+"/")
		if !isPublic(folder) {
			continue
		}
		p, err := packages.Import(importPath)
		if err != nil {
			return nil, err
		}
		g := &goPackage{pkg: p, folder: folder}
		for _, name := range p.Scope().Names() {
			if o := p.Scope().Lookup(name); o.Exported() {
				g.object(o)
			}
		}
		list, aliases = append(list, g.list...), append(aliases, g.aliases...)
	}
	for _, a := range aliases {
		for i := range list {
			list[i].Detail = a.apply(list[i].Detail)
		}
	}
	return list, nil
}

// goPackage lists the exported names of a package.
type goPackage struct {
	pkg     *types.Package
	folder  string
	list    []Name
	aliases []Rename // from types of internal packages
}

func (g *goPackage) add(name, detail string) {
	g.list = append(g.list, Name{"go", g.folder + "." + name, detail})
}

// text is a type, with the folders of our packages and without the names of parameters.
func text(t types.Type) string {
	return types.TypeString(nameless(t), func(p *types.Package) string { return strings.TrimPrefix(p.Path(), module+"/") })
}

func (g *goPackage) object(o types.Object) {
	switch o := o.(type) {
	case *types.Const:
		g.add(o.Name(), "const "+text(o.Type())+" = "+o.Val().ExactString())
	case *types.Var:
		g.add(o.Name(), "var "+text(o.Type()))
	case *types.Func:
		g.add(o.Name(), text(o.Type()))
	case *types.TypeName:
		g.typeName(o)
	}
}

func (g *goPackage) typeName(o *types.TypeName) {
	t := types.Unalias(o.Type())
	if o.IsAlias() {
		_, ok := t.(*types.Named)
		if !ok || !strings.Contains("/"+text(t), "/internal/") {
			g.add(o.Name(), "= "+text(t))
			return
		}
		// Users see the type under this name alone.
		g.aliases = append(g.aliases, Rename{Old: text(t), New: g.folder + "." + o.Name()})
	}
	switch u := t.Underlying().(type) {
	case *types.Struct:
		g.add(o.Name(), "type struct")
		g.fields(o.Name(), u)
	case *types.Interface:
		g.add(o.Name(), "type interface")
	default:
		g.add(o.Name(), "type "+text(u))
	}
	ofValues := types.NewMethodSet(t)
	all := ofValues
	if !types.IsInterface(t) {
		all = types.NewMethodSet(types.NewPointer(t))
	}
	for m := range all.Methods() {
		detail := text(m.Type())
		if ofValues.Lookup(g.pkg, m.Obj().Name()) == nil {
			detail = "*" + detail // values do not have the method
		}
		if m.Obj().Exported() {
			g.add(o.Name()+"."+m.Obj().Name(), detail)
		}
	}
}

// fields lists the exported fields of a struct, and those that it has from unexported embedded ones.
func (g *goPackage) fields(name string, s *types.Struct) {
	for f := range s.Fields() {
		inner, isStruct := f.Type().Underlying().(*types.Struct)
		switch {
		case f.Exported():
			g.add(name+"."+f.Name(), "field "+text(f.Type()))
		case f.Embedded() && isStruct:
			g.fields(name, inner)
		}
	}
}

// nameless is a type without the names of parameters, which callers do not use.
func nameless(t types.Type) types.Type {
	s, ok := t.(*types.Signature)
	if !ok {
		return t
	}
	tuple := func(list *types.Tuple) *types.Tuple {
		var vars []*types.Var
		for v := range list.Variables() {
			vars = append(vars, types.NewParam(token.NoPos, nil, "", nameless(v.Type())))
		}
		return types.NewTuple(vars...)
	}
	return types.NewSignatureType(nil, nil, nil, tuple(s.Params()), tuple(s.Results()), s.Variadic())
}
