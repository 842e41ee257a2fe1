package names

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

//go:embed testdata/program/main.go
var program string

// rootCommand gives the program what package main of cmd/kvport keeps for itself.
const rootCommand = `package kvport

import (
	"io"

	"github.com/spf13/cobra"
)

// Root is the command kvport.
func Root() *cobra.Command { return newRoot(io.Discard, io.Discard) }
`

var packageMain = regexp.MustCompile(`(?m)^package main$`)

// overlay tells the Go command which files replace those of a work tree.
type overlay struct {
	folder  string            // where they are
	Replace map[string]string // no file: as if the one in the work tree were not there
}

func (o *overlay) add(path, text string) error {
	file := filepath.Join(o.folder, fmt.Sprintf("%d.go", len(o.Replace)))
	o.Replace[path] = file
	return os.WriteFile(file, []byte(text), 0o600)
}

// programNames runs testdata/program in the work tree. The commands that it imports become packages.
func programNames(ctx context.Context, root string) ([]Name, error) {
	folder, err := os.MkdirTemp("", "kvport-names-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder)
	o := &overlay{folder: folder, Replace: map[string]string{}}
	if err := o.fill(root); err != nil {
		return nil, err
	}
	data, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	file := filepath.Join(folder, "overlay.json")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, "go", "run", "-buildvcs=false", "-overlay", file, "./verify/names/program")
	cmd.Dir, cmd.Stderr = root, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("the program that lists commands, plugins, cases and mutants: %w", err)
	}
	return Parse(string(out))
}

// fill adds the program, the files of cmd/kvport and those of every plugin.
func (o *overlay) fill(root string) error {
	root, err := filepath.Abs(root)
	if err != nil {
		return err
	}
	plugins, err := filepath.Glob(filepath.Join(root, "plugins", "*", "main.go"))
	if err != nil {
		return err
	}
	imports, calls := "", ""
	commands := []string{filepath.Join(root, "cmd", "kvport")}
	for _, file := range plugins {
		folder := filepath.Dir(file)
		commands = append(commands, folder)
		imports += fmt.Sprintf("import %q\n", module+"/plugins/"+filepath.Base(folder))
		calls += filepath.Base(folder) + ".Plugin(), "
	}
	for _, folder := range commands {
		if err := o.library(folder); err != nil {
			return err
		}
	}
	text := program
	for _, r := range Renames() { // the work tree may be older than a rename
		if _, err := os.Stat(filepath.Join(root, r.New)); err != nil {
			text = strings.ReplaceAll(text, `"`+module+"/"+r.New+`"`, `"`+module+"/"+r.Old+`"`)
		}
	}
	target := filepath.Join(root, "verify", "names", "program")
	return errors.Join(
		o.add(filepath.Join(root, "cmd", "kvport", "names_root.go"), rootCommand),
		o.add(filepath.Join(target, "main.go"), text),
		o.add(filepath.Join(target, "plugins.go"), "package main\n\n"+imports+"\nfunc plugins() []any { return []any{"+calls+"} }\n"),
	)
}

// library makes a command a package that can be imported. What a plugin serves its function Plugin returns.
func (o *overlay) library(folder string) error {
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		return err
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			o.Replace[file] = ""
			continue
		}
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		text := packageMain.ReplaceAllString(string(data), "package "+filepath.Base(folder))
		if before, after, served := strings.Cut(text, "sdk.Serve("); served {
			text = strings.Replace(before, "func main() {", "func Plugin() any {", 1) + "return (" + after + "\nvar _ = sdk.Serve\n"
		}
		if err := o.add(file, text); err != nil {
			return err
		}
	}
	return nil
}
