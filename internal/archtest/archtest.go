// Package archtest keeps the architecture of the repository: who may import whom, how big files and
// functions may get, and what may stand where. It reads the files itself instead of asking the build
// system, so that neither build tags nor the test cache can hide a violation.
//
// [Load] reads a tree, [Tree.Check] applies every rule under a [Policy]; [Kvport] is the policy of
// this repository and the only place to change when the architecture changes.
package archtest

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
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
		{"race detector", checkAlone},
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

// Tree is a repository read into memory.
type Tree struct {
	Module string  // module path of the root's go.mod
	Files  []*File // every Go file, in lexical order
	// Texts are all text files, Go files too, by path.
	Texts map[string][]byte
	// Nested are the folders below the root that hold a go.mod of their own. Their Go files are
	// in Texts only.
	Nested []string

	fset *token.FileSet
}

// File is one Go file.
type File struct {
	Path      string // slash-separated, relative to the root
	Folder    string // its folder; "." for the root
	Test      bool
	Generated bool
	Lines     int
	AST       *ast.File
}

// Main reports whether the file belongs to a command.
func (f *File) Main() bool { return f.AST.Name.Name == "main" }

// Public reports whether strangers may import the file's package.
func (f *File) Public() bool {
	return !f.Test && !f.Main() && !under(f.Folder, "internal") && !strings.Contains(f.Folder+"/", "/internal/")
}

// maxText is the largest text file that Load keeps; larger ones are data.
const maxText = 1 << 20

// Load reads the tree at root: every Go file whatever its build tags, and every text file. Folders that Go
// ignores (testdata, names with a leading dot or underscore) hold no Go files of the tree. Build output and
// everything else that a leading dot or bin hides is left out, except .ci.
func Load(root string) (*Tree, error) {
	t := &Tree{Texts: map[string][]byte{}, fset: token.NewFileSet()}
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if d.IsDir() {
			if rel == "bin" || d.Name() == "__pycache__" || strings.HasPrefix(rel, ".") && rel != "." && rel != ".ci" {
				return fs.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() || rel == ".git" { // a work tree's .git is a file
			return nil
		}
		return t.add(file, rel)
	})
	if err != nil {
		return nil, fmt.Errorf("read tree %s: %w", root, err)
	}
	if err := t.parse(); err != nil {
		return nil, fmt.Errorf("read tree %s: %w", root, err)
	}
	return t, nil
}

// add keeps a file's text, unless it is data.
func (t *Tree) add(file, rel string) error {
	src, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if !strings.HasSuffix(rel, ".go") && (len(src) > maxText || bytes.IndexByte(src, 0) >= 0) {
		return nil
	}
	t.Texts[rel] = src
	if dir, ok := strings.CutSuffix(rel, "/go.mod"); ok {
		t.Nested = append(t.Nested, dir)
	}
	return nil
}

// parse makes Files of the Go files among Texts and finds the module path.
func (t *Tree) parse() error {
	mod, ok := t.Texts["go.mod"]
	if !ok {
		return errors.New("no go.mod at the root")
	}
	line, _, _ := bytes.Cut(mod, []byte("\n"))
	t.Module = strings.TrimSpace(strings.TrimPrefix(string(line), "module"))
	for _, name := range sortedKeys(t.Texts) {
		if !strings.HasSuffix(name, ".go") || ignored(name) || underAny(path.Dir(name), t.Nested) {
			continue
		}
		src := t.Texts[name]
		parsed, err := parser.ParseFile(t.fset, name, src, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		t.Files = append(t.Files, &File{
			Path: name, Folder: path.Dir(name), Test: strings.HasSuffix(name, "_test.go"),
			Generated: ast.IsGenerated(parsed), Lines: bytes.Count(src, []byte("\n")), AST: parsed,
		})
	}
	return nil
}

// ignored reports whether the Go tool skips the file: in testdata, or below a name with a leading
// dot or underscore.
func ignored(name string) bool {
	for part := range strings.SplitSeq(name, "/") {
		if part == "testdata" || strings.HasPrefix(part, "_") || strings.HasPrefix(part, ".") {
			return true
		}
	}
	return false
}

// importPath is the path an import names.
func importPath(spec *ast.ImportSpec) string {
	p, err := strconv.Unquote(spec.Path.Value)
	if err != nil {
		return spec.Path.Value // the parser checked it: not reached
	}
	return p
}

// local is the folder of this module that an import path names.
func (t *Tree) local(imported string) (folder string, ok bool) {
	if imported == t.Module {
		return ".", true
	}
	return strings.CutPrefix(imported, t.Module+"/")
}

// packages groups the files of each folder that keep accepts.
func (t *Tree) packages(keep func(*File) bool) map[string][]*File {
	byFolder := map[string][]*File{}
	for _, f := range t.Files {
		if keep(f) {
			byFolder[f.Folder] = append(byFolder[f.Folder], f)
		}
	}
	return byFolder
}
