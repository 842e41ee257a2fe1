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
	only     []string
	list     bool
}

func newConform() *cobra.Command {
	f := &conformFlags{}
	cmd := &cobra.Command{
		Use:   "conform PLUGIN_BINARY",
		Short: "Check that a connector plugin keeps the contract",
		Args: func(cmd *cobra.Command, args []string) error {
			if f.list {
				return cobra.NoArgs(cmd, args)
			}
			return cobra.ExactArgs(1)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.list {
				return f.writeCases(cmd)
			}
			return f.run(cmd, args[0])
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.config, "config", "{}", "the plugin's kv_connector_extra_config as JSON, or @FILE; ${TMP} in it becomes a fresh folder in every case")
	flags.StringSliceVar(&f.profiles, "profile", []string{string(conformance.Store)}, "kind of connector, whose cases must all run; may be repeated: "+profileNames())
	flags.StringVar(&f.format, "format", "text", "text, json (a line a case) or junit")
	flags.StringSliceVar(&f.only, "case", nil, "run these cases only; may be repeated")
	flags.BoolVar(&f.list, "list", false, "list the cases, those of --profile if it is given, and run none")
	flags.Uint64Var(&f.seed, "seed", 1, "of sizes, orders and bytes")
	return cmd
}

// writeCases lists the cases of the profiles, or all, a line each, and their number.
func (f *conformFlags) writeCases(cmd *cobra.Command) error {
	profiles, err := f.parseProfiles()
	if err != nil {
		return err
	}
	if !cmd.Flags().Changed("profile") {
		profiles = conformance.Profiles()
	}
	w := cmd.OutOrStdout()
	count := 0
	for _, c := range conformance.Cases() {
		if !slices.ContainsFunc(c.Profiles, func(p conformance.Profile) bool { return slices.Contains(profiles, p) }) {
			continue
		}
		count++
		var names []string
		for _, p := range c.Profiles {
			names = append(names, string(p))
		}
		if _, err := fmt.Fprintf(w, "%-11s %-21s %s [%s]\n", c.Rule, c.ID, c.Text, strings.Join(names, " ")); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(w, "%d cases\n", count)
	return err
}

func (f *conformFlags) parseProfiles() ([]conformance.Profile, error) {
	var profiles []conformance.Profile
	for _, name := range f.profiles {
		p, err := conformance.ParseProfile(name)
		if err != nil {
			return nil, fmt.Errorf("--profile: %w", err)
		}
		profiles = append(profiles, p)
	}
	return profiles, nil
}

// checkOnly wants the names of --case to be those of cases.
func (f *conformFlags) checkOnly() error {
	for _, id := range f.only {
		if !slices.ContainsFunc(conformance.Cases(), func(c conformance.Case) bool { return c.ID == id }) {
			return fmt.Errorf("--case: there is no case %q; kvport conform --list lists them", id)
		}
	}
	return nil
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
	profiles, err := f.parseProfiles()
	if err == nil {
		err = f.checkOnly()
	}
	if err != nil {
		return err
	}
	options := conformance.Options{Seed: f.seed, Profiles: profiles, Only: f.only}
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
