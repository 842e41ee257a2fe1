// Package docs holds the documentation, and gives programs the sentences of it that they print. Its test keeps the pages
// true.
package docs

import (
	_ "embed" // the pages below
	"slices"
	"strings"
)

//go:embed spec/README.md
var spec string

//go:embed write-a-connector.md
var forAuthors string

// Rule is the sentence of a rule of docs/spec, such as WORK-01; empty if there is no such rule.
func Rule(id string) string {
	_, body, _ := strings.Cut(spec, "\n### "+id+"\n")
	sentence, _, _ := strings.Cut(body, "\n")
	return sentence
}

// Mistakes are the common mistakes that break a rule, as write-a-connector.md lists them.
func Mistakes(rule string) (out []string) {
	if Rule(rule) == "" {
		return nil
	}
	_, table, _ := strings.Cut(forAuthors, "\n## Common mistakes\n")
	table, _, _ = strings.Cut(table, "\n## ")
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) == 2 && slices.Contains(strings.Split(strings.TrimSpace(cells[1]), ", "), rule) {
			out = append(out, strings.TrimSpace(cells[0]))
		}
	}
	return out
}
