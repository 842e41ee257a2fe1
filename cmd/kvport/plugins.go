package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/invopop/jsonschema"
	"github.com/spf13/cobra"

	"github.com/kvport/kvport/connector"
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
		{"scope", cmp.Or(m.Scope, "depends on the config")},
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

// verifyWait bounds each question to a plugin.
const verifyWait = 5 * time.Second

// verification runs the checks of one plugin in order; each needs those before it.
type verification struct {
	binary *host.Binary
	config json.RawMessage
	proc   *host.Process
	region *host.Region
	info   connector.Info
	checks []check
}

func (f *pluginsFlags) verify(cmd *cobra.Command, name string) error {
	if err := checkFormat(f.format); err != nil {
		return err
	}
	config, err := readObject(f.config)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	b, err := f.find(cmd, name)
	if err != nil {
		return fail(err)
	}
	tmp, err := os.MkdirTemp("", "kvport-verify-")
	if err != nil {
		return fail(err)
	}
	quoted, err := json.Marshal(tmp)
	if err != nil {
		return fail(errors.Join(err, os.RemoveAll(tmp)))
	}
	config = bytes.ReplaceAll(config, []byte("${TMP}"), bytes.Trim(quoted, `"`))
	checks := verifyPlugin(cmd.Context(), b, config)
	err = errors.Join(writeChecks(cmd.OutOrStdout(), f.format, checks), os.RemoveAll(tmp))
	if err == nil && failed(checks) {
		err = errSilent
	}
	return fail(err)
}

// verifyPlugin starts a plugin, talks to both its sides and ends it. The last check is the first that
// fails.
func verifyPlugin(ctx context.Context, b *host.Binary, config json.RawMessage) []check {
	v := &verification{binary: b, config: config}
	defer v.cleanup()
	for _, step := range []struct {
		name string
		run  func(context.Context) (string, error)
		mend string
	}{
		{"sha256", v.hash, "make the binary readable"},
		{"manifest", v.manifest, "see docs/spec for what --manifest prints"},
		{"handshake", v.handshake, "run the binary by hand to see what it prints; its main function is sdk.Serve"},
		{"heartbeat", v.heartbeat, "the plugin hangs"},
		{"describe", v.describe, "give its kv_connector_extra_config as --config; plugins describe NAME lists the fields"},
		{"worker side", v.worker, "the plugin must open with the config and map the region it is given"},
		{"scheduler side", v.scheduler, "the plugin must open with the config"},
		{"clean exit", v.exit, "Close of both sides must return, and the process end with code 0"},
	} {
		limited, cancel := context.WithTimeout(ctx, verifyWait)
		detail, err := step.run(limited)
		cancel()
		if err != nil {
			v.checks = append(v.checks, check{step.name, statusFail, err.Error(), step.mend})
			return v.checks
		}
		v.checks = append(v.checks, check{Check: step.name, Status: statusOK, Detail: detail})
	}
	return v.checks
}

func (v *verification) hash(context.Context) (string, error) { return fileHash(v.binary.Path) }

func (v *verification) manifest(context.Context) (string, error) {
	m := &v.binary.Manifest
	return fmt.Sprintf("%s version %q, protocol versions %s, at %s", strings.Join(append([]string{m.Name}, m.Aliases...), ", "),
		m.Version, numbers(m.ProtocolVersions), v.binary.Path), nil
}

// verifyBlocks is how many blocks the cache of the check has.
const verifyBlocks = 4

func (v *verification) layout() (connector.Layout, int64) {
	l := connector.Layout{
		Name: "kvport", Blocks: verifyBlocks,
		Groups:   []connector.Group{{BlockTokens: 16, Policy: connector.PolicyAll}},
		Segments: []connector.Segment{{BlockStride: 1024, Bytes: 1024}},
	}
	if len(v.info.Layouts) > 0 {
		l.Name = v.info.Layouts[0]
	}
	return host.WithDigests(l)
}

func (v *verification) handshake(ctx context.Context) (string, error) {
	_, size := v.layout()
	var err error
	if v.region, err = host.NewRegion(size); err != nil {
		return "", err
	}
	began := time.Now()
	v.proc, err = host.Launch(ctx, v.binary.Path, host.LaunchOptions{
		Regions: []*host.Region{v.region}, Environment: v.binary.Manifest.Environment,
	})
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("started and answered in %s, mutual TLS on a private socket", time.Since(began).Round(time.Millisecond)), nil
}

func (v *verification) heartbeat(ctx context.Context) (string, error) {
	began := time.Now()
	if err := v.proc.Heartbeat(ctx); err != nil {
		return "", err
	}
	return "answered in " + time.Since(began).Round(time.Microsecond).String(), nil
}

func (v *verification) describe(ctx context.Context) (string, error) {
	info, err := v.proc.Describe(ctx, v.config)
	if err != nil {
		return "", fmt.Errorf("with the config %s: %w", v.config, err)
	}
	m := &v.binary.Manifest
	if info.Name != m.Name {
		return "", fmt.Errorf("it calls itself %q here and %q in its manifest", info.Name, m.Name)
	}
	for _, name := range info.Capabilities.Names() {
		if !slices.Contains(m.Capabilities, name) {
			return "", fmt.Errorf("it has %s with this config, which its manifest does not announce", name)
		}
	}
	v.info = info
	detail := "scope " + info.Scope.String() + ", capabilities "
	if info.Capabilities == 0 {
		return detail + "none", nil
	}
	return detail + info.Capabilities.String(), nil
}

func (v *verification) env() connector.Env {
	layout, _ := v.layout()
	key := make(connector.Secret, 32) // nobody else has it, so nobody can connect
	_, _ = rand.Read(key)             // never fails
	return connector.Env{
		Engine: "kvport-verify", Epoch: uint64(time.Now().UnixNano()), Role: connector.RoleBoth, World: 1,
		Model: connector.NewFingerprint("kvport verify"), Shape: connector.NewFingerprint("kvport verify"), Layout: layout,
		LinkKey: key, RouterKey: key,
	}
}

func (v *verification) worker(ctx context.Context) (string, error) {
	w, err := v.proc.OpenWorker(ctx, v.env(), v.config)
	if err != nil {
		return "", err
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", v.proc.PID()))
	if err != nil {
		return "", errors.Join(err, w.Close())
	}
	detail := "opened; the cache region was passed and is mapped"
	if !bytes.Contains(maps, []byte("memfd:kvport-cache")) {
		detail = "opened; the cache region was passed, the plugin has not mapped it yet"
	}
	return detail, w.Close()
}

func (v *verification) scheduler(ctx context.Context) (string, error) {
	s, err := v.proc.OpenScheduler(ctx, v.env(), v.config)
	if err != nil {
		return "", err
	}
	space := connector.KeySpace{Salt: "kvport verify"}
	matches, err := s.Match(ctx, []connector.Query{{Tokens: 17, Keys: space.Keys(make([]int32, 16), 16)}})
	if err = errors.Join(err, s.Close()); err != nil {
		return "", err
	}
	if matches[0].Tokens != 0 {
		return "", fmt.Errorf("it claims %d tokens that nobody stored", matches[0].Tokens)
	}
	return "opened; an unknown prompt is a miss", nil
}

func (v *verification) exit(ctx context.Context) (string, error) {
	p := v.proc
	v.proc = nil
	if err := p.Close(ctx); err != nil {
		return "", err
	}
	if n := p.Violations(); n > 0 {
		return "", fmt.Errorf("%d of its answers broke the protocol", n)
	}
	return "ended with code 0, nothing is left of it", nil
}

func (v *verification) cleanup() {
	if v.proc != nil {
		v.proc.Kill()
	}
	if v.region != nil {
		_ = v.region.Close() // what could go wrong does not concern the plugin
	}
}
