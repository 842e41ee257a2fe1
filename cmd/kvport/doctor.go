package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/engine/gguf"
	"github.com/kvport/kvport/engine/tokenizer"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/ticket"
)

type doctorFlags struct {
	format         string
	folders        []string
	host           string
	port           int
	model          string
	transferConfig string
}

func newDoctor() *cobra.Command {
	f := &doctorFlags{}
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check what this machine has and lacks, and how to mend it",
		Long: "Check what this machine has and lacks, and how to mend it. Give it the flags that serve will get.\n" +
			"It exits with code 1 if anything would not work.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.format, "format", "text", "text or json")
	flags.StringVar(&f.host, "host", "127.0.0.1", "address that serve will listen on")
	flags.IntVar(&f.port, "port", 0, "port that serve will listen on (default any)")
	flags.StringVar(&f.model, "model", defaultModel, "model that serve will get")
	flags.StringVar(&f.transferConfig, "kv-transfer-config", "", "connector as JSON, or @FILE with it, as serve will get it")
	addPluginPath(flags, &f.folders)
	return cmd
}

// defaultModel is where make deps puts the demo model.
const defaultModel = ".deps/model/SmolLM2-135M-Instruct.Q4_1.gguf"

func (f *doctorFlags) run(cmd *cobra.Command) error {
	if err := checkFormat(f.format); err != nil {
		return err
	}
	if f.port < 0 || f.port > 65535 {
		return fmt.Errorf("--port is %d, want 0 to 65535", f.port)
	}
	var config *host.Config
	if cmd.Flags().Changed("kv-transfer-config") {
		var err error
		if config, err = host.ParseConfig(f.transferConfig); err != nil {
			return err
		}
	}
	var checks []check
	for _, part := range []func() []check{
		func() []check { return checkKernel(cmd.Context()) }, checkCPU, checkLimits, checkSpace, checkClock,
		func() []check { return checkNative(cmd.Context()) },
		func() []check { return []check{checkSocket(), checkKey(config), f.checkPort(cmd.Context())} },
		func() []check { return f.checkModel(cmd.Flags().Changed("model")) },
		func() []check { return f.checkPlugins(cmd.Context(), config) },
	} {
		checks = append(checks, part()...)
	}
	if err := cmd.Context().Err(); err != nil {
		return fail(errors.New("interrupted"))
	}
	if err := writeChecks(cmd.OutOrStdout(), f.format, checks); err != nil {
		return fail(err)
	}
	if failed(checks) > 0 {
		return fail(errSilent)
	}
	return nil
}

// result is a check that is ok, or failed with err and to be mended as told.
func result(name, detail string, err error, mend string) check {
	if err != nil {
		return check{name, statusFail, err.Error(), mend}
	}
	return check{Check: name, Status: statusOK, Detail: detail}
}

// warn turns a failure into a warning: the machine works without.
func (c check) warn() check {
	if c.Status == statusFail {
		c.Status = statusWarn
	}
	return c
}

// checkSocket finds out where plugins' sockets would be.
func checkSocket() check {
	const name = "plugin sockets"
	dir, err := host.SocketDir()
	if err != nil {
		return result(name, "", err, "set TMPDIR to a folder that can be written to and has a short path")
	}
	if err := os.Remove(dir); err != nil {
		return result(name, "", err, "check the folder's permissions")
	}
	root := filepath.Dir(dir)
	if tmp := filepath.Clean(os.TempDir()); root != tmp {
		return check{name, statusWarn, fmt.Sprintf("in %s: TMPDIR %s cannot hold sockets (too long, or not writable)", root, tmp), "set TMPDIR to a short path if they should be elsewhere"}
	}
	return check{Check: name, Status: statusOK, Detail: "in " + root}
}

// checkKey reads the key that signs tickets, as serve would: the one that a user's engines share is
// made when it is not there.
func checkKey(config *host.Config) check {
	const name = "ticket key"
	if config != nil && config.Settings.TicketKeyFile != "" {
		_, err := ticket.LoadKey(config.Settings.TicketKeyFile)
		return result(name, config.Settings.TicketKeyFile+" is readable by its owner only", err, "make a key: head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE")
	}
	_, err := ticket.SharedKey()
	return result(name, "this user's engines share one in a private folder", err, "remove what is in its place, or set kvport.ticket_key_file in --kv-transfer-config")
}

func (f *doctorFlags) checkPort(ctx context.Context) check {
	const name = "port"
	var listen net.ListenConfig
	l, err := listen.Listen(ctx, "tcp", net.JoinHostPort(f.host, strconv.Itoa(f.port)))
	if err != nil {
		mend := "give another --port, or end the process that has it: ss -ltnp"
		if f.port == 0 {
			mend = "bring the loopback interface up: ip link set lo up"
		}
		return result(name, "", err, mend)
	}
	detail := "can listen on " + l.Addr().String()
	return result(name, detail, l.Close(), "see the message")
}

func (f *doctorFlags) checkModel(asked bool) []check {
	const name = "model"
	if f.model == "sim" || f.model == "tiny-random" {
		return []check{{Check: name, Status: statusOK, Detail: f.model + " needs no file"}}
	}
	file, err := gguf.Open(f.model)
	if err == nil {
		_, err = tokenizer.FromGGUF(file)
		err = errors.Join(err, file.Close())
	}
	if errors.Is(err, os.ErrNotExist) && !asked {
		return []check{{name, statusWarn, "there is no " + f.model, "make deps fetches it; or give --model FILE"}}
	}
	return []check{result(name, f.model+" is a GGUF file with a tokenizer", err, "give the path of a GGUF file of a Llama model; make deps fetches one")}
}

// checkPlugins starts every plugin that is found. A broken plugin fails the examination only if the
// config names it.
func (f *doctorFlags) checkPlugins(ctx context.Context, config *host.Config) []check {
	const rebuild = "rebuild it, or take it away; plugins verify says more"
	folders := pluginFolders(f.folders)
	var checks []check
	for _, found := range host.List(ctx, folders) {
		name := "plugin " + filepath.Base(found.Path)
		if found.Err != nil {
			checks = append(checks, result(name, "", found.Err, rebuild).warn())
			continue
		}
		detail, err := tryPlugin(ctx, &host.Binary{Path: found.Path, Manifest: *found.Manifest})
		checks = append(checks, result(name, detail, err, rebuild).warn())
	}
	if len(checks) == 0 {
		checks = append(checks, check{"plugins", statusWarn, fmt.Sprintf("none in %v", folders), "make build puts some beside kvport; or set KVPORT_PLUGIN_PATH"})
	}
	if config != nil {
		checks = append(checks, f.checkConfig(ctx, config))
	}
	return checks
}

// tryPlugin starts a plugin and ends it again.
func tryPlugin(ctx context.Context, b *host.Binary) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, verifyWait)
	defer cancel()
	v := &verification{binary: b}
	defer v.cleanup()
	if _, err := v.handshake(ctx); err != nil {
		return "", err
	}
	began := time.Now()
	if _, err := v.heartbeat(ctx); err != nil {
		return "", err
	}
	beat := time.Since(began).Round(time.Microsecond)
	if _, err := v.exit(ctx); err != nil {
		return "", err
	}
	return fmt.Sprintf("%s version %q starts, answers in %s and ends", b.Manifest.Name, b.Manifest.Version, beat), nil
}

// checkConfig asks the wanted plugin about its config.
func (f *doctorFlags) checkConfig(ctx context.Context, config *host.Config) check {
	const name, mend = "kv-transfer-config", "plugins describe NAME lists the fields of its config"
	b := &host.Binary{Path: config.ModulePath}
	var err error
	if config.ModulePath == "" {
		b, err = host.Find(pluginFolders(f.folders), config.Connector)
	} else if m, failure := host.ReadManifest(ctx, config.ModulePath); failure != nil {
		err = failure
	} else {
		b.Manifest = *m
	}
	if err != nil {
		return result(name, "", err, "name a plugin that plugins list shows")
	}
	if hash, err := fileHash(b.Path); err == nil && config.Settings.PluginSHA256 != "" && hash != config.Settings.PluginSHA256 {
		return result(name, "", fmt.Errorf("%s has SHA-256 %s, not kvport.plugin_sha256", b.Path, hash), "plugins verify prints the hash")
	}
	ctx, cancel := context.WithTimeout(ctx, verifyWait)
	defer cancel()
	for _, w := range config.Adopt(&b.Manifest) {
		slog.Warn("kv-transfer-config: " + w)
	}
	v := &verification{binary: b, config: config.Extra}
	defer v.cleanup()
	if _, err := v.handshake(ctx); err != nil {
		return result(name, "", err, "plugins verify says more")
	}
	detail, err := v.describe(ctx)
	return result(name, b.Manifest.Name+" accepts its config: "+detail, err, mend)
}
