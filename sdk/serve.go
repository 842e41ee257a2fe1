package sdk

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/fault"
	"github.com/kvport/kvport/internal/wire"
)

// stopTimeout is how long a plugin that must stop waits for its sides to close.
const stopTimeout = 5 * time.Second

// Serve is the whole main function of a plugin process. It serves p to the host that started the process,
// and does not return. The process ends when the host says so, hangs up or dies; it ignores SIGINT and
// SIGTERM. With --manifest it prints a description of p, and with --version the version. If a person starts
// it by hand, it explains how plugins are started and exits with code 2.
func Serve(p connector.Plugin) {
	// Descriptors that the host passed must not reach processes that the connector starts: those
	// could write into the cache after our death.
	_ = unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC) // on kernels before 5.11, shm.Map does this later
	if os.Getenv(wire.CookieKey) == wire.CookieValue && len(os.Args) == 1 {
		serve(p)
		os.Exit(0)
	}
	os.Exit(runByHand(p, os.Args, os.Stdout, os.Stderr))
}

// serve talks to the host until it hangs up.
func serve(p connector.Plugin) {
	// Service managers send SIGTERM to all processes at once. The engine then drains, for which it needs
	// this plugin, and stops the plugin when it is done.
	signal.Notify(make(chan os.Signal, 1), unix.SIGTERM)
	stderr := os.Stderr // go-plugin replaces it
	log := slog.New(newLogHandler(stderr))
	slog.SetDefault(log)
	if err := watchParent(func() { os.Exit(1) }); err != nil {
		log.Warn("cannot watch the host: if it dies, only the closed connection shows it", "error", err)
	}
	fault.Crash("sdk.serve")
	server := NewServer(p, log)
	plugin.Serve(&plugin.ServeConfig{
		HandshakeConfig: wire.Handshake(),
		Plugins:         plugin.PluginSet{wire.PluginName: &wire.Plugin{Service: server}},
		GRPCServer: func(options []grpc.ServerOption) *grpc.Server {
			return grpc.NewServer(append(options, wire.ServerOptions()...)...)
		},
		Logger: hclog.New(&hclog.LoggerOptions{Level: hclog.Info, Output: stderr, JSONFormat: true}),
	})
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if err := server.Stop(ctx); err != nil {
		log.Error("sides are still open at exit", "error", err)
	}
}

// watchParent calls gone when the parent process ends. It costs one sleeping goroutine.
func watchParent(gone func()) error {
	parent := os.Getppid()
	if parent == 0 {
		return errors.New("the parent is in another pid namespace")
	}
	fd, err := unix.PidfdOpen(parent, unix.PIDFD_NONBLOCK)
	if err != nil {
		if os.Getppid() != parent {
			gone()
		}
		return os.NewSyscallError("pidfd_open", err)
	}
	if os.Getppid() != parent { // the parent died first, so fd refers to no process or to another one
		gone()
	}
	file := os.NewFile(uintptr(fd), "parent")
	conn, err := file.SyscallConn()
	if err != nil {
		return errors.Join(err, file.Close())
	}
	go func() {
		defer file.Close()
		err := conn.Read(func(fd uintptr) bool {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			return err == nil && n > 0
		})
		if err == nil {
			gone()
		}
	}()
	return nil
}

// runByHand is the program when a person or a script starts it. It returns the exit code.
func runByHand(p connector.Plugin, args []string, stdout, stderr io.Writer) int {
	name := filepath.Base(args[0])
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	manifest := flags.Bool("manifest", false, "")
	config := flags.String("config", "", "")
	version := flags.Bool("version", false, "")
	err := flags.Parse(args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(stdout, usage(name, p))
		return 0
	case err != nil || flags.NArg() > 0 || *config != "" && !*manifest:
		if err == nil {
			err = fmt.Errorf("unexpected arguments %q", flags.Args())
		}
		fmt.Fprintf(stderr, "%s: %v\n%s", name, err, usage(name, p))
		return 2
	case *version:
		fmt.Fprintf(stdout, "%s %s (protocol %d)\n", p.Name, p.Version, wire.ProtocolVersion)
		return 0
	case *manifest:
		return printManifest(name, p, *config, stdout, stderr)
	}
	fmt.Fprint(stderr, usage(name, p))
	return 2
}

func usage(name string, p connector.Plugin) string {
	return fmt.Sprintf(`%[1]s is the KV connector %[2]s, version %[3]s, a kvport plugin (protocol %[4]d).
It does nothing by itself: an inference engine starts it, told by

  --kv-transfer-config '{"kv_connector": %[2]q, "kv_role": "kv_both"}'

%[1]s --manifest [--config JSON]   print what it can do and its config's schema, as JSON
%[1]s --version                    print its version
`, name, p.Name, p.Version, wire.ProtocolVersion)
}

// printManifest prints the manifest for a config, or in general. Without a config it describes the effect
// of an empty one, if that is valid.
func printManifest(name string, p connector.Plugin, config string, stdout, stderr io.Writer) int {
	given := config != ""
	if !given {
		config = "{}"
	}
	var info connector.Info
	err := wire.Guard(slog.New(slog.NewTextHandler(stderr, nil)), "describe", func() (err error) {
		info, err = p.Describe(context.Background(), json.RawMessage(config))
		return err
	})
	described := &info
	if err != nil {
		if given || errors.Is(err, ErrPanic) {
			fmt.Fprintf(stderr, "%s: %v\n", name, err)
			return 2
		}
		described = nil
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(wire.NewManifest(&p, described)); err != nil {
		fmt.Fprintf(stderr, "%s: manifest: %v\n", name, err)
		return 1
	}
	if _, err := stdout.Write(out.Bytes()); err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", name, err)
		return 1
	}
	return 0
}
