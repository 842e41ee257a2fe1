package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/sdk/host"
)

type conformFlags struct {
	config   string
	profiles []string
	format   string
	seed     uint64
}

func newConform() *cobra.Command {
	f := &conformFlags{}
	cmd := &cobra.Command{
		Use:   "conform PLUGIN_BINARY",
		Short: "Check that a connector plugin keeps the contract",
		Args:  cobra.ExactArgs(1),
		RunE:  func(cmd *cobra.Command, args []string) error { return f.run(cmd, args[0]) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.config, "config", "{}", "the plugin's kv_connector_extra_config as JSON, or @FILE; ${TMP} in it becomes a fresh folder in every case")
	flags.StringSliceVar(&f.profiles, "profile", []string{string(conformance.Store)}, "kind of connector, whose cases must all run; may be repeated: "+profileNames())
	flags.StringVar(&f.format, "format", "text", "text, json (a line a case) or junit")
	flags.Uint64Var(&f.seed, "seed", 1, "of sizes, orders and bytes")
	return cmd
}

func profileNames() string {
	var names []string
	for _, p := range conformance.Profiles() {
		names = append(names, string(p))
	}
	return strings.Join(names, ", ")
}

func (f *conformFlags) run(cmd *cobra.Command, binary string) error {
	if !slices.Contains([]string{"text", "json", "junit"}, f.format) {
		return fmt.Errorf("--format is %q, want text, json or junit", f.format)
	}
	options := conformance.Options{Seed: f.seed}
	for _, name := range f.profiles {
		p, err := conformance.ParseProfile(name)
		if err != nil {
			return fmt.Errorf("--profile: %w", err)
		}
		options.Profiles = append(options.Profiles, p)
	}
	config, err := readObject(f.config)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	// A bare name means a file here, as in every other path, not one on PATH.
	if binary, err = filepath.Abs(binary); err != nil {
		return err
	}
	// What cannot even say its name is no plugin: not worth twenty failed cases.
	manifest, err := host.ReadManifest(cmd.Context(), binary)
	if err != nil {
		return err
	}
	results := conformance.Check(cmd.Context(), conformance.Binary(binary, config), options)
	if err := cmd.Context().Err(); err != nil {
		return fail(errors.New("interrupted"))
	}
	if err := writeResults(cmd.OutOrStdout(), f.format, manifest.Name, results); err != nil {
		return fail(err)
	}
	if conformance.Failed(results) != nil {
		return fail(errSilent)
	}
	return nil
}

func writeResults(w io.Writer, format, name string, results []conformance.Result) error {
	switch format {
	case "json":
		return conformance.WriteJSON(w, results)
	case "junit":
		return conformance.WriteJUnit(w, name, results)
	}
	return conformance.WriteText(w, results)
}

// maxConfig bounds a config or key file, in bytes.
const maxConfig = 1 << 20

// readObject reads a JSON object, or @FILE with one in it.
func readObject(arg string) (json.RawMessage, error) {
	data := []byte(arg)
	if path, isFile := strings.CutPrefix(arg, "@"); isFile {
		var err error
		if data, err = host.ReadFile(path, maxConfig); err != nil {
			return nil, err
		}
	}
	var object map[string]json.RawMessage
	err := json.Unmarshal(data, &object)
	var syntax *json.SyntaxError
	switch {
	case errors.As(err, &syntax):
		return nil, fmt.Errorf("not JSON: %w at byte %d", err, syntax.Offset)
	case err != nil || object == nil:
		return nil, errors.New("want a JSON object")
	}
	return bytes.TrimSpace(data), nil
}
