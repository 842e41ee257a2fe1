// Package names lists everything that users of kvport call by name, so that no name is lost by accident.
//
// testdata/names.txt is the list as it is now, one name a line: section, name and details, with tabs between
// them. This command, at the root of the repository, writes it in less than 20 seconds:
//
//	go run ./verify/names/write
//
// A test fails when the list is stale. After a merge conflict in names.txt run the command again: it writes
// the whole file and does not read it.
//
// testdata/before.txt is the list at commit 3bfa461, the parent of the redesign. It does not change.
// testdata/renames.txt says which folders and Go names have other names since then. Every other name that is
// lost or changed is listed in testdata/accepted.txt, with what replaces it, and in CHANGELOG.md. A test fails
// otherwise.
//
// With -lines the same command prints the lines of Go by folder, and with -tree PATH it reads another work
// tree. go test ./verify/names -run TestNothingIsLost -v prints what is new since then.
package names

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Name is one line of the list.
type Name struct {
	Section string // such as "flag"
	Name    string // such as "kvport serve --port"
	Detail  string // such as "int default 8000": what users rely on in addition to the name
}

// String is the line of the name.
func (n Name) String() string { return n.Section + "\t" + n.Name + "\t" + n.Detail }

// key is what a name is found by.
func (n Name) key() string { return n.Section + "\t" + n.Name }

// Collect lists the names of the work tree at root, sorted.
func Collect(ctx context.Context, root string) ([]Name, error) {
	var all []Name
	for _, collect := range []func(context.Context, string) ([]Name, error){goNames, programNames, sourceNames, pageNames, protoNames} {
		list, err := collect(ctx, root)
		if err != nil {
			return nil, err
		}
		all = append(all, list...)
	}
	slices.SortFunc(all, func(a, b Name) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(all), nil
}

// Format is the text of a list, as Parse reads it.
func Format(list []Name) string {
	var out strings.Builder
	for _, n := range list {
		out.WriteString(strings.TrimRight(n.String(), "\t") + "\n")
	}
	return out.String()
}

// Parse reads what Format wrote.
func Parse(text string) ([]Name, error) {
	var list []Name
	for _, fields := range rows(text) {
		if len(fields) < 2 {
			return nil, fmt.Errorf("%q has no section and name: %w", fields[0], errForm)
		}
		n := Name{Section: fields[0], Name: fields[1]}
		if len(fields) > 2 {
			n.Detail = fields[2]
		}
		list = append(list, n)
	}
	return list, nil
}

var errForm = errors.New("want columns with tabs between them")

// rows are the lines of a file, split at tabs. Empty lines and comments, which begin with #, are left out.
func rows(text string) (out [][]string) {
	for line := range strings.Lines(text) {
		if line = strings.TrimRight(line, "\n"); line != "" && !strings.HasPrefix(line, "#") {
			out = append(out, strings.Split(line, "\t"))
		}
	}
	return out
}
