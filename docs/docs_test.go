package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"
)

var (
	block = regexp.MustCompile("(?s)```(go|python|js|jsonl)\n(.*?)```")
	fence = regexp.MustCompile("(?s)```.*?```")
	link  = regexp.MustCompile(`\]\(([^)#][^)]*)\)`)
)

// pages are all Markdown files of the repository.
func pages(t *testing.T) []string {
	t.Helper()
	return files(t, ".md")
}

func files(t *testing.T, suffix string) []string {
	t.Helper()
	var out []string
	require.NoError(t, filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.HasPrefix(d.Name(), ".") && d.Name() != ".." {
			return fs.SkipDir
		}
		if err == nil && strings.HasSuffix(path, suffix) {
			out = append(out, path)
		}
		return err
	}))
	return out
}

// TestCodeBlocks: code in the documentation is cut from files that are compiled or run by tests.
func TestCodeBlocks(t *testing.T) {
	code := map[string]string{"go": read(t, files(t, ".go")), "python": read(t, files(t, ".py")), "js": read(t, files(t, ".mjs")), "jsonl": read(t, files(t, ".jsonl"))}
	blocks := map[string]int{}
	for _, page := range pages(t) {
		for _, m := range block.FindAllStringSubmatch(read(t, []string{page}), -1) {
			blocks[m[1]]++
			if !strings.Contains(code[m[1]], m[2]) {
				t.Errorf("%s shows code that is in no %s file:\n%s", page, m[1], m[2])
			}
		}
	}
	for kind := range code {
		require.Positive(t, blocks[kind], kind)
	}
}

// TestExamplesAreShort: an example that shows a way to write a connector is one file of at most 100 lines.
func TestExamplesAreShort(t *testing.T) {
	for _, name := range []string{"minimal", "custom", "database", "p2p"} {
		folder := filepath.Join("..", "examples", name)
		sources, err := filepath.Glob(filepath.Join(folder, "*.go"))
		require.NoError(t, err)
		for _, path := range sources {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			require.Equal(t, filepath.Join(folder, "main.go"), path)
			require.LessOrEqual(t, strings.Count(read(t, []string{path}), "\n"), 100, path)
		}
	}
}

// TestConnectorTable: the README says what every plugin is for.
func TestConnectorTable(t *testing.T) {
	readme := read(t, []string{filepath.Join("..", "README.md")})
	mains, err := filepath.Glob(filepath.Join("..", "plugins", "*", "main.go"))
	require.NoError(t, err)
	require.NotEmpty(t, mains)
	name := regexp.MustCompile(`Name: +"(\w+)"`)
	for _, path := range mains {
		plugin := "kvport-" + filepath.Base(filepath.Dir(path))
		row := regexp.MustCompile("(?m)^\\| `(\\w+)` \\| `" + plugin + "`").FindStringSubmatch(readme)
		require.NotNil(t, row, "the README's table has no row for %s", plugin)
		if m := name.FindStringSubmatch(read(t, []string{path})); m != nil {
			require.Equal(t, m[1], row[1], plugin)
		}
	}
}

// read is the text of some files, one after another.
func read(t *testing.T, paths []string) string {
	t.Helper()
	var all strings.Builder
	for _, path := range paths {
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		all.Write(data)
	}
	return all.String()
}

// TestLinks: relative links lead somewhere.
func TestLinks(t *testing.T) {
	links := 0
	for _, page := range pages(t) {
		text := fence.ReplaceAllString(read(t, []string{page}), "")
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			target, _, _ := strings.Cut(m[1], "#")
			if target == "" || strings.Contains(target, "://") {
				continue
			}
			links++
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), target)); err != nil {
				t.Errorf("%s links to %s: %v", page, m[1], err)
			}
		}
	}
	require.Positive(t, links)
}

// TestAcceptanceCommands: every test that docs/acceptance.md names exists in a folder that its command names.
func TestAcceptanceCommands(t *testing.T) {
	span := regexp.MustCompile("`([^`]*go test [^`]*)`")
	command := regexp.MustCompile(`go test ((?:\./\S+ )+)-run (\S+)`)
	found := 0
	for _, m := range span.FindAllStringSubmatch(read(t, []string{"acceptance.md"}), -1) {
		for one := range strings.SplitSeq(m[1], ";") {
			if m := command.FindStringSubmatch(one); m != nil {
				found++
				requireTests(t, one, strings.Fields(m[1]), m[2])
			}
		}
	}
	require.Greater(t, found, 50)
}

// requireTests checks that a pattern of -run names tests of the folders, each part at least one.
func requireTests(t *testing.T, command string, folders []string, pattern string) {
	t.Helper()
	var code strings.Builder
	for _, folder := range folders {
		sources, err := filepath.Glob(filepath.Join("..", folder, "*_test.go"))
		require.NoError(t, err)
		require.NotEmpty(t, sources, command)
		for _, path := range sources {
			data, err := os.ReadFile(path)
			require.NoError(t, err)
			code.Write(data)
		}
	}
	pattern = strings.NewReplacer("'", "", `\|`, "|", "$", "").Replace(pattern)
	for part := range strings.SplitSeq(pattern, "|") {
		name, _, _ := strings.Cut(part, "/")
		named := regexp.MustCompile(`(?m)^func (Test)?\w*` + strings.TrimPrefix(name, "Test"))
		require.True(t, named.MatchString(code.String()), "%s: no test of %v is called %s", command, folders, name)
	}
}

// TestMessagesOfAuthors: what the page for authors quotes is said somewhere in the code. An ellipsis stands for what differs.
func TestMessagesOfAuthors(t *testing.T) {
	_, section, found := strings.Cut(read(t, []string{"write-a-connector.md"}), "## What is said when something is wrong\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	var code strings.Builder
	for _, folder := range []string{"sdk", "host", "conformance", "internal/strictjson", "cmd/kvport"} {
		require.NoError(t, filepath.WalkDir(filepath.Join("..", folder), func(path string, d fs.DirEntry, err error) error {
			if d != nil && d.Name() == "mutants" {
				return fs.SkipDir
			}
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			data, err := os.ReadFile(path)
			code.Write(data)
			return err
		}))
	}
	quoted := 0
	for line := range strings.Lines(section) {
		row := strings.Split(line, "|")
		if len(row) < 4 {
			continue
		}
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[1], -1) {
			parts := strings.Split(m[1], "…")
			for i := range parts {
				parts[i] = regexp.QuoteMeta(strings.ReplaceAll(parts[i], `"`, `\"`))
			}
			require.True(t, regexp.MustCompile(strings.Join(parts, `[^\n]*`)).MatchString(code.String()), "%q is said nowhere", m[1])
			quoted++
		}
	}
	require.Greater(t, quoted, 30)
}

// TestAcceptanceLines: every line of tests/vllm and tests/sglang that docs/acceptance.md names exists, and none is left out.
func TestAcceptanceLines(t *testing.T) {
	page := read(t, []string{"acceptance.md"})
	for folder, args := range map[string]string{"vllm": "VLLM_ARGS", "sglang": "SGLANG_ARGS"} {
		code := read(t, []string{filepath.Join("..", "tests", folder, "run.py")})
		var named, lines []string
		for _, m := range regexp.MustCompile("`make "+folder+"-test "+args+"='--only (\\S+)(?: --all)?'`").FindAllStringSubmatch(page, -1) {
			named = append(named, strings.Split(m[1], ",")...)
		}
		for _, m := range regexp.MustCompile(`(?m)^    "(\w+)": \(\w+\.\w+, "`).FindAllStringSubmatch(code, -1) {
			lines = append(lines, m[1])
		}
		require.NotEmpty(t, lines)
		require.ElementsMatch(t, lines, named, folder)
	}
}

// TestGlossary: the design page explains at most 40 terms, in order, each once.
func TestGlossary(t *testing.T) {
	_, glossary, found := strings.Cut(read(t, []string{"design.md"}), "## Glossary")
	require.True(t, found)
	var terms []string
	for _, m := range regexp.MustCompile(`(?m)^\| ([^|]+) \| [^|]+ \|$`).FindAllStringSubmatch(glossary, -1) {
		terms = append(terms, m[1])
	}
	require.Equal(t, "term", terms[0])
	terms = terms[1:]
	require.NotEmpty(t, terms)
	require.LessOrEqual(t, len(terms), 40)
	require.IsIncreasing(t, terms)
}

// TestDesignPage: the design page stays short enough to be read at once, and what it says about folders and files is there.
func TestDesignPage(t *testing.T) {
	page := read(t, []string{"design.md"})
	words := slices.DeleteFunc(strings.Fields(page), func(f string) bool { // the lines of tables and drawings
		return !strings.ContainsFunc(f, func(c rune) bool { return unicode.IsLetter(c) || unicode.IsDigit(c) })
	})
	require.LessOrEqual(t, len(words), 6000)
	require.Positive(t, requirePaths(t, page, "## The parts", 0))
	require.GreaterOrEqual(t, requirePaths(t, page, "## Where do I change ...?", 1), 28)
}

// requirePaths checks the paths in one column of the table of a section, and counts the rows. X stands for any name.
func requirePaths(t *testing.T, page, heading string, column int) (rows int) {
	t.Helper()
	_, section, found := strings.Cut(page, "\n"+heading+"\n")
	require.True(t, found, heading)
	section, _, _ = strings.Cut(section, "\n## ")
	path := regexp.MustCompile("`([^` ]+)`")
	for _, row := range regexp.MustCompile(`(?m)^\| .* \|$`).FindAllString(section, -1)[1:] {
		rows++
		paths := path.FindAllStringSubmatch(strings.Split(strings.Trim(row, "|"), " | ")[column], -1)
		require.NotEmpty(t, paths, "this row names no file: %s", row)
		for _, m := range paths {
			matches, err := filepath.Glob(filepath.Join("..", strings.ReplaceAll(m[1], "X", "*")))
			require.NoError(t, err)
			require.NotEmpty(t, matches, "%s: %s is not there", heading, m[1])
		}
	}
	return rows
}

// TestMetricsOnPages: metrics that pages about serving name are on the page of metrics, with the labels that they have there. Those of connectors and
// of the shims for other engines are on pages of their own.
func TestMetricsOnPages(t *testing.T) {
	labels := map[string][]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(kvport_\\w+)` \\| \\w+ \\| ([^|]*) \\|").FindAllStringSubmatch(read(t, []string{"metrics.md"}), -1) {
		labels[m[1]] = strings.Split(m[2], ", ")
	}
	require.Greater(t, len(labels), 50)
	others := regexp.MustCompile(`^kvport_(connector|shim)_|^kvport_(ticket|cache|vllm|sglang|agent)$`)
	ofPrometheus := []string{"le", "job", "instance", "pod"}
	named := 0
	for _, page := range []string{"router.md", "autoscaling.md", "operate.md", "benchmarks.md", filepath.Join("..", "README.md")} {
		for _, m := range regexp.MustCompile(`(kvport_[a-z_]+)(?:\{([^}]*)\})?`).FindAllStringSubmatch(read(t, []string{page}), -1) {
			name := regexp.MustCompile(`_(bucket|count|sum)$`).ReplaceAllString(m[1], "")
			if others.MatchString(name) {
				continue
			}
			named++
			known, is := labels[name]
			require.True(t, is, "%s names %s, which is no metric", page, m[1])
			for _, label := range regexp.MustCompile(`(\w+)=`).FindAllStringSubmatch(m[2], -1) {
				require.Contains(t, append(known, ofPrometheus...), label[1], "%s: %s", page, m[0])
			}
		}
	}
	require.Greater(t, named, 40)
}

// TestRecords: a record of a decision has a number and a status, and every record that code or a page names by number exists.
func TestRecords(t *testing.T) {
	records, err := filepath.Glob(filepath.Join("adr", "*.md"))
	require.NoError(t, err)
	there := map[string]bool{}
	for _, path := range records {
		number, _, _ := strings.Cut(filepath.Base(path), "-")
		number = strings.TrimLeft(number, "0")
		there[number] = true
		require.Regexp(t, `(?s)^# `+number+`\. [^\n]+\n\nStatus: `, read(t, []string{path}), path)
	}
	require.NotEmpty(t, there)
	named := regexp.MustCompile(`\brecord (\d+)\b`)
	for _, suffix := range []string{".go", ".py", ".md", ".txt"} {
		for _, path := range files(t, suffix) {
			for _, m := range named.FindAllStringSubmatch(read(t, []string{path}), -1) {
				require.True(t, there[m[1]], "%s names record %s, which is not there", path, m[1])
			}
		}
	}
}

// TestSentences: what programs print of the pages is of the rule they ask for, and nothing for what is no rule.
func TestSentences(t *testing.T) {
	require.Contains(t, Rule("WORK-02"), "BlockError")
	require.Equal(t, []string{"returning one error for a whole transfer if only one block is missing"}, Mistakes("WORK-02"))
	require.Equal(t, []string{"remembering something in Match"}, Mistakes("SCHED-03"), "one of two rules")
	for _, unknown := range []string{"", "WORK-0", "rule", "---", "WORK-"} {
		require.Empty(t, Mistakes(unknown), unknown)
		require.Empty(t, Rule(unknown), unknown)
	}
}
