package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/engine/gguf"
	"github.com/kvport/kvport/engine/model/kernel"
	"github.com/kvport/kvport/engine/tokenizer"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/mac"
	"github.com/kvport/kvport/internal/machine"
	"github.com/kvport/kvport/native/cuda"
	"github.com/kvport/kvport/native/nccl"
	"github.com/kvport/kvport/native/nixl"
	"github.com/kvport/kvport/native/ucx"
)

type doctorFlags struct {
	format         string
	folders        []string
	host           string
	port           int
	model          string
	transferConfig string
	tls            tlsFiles
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
	f.tls.addTLS(cmd)
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
		func() []check {
			return []check{checkSocket(), checkKey(config), f.checkPort(cmd.Context()), f.checkTLS(time.Now())}
		},
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
	if failed(checks) {
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

// checkKey reads the key that signs tickets, as serve would. It does not make the one that a user's engines share.
func checkKey(config *host.Config) check {
	const name = "ticket key"
	path, whose, mend := "", "this user's engines share", "remove what is in its place, or set kvport.ticket_key_file in --kv-transfer-config"
	if config != nil && config.Settings.TicketKeyFile != "" {
		path, whose, mend = config.Settings.TicketKeyFile, "kvport.ticket_key_file names", "see the message; kvport keys init --file FILE makes a file with a key"
	}
	shared := path == ""
	var err error
	if shared {
		if path, err = keyring.SharedPath(); err != nil {
			found := result(name, "", err, mend)
			if !keyring.HasShared() {
				found.Detail = "an engine has a key of its own, and does not start where others need the same (kv_producer, kv_consumer, stores that engines share): " + found.Detail
				found = found.warn()
			}
			return found
		}
	}
	ring, err := keyring.Load(path)
	if shared && errors.Is(err, fs.ErrNotExist) {
		return check{Check: name, Status: statusOK, Detail: "the first engine makes the one that this user's engines share: " + path}
	}
	if err != nil {
		return result(name, "", err, mend)
	}
	ids := ring.IDs()
	return result(name, fmt.Sprintf("%s %s, which only its owner can read: %s signs, %d read (%s)",
		whose, path, ids[0], len(ids), strings.Join(ids, " ")), nil, mend)
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

// checkTLS says whether the port will speak HTTPS, and with which certificate.
func (f *doctorFlags) checkTLS(now time.Time) check {
	const name, mend = "tls", "see the message"
	if err := f.tls.check(serverTLS()); err != nil {
		return result(name, "", err, mend)
	}
	if f.tls.cert == "" {
		off := check{Check: name, Status: statusOK, Detail: "off: the port speaks HTTP, on loopback alone"}
		if addr, err := net.ResolveTCPAddr("tcp", net.JoinHostPort(f.host, "0")); err == nil && !addr.IP.IsLoopback() {
			off = check{name, statusWarn, "off: API keys, prompts and answers cross the network in clear text", "give --tls-cert-file and --tls-key-file, or have a proxy in front that encrypts"}
		}
		return off
	}
	config, err := f.tls.server()
	if err != nil {
		return result(name, "", err, mend)
	}
	leaf := config.Certificates[0].Leaf
	if now.Before(leaf.NotBefore) || now.After(leaf.NotAfter) {
		err = fmt.Errorf("the certificate %s is valid from %s to %s", f.tls.cert, leaf.NotBefore.Format(time.RFC3339), leaf.NotAfter.Format(time.RFC3339))
	}
	detail := fmt.Sprintf("on: %s is valid until %s", f.tls.cert, leaf.NotAfter.Format(time.RFC3339))
	if config.ClientCAs != nil {
		detail += ", and clients need a certificate"
	}
	return result(name, detail, err, "get a new certificate, or set the clock")
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
		checks = append(checks, f.checkConfig(ctx, config)...)
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
func (f *doctorFlags) checkConfig(ctx context.Context, config *host.Config) []check {
	v := &verification{config: config.Extra}
	defer v.cleanup()
	c := f.describe(ctx, config, v)
	if c.Status != statusOK {
		return []check{c}
	}
	return []check{c, checkDigests(&config.Settings, &v.info, mac.Implementation())}
}

// checkDigests says how digests are made, and whether other machines that see the blocks can have the key. Which keys a
// store's blocks were made with is known only when they are loaded: see kvport_digest_misses_total.
func checkDigests(s *host.Settings, info *connector.Info, by string) check {
	const name = "digests"
	store := "only this machine sees what is stored"
	if info.BeyondMachine != "" {
		store = "other machines may see what is stored (" + info.BeyondMachine + ")"
	}
	if path, err := keyring.SharedPath(); err == nil && s.TicketKeyFile == "" && s.Digest != host.DigestXXH3 && info.Scope > connector.ScopeEngine {
		store += "; engines of other users and in containers that lack " + path + " have another key and cannot use it, unless kvport.ticket_key_file names one for all"
	}
	if s.Digest == host.DigestXXH3 {
		return check{
			name, statusWarn, "xxh3: they find damage, and whoever can write a store can forge them; " + store,
			"leave out kvport.digest, and give all machines that share a store the same kvport.ticket_key_file",
		}
	}
	if err := s.CheckShared(info); err != nil {
		return result(name, "", err, "kvport keys init --file FILE makes a file of keys; name its copy on each machine in kvport.ticket_key_file")
	}
	if by == "portable" {
		return check{name, statusWarn, "keyed, but slow: this CPU has no AES instructions that kvport uses; " + store, `set kvport.digest to "xxh3" if that costs too much: it finds damage, but not forgery`}
	}
	return check{Check: name, Status: statusOK, Detail: fmt.Sprintf("keyed (%s): the first of the ticket keys makes them; %s", by, store)}
}

// describe starts the wanted plugin in v and asks it about its config.
func (f *doctorFlags) describe(ctx context.Context, config *host.Config, v *verification) check {
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
	v.binary, v.config = b, config.Extra
	if _, err := v.handshake(ctx); err != nil {
		return result(name, "", err, "plugins verify says more")
	}
	detail, err := v.describe(ctx)
	return result(name, b.Manifest.Name+" accepts its config: "+detail, err, mend)
}

// status is the outcome of one check.
type status string

// The outcomes.
const (
	statusOK   status = "ok"
	statusWarn status = "warn" // works, with the limits that the detail names
	statusFail status = "fail"
)

// check is a line of doctor and of plugins verify.
type check struct {
	Check  string `json:"check"`
	Status status `json:"status"`
	Detail string `json:"detail"`
	Mend   string `json:"mend,omitempty"` // what to do; set unless all is well
}

// checkFormat refuses other values of --format.
func checkFormat(format string) error {
	if format != "text" && format != "json" {
		return fmt.Errorf("--format is %q, want text or json", format)
	}
	return nil
}

// writeChecks prints a line a check, and in text its mend on a line below.
func writeChecks(w io.Writer, format string, checks []check) error {
	if format == "json" {
		return writeJSONLines(w, checks)
	}
	width := 0
	for _, c := range checks {
		width = max(width, len(c.Check))
	}
	for _, c := range checks {
		if _, err := fmt.Fprintf(w, "%-4s  %-*s  %s\n", c.Status, width, c.Check, printable(c.Detail)); err != nil {
			return err
		}
		if c.Mend == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "      %-*s  mend: %s\n", width, "", printable(c.Mend)); err != nil {
			return err
		}
	}
	return nil
}

func writeJSONLines[T any](w io.Writer, rows []T) error {
	out := json.NewEncoder(w)
	for _, row := range rows {
		if err := out.Encode(row); err != nil {
			return err
		}
	}
	return nil
}

// failed reports whether one of the checks did not pass.
func failed(checks []check) bool {
	return slices.ContainsFunc(checks, func(c check) bool { return c.Status == statusFail })
}

// printable makes one line of what a plugin says about itself, without characters that control the terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, s)
}

// probeWait is how long the look at one library may take: NIXL's UCX starts in half a second on a quiet machine.
const probeWait = 20 * time.Second

// probe looks at one library.
type probe struct {
	name string
	run  func() check
}

// probes are the libraries that connectors may move blocks with, in the order of doctor's lines.
func probes() []probe {
	return []probe{{"nixl", probeNIXL}, {"ucx", probeUCX}, {"cuda", probeCUDA}, {"nccl", probeNCCL}}
}

// checkNative says which libraries this host can use and why not the others. Each is loaded in a process of its
// own: they write to stderr, start threads, and may crash.
func checkNative(ctx context.Context) []check {
	var checks []check
	for _, p := range probes() {
		checks = append(checks, probeApart(ctx, p.name))
	}
	return checks
}

func probeApart(ctx context.Context, name string) check {
	ctx, cancel := context.WithTimeout(ctx, probeWait)
	defer cancel()
	const mend = "only connectors that use it are concerned; kvport probe " // and the name
	exe, err := os.Executable()
	if err != nil {
		return check{name, statusWarn, err.Error(), mend + name}
	}
	cmd := exec.CommandContext(ctx, exe, "probe", name)
	cmd.Args[0] = os.Args[0]
	cmd.WaitDelay = time.Second
	var out, said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &said
	var c check
	err = cmd.Run()
	if err == nil {
		err = json.Unmarshal(out.Bytes(), &c)
	}
	if err != nil {
		last := strings.TrimSpace(said.String())
		last = last[strings.LastIndexByte(last, '\n')+1:]
		return check{name, statusWarn, fmt.Sprintf("looking at it failed: %v: %s", err, last), mend + name + " shows all of it"}
	}
	return c
}

// newProbe is the process of probeApart.
func newProbe() *cobra.Command {
	var names []string
	for _, p := range probes() {
		names = append(names, p.name)
	}
	return &cobra.Command{
		Use:    "probe NAME",
		Short:  "Look at one of the libraries that doctor looks at, with all that it says",
		Hidden: true,
		Args:   cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs), ValidArgs: names,
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, p := range probes() {
				if p.name == args[0] {
					if err := writeJSONLines(cmd.OutOrStdout(), []check{p.run()}); err != nil {
						return fail(err)
					}
				}
			}
			return nil
		},
	}
}

// missing is the line of a library that cannot be loaded: its error says what to do.
func missing(name string, err error) check {
	c := check{name, statusWarn, err.Error(), "see the message"}
	var n *nixl.LoadError
	var u *ucx.LoadError
	var d *cuda.LoadError
	var l *nccl.LoadError
	switch {
	case errors.As(err, &n):
		c.Mend = n.Mend
	case errors.As(err, &u):
		c.Mend = u.Mend
	case errors.As(err, &d):
		c.Mend = d.Mend
	case errors.As(err, &l):
		c.Mend = l.Mend
	}
	c.Detail = strings.TrimSuffix(c.Detail, ": "+c.Mend)
	return c
}

// tried sorts names by whether they worked. What each would need is in brackets.
func tried(names []string, needs map[string]string, try func(name string) error) string {
	var here, not []string
	for _, name := range names {
		if err := try(name); err == nil {
			here = append(here, name)
		} else {
			not = append(not, strings.TrimSuffix(fmt.Sprintf("%s (%s)", name, needs[name]), " ()"))
		}
	}
	text := strings.Join(here, ", ")
	if len(here) == 0 {
		text = "none"
	}
	if len(not) > 0 {
		text += "; not here: " + strings.Join(not, ", ")
	}
	return text
}

func probeNIXL() check {
	const name = "nixl"
	lib, err := nixl.Open("")
	if err != nil {
		return missing(name, err)
	}
	agent, err := lib.NewAgent("doctor", nixl.Options{})
	if err != nil {
		return check{name, statusWarn, err.Error(), "see the message"}
	}
	backends := tried([]string{"UCX", "POSIX", "GDS"}, map[string]string{"GDS": "needs an NVIDIA GPU with GPUDirect Storage"}, func(backend string) error {
		// So UCX opens no port.
		if err := errors.Join(os.Setenv("UCX_TLS", ucx.SharedMemory), os.Setenv("UCX_POSIX_ERROR_HANDLING", "y")); err != nil {
			return err
		}
		_, err := agent.Backend(backend, nil)
		return err
	})
	if err := agent.Close(); err != nil {
		return check{name, statusWarn, err.Error(), "see the message"}
	}
	return check{Check: name, Status: statusOK, Detail: fmt.Sprintf("%s, backends: %s", lib.Path(), backends)}
}

func probeUCX() check {
	const name = "ucx"
	lib, err := ucx.Open("")
	if err != nil {
		return missing(name, err)
	}
	needs := map[string]string{
		"cma": "needs leave to read another process's memory: kernel.yama.ptrace_scope, container capabilities",
		"rc":  "needs an RDMA device, without which UCX moves nothing between machines by default", "cuda_ipc": "needs an NVIDIA GPU",
	}
	transports := tried([]string{"cma", "posix", "rc", "cuda_ipc"}, needs, func(transport string) error {
		w, err := lib.NewWorker(ucx.Options{Transports: transport})
		if err != nil {
			return err
		}
		return w.Close()
	})
	return check{Check: name, Status: statusOK, Detail: fmt.Sprintf("%s %s, transports: %s; over tcp it authenticates nobody, so connectors use that only where ucx_tcp is trusted-network",
		lib.Version(), lib.Path(), transports)}
}

func probeCUDA() check {
	const name = "cuda"
	lib, err := cuda.Open("")
	if err != nil {
		return missing(name, err)
	}
	n, err := lib.Devices()
	if err != nil {
		return check{name, statusWarn, err.Error(), "nothing, unless this host has an NVIDIA GPU: then install its driver"}
	}
	return check{Check: name, Status: statusOK, Detail: fmt.Sprintf("%s, devices: %d", lib.Path(), n)}
}

func probeNCCL() check {
	const name = "nccl"
	lib, err := nccl.Open("")
	if err != nil {
		return missing(name, err)
	}
	version, err := lib.Version()
	if err != nil {
		return check{name, statusWarn, err.Error(), "see the message"}
	}
	return check{Check: name, Status: statusOK, Detail: fmt.Sprintf("%s %s; it works only with a device of cuda", version, lib.Path())}
}

// checkKernel tries each thing that kvport asks of the kernel.
func checkKernel(ctx context.Context) []check {
	const newer = "use Linux 5.10 or newer; in a container, let its seccomp profile pass the call"
	release := "unknown"
	var name unix.Utsname
	if err := unix.Uname(&name); err == nil {
		release = unix.ByteSliceToString(name.Release[:])
	}
	region, err := host.NewRegion(int64(os.Getpagesize()))
	if err == nil {
		err = region.Close()
	}
	checks := []check{
		{Check: "kernel", Status: statusOK, Detail: "Linux " + release + " " + runtime.GOARCH},
		result("memfd seals", "memfd_create and F_ADD_SEALS work", err, newer),
		result("vectored I/O", "preadv and pwritev work", tryVectors(), newer),
		checkProc(),
		checkSandbox(),
		checkMemfdExec(),
	}
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err == nil {
		err = unix.Close(fd)
	}
	checks = append(checks, result("pidfd", "pidfd_open works", err, newer).warn())
	return append(checks, result("death signal", "PR_SET_PDEATHSIG works: plugins die with their engine", tryDeathSignal(ctx), newer))
}

// tryDeathSignal starts this program as plugins are started.
func tryDeathSignal(ctx context.Context) error {
	runtime.LockOSThread() // the child would die with the thread
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "--version")
	cmd.Args[0] = os.Args[0]
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return cmd.Run()
}

// tryVectors writes and reads several spans at once.
func tryVectors() error {
	fd, err := unix.MemfdCreate("kvport-doctor", unix.MFD_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("memfd_create", err)
	}
	defer unix.Close(fd)
	spans := [][]byte{[]byte("ab"), []byte("cd")}
	if n, err := unix.Pwritev(fd, spans, 0); err != nil || n != 4 {
		return fmt.Errorf("pwritev wrote %d of 4 bytes: %w", n, err)
	}
	if n, err := unix.Preadv(fd, spans, 0); err != nil || n != 4 {
		return fmt.Errorf("preadv read %d of 4 bytes: %w", n, err)
	}
	return nil
}

func checkProc() check {
	_, err := os.ReadDir("/proc/self/fd")
	if err == nil {
		_, err = os.Stat("/proc/meminfo")
	}
	return result("/proc", "is mounted", err, "mount it: mount -t proc none /proc")
}

// checkSandbox: what a plugin at trust level staged is held back from.
func checkSandbox() check {
	const name, mend = "sandbox", "use Linux 6.12 or newer with lsm=landlock; in a container, let its seccomp profile pass landlock_create_ruleset and seccomp"
	has, lacks := host.SandboxSupport()
	if len(lacks) > 0 {
		return check{name, statusWarn, has + ": " + strings.Join(lacks, "; "), mend}
	}
	return check{Check: name, Status: statusOK, Detail: has + ": plugins at trust level staged run in it"}
}

// checkMemfdExec: pinned plugins are run from sealed memory.
func checkMemfdExec() check {
	const name = "pinned plugins"
	data, err := os.ReadFile("/proc/sys/vm/memfd_noexec") // absent before Linux 6.3
	if level := strings.TrimSpace(string(data)); err == nil && level != "0" {
		return check{name, statusWarn, "vm.memfd_noexec is " + level + ": kvport.plugin_sha256 may not work", "sysctl vm.memfd_noexec=0"}
	}
	return check{Check: name, Status: statusOK, Detail: "programs in sealed memory may be run"}
}

// checkCPU says which kernels a model would run on and measures them on a small product.
func checkCPU() []check {
	c, err := kernel.New(kernel.Options{})
	if err != nil {
		return []check{result("cpu", "", err, "report it as a bug")}
	}
	defer c.Close()
	speed, err := multiplySpeed(c)
	if err != nil {
		return []check{result("cpu", "", err, "free some memory")}
	}
	detail := fmt.Sprintf("%s kernels, %d threads, about %.3g GFLOP/s", c.ISA(), c.Threads(), speed)
	if c.ISA() == kernel.Portable {
		const mend = "run on an x86-64 CPU with AVX2 and FMA, or AVX-512; --model sim and tiny-random work anywhere"
		return []check{{"cpu", statusWarn, detail + ": the portable kernels have the same bits and are too slow to serve a real model", mend}}
	}
	return []check{{Check: "cpu", Status: statusOK, Detail: detail}}
}

// multiplySpeed is what a matrix product reaches, in 1e9 floating point operations a second.
func multiplySpeed(c *kernel.Compute) (float64, error) {
	const rows, n, k, least = 16, 256, 256, 20 * time.Millisecond
	memory, err := kernel.NewMemory(kernel.MatrixBytes(n, k, kernel.F32))
	if err != nil {
		return 0, err
	}
	defer memory.Close()
	w := c.Pack(memory, n, k, kernel.F32, func(dst []float32, row int) {
		for i := range dst {
			dst[i] = float32((row+i)%7) - 3
		}
	})
	x, y := make([]float32, rows*k), make([]float32, rows*w.Stride())
	for i := range x {
		x[i] = float32(i%5) - 2
	}
	began, done := time.Now(), 0
	for ; done == 0 || time.Since(began) < least; done++ {
		c.MatMul(y, x, rows, w)
	}
	return float64(2*rows*n*k*done) / time.Since(began).Seconds() / 1e9, nil
}

// What an engine and its plugin want.
const (
	leastFiles, goodFiles = 128, 1024
	goodLocked            = 64 << 20 // bytes
	leastSpace, goodSpace = 1 << 20, 1 << 30
	leastMemory           = 256 << 20
)

// checkLimits looks at how much a process may have: less than least fails, and less than good has a consequence.
func checkLimits() []check {
	var checks []check
	for _, want := range []struct {
		resource    int
		name, limit string
		least, good uint64
		consequence string
		mend        string
	}{
		{unix.RLIMIT_NOFILE, "open files", "RLIMIT_NOFILE", leastFiles, goodFiles, ": each request and each plugin session takes one", "ulimit -n 65536, or LimitNOFILE= in the systemd unit"},
		{unix.RLIMIT_MEMLOCK, "locked memory", "RLIMIT_MEMLOCK", 0, goodLocked, " bytes: connectors that register memory with a network card cannot", "ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit; not needed for stores"},
		{unix.RLIMIT_FSIZE, "file size", "RLIMIT_FSIZE", 0, goodSpace, " bytes: larger caches and blocks cannot be written", "ulimit -f unlimited"},
	} {
		var l unix.Rlimit
		err := unix.Getrlimit(want.resource, &l)
		c := result(want.name, want.limit+" is "+limit(l.Cur), err, want.mend)
		switch {
		case err != nil:
		case l.Cur < want.least:
			c.Status, c.Mend = statusFail, want.mend
		case l.Cur < want.good:
			c = check{want.name, statusWarn, c.Detail + want.consequence, want.mend}
		}
		checks = append(checks, c)
	}
	return checks
}

func limit(n uint64) string {
	if n == unix.RLIM_INFINITY {
		return "unlimited"
	}
	return strconv.FormatUint(n, 10)
}

// checkSpace looks at the room for caches (memory) and for what plugins and tests write.
func checkSpace() []check {
	checks := []check{checkMemory()}
	folders := []string{os.TempDir()}
	if _, err := os.Stat("/dev/shm"); err == nil {
		folders = append(folders, "/dev/shm")
	}
	for _, folder := range folders {
		name := "space in " + filepath.Clean(folder)
		var st unix.Statfs_t
		if err := unix.Statfs(folder, &st); err != nil {
			checks = append(checks, result(name, "", err, "set TMPDIR to a folder that exists"))
			continue
		}
		free := st.Bavail * uint64(st.Bsize)
		c := check{Check: name, Status: statusOK, Detail: size(free) + " free"}
		const mend = "free some space, or point TMPDIR and the connectors' folders elsewhere"
		switch {
		case free < leastSpace && folder == folders[0]:
			c.Status, c.Mend = statusFail, mend
		case free < goodSpace:
			c.Status, c.Mend = statusWarn, mend
		}
		checks = append(checks, c)
	}
	return checks
}

// checkMemory: a cache is memory that is taken at start.
func checkMemory() check {
	const name, mend = "memory", "free some, raise the container's limit, or give serve a small --num-blocks"
	available, _ := machine.Memory("/", "MemAvailable")
	detail := size(uint64(available)) + " available"
	if room := machine.GroupMemory("/"); room < available {
		available, detail = room, size(uint64(room))+" left to this control group"
	}
	if available < leastMemory {
		return check{name, statusWarn, detail, mend}
	}
	return check{Check: name, Status: statusOK, Detail: detail}
}

func size(n uint64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	f, i := float64(n), 0
	for ; f >= 1024 && i < len(units)-1; i++ {
		f /= 1024
	}
	return fmt.Sprintf("%.4g %s", f, units[i])
}

// firstYear is when kvport began.
const firstYear = 2026

// checkClock: certificates between engine and plugin want a clock that is roughly right; leases are
// durations and do not mind.
func checkClock() []check {
	const name, mend = "clock", "set the time, best by NTP: timedatectl set-ntp true"
	now := time.Now()
	if now.Year() < firstYear {
		return []check{{name, statusFail, "it is " + now.UTC().Format(time.RFC3339) + ", before this program was written", mend}}
	}
	var t unix.Timex
	state, err := unix.Adjtimex(&t)
	const unsynchronised = 5 // TIME_ERROR
	detail := now.UTC().Format(time.RFC3339)
	if err == nil && state == unsynchronised {
		return []check{{name, statusWarn, detail + ", the kernel does not know it synchronised; on one machine that does not matter", mend}}
	}
	return []check{{Check: name, Status: statusOK, Detail: detail}}
}
