package planted

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/fixture"

	"github.com/kvport/kvport/verify/testkit"
)

// planted is the name of a connector that is a copy of the one that stands for stores. It is written so that it does not stand here:
// archtest looks for it in the copy.
const planted = "Planted" + "Connector"

const plantedFixture = `{
  "connector": "` + planted + `",
  "page": "connectors/planted.md",
  "groups": true,
  "profiles": ["store"],
  "setups": [
    {"config": CONFIG, "pairs": true, "keeps": true}
  ]
}
`

const plantedPage = "# " + planted + "\n\nIt is here for a test.\n\n<!-- fields -->\n<!-- end -->\n"

// TestPlantedConnector: a connector of another name takes three places, its folder, its plugin and its page. Everything that
// enumerates connectors finds it there, in a copy of this repository, and runs it with one prompt.
func TestPlantedConnector(t *testing.T) {
	if testing.Short() {
		t.Skip("builds and runs a copy of the repository: left out with -short, which the race stage uses")
	}
	tree := copyTree(t, testkit.Root(t))
	tree.plant()
	tree.run("go", "build", "-trimpath", "-buildvcs=false", "-o", "bin/", "./cmd/kvport")
	tree.run("go", "build", "-trimpath", "-buildvcs=false", "-o", "bin/kvport-planted", "./plugins/planted")

	tree.run("go", "test", "./internal/archtest", "-run", "TestRepository", "-count=1")
	tree.run("go", "test", "./verify/fixture", "-count=1")
	tree.run("go", "test", "./docs", "-run", "TestConnectorPages", "-count=1", "-update")
	tree.run("go", "test", "./docs", "-run", "TestConnectorPages", "-count=1")
	require.Contains(t, tree.read("docs/connectors/planted.md"), "| Field | Values |")

	require.Contains(t, tree.run("scripts/conform.sh"), "conform: 1 passed, 0 failed")
	said := tree.run("go", "test", "./verify/acceptance", "-run", "^(TestConnectors|TestKeyMatrix)$", "-count=1", "-v",
		"-args", "-connector", planted, "-prompts", "1", "-tokens", "4", "-model", "sim")
	for _, name := range []string{"TestConnectors/" + planted, "TestKeyMatrix/connectors/" + planted} {
		require.Contains(t, said, "--- PASS: "+name)
	}
	said = tree.run("bin/kvport", "bench", "store", "--quick", "--only", planted, "--plugin-path", "bin")
	require.Contains(t, said, planted+" (its fixture has no config for kvport bench)")
	said = tree.run("go", "run", "./examples/demo", "--connector", planted, "--model", "sim", "--prompts", "1", "--tokens", "4", "--kill=false")
	require.Contains(t, said, "All tokens equal")
	said = tree.run("python3", "tests/vllm/run.py", "--list", "--connector", planted)
	for _, line := range []string{"connectors", "together", "pd"} {
		require.Contains(t, said, line+": Planted ("+planted+")\n")
	}
}

// plantedTree is a copy of the repository.
type plantedTree struct {
	*testing.T
	dir string
}

// copyTree copies what git would keep. What was built and fetched is there by links. Caches of Python tools are
// left out: they change while the tests of python/ run beside this one.
func copyTree(t *testing.T, from string) *plantedTree {
	t.Helper()
	tree := &plantedTree{T: t, dir: t.TempDir()}
	require.NoError(t, filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil || rel == "." {
			return err
		}
		top := filepath.Dir(rel) == "."
		switch {
		case top && (rel == "bin" || rel == "dist"), strings.HasPrefix(d.Name(), "."), d.Name() == "__pycache__":
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		case d.IsDir():
			return os.Mkdir(filepath.Join(tree.dir, rel), 0o700)
		case !d.Type().IsRegular():
			return nil
		}
		return tree.copy(path, rel)
	}))
	require.NoError(t, os.Symlink(filepath.Join(from, ".deps"), filepath.Join(tree.dir, ".deps")))
	require.NoError(t, os.Mkdir(filepath.Join(tree.dir, "bin"), 0o700))
	built, err := filepath.Glob(filepath.Join(from, "bin", "kvport-*"))
	require.NoError(t, err)
	for _, path := range built {
		require.NoError(t, os.Symlink(path, filepath.Join(tree.dir, "bin", filepath.Base(path))))
	}
	return tree
}

// copy copies a file with its mode.
func (p *plantedTree) copy(from, rel string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(p.dir, rel), data, info.Mode())
}

// plant writes the three places.
func (p *plantedTree) plant() {
	p.Helper()
	typical := testkit.Typical(p.T, fixture.Store)
	x := filepath.Base(typical.Folder)
	main := p.read(filepath.Join(typical.Folder, "main.go"))
	_, aliases, found := strings.Cut(main, "Aliases: ")
	require.True(p, found, "the plugin has no aliases")
	aliases, _, _ = strings.Cut(aliases, "}, ")
	main = strings.Replace(main, "Aliases: "+aliases+"}, ", "", 1)
	names := strings.NewReplacer(typical.Connector, planted, x, "planted")
	p.write("plugins/planted/main.go", names.Replace(main))
	p.write("plugins/planted/fixture.json", strings.Replace(plantedFixture, "CONFIG", string(typical.Setups[0].Config), 1))
	sources, err := filepath.Glob(filepath.Join(p.dir, "connectors", x, "*.go"))
	require.NoError(p, err)
	for _, source := range sources {
		if name := filepath.Base(source); !strings.HasSuffix(name, "_test.go") {
			p.write(filepath.Join("connectors", "planted", name), names.Replace(p.read(filepath.Join("connectors", x, name))))
		}
	}
	p.write("docs/connectors/planted.md", plantedPage)
}

func (p *plantedTree) read(rel string) string {
	p.Helper()
	data, err := os.ReadFile(filepath.Join(p.dir, rel))
	require.NoError(p, err)
	return string(data)
}

func (p *plantedTree) write(rel, text string) {
	p.Helper()
	path := filepath.Join(p.dir, rel)
	require.NoError(p, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(p, os.WriteFile(path, []byte(text), 0o600))
}

// run runs a command in the copy and gives what it printed. Packages without paths in them are built once for all copies.
func (p *plantedTree) run(name string, args ...string) string {
	p.Helper()
	cmd := exec.CommandContext(p.Context(), name, args...)
	if strings.Contains(name, "/") {
		cmd.Path = filepath.Join(p.dir, name)
	}
	cmd.Dir = p.dir
	cmd.Env = append(os.Environ(), "GOFLAGS=-trimpath -buildvcs=false -vet=off -ldflags=-w", "PLUGINS=planted", "EXAMPLES=")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(p, cmd.Run(), "%s %s:\n%s", name, strings.Join(args, " "), &out)
	return out.String()
}
