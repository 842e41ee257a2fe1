package archtest

import (
	"path"
	"slices"
	"strings"
)

// policyFile is where violations of the policy itself are reported.
const policyFile = "internal/archtest/policy.go"

// place is a folder's row in the import table.
type place struct {
	row  string // the pattern; empty when no row fits
	star string // what "*" stands for
}

// rowMatches reports whether folder is what pattern names or lies below it, and what "*" stands for.
func rowMatches(pattern, folder string) (star string, ok bool) {
	want, have := strings.Split(pattern, "/"), strings.Split(folder, "/")
	if len(have) < len(want) {
		return "", false
	}
	for i, w := range want {
		switch {
		case w == "*":
			star = have[i]
		case w != have[i]:
			return "", false
		}
	}
	return star, true
}

// locate finds the most specific row of folder: the longest pattern, and of two the one without "*".
func locate(table map[string][]string, folder string) place {
	var best place
	for _, row := range sortedKeys(table) {
		star, ok := rowMatches(row, folder)
		longer := strings.Count(row, "/") - strings.Count(best.row, "/")
		if ok && (best.row == "" || longer > 0 || longer == 0 && strings.Contains(best.row, "*")) {
			best = place{row, star}
		}
	}
	return best
}

// allows reports whether a list of allowed folders lets something at p import folder.
func allows(list []string, p place, folder string) bool {
	ok := false
	for _, entry := range list {
		entry, not := strings.CutPrefix(entry, "!")
		entry = strings.ReplaceAll(entry, "*", p.star)
		base, below := strings.CutSuffix(entry, "/...")
		if entry == "..." || folder == base || below && under(folder, base) {
			ok = !not
		}
	}
	return ok
}

func checkImports(t *Tree, p *Policy, report reporter) {
	for _, f := range t.Files {
		from := locate(p.Imports, f.Folder)
		if from.row == "" {
			report(f.Path, 0, "folder %s has no row in the import table of %s", f.Folder, policyFile)
			continue
		}
		for _, spec := range f.AST.Imports {
			to, local := t.local(importPath(spec))
			if !local || locate(p.Imports, to) == from || allows(p.Imports[from.row], from, to) {
				continue
			}
			if f.Test && allows(p.Tests, from, to) {
				continue
			}
			report(f.Path, t.line(spec), "%s must not import %s", f.Folder, to)
		}
	}
}

func checkHeavy(t *Tree, p *Policy, report reporter) {
	for _, f := range t.Files {
		from := locate(p.Imports, f.Folder)
		for _, spec := range f.AST.Imports {
			for heavy, rows := range p.Heavy {
				if under(importPath(spec), heavy) && !slices.Contains(rows, from.row) {
					report(f.Path, t.line(spec), "%s must not import %s: only %s may", f.Folder, importPath(spec), strings.Join(rows, ", "))
				}
			}
		}
	}
}

func checkStdOnly(t *Tree, p *Policy, report reporter) {
	for _, f := range t.Files {
		if f.Test || !slices.Contains(p.StdOnly, locate(p.Imports, f.Folder).row) {
			continue
		}
		for _, spec := range f.AST.Imports {
			imported := importPath(spec)
			host, _, _ := strings.Cut(imported, "/")
			if _, local := t.local(imported); !local && strings.Contains(host, ".") {
				report(f.Path, t.line(spec), "%s must not import %s: it stands on the standard library alone", f.Folder, imported)
			}
		}
	}
}

// checkTable makes sure that the table names only folders that have a row and allows no cycle.
func checkTable(_ *Tree, p *Policy, report reporter) {
	// Patterns become sample folders, so that rows can be asked what they allow.
	sample := func(pattern string) string {
		return strings.ReplaceAll(strings.TrimSuffix(strings.TrimPrefix(pattern, "!"), "/..."), "*", "any")
	}
	folders := map[string]string{} // sample folder to its row
	for _, row := range sortedKeys(p.Imports) {
		folders[sample(row)] = row
		for _, entry := range p.Imports[row] {
			folder := sample(entry)
			to := locate(p.Imports, folder)
			switch {
			case to.row != "":
				folders[folder] = to.row
			case !slices.ContainsFunc(sortedKeys(p.Imports), func(r string) bool { return entry == "..." || under(r, folder) }):
				report(policyFile, 0, "row %s allows %s, which has no row", row, entry)
			}
		}
	}
	edges := map[string][]string{}
	for row, list := range p.Imports {
		for _, folder := range sortedKeys(folders) {
			if folders[folder] != row && allows(list, place{row, "any"}, folder) {
				edges[row] = append(edges[row], folders[folder])
			}
		}
	}
	if cycle := findCycle(edges); cycle != nil {
		report(policyFile, 0, "the table allows an import cycle: %s", strings.Join(cycle, " -> "))
	}
}

// findCycle returns the nodes of one cycle, its first node again at the end, or nil.
func findCycle(edges map[string][]string) []string {
	var trail []string
	done := map[string]bool{}
	var visit func(node string) []string
	visit = func(node string) []string {
		if i := slices.Index(trail, node); i >= 0 {
			return append(slices.Clone(trail[i:]), node)
		}
		if done[node] {
			return nil
		}
		trail = append(trail, node)
		for _, next := range edges[node] {
			if cycle := visit(next); cycle != nil {
				return cycle
			}
		}
		trail, done[node] = trail[:len(trail)-1], true
		return nil
	}
	for _, node := range sortedKeys(edges) {
		if cycle := visit(node); cycle != nil {
			return cycle
		}
	}
	return nil
}

// checkModules keeps a go.mod from hiding a folder from every other rule.
func checkModules(t *Tree, p *Policy, report reporter) {
	for _, folder := range t.Nested {
		if !slices.Contains(p.Modules, folder) && !ignored(folder) {
			report(path.Join(folder, "go.mod"), 1, "%s must not be a module of its own", folder)
		}
	}
}
