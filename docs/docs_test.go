// Package docs holds the documentation; its test keeps the pages true.
package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	goBlock = regexp.MustCompile("(?s)```go\n(.*?)```")
	link    = regexp.MustCompile(`\]\(([^)#][^)]*)\)`)
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

// TestGoBlocks: Go code in the documentation is cut from files that are compiled.
func TestGoBlocks(t *testing.T) {
	var code strings.Builder
	for _, path := range files(t, ".go") {
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		code.Write(data)
	}
	blocks := 0
	for _, page := range pages(t) {
		data, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, m := range goBlock.FindAllStringSubmatch(string(data), -1) {
			blocks++
			if !strings.Contains(code.String(), m[1]) {
				t.Errorf("%s shows code that is in no Go file:\n%s", page, m[1])
			}
		}
	}
	require.Positive(t, blocks)
}

// TestLinks: relative links lead somewhere.
func TestLinks(t *testing.T) {
	links := 0
	for _, page := range pages(t) {
		data, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, m := range link.FindAllStringSubmatch(string(data), -1) {
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

// TestAcceptanceCommands: every test that docs/acceptance.md names exists in the folder it names.
func TestAcceptanceCommands(t *testing.T) {
	data, err := os.ReadFile("acceptance.md")
	require.NoError(t, err)
	command := regexp.MustCompile("`go test \\./(\\S+)( -run (\\S+))? -v`")
	found := command.FindAllStringSubmatch(string(data), -1)
	require.NotEmpty(t, found)
	for _, m := range found {
		sources, err := filepath.Glob(filepath.Join("..", m[1], "*_test.go"))
		require.NoError(t, err)
		require.NotEmpty(t, sources, m[0])
		var code strings.Builder
		for _, path := range sources {
			data, err := os.ReadFile(path)
			require.NoError(t, err)
			code.Write(data)
		}
		pattern := strings.NewReplacer("'", "", `\|`, "|").Replace(m[3])
		require.Regexp(t, `(?m)^func Test\w*`, code.String(), m[0])
		for part := range strings.SplitSeq(pattern, "|") {
			require.Regexp(t, `(?m)^func (Test)?\w*`+strings.TrimPrefix(part, "Test"), code.String(), m[0])
		}
	}
}
