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
type Sandbox struct{ of sandbox.Spec }

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

// SandboxSupport says what this machine's kernel can refuse to plugins, and, a line each, what it cannot.
func SandboxSupport() (has string, lacks []string) {
	s := sandbox.Probe()
	return s.String(), s.Lacks()
}

func (s *Sandbox) spec() *sandbox.Spec {
	if s == nil {
		return nil
	}
	return &s.of
}

// makeFolders makes the folders that the plugin writes: rules are for folders that exist. What cannot be made is the
// plugin's to complain about.
func (s *Sandbox) makeFolders() {
	if s == nil {
		return
	}
	for _, path := range s.of.Policy.Write {
		_ = os.MkdirAll(path, 0o700)
	}
}

// box says whether a plugin runs in a sandbox.
type box struct {
	on    bool
	why   string   // it is off
	warn  bool     // about that
	lacks []string // of one that is on: what the kernel cannot refuse
}

// box decides whether the plugin of a config runs in a sandbox. Errors wrap ErrConfig.
func (c *Config) box(kernel sandbox.Support) (box, error) {
	set := &c.Settings
	staged := set.Trust == TrustStaged
	switch {
	case set.CrossMemory:
		return box{why: "kvport.cross_memory is true", warn: true}, nil
	case set.Sandbox == SandboxOff:
		return box{why: "kvport.sandbox is off", warn: staged}, nil
	case set.Sandbox != SandboxOn && !staged:
		return box{why: "kvport.trust is in-place"}, nil
	}
	var why string
	switch {
	case c.Connector == MultiName:
		why = "a MultiConnector that is a plugin starts its children itself; without kv_connector_module_path the host starts them, each in a sandbox of its own"
	case c.trampoline == "":
		why = "this program does not say which program puts plugins into one"
	case !kernel.Any():
		why = strings.Join(kernel.Lacks(), "; ")
	}
	if why == "" {
		return box{on: true, lacks: kernel.Lacks()}, nil
	}
	if set.Sandbox == SandboxOn {
		return box{}, fmt.Errorf(`%w: kvport.sandbox: is "on", but there is none: %s`, ErrConfig, why)
	}
	return box{why: why, warn: true}, nil
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

// usual begin the names of variables that a plugin in a sandbox may have although the operator lists none: those of kvport
// and of the systems that connectors speak to. A malicious manifest would name others.
func usual() []string {
	return []string{"KVPORT_", "LMCACHE_", "AIBRIX_", "VLLM_AIBRIX_", "VLLM_NIXL_", "UCX_", "NIXL_", "NCCL_", "CUDA_"}
}

// folders are variables that a plugin may have, too. Much that is not the plugin's lies below most of them.
func folders() []string { return []string{"HOME", "TMPDIR", "XDG_CACHE_HOME", "LD_LIBRARY_PATH"} }

// environment gives the names of the variables that a plugin gets if they are set, and those that are set and that it
// does not get although its manifest names them.
func (c *Config) environment(m *Manifest, b *box) (names, withheld []string) {
	list := c.Settings.Environment
	for _, name := range m.Environment {
		permitted := true
		switch {
		case list != nil:
			permitted = slices.Contains(list, name)
		case b.on:
			permitted = slices.Contains(folders(), name) ||
				slices.ContainsFunc(usual(), func(prefix string) bool { return strings.HasPrefix(name, prefix) })
		}
		if _, set := os.LookupEnv(name); permitted {
			names = append(names, name)
		} else if set {
			withheld = append(withheld, name)
		}
	}
	return names, withheld
}

// confine is the sandbox of a plugin with those variables and needs; nil if it runs outside. The author of the needs may
// mean harm. A variable is the path of something to read if it is not a folder of everything, and of something to write
// only if the operator has listed it: the operator set the others for other programs.
func (c *Config) confine(b *box, env []string, needs connector.Needs) *Sandbox {
	if !b.on {
		return nil
	}
	allow := &c.Settings.SandboxAllow
	readable := func(name string) bool { return slices.Contains(env, name) && !slices.Contains(folders(), name) }
	writable := func(name string) bool { return readable(name) && slices.Contains(c.Settings.Environment, name) }
	return &Sandbox{sandbox.Spec{Trampoline: c.trampoline, Policy: sandbox.Policy{
		Read:    slices.Concat(absolute(allow.Read), c.paths(needs.Reads, readable)),
		Run:     absolute(allow.Run),
		Write:   slices.Concat(absolute(allow.Write), c.paths(needs.Writes, writable)),
		Network: allow.Network && needs.Network,
		Data:    uint64(allow.DataBytes),
	}}}
}

// paths are the values of some fields of the connector's config, and of those variables among them that are permitted.
func (c *Config) paths(names []string, permitted func(variable string) bool) (paths []string) {
	var fields map[string]json.RawMessage
	_ = json.Unmarshal(c.Extra, &fields) // what is no object has no fields
	for _, name := range names {
		var value string
		if raw, given := fields[name]; given {
			_ = json.Unmarshal(raw, &value) // what is no string is no path
		} else if permitted(name) {
			value = os.Getenv(name)
		}
		if value = strings.TrimPrefix(value, "file://"); value != "" {
			paths = append(paths, value)
		}
	}
	return absolute(paths)
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
