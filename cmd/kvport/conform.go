package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/host"
)

type conformFlags struct {
	config   string
	profiles []string
	format   string
	seed     uint64
	budget   time.Duration
	only     []string
	list     bool
	timeout  time.Duration
	failFast bool
	log      string
	sandbox  bool
	control  string
}

func newConform() *cobra.Command {
	f := &conformFlags{}
	cmd := &cobra.Command{
		Use:   "conform PLUGIN_BINARY",
		Short: "Check that a connector plugin keeps the contract",
		Args: func(cmd *cobra.Command, args []string) error {
			switch {
			case f.list && len(args) > 0:
				return fmt.Errorf("--list lists the cases of the suite and takes no plugin: leave out %q, or --list", args[0])
			case f.list:
				return nil
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
	flags.StringVar(&f.config, "config", "{}", "the plugin's kv_connector_extra_config as JSON, or @FILE; @TMP@ in it becomes a fresh folder in every case, @UNIQUE@ a fresh name, @PROXY:HOST:PORT@ a relay to that server")
	flags.StringSliceVar(&f.profiles, "profile", []string{string(conformance.Store)}, "kind of connector, whose cases must all run; one or more of "+joined(conformance.Profiles(), ", ")+"; or auto: those that fit the plugin")
	flags.StringVar(&f.format, "format", "text", "text, json (a line a case) or junit (at the end)")
	flags.DurationVar(&f.timeout, "timeout", 0, "end the run after this time, such as 10m, with the results so far and exit code 1; 0: never")
	flags.BoolVar(&f.failFast, "fail-fast", false, "end the run at the first case that failed")
	flags.StringVar(&f.log, "log", "", "write what the plugin logs, and what it writes to standard error, to this file, each line with its case")
	flags.BoolVar(&f.sandbox, "sandbox", false, "run the plugin in the sandbox that it has at trust level staged")
	flags.StringVar(&f.control, "server-control", "", "a program that changes what lies in the server of @PROXY:HOST:PORT@, and how it runs, for the cases of profile remote that need it")
	flags.StringSliceVar(&f.only, "case", nil, "run these cases only; may be repeated")
	flags.BoolVar(&f.list, "list", false, "list the cases, those of --profile if it is given, and run none")
	flags.Uint64Var(&f.seed, "seed", 1, "of sizes, orders, bytes and random histories; the same seed makes the same calls")
	flags.DurationVar(&f.budget, "budget", time.Second, "how long each of the cases named random plays histories, such as 60s; from 5s on, batches have up to 4096 keys")
	return cmd
}

// writeCases lists the cases of the profiles, or all, a line each, and their number.
func (f *conformFlags) writeCases(cmd *cobra.Command) error {
	profiles, err := f.parseProfiles()
	if err != nil {
		return err
	}
	if slices.Contains(f.profiles, auto) {
		return errors.New("--list runs no plugin, so --profile auto has nothing to look at: leave out one of them")
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
		if _, err := fmt.Fprintf(w, "%-11s %-21s %s [%s]\n", c.Rule, c.ID, c.Text, joined(c.Profiles, " ")); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(w, "%d cases\n", count)
	return err
}

func (f *conformFlags) parseProfiles() ([]conformance.Profile, error) {
	var profiles []conformance.Profile
	for _, name := range f.profiles {
		if name == auto {
			continue
		}
		p, err := conformance.ParseProfile(name)
		if err != nil {
			return nil, fmt.Errorf("--profile: %w", err)
		}
		profiles = append(profiles, p)
	}
	return profiles, nil
}

// auto is what --profile is for the profiles that fit the plugin.
const auto = "auto"

// checkOnly refuses a name in --case that no case has.
func (f *conformFlags) checkOnly(cmd *cobra.Command) error {
	if cmd.Flags().Changed("case") && len(f.only) == 0 {
		return errors.New("--case names no case; kvport conform --list lists them")
	}
	for _, id := range f.only {
		if !slices.ContainsFunc(conformance.Cases(), func(c conformance.Case) bool { return c.ID == id }) {
			return fmt.Errorf("--case: there is no case %q; kvport conform --list lists them", id)
		}
	}
	return nil
}

func joined(profiles []conformance.Profile, separator string) string {
	var names []string
	for _, p := range profiles {
		names = append(names, string(p))
	}
	return strings.Join(names, separator)
}

// checkFlags refuses what makes no sense, and gives the profiles that are named.
func (f *conformFlags) checkFlags(cmd *cobra.Command) ([]conformance.Profile, error) {
	if !slices.Contains([]string{"text", "json", "junit"}, f.format) {
		return nil, fmt.Errorf("--format is %q, want text, json or junit", f.format)
	}
	if f.timeout < 0 {
		return nil, fmt.Errorf("--timeout is %v, want 0 (none) or more", f.timeout)
	}
	if f.budget <= 0 {
		return nil, fmt.Errorf("--budget is %v, want more than 0", f.budget)
	}
	if err := f.checkOnly(cmd); err != nil {
		return nil, err
	}
	return f.parseProfiles()
}

func (f *conformFlags) run(cmd *cobra.Command, binary string) error {
	profiles, err := f.checkFlags(cmd)
	if err != nil {
		return err
	}
	config, err := readObject(f.config)
	if err == nil {
		err = reachable(cmd.Context(), config)
	}
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	if err := f.checkControl(config); err != nil {
		return fmt.Errorf("--server-control: %w", err)
	}
	// A bare name means a file here, as in every other path, not one on PATH.
	if binary, err = filepath.Abs(binary); err != nil {
		return err
	}
	// A program that cannot even say its name is not a plugin, and not worth twenty failed cases.
	manifest, err := host.ReadManifest(cmd.Context(), binary)
	if err != nil {
		return err
	}
	options := conformance.Options{Seed: f.seed, Budget: f.budget, Profiles: profiles, Only: f.only, FailFast: f.failFast}
	plugin := conformance.Binary(binary, config)
	if f.sandbox {
		plugin = conformance.Sandboxed(plugin, host.Self)
	}
	if f.control != "" {
		plugin = conformance.Controlled(plugin, f.control)
	}
	if f.log == "" {
		return f.check(cmd, manifest.Name, plugin, options)
	}
	log, err := os.OpenFile(f.log, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("--log: %w", err)
	}
	options.Log = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	err = f.check(cmd, manifest.Name, plugin, options)
	if closed := log.Close(); closed != nil && err == nil {
		return fail(fmt.Errorf("--log: %w", closed))
	}
	return err
}

// checkControl refuses a control program that is none, or has no server to change.
func (f *conformFlags) checkControl(config json.RawMessage) error {
	if f.control == "" {
		return nil
	}
	switch servers, err := conformance.Proxied(config); {
	case err != nil:
		return err
	case len(servers) == 0:
		return errors.New("--config names no server that it could change, as @PROXY:HOST:PORT@")
	case !bytes.Contains(config, []byte("@UNIQUE@")):
		return errors.New("--config has no @UNIQUE@, by which it could tell the values of a case from those of others")
	}
	path, err := filepath.Abs(f.control)
	if err == nil {
		_, err = exec.LookPath(path)
	}
	return err
}

// reachable reports what is wrong with the servers to which a config has relays: each case would accuse the plugin of that.
func reachable(ctx context.Context, config json.RawMessage) error {
	servers, err := conformance.Proxied(config)
	if err != nil {
		return err
	}
	for _, address := range servers {
		conn, err := (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "tcp", address)
		if err != nil {
			return fmt.Errorf("@PROXY:%s@: no server is there: %w", address, err)
		}
		if err := conn.Close(); err != nil {
			return err
		}
	}
	return nil
}

// suggest adds the profiles that fit the plugin, for --profile auto, and says which.
func (f *conformFlags) suggest(ctx context.Context, errs io.Writer, plugin conformance.Maker, o *conformance.Options) error {
	if !slices.Contains(f.profiles, auto) {
		return nil
	}
	fit, notes, err := conformance.Suggest(ctx, plugin, *o)
	if err != nil {
		return fmt.Errorf("--profile auto: the trial of the plugin: %w", err)
	}
	for _, p := range fit {
		if !slices.Contains(o.Profiles, p) {
			o.Profiles = append(o.Profiles, p)
		}
	}
	for _, note := range notes {
		if _, err := fmt.Fprintf(errs, "--profile auto: %s\n", note); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(errs, "profiles: %s\n", joined(o.Profiles, ","))
	return err
}

// errTimeout ends a run that took longer than --timeout.
var errTimeout = errors.New("--timeout is over")

// check runs the cases and writes what they find as they end. Whatever ends the run, its results are written.
func (f *conformFlags) check(cmd *cobra.Command, name string, plugin conformance.Maker, o conformance.Options) error {
	ctx, cancel := cmd.Context(), func() {}
	if f.timeout > 0 {
		ctx, cancel = context.WithTimeoutCause(ctx, f.timeout, errTimeout)
	}
	defer cancel()
	switch err := f.suggest(ctx, cmd.ErrOrStderr(), plugin, &o); {
	case errors.Is(err, errTimeout):
		return fail(fmt.Errorf("--timeout of %v is over: no case ran", f.timeout))
	case err != nil && ctx.Err() != nil:
		return fail(errors.New("interrupted: no case ran"))
	case err != nil:
		return fail(err)
	}
	w := cmd.OutOrStdout()
	var broken error // writing failed
	cases := 0
	o.Progress = func(r conformance.Result) {
		cases = r.Of
		if err := f.writeCase(w, r); err != nil && broken == nil {
			broken = err
			cancel()
		}
	}
	results := conformance.Check(ctx, plugin, o)
	if err := errors.Join(broken, f.writeEnd(w, name, results)); err != nil {
		return fail(err)
	}
	switch failed := conformance.Failed(results) != nil; {
	case ctx.Err() != nil && errors.Is(context.Cause(ctx), errTimeout):
		return fail(fmt.Errorf("--timeout of %v is over: %d of %d cases ran", f.timeout, len(results), max(cases, len(results))))
	case ctx.Err() != nil:
		return fail(fmt.Errorf("interrupted: %d of %d cases ran", len(results), max(cases, len(results))))
	case failed:
		return fail(errSilent)
	case slices.ContainsFunc(results, func(r conformance.Result) bool { return r.Status == conformance.Inconclusive }):
		return errInconclusive
	}
	return nil
}

// errInconclusive ends a run in which nothing failed and the machine kept cases from a verdict.
var errInconclusive = fmt.Errorf("cases stayed %w", conformance.ErrInconclusive)

// writeCase writes what can be written of a case as it ends.
func (f *conformFlags) writeCase(w io.Writer, r conformance.Result) error {
	switch {
	case f.format == "text":
		return conformance.WriteCase(w, r)
	case f.format == "json" && !r.Again:
		return conformance.WriteJSON(w, []conformance.Result{r})
	}
	return nil
}

// writeEnd writes what stands at the end.
func (f *conformFlags) writeEnd(w io.Writer, name string, results []conformance.Result) error {
	switch f.format {
	case "text":
		return conformance.WriteSummary(w, results)
	case "junit":
		return conformance.WriteJUnit(w, name, results)
	}
	return nil
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
	if syntax, is := errors.AsType[*json.SyntaxError](err); is {
		return nil, fmt.Errorf("not JSON: %w at byte %d", err, syntax.Offset)
	}
	if err != nil || object == nil {
		return nil, errors.New("want a JSON object")
	}
	return bytes.TrimSpace(data), nil
}
