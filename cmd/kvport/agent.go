package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/host/agent"
)

type agentFlags struct {
	transferConfig string
	socket         string
	check          bool
	pluginPath     []string
	logLevel       string
}

func newAgent() *cobra.Command {
	f := &agentFlags{}
	cmd := &cobra.Command{
		Use:   "agent --kv-transfer-config JSON|@FILE --socket PATH",
		Short: "Serve a connector to an engine that is not written in Go",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.transferConfig, "kv-transfer-config", "", "connector as JSON, or @FILE with it")
	flags.StringVar(&f.socket, "socket", "", "path of the socket to make, in a folder of mode 0700")
	flags.BoolVar(&f.check, "check", false, "check the config, also with the plugin, print what it says as a line of JSON and end")
	addPluginPath(flags, &f.pluginPath)
	addLogLevel(cmd, &f.logLevel)
	return cmd
}

func (f *agentFlags) run(cmd *cobra.Command) error {
	if err := setLog(cmd.ErrOrStderr(), f.logLevel); err != nil {
		return err
	}
	if f.transferConfig == "" {
		return errors.New("--kv-transfer-config is required: JSON, or @FILE with it")
	}
	cfg, err := host.ParseConfig(f.transferConfig)
	if err != nil {
		return err
	}
	cfg.SandboxedBy(host.Self)
	for _, w := range cfg.Warnings {
		slog.Warn("kv-transfer-config: " + w)
	}
	if f.socket == "" && !f.check {
		return errors.New("--socket is required: the path of the socket to make")
	}
	path, err := filepath.Abs(f.socket)
	if err != nil {
		return fail(err)
	}
	if f.check {
		return f.describe(cmd, cfg, path)
	}
	return fail(agent.Run(cmd.Context(), agent.Config{
		Transfer: cfg, PluginPath: pluginFolders(f.pluginPath), Socket: path, Log: slog.Default(), Build: newBuildInfo(),
		Ready: func() { fmt.Fprintf(cmd.OutOrStdout(), "kvport: ready socket=%s\n", path) },
	}))
}

// checked is what --check prints.
type checked struct {
	Connector     string   `json:"connector"`
	Role          string   `json:"role"`
	Loads         bool     `json:"loads"`
	Saves         bool     `json:"saves"`
	Layouts       []string `json:"layouts"` // that it needs; empty: any
	Groups        bool     `json:"groups"`
	Capabilities  []string `json:"capabilities"`
	Scope         string   `json:"scope"`
	Lossy         bool     `json:"lossy"`
	FailurePolicy string   `json:"failure_policy"`
	Trust         string   `json:"trust"`

	// Milliseconds: how long a load, in addition to the second number for each GiB, and a save may take before
	// the agent ends the plugin.
	LoadMS       int64 `json:"load_ms"`
	LoadPerGiBMS int64 `json:"load_per_gib_ms"`
	SaveMS       int64 `json:"save_ms"`
}

func (f *agentFlags) describe(cmd *cobra.Command, cfg *host.Config, path string) error {
	if f.socket != "" {
		if err := agent.CheckSocket(path); err != nil {
			return err
		}
	}
	info, err := host.Inspect(cmd.Context(), cfg, host.Options{PluginPath: pluginFolders(f.pluginPath), Log: slog.Default()})
	if err != nil {
		return fail(err)
	}
	d := &cfg.Settings.Deadlines
	out := checked{
		Connector: info.Name, Role: cfg.Role.String(), Loads: cfg.Role.Loads(), Saves: cfg.Role.Saves(),
		Layouts: append([]string{}, info.Layouts...), Groups: info.Groups, Capabilities: info.Capabilities.Names(),
		Scope: info.Scope.String(), Lossy: info.Lossy, FailurePolicy: string(cfg.FailurePolicy), Trust: string(cfg.Settings.Trust),
		LoadMS: (d.Transfer + d.Grace).Milliseconds(), LoadPerGiBMS: d.TransferPerGiB.Milliseconds(), SaveMS: (d.Save + d.Grace).Milliseconds(),
	}
	return fail(json.NewEncoder(cmd.OutOrStdout()).Encode(out))
}
