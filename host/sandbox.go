package host

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/sandbox"
)

// Self is the path by which a program that calls [SandboxMain] names itself in [Config.SandboxedBy].
const Self = sandbox.Self

// SandboxMain must be the first that the main function of a program calls which gives itself to
// [Config.SandboxedBy]: the program is started again to put plugins into their sandbox, and does not come back from
// this call then. Otherwise it does nothing.
func SandboxMain() { sandbox.Main() }

// SandboxedBy says that plugins get into their sandbox by a program which calls [SandboxMain] first, such as [Self] or
// a kvport binary. Without it there is no sandbox. It holds for all children of a MultiConnector, too.
func (c *Config) SandboxedBy(program string) {
	c.trampoline = program
	for _, child := range c.Children {
		child.SandboxedBy(program)
	}
}

// Sandbox is what a plugin process is confined to. It may be nil: then the process is not confined.
type Sandbox struct {
	of      sandbox.Spec
	env     []string // names of the variables that the plugin may have
	folders []string // that the plugin writes, and that are made before it starts
}

// NewSandbox is the sandbox in which a host runs a plugin with that manifest for that config. It is nil where the
// plugin runs outside one. Errors wrap ErrConfig.
func NewSandbox(c *Config, m *Manifest) (*Sandbox, error) {
	b, err := c.box(sandbox.Probe())
	if err != nil {
		return nil, err
	}
	env, _ := c.environment(m, &b)
	s := c.confine(&b, env, m.Needs)
	s.makeFolders()
	return s, nil
}

// SandboxSupport says what this machine's kernel can refuse to plugins, and, a line each, what it cannot refuse to those without a
// network either.
func SandboxSupport() (has string, lacks []string) {
	s := sandbox.Probe()
	return s.String(), s.Lacks(false)
}

func (s *Sandbox) spec() *sandbox.Spec {
	if s == nil {
		return nil
	}
	return &s.of
}

// permitted are those of some variables that the process may have.
func (s *Sandbox) permitted(env []string) []string {
	if s == nil {
		return env
	}
	return slices.DeleteFunc(slices.Clone(env), func(name string) bool { return !slices.Contains(s.env, name) })
}

// makeFolders makes the folders that the plugin writes: rules are for folders that exist. Of what the operator permits only
// what ends in a slash is known to be a folder. What cannot be made is the plugin's to complain about.
func (s *Sandbox) makeFolders() {
	if s == nil {
		return
	}
	for _, path := range s.folders {
		_ = os.MkdirAll(path, 0o700)
	}
}

// box says whether a plugin runs in a sandbox.
type box struct {
	on     bool
	why    string // it is off
	warn   bool   // about that
	kernel sandbox.Support
	lacks  []string // of one that is on: what the kernel cannot refuse
}

// box decides whether the plugin of a config runs in a sandbox. Errors wrap ErrConfig.
func (c *Config) box(kernel sandbox.Support) (box, error) {
	set := &c.Settings
	staged := set.Trust == TrustStaged
	switch {
	case set.CrossMemory:
		return box{why: "kvport.cross_memory is true", warn: true, kernel: kernel}, nil
	case set.Sandbox == SandboxOff:
		return box{why: "kvport.sandbox is off", warn: staged, kernel: kernel}, nil
	case set.Sandbox != SandboxOn && !staged:
		return box{why: "kvport.trust is in-place", kernel: kernel}, nil
	}
	var why string
	switch {
	case c.Connector == MultiName:
		why = "a MultiConnector that is a plugin starts its children itself; without kv_connector_module_path the host starts them, each in a sandbox of its own"
	case c.trampoline == "":
		why = "this program does not say which program puts plugins into one"
	case !kernel.Any(), set.Sandbox == SandboxOn && !kernel.Confines():
		why = strings.Join(kernel.Lacks(false), "; ")
	}
	if why == "" {
		return box{on: true, kernel: kernel, lacks: kernel.Lacks(false)}, nil
	}
	if set.Sandbox == SandboxOn {
		return box{}, fmt.Errorf(`%w: kvport.sandbox: is "on", but there is none that keeps files and memory from a plugin: %s`, ErrConfig, why)
	}
	return box{why: why, warn: true, kernel: kernel}, nil
}

// settle says which needs the plugin has that runs in it: to a network the kernel may have less to say.
func (b *box) settle(c *Config, needs *connector.Needs) {
	if b.on {
		b.lacks = b.kernel.Lacks(c.online(needs))
	}
}

// state is what Health says.
func (b *box) state() (state string, lacks []string) {
	switch {
	case !b.on:
		return "off", []string{b.why}
	case len(b.lacks) > 0:
		return "partial", b.lacks
	}
	return "on", nil
}

// tell logs, once, what an operator must know of the sandbox, and which variables a plugin does not get. log may be nil.
func (b *box) tell(log *slog.Logger, name string, withheld []string) {
	if log == nil {
		return
	}
	if !b.on && b.warn {
		log.Warn("the plugin runs outside the sandbox: it can do all that this user can", "connector", name, "reason", b.why)
	}
	if b.on && len(b.lacks) > 0 {
		log.Warn("this kernel has only a part of the sandbox", "connector", name, "lacks", b.lacks)
	}
	if len(withheld) > 0 {
		log.Warn("the plugin does not get variables that its manifest names: kvport.environment permits them", "connector", name, "variables", withheld)
	}
}

// search is the sandbox in which files of the plugin folders that may be any connector's are asked for their names: one of them may be a plugin that is
// trusted less than the one which is looked for. It is nil where there is none.
func (c *Config) search(kernel *sandbox.Support) *sandbox.Spec {
	if c.trampoline == "" || !kernel.Any() {
		return nil
	}
	return &sandbox.Spec{Trampoline: c.trampoline, Policy: sandbox.Policy{Run: absolute(c.Settings.SandboxAllow.Run)}}
}

// confine is the sandbox of a plugin with those variables and needs; nil if it runs outside.
func (c *Config) confine(b *box, env []string, needs connector.Needs) *Sandbox {
	if !b.on {
		return nil
	}
	allow := &c.Settings.SandboxAllow
	reads, readSockets := c.places(needs.Reads, env, false)
	writes, writeSockets := c.places(needs.Writes, env, true)
	return &Sandbox{
		env:     env,
		folders: slices.Concat(slices.DeleteFunc(slices.Clone(allow.Write), func(path string) bool { return !strings.HasSuffix(path, "/") }), writes),
		of: sandbox.Spec{Trampoline: c.trampoline, Policy: sandbox.Policy{
			Read:    slices.Concat(absolute(allow.Read), reads),
			Run:     absolute(allow.Run),
			Write:   slices.Concat(absolute(allow.Write), writes),
			Connect: slices.Concat(readSockets, writeSockets),
			Network: c.online(&needs),
			Data:    uint64(allow.DataBytes),
		}},
	}
}

// online reports whether a plugin with those needs has a network in its sandbox.
func (c *Config) online(needs *connector.Needs) bool {
	return c.Settings.SandboxAllow.Network && needs.Network
}

// places are the paths, and the paths of sockets, in some fields of the connector's config and in variables that the plugin gets.
// URLs of servers are none.
func (c *Config) places(names, env []string, write bool) (paths, sockets []string) {
	var fields map[string]json.RawMessage
	_ = json.Unmarshal(c.Extra, &fields) // what is no object has no fields
	for _, name := range names {
		var values []string
		if raw, given := fields[name]; given {
			var value string
			_ = json.Unmarshal(raw, &value) // what is no string is no path
			values = []string{value}
		} else if slices.Contains(env, name) && c.holdsPath(name, write) {
			values = variable(name)
		}
		for _, value := range values {
			switch scheme, rest, isURL := strings.Cut(value, "://"); {
			case isURL && scheme == "unix" && rest != "":
				sockets = append(sockets, rest)
			case isURL && scheme == "file" && rest != "":
				paths = append(paths, rest)
			case !isURL && value != "":
				paths = append(paths, value)
			}
		}
	}
	return absolute(paths), absolute(sockets)
}

// absolute makes paths begin at the root: a plugin runs in the working folder of this process.
func absolute(paths []string) []string {
	out := make([]string, len(paths))
	for i, path := range paths {
		out[i] = path
		if abs, err := filepath.Abs(path); err == nil {
			out[i] = abs
		}
	}
	return out
}
