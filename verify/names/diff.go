package names

import (
	_ "embed"
	"fmt"
	"regexp"
	"strings"
)

//go:embed testdata/renames.txt
var renames string

// Rename is a folder that moved since commit 3bfa461, or an exported Go name such as host.Config that changed.
type Rename struct{ Old, New, Why string }

// Renames is the table in testdata/renames.txt, to be applied in this order.
func Renames() (list []Rename) {
	for _, row := range rows(renames) {
		list = append(list, Rename{row[0], row[1], row[2]})
	}
	return list
}

// ofGo reports whether it is a Go name that changed.
func (r Rename) ofGo() bool { return strings.Contains(r.Old, ".") }

// apply gives a name, a type, a path or a command with what is new.
func (r Rename) apply(s string) string {
	old := regexp.QuoteMeta(r.Old)
	if r.ofGo() {
		return regexp.MustCompile(`(^|[^\w./])`+old+`\b`).ReplaceAllString(s, "${1}"+r.New)
	}
	s = regexp.MustCompile(`(^|\./|[^\w./])`+old+`([/.])`).ReplaceAllString(s, "${1}"+r.New+"${2}")
	return regexp.MustCompile(`(\./)`+old+`($|\s)`).ReplaceAllString(s, "${1}"+r.New+"${2}")
}

// Difference is a name that is lost, or that has other details.
type Difference struct {
	Was Name // with today's folders
	Is  Name // zero if it is lost
}

// String says what became of the name.
func (d Difference) String() string {
	if d.Is.Name == "" {
		return fmt.Sprintf("%s is lost (%s)", d.Was.key(), d.Was.Detail)
	}
	return fmt.Sprintf("%s was %q, is %q", d.Was.key(), d.Was.Detail, d.Is.Detail)
}

// Compare finds which names of before are lost or changed, and which are new.
func Compare(before, now []Name, renames []Rename) (differences []Difference, added []Name) {
	today, old := map[string]Name{}, map[string]bool{}
	for _, n := range now {
		today[n.key()] = n
	}
	for _, was := range before {
		if was.Section == "go" || was.Section == "acceptance" {
			for _, r := range renames {
				was.Name, was.Detail = r.apply(was.Name), r.apply(was.Detail)
			}
		}
		old[was.key()] = true
		if is := today[was.key()]; is != was {
			differences = append(differences, Difference{was, is})
		}
	}
	for _, n := range now {
		if !old[n.key()] {
			added = append(added, n)
		}
	}
	return differences, added
}

// Accepted is a row of testdata/accepted.txt: a difference that is meant, and what replaces the name. A
// name that ends in * stands for all that begin so.
type Accepted struct{ Section, Name, Replacement string }

// covers reports whether the row accepts a difference.
func (a Accepted) covers(d Difference) bool {
	begin, several := strings.CutSuffix(a.Name, "*")
	return a.Section == d.Was.Section && (a.Name == d.Was.Name || several && strings.HasPrefix(d.Was.Name, begin))
}

// ParseAccepted reads testdata/accepted.txt.
func ParseAccepted(text string) (list []Accepted, err error) {
	for _, row := range rows(text) {
		if len(row) != 3 || row[2] == "" {
			return nil, fmt.Errorf("%q: %w: section, name, what replaces it", row, errForm)
		}
		list = append(list, Accepted{row[0], row[1], row[2]})
	}
	return list, nil
}

// Unaccounted says what is wrong with the differences: those that no row accepts, rows that accept nothing,
// and accepted or renamed names that CHANGELOG.md does not have in backquotes.
func Unaccounted(differences []Difference, accepted []Accepted, renames []Rename, changelog string) (wrong []string) {
	for _, r := range renames {
		if (r.ofGo() || isPublic(r.Old)) && !strings.Contains(changelog, "`"+r.Old+"`") {
			wrong = append(wrong, fmt.Sprintf("%s is renamed, but CHANGELOG.md does not have `%[1]s`", r.Old))
		}
	}
	used := make([]bool, len(accepted))
	for _, d := range differences {
		found := false
		for i, a := range accepted {
			if a.covers(d) {
				used[i], found = true, true
			}
		}
		if !found {
			wrong = append(wrong, d.String())
		}
	}
	for i, a := range accepted {
		if !used[i] {
			wrong = append(wrong, fmt.Sprintf("%s\t%s is accepted as a difference and is none", a.Section, a.Name))
		}
		begin, several := strings.CutSuffix(a.Name, "*")
		if !several {
			begin += "`"
		}
		if !strings.Contains(changelog, "`"+begin) {
			wrong = append(wrong, fmt.Sprintf("%s\t%s is accepted as a difference, but CHANGELOG.md does not have `%[2]s`", a.Section, a.Name))
		}
	}
	return wrong
}
