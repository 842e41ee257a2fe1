package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/invopop/jsonschema"
	"github.com/spf13/cobra"

	"github.com/kvport/kvport/host"
)

type pluginsFlags struct {
	folders []string
	format  string
	config  string
}

func newPlugins() *cobra.Command {
	f := &pluginsFlags{}
	cmd := &cobra.Command{
		Use:   "plugins",
		Short: "List, describe and check the connector plugins of this machine",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	flags := cmd.PersistentFlags()
	addPluginPath(flags, &f.folders)
	flags.StringVar(&f.format, "format", "text", "text or json")
	list := &cobra.Command{
		Use: "list", Short: "List the plugins that are found", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.list(cmd) },
	}
	describe := &cobra.Command{
		Use: "describe NAME", Short: "Say what a plugin is and how it is configured; NAME may be the path of a binary", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return f.describe(cmd, args[0]) },
	}
	verify := &cobra.Command{
		Use: "verify NAME", Short: "Start a plugin and check that it works; NAME may be the path of a binary", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return f.verify(cmd, args[0]) },
	}
	verify.Flags().StringVar(&f.config, "config", "{}", "the plugin's kv_connector_extra_config as JSON, or @FILE; ${TMP} in it becomes a fresh folder")
	cmd.AddCommand(list, describe, verify)
	return cmd
}

// pluginRow is a line of plugins list.
type pluginRow struct {
	Name             string   `json:"name"`
	Aliases          []string `json:"aliases"`
	Version          string   `json:"version"`
	ProtocolVersions []int    `json:"protocol_versions"`
	Capabilities     []string `json:"capabilities"`
	Path             string   `json:"path"`
	SHA256           string   `json:"sha256"`
	Error            string   `json:"error,omitempty"` // set: the file is not a plugin that works, and all fields before Path are empty
}

func (f *pluginsFlags) list(cmd *cobra.Command) error {
	if err := checkFormat(f.format); err != nil {
		return err
	}
	folders := pluginFolders(f.folders)
	rows := []pluginRow{}
	for _, found := range host.List(cmd.Context(), folders) {
		row := pluginRow{Path: found.Path}
		hash, err := fileHash(found.Path)
		if row.SHA256 = hash; found.Err != nil {
			err = found.Err
		}
		if m := found.Manifest; m != nil {
			row.Name, row.Aliases, row.Version = m.Name, m.Aliases, m.Version
			row.ProtocolVersions, row.Capabilities = m.ProtocolVersions, m.Capabilities
		}
		if err != nil {
			row.Error = err.Error()
		}
		rows = append(rows, row)
	}
	if f.format == "json" {
		return fail(writeJSONLines(cmd.OutOrStdout(), rows))
	}
	if len(rows) == 0 {
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "no plugins (looked for kvport-* in %s)\n", strings.Join(folders, ", "))
		return fail(err)
	}
	return fail(writePlugins(cmd.OutOrStdout(), rows))
}

// shownHash is how many digits of a hash a table shows.
const shownHash = 12

func writePlugins(w io.Writer, rows []pluginRow) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "NAME\tALIASES\tVERSION\tPROTOCOL\tCAPABILITIES\tSHA256\tPATH")
	for _, r := range rows {
		cells := []string{
			r.Name, strings.Join(r.Aliases, ","), r.Version, numbers(r.ProtocolVersions), strings.Join(r.Capabilities, ","),
			r.SHA256[:min(len(r.SHA256), shownHash)], r.Path,
		}
		if r.Error != "" {
			cells[0], cells[6] = "(broken)", strings.TrimPrefix(r.Error, r.Path+" ")
			if !strings.Contains(cells[6], r.Path) {
				cells[6] = r.Path + ": " + cells[6]
			}
		}
		for i, c := range cells {
			if cells[i] = printable(c); cells[i] == "" {
				cells[i] = "-"
			}
		}
		fmt.Fprintln(table, strings.Join(cells, "\t"))
	}
	return table.Flush()
}

func numbers(list []int) string {
	return strings.Trim(strings.Join(strings.Fields(fmt.Sprint(list)), ","), "[]")
}

// find looks for a plugin by name, or takes the path of one.
func (f *pluginsFlags) find(cmd *cobra.Command, name string) (*host.Binary, error) {
	if !strings.ContainsRune(name, os.PathSeparator) {
		return host.Find(pluginFolders(f.folders), name)
	}
	m, err := host.ReadManifest(cmd.Context(), name)
	if err != nil {
		return nil, err
	}
	return &host.Binary{Path: name, Manifest: *m}, nil
}

func (f *pluginsFlags) describe(cmd *cobra.Command, name string) error {
	if err := checkFormat(f.format); err != nil {
		return err
	}
	b, err := f.find(cmd, name)
	if err != nil {
		return err
	}
	if f.format == "json" {
		return fail(json.NewEncoder(cmd.OutOrStdout()).Encode(b.Manifest))
	}
	hash, err := fileHash(b.Path)
	if err != nil {
		return fail(err)
	}
	return fail(writeManifest(cmd.OutOrStdout(), b, hash))
}

func writeManifest(w io.Writer, b *host.Binary, hash string) error {
	m := &b.Manifest
	list := func(names []string) string {
		if len(names) == 0 {
			return "none"
		}
		return strings.Join(names, ", ")
	}
	scope := m.Scope
	if scope == "" {
		scope = "depends on the config"
	}
	arena := "none"
	switch {
	case m.ArenaBytes > 0:
		arena = fmt.Sprintf("%d bytes", m.ArenaBytes)
	case m.Scope == "": // it says nothing without a config
		arena = "depends on the config"
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, line := range [][2]string{
		{"name", m.Name},
		{"aliases", list(m.Aliases)},
		{"version", m.Version},
		{"binary", b.Path},
		{"sha256", hash},
		{"protocol versions", numbers(m.ProtocolVersions)},
		{"capabilities", list(m.Capabilities)},
		{"scope", scope},
		{"environment it sees", list(m.Environment)},
		{"arena", arena},
		{"metrics of its own", list(m.Stats)},
	} {
		fmt.Fprintf(table, "%s\t%s\n", line[0], printable(line[1]))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	return writeSchema(w, m.ConfigSchema)
}

// writeSchema prints the fields of a config; what is no plain schema of an object is shown as it is.
func writeSchema(w io.Writer, raw json.RawMessage) error {
	if len(raw) == 0 {
		_, err := fmt.Fprintln(w, "\nkv_connector_extra_config: the plugin does not say")
		return err
	}
	var schema jsonschema.Schema
	var text strings.Builder
	if err := json.Unmarshal(raw, &schema); err != nil {
		fmt.Fprintf(&text, "  %s\n", printable(string(raw)))
	} else {
		writeFields(&text, &schema, "")
	}
	if text.Len() == 0 {
		text.WriteString("  no fields\n")
	}
	_, err := fmt.Fprintf(w, "\nkv_connector_extra_config:\n%s", text.String())
	return err
}

// maxDepth ends schemas that are too deep to be read.
const maxDepth = 8

func writeFields(w *strings.Builder, schema *jsonschema.Schema, path string) {
	if schema.Properties == nil || strings.Count(path, ".") > maxDepth {
		return
	}
	for p := schema.Properties.Oldest(); p != nil; p = p.Next() {
		field, name := p.Value, path+p.Key
		notes := fieldNotes(field)
		if slices.Contains(schema.Required, p.Key) {
			notes = slices.Insert(notes, 1, "required")
		}
		fmt.Fprintf(w, "  %s  (%s)\n", printable(name), printable(strings.Join(notes, ", ")))
		if field.Description != "" {
			fmt.Fprintf(w, "      %s\n", printable(field.Description))
		}
		writeFields(w, field, name+".")
		if field.Items != nil {
			writeFields(w, field.Items, name+"[].")
		}
	}
}

// fieldNotes are the type of a field and what limits it.
func fieldNotes(s *jsonschema.Schema) []string {
	kind := s.Type
	switch {
	case kind == "":
		kind = "any"
	case s.Items != nil && s.Items.Type != "":
		kind += " of " + s.Items.Type
	}
	notes := []string{kind}
	add := func(what string, value any) { notes = append(notes, fmt.Sprintf("%s %v", what, value)) }
	if s.Default != nil {
		if text, err := json.Marshal(s.Default); err == nil {
			add("default", string(text))
		}
	}
	if s.Minimum != "" {
		add("at least", s.Minimum)
	}
	if s.Maximum != "" {
		add("at most", s.Maximum)
	}
	if len(s.Enum) > 0 {
		add("one of", strings.Trim(fmt.Sprint(s.Enum), "[]"))
	}
	if s.Pattern != "" {
		add("matches", s.Pattern)
	}
	return notes
}

// fileHash is the SHA-256 of a file, in the form of kvport.plugin_sha256.
func fileHash(path string) (string, error) {
	file, err := host.OpenFile(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	h := sha256.New()
	if _, err := io.Copy(h, file); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
