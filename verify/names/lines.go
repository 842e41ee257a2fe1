package names

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
)

// kind is what a Go file is for.
type kind int

const (
	product kind = iota
	test
	generated
	other // verify, conformance and examples
	kinds
)

// goFile is a Go file of a work tree.
type goFile struct {
	path string // in the folder of today, see Renames
	text []byte
	kind kind
}

var generatedLine = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

// goFiles visits every Go file of a work tree, those in testdata too.
func goFiles(root string, visit func(goFile) error) error {
	renames := Renames()
	return fs.WalkDir(os.DirFS(root), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && name != "." && (strings.HasPrefix(d.Name(), ".") || name == "bin") {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(name, ".go") {
			return nil
		}
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			return err
		}
		f := goFile{path: name, text: text}
		for _, r := range renames {
			f.path = r.apply(f.path)
		}
		f.kind = kindOf(f)
		return visit(f)
	})
}

func kindOf(f goFile) kind {
	top, _, _ := strings.Cut(f.path, "/")
	switch {
	case strings.HasSuffix(f.path, "_test.go") || strings.Contains(f.path, "/testdata/"):
		return test
	case generatedLine.Match(f.text):
		return generated
	case top == "verify" || top == "conformance" || top == "examples":
		return other
	}
	return product
}

// WriteLines prints the lines of Go in each folder of a work tree, blank ones and comments included. Folders
// have the names that they have today, so that work trees can be compared.
func WriteLines(w io.Writer, root string) error {
	type count struct{ lines, files [kinds]int }
	folders := map[string]count{}
	err := goFiles(root, func(f goFile) error {
		parts := strings.SplitN(f.path, "/", 4)
		for _, folder := range []string{strings.Join(parts[:min(2, len(parts)-1)], "/"), "total"} {
			c := folders[folder]
			c.lines[f.kind] += bytes.Count(f.text, []byte("\n"))
			c.files[f.kind]++
			folders[folder] = c
		}
		return nil
	})
	if err != nil {
		return err
	}
	total := folders["total"]
	delete(folders, "total")
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	row := func(name string, c count) {
		fmt.Fprintf(table, "%d\t%d\t%d\t%d\t%d\t  %s\n", c.lines[product], c.files[product], c.lines[test], c.lines[generated], c.lines[other], name)
	}
	fmt.Fprintln(table, "product\tits files\ttests\tgenerated\tverify, conformance, examples\t  folder")
	for _, name := range slices.Sorted(maps.Keys(folders)) {
		row(name, folders[name])
	}
	row("total", total)
	return table.Flush()
}
