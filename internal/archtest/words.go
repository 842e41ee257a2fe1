package archtest

import (
	"bytes"
	"cmp"
	"fmt"
	"go/ast"
	"go/token"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// Occurrence is one place where the text is not plain English or a name is private dialect.
type Occurrence struct {
	File    string
	Line    int
	Text    string // what stands out
	Instead string // what to write
	Row     string // the row of Policy.Words that counts it
}

// String is the occurrence as compilers print errors.
func (o Occurrence) String() string {
	return fmt.Sprintf("%s:%d: %q: write %s", o.File, o.Line, o.Text, o.Instead)
}

// checkWords compares the occurrences with what the policy still allows. A row without an allowance
// reports each of them, another row only that it has too many.
func checkWords(t *Tree, p *Policy, report reporter) {
	counts := map[string]int{}
	for _, o := range t.Words(p) {
		counts[o.Row]++
		if p.Words[o.Row] == 0 {
			report(o.File, o.Line, "%q: write %s", o.Text, o.Instead)
		}
	}
	for _, row := range sortedKeys(p.Words) {
		if allowed := p.Words[row]; allowed > 0 && counts[row] > allowed {
			report(row, 0, "%d phrases of the word list, %d allowed: `go test ./internal/archtest -run Words -v` lists them", counts[row], allowed)
		}
	}
}

// Words finds the phrases of the word list in comments, in pages and in messages, which are strings of
// several words, and the private words in declared names. Generated files and testdata do not count,
// nor does code in pages.
func (t *Tree) Words(p *Policy) []Occurrence {
	s := &scan{phrases: phrases(), dialect: dialect(), rows: sortedKeys(p.Words)}
	for _, f := range t.Files {
		if !f.Generated && f.Folder != "internal/archtest" { // this folder quotes what it forbids
			s.goFile(t, f)
		}
	}
	for _, name := range sortedKeys(t.Texts) {
		switch {
		case ignored(name):
		case path.Ext(name) == ".md":
			s.text(name, 1, string(pageCode.ReplaceAllFunc(t.Texts[name], blank)))
		case path.Ext(name) == ".proto":
			s.text(name, 1, string(slashes.ReplaceAllFunc(t.Texts[name], blank)))
		}
	}
	slices.SortStableFunc(s.found, func(a, b Occurrence) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line))
	})
	return s.found
}

// scan collects occurrences.
type scan struct {
	phrases []phrase
	dialect map[string]string
	rows    []string
	found   []Occurrence
}

// row is the longest row that covers a file, or its first folder, which is then allowed nothing.
func (s *scan) row(file string) string {
	best := ""
	for _, row := range s.rows {
		if under(file, row) && len(row) > len(best) {
			best = row
		}
	}
	if best == "" {
		best, _, _ = strings.Cut(file, "/")
	}
	return best
}

func (s *scan) add(file string, line int, text, instead string) {
	text = strings.Join(strings.Fields(strings.TrimLeft(text, ".;: \n")), " ")
	s.found = append(s.found, Occurrence{File: file, Line: line, Text: text, Instead: instead, Row: s.row(file)})
}

// text searches a text that starts on a line.
func (s *scan) text(file string, line int, text string) {
	for _, p := range s.phrases {
		if !strings.Contains(text, p.key) {
			continue
		}
		for _, at := range p.pattern.FindAllStringIndex(text, -1) {
			if p.unless == nil || !p.unless.MatchString(text[at[1]:]) {
				s.add(file, line+strings.Count(text[:at[0]], "\n"), text[at[0]:at[1]], p.instead)
			}
		}
	}
}

// goFile searches comments, messages and declared names.
func (s *scan) goFile(t *Tree, f *File) {
	for _, group := range f.AST.Comments {
		s.text(f.Path, t.line(group), commentText(group))
	}
	ast.Inspect(f.AST, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.BasicLit:
			if text, err := strconv.Unquote(node.Value); err == nil && node.Kind == token.STRING && strings.Contains(text, " ") {
				s.text(f.Path, t.line(node), text)
			}
		case *ast.FuncDecl:
			s.names(t, f, node.Name)
		case *ast.TypeSpec:
			s.names(t, f, node.Name)
		case *ast.ValueSpec:
			s.names(t, f, node.Names...)
		case *ast.Field:
			s.names(t, f, node.Names...)
		}
		return true
	})
}

// names searches names for private words.
func (s *scan) names(t *Tree, f *File, names ...*ast.Ident) {
	for _, name := range names {
		for _, part := range nameParts(name.Name) {
			if instead, ok := s.dialect[part]; ok {
				s.add(f.Path, t.line(name), name.Name, instead)
			}
		}
	}
}

// commentText is a comment group without its slashes, line by line.
func commentText(group *ast.CommentGroup) string {
	var b strings.Builder
	for i, c := range group.List {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(strings.TrimLeft(c.Text, "/* "))
	}
	return b.String()
}

// nameParts are the words of a name in camel case, in lower case.
func nameParts(name string) []string {
	var parts []string
	start := 0
	for i, r := range name {
		if i > start && (unicode.IsUpper(r) || r == '_') {
			parts = append(parts, strings.ToLower(name[start:i]))
			start = i
		}
	}
	return append(parts, strings.ToLower(name[start:]))
}

// pageCode is what a page shows of code: blocks between fences, and spans. slashes begin a line of a
// comment.
var (
	pageCode = regexp.MustCompile("(?s)```.*?```|`[^`\n]*`")
	slashes  = regexp.MustCompile(`(?m)^\s*//`)
)

// blank replaces everything by spaces, except the ends of lines, so that lines keep their numbers.
func blank(code []byte) []byte {
	return bytes.Map(func(r rune) rune {
		if r == '\n' {
			return r
		}
		return ' '
	}, code)
}

// phrase is wording that a native reader stumbles over.
type phrase struct {
	key     string         // a part of every match: text without it is not searched
	pattern *regexp.Regexp // the wording
	unless  *regexp.Regexp // what follows a match that is good English; nil when nothing excuses it
	instead string         // what to write
}

// phrases lists what comments, messages and pages do not say. A pattern belongs here if nearly every
// match reads badly: a precise pattern helps whoever writes, a vague one only annoys.
func phrases() []phrase {
	list := []struct{ key, pattern, unless, instead string }{
		{"new", `\b[Aa]new\b`, "", "again"},
		{"for", `\b[Bb]ut\s+for\b`, `^\s+(?:a|the)\s+(?:moment|while|time)\b`, "except"},
		{"esides", `\b[Bb]esides\b`, "", "also, in addition to, apart from"},
		{"wants", `\bwants\b`, "", "requires, needs, asks for"},
		{"still", `\b(?:stands?|stood|standing)\s+still\b`, "", "stalls, stops"},
		{"needs", `\bneeds\s+not\b`, "", "need not, does not need to"},
		{"more", `\bno\s+more[.,;:)]`, "", "no longer, not any more"},
		{"Who", `(?:^|[.;:]\s|\n\s*\n)Who\s[^.?]*\.`, "", "whoever, whichever, or the noun"},
		{"who", `\b(?:for|by|to|from|with|than|tells?)\s+who\b`, "", "whoever, those who, or the noun"},
		{"o many", `\b[Ss]o\s+many\b`, `^\s+(?:that|as)\b`, "that many, as many as, the number"},
		{"o often", `\b[Ss]o\s+often\b`, `^\s+(?:that|as)\b`, "that often, as often as, the number of times"},
		{"o much", `\b[Ss]o\s+much\b`, `^\s+(?:that|as)\b`, "that much, as much as"},
		{"hat of", `\b[Ww]hat\s+of\b`, "", "which part of, what in"},
		{"of", `\b(?:[Ss]ays?|[Tt]ells?|[Tt]old|[Hh]ears?)\s+of\b`, "", "says about, is told about, learns of"},
		{"stand", `\bstands?\s+(?:in|on|there|before|beside|behind)\b`, `^\s+its\s+own\b`, "is in, comes before"},
		{"in line", `\b(?:stood|standing)\s+in\s+line\b`, "", "waits for"},
		{"twice", `\bis\s+there\s+twice\b`, "", "appears twice"},
		{"is no", `\b(?:is|are)\s+no\s+(?:multiple|number|name|tag|key|power|seed|error|list|connector|plugin|ticket|file|folder|address|integer|prefix)\b`, "", "is not a"},
		{"vain", `\bin\s+vain\b`, "", "without success, for nothing"},
		{"'s", `\bof\s+its\s+user's\b`, "", "that the caller provides"},
		{"is to", `\bis\s+to\s+(?:stay|be)\b`, "", "stays, must be"},
		{"go on", `\blets?\s+go\s+on\b`, "", "lets it continue"},
	}
	phrases := make([]phrase, 0, len(list))
	for _, p := range list {
		one := phrase{key: p.key, pattern: regexp.MustCompile(p.pattern), instead: p.instead}
		if p.unless != "" {
			one.unless = regexp.MustCompile(p.unless)
		}
		phrases = append(phrases, one)
	}
	return phrases
}

// dialect maps parts of private names to the field's word. A name such as newsDesk has the parts news
// and desk.
func dialect() map[string]string {
	return map[string]string{
		"house":  "session, the children of one engine",
		"guest":  "session, process",
		"nest":   "children, composite",
		"desk":   "event queue",
		"teller": "poller, reporter",
		"office": "signer",
		"duty":   "obligation",
		"duties": "obligations",
		"dice":   "rng",
		"pulse":  "heartbeat",
		"heirs":  "descendants",
		"strike": "kill",
		"shun":   "quarantine",
	}
}
