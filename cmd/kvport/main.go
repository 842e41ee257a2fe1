// Command kvport serves a model, routes requests to prefill and decode instances, and checks
// connector plugins.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/wire"
	"github.com/kvport/kvport/verify/bench"
)

// version is set by the linker.
var version = "unknown"

// Exit codes.
const (
	exitOK      = 0
	exitFailure = 1
	exitUsage   = 2 // a changed flag, config or binary could cure it

	exitCutOff       = 3 // of serve and route: requests, or saves of a connector, had not ended when --drain-timeout was over
	exitInconclusive = 3 // of conform: the machine kept a case from a verdict
)

func main() {
	host.SandboxMain()
	surviveHangups()
	bench.ServePlugin()
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// surviveHangups keeps SIGHUP from ending a command that serves. A front, which reads its API keys again then, has a
// channel of its own.
func surviveHangups() {
	if len(os.Args) > 1 && slices.Contains([]string{"serve", "route", "agent"}, os.Args[1]) {
		signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	}
}

// run executes one command line and gives its exit code.
func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := untilSignal(stderr)
	defer stop()
	root := newRoot(stdout, stderr)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	if !errors.Is(err, errSilent) {
		fmt.Fprintln(stderr, "kvport: "+brief(err.Error()))
	}
	return codeOf(err)
}

// codeOf is the exit code of a command which ended with an error.
func codeOf(err error) int {
	if errors.Is(err, errCutOff) || errors.Is(err, errGivenUp) {
		return exitCutOff
	}
	if errors.Is(err, conformance.ErrInconclusive) {
		return exitInconclusive
	}
	if _, is := errors.AsType[*failure](err); is && !errors.Is(err, host.ErrConfig) {
		return exitFailure
	}
	return exitUsage
}

func newRoot(stdout, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:   "kvport",
		Short: "An inference engine with pluggable KV-cache connectors",
		// Errors are a line or two; whoever needs the usage asks for it.
		SilenceUsage: true, SilenceErrors: true,
		Version: buildVersion(),
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return flagError(err) })
	root.SetVersionTemplate("kvport {{.Version}}\n")
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddCommand(newServe(), newAgent(), newRoute(), newConform(), newBench(), newPlugins(), newKeys(), newSchema(), newDoctor(), newProbe(), newSim(), newVersion())
	return root
}

// flagError says in words why a flag cannot have its value; the flag package says it in those of package strconv.
func flagError(err error) error {
	number, ok := errors.AsType[*strconv.NumError](err)
	if !ok {
		return err
	}
	reason := "want a number"
	switch {
	case errors.Is(err, strconv.ErrRange):
		reason = "out of range"
	case number.Func == "ParseBool":
		reason = "want true or false"
	case number.Func == "ParseInt" || number.Func == "ParseUint":
		reason = "want a whole number"
	}
	return errors.New(strings.TrimSuffix(err.Error(), number.Error()) + reason)
}

// failure marks an error of a command at work, as opposed to one of its flags or config.
type failure struct{ err error }

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// errSilent ends a command with a failure that it has already told.
var errSilent = errors.New("failed")

// fail marks err, if any, as a failure.
func fail(err error) error {
	if err == nil {
		return nil
	}
	return &failure{err}
}

// brief keeps an error message to two lines of reasonable length: it may quote a config of a megabyte.
func brief(message string) string {
	const limit = 1000
	lines := strings.SplitN(strings.TrimSpace(message), "\n", 3)
	lines = lines[:min(len(lines), 2)]
	for i, line := range lines {
		if len(line) > limit {
			lines[i] = strings.ToValidUTF8(line[:limit], "") + "..."
		}
	}
	return strings.Join(lines, "\n")
}

// sameSignal is how soon after the first signal another one counts as the same: timeout(1) and some
// shells send theirs to the process and then to its group.
const sameSignal = time.Second

// untilSignal gives a context that ends with the first SIGINT or SIGTERM. The second one ends the
// process.
func untilSignal(stderr io.Writer) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		if s := secondSignal(ctx, cancel, signals); s != nil {
			fmt.Fprintf(stderr, "kvport: %v again, not waiting any longer\n", s)
			os.Exit(exitFailure)
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel()
	}
}

// secondSignal calls cancel at the first signal and returns at the second; nil if ctx ends before
// the first one.
func secondSignal(ctx context.Context, cancel func(), signals <-chan os.Signal) os.Signal {
	select {
	case <-signals:
	case <-ctx.Done():
		return nil
	}
	first := time.Now()
	cancel()
	for s := range signals {
		if time.Since(first) >= sameSignal {
			return s
		}
	}
	return nil
}

// addLogLevel adds --log-level, whose value setLog reads.
func addLogLevel(cmd *cobra.Command, level *string) {
	cmd.Flags().StringVar(level, "log-level", "info", "debug, info, warn or error")
}

// setLog makes the default logger: text on a terminal, else JSON, to w.
func setLog(w io.Writer, level string) error {
	var least slog.Level
	if err := least.UnmarshalText([]byte(strings.ToUpper(level))); err != nil {
		return fmt.Errorf("--log-level is %q, want debug, info, warn or error", level)
	}
	options := &slog.HandlerOptions{Level: least, ReplaceAttr: plainAttr}
	if f, ok := w.(*os.File); ok && isTerminal(f) {
		slog.SetDefault(slog.New(slog.NewTextHandler(w, options)))
		return nil
	}
	slog.SetDefault(slog.New(slog.NewJSONHandler(w, options)))
	return nil
}

// plainAttr gives each thing one name and one form in all lines.
func plainAttr(groups []string, a slog.Attr) slog.Attr {
	if len(groups) == 0 && a.Key == "err" {
		a.Key = "error"
	}
	a.Value = wire.PlainValue(a.Value)
	return a
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// flagSet takes a flag that is a list.
type flagSet interface {
	StringSliceVar(p *[]string, name string, value []string, usage string)
}

// addPluginPath adds --plugin-path, whose folders pluginFolders takes.
func addPluginPath(flags flagSet, folders *[]string) {
	flags.StringSliceVar(folders, "plugin-path", nil, "folders with kvport-* plugins, before KVPORT_PLUGIN_PATH and this binary's own")
}

// pluginFolders are where plugins are looked for, in order.
func pluginFolders(first []string) []string {
	folders := slices.Clone(first)
	for _, folder := range filepath.SplitList(os.Getenv("KVPORT_PLUGIN_PATH")) {
		if folder != "" {
			folders = append(folders, folder)
		}
	}
	if self, err := os.Executable(); err == nil {
		if target, err := filepath.EvalSymlinks(self); err == nil {
			self = target
		}
		folders = append(folders, filepath.Dir(self))
	}
	return folders
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version, as --version does",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "kvport %s\n", buildVersion())
			return fail(err)
		},
	}
}

// buildVersion is what the linker was told. A binary of go install or go build has what the Go command
// noted in it.
func buildVersion() string {
	if version != "unknown" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return version
	}
	return notedVersion(info)
}

// notedVersion is the module's version, else the commit, else "devel": of a working tree, unknown which.
func notedVersion(info *debug.BuildInfo) string {
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	commit, changed := "devel", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision" && s.Value != "":
			commit = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			changed = "+dirty"
		}
	}
	return commit + changed
}

// newBuildInfo is the metric that says which program runs.
func newBuildInfo() prometheus.Gauge {
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "kvport_build_info", Help: "1 for the version of kvport that runs and the Go that built it.",
		ConstLabels: prometheus.Labels{"version": buildVersion(), "goversion": runtime.Version()},
	})
	g.Set(1)
	return g
}

// printRouteSchema is kvport schema --route.
func printRouteSchema(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("--route: the config of kvport route has no connector %q", args[0])
	}
	schema, err := routeSchema()
	if err == nil {
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s\n", schema)
	}
	return fail(err)
}

func newSchema() *cobra.Command {
	var folders []string
	var route bool
	cmd := &cobra.Command{
		Use:   "schema [CONNECTOR]",
		Short: "Print the JSON Schema of --kv-transfer-config, of one connector's kv_connector_extra_config, or of kvport route --config",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if route {
				return printRouteSchema(cmd, args)
			}
			var plugins []*host.Manifest
			for _, found := range host.List(cmd.Context(), pluginFolders(folders)) {
				if found.Manifest != nil {
					plugins = append(plugins, found.Manifest)
				}
			}
			schema, err := host.ConfigSchema(plugins, append(args, "")[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s\n", schema)
			return fail(err)
		},
	}
	addPluginPath(cmd.Flags(), &folders)
	cmd.Flags().BoolVar(&route, "route", false, "print the schema of kvport route --config")
	return cmd
}
