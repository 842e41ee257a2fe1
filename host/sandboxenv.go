package host

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// usual begin the names of variables that a plugin in a sandbox may have although the operator lists none: those of kvport
// and of the systems that connectors speak to. A malicious manifest would name others.
func usual() []string {
	return []string{"KVPORT_", "LMCACHE_", "AIBRIX_", "VLLM_AIBRIX_", "VLLM_NIXL_", "UCX_", "NIXL_", "NCCL_", "CUDA_"}
}

// secretWords are in the names of variables with credentials. An address may have some in it.
func secretWords() []string {
	return []string{"PASSWORD", "PASSWD", "KEY", "TOKEN", "SECRET", "CREDENTIAL", "URL"}
}

// owns reports whether a variable belongs to the config's connector, so that the plugin gets it even if it is a credential or names
// a file: its first word, after KVPORT_, begins the connector's name, as REMOTE does that of a RemoteConnector. The operator has
// written that name into the config; what a manifest says does not count.
func (c *Config) owns(name string) bool {
	if !slices.ContainsFunc(usual(), func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
		return false
	}
	word, _, more := strings.Cut(strings.TrimPrefix(name, "KVPORT_"), "_")
	return more && word != "" && strings.HasPrefix(strings.ToUpper(c.Connector), word)
}

// everywhere are variables of paths that every program has.
func everywhere() []string { return []string{"HOME", "TMPDIR", "XDG_CACHE_HOME"} }

// harmless reports whether a plugin in a sandbox may have a variable that the operator does not list.
func (c *Config) harmless(name string) bool {
	within := func(part string) bool { return strings.Contains(name, part) }
	begins := func(prefix string) bool { return strings.HasPrefix(name, prefix) }
	if name == librariesPath || slices.Contains(everywhere(), name) || c.owns(name) {
		return true
	}
	return slices.ContainsFunc(usual(), begins) && !slices.ContainsFunc(secretWords(), within)
}

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
			permitted = c.harmless(name)
		}
		if _, set := os.LookupEnv(name); permitted {
			names = append(names, name)
		} else if set {
			withheld = append(withheld, name)
		}
	}
	return names, withheld
}

// librariesPath is a list of folders.
const librariesPath = "LD_LIBRARY_PATH"

// holdsPath reports whether what a variable names may be read, or written, by a plugin that gets the variable and whose
// manifest asks for that: the operator lists it, it belongs to the connector, or it names folders of libraries. Variables that
// every program has name the whole home folder, or worse.
func (c *Config) holdsPath(name string, write bool) bool {
	begins := func(prefix string) bool { return strings.HasPrefix(name, prefix) }
	switch {
	case name == librariesPath:
		return !write
	case slices.Contains(everywhere(), name), slices.Contains([]string{"PATH", "PWD", "KVPORT_PLUGIN_PATH"}, name), slices.ContainsFunc([]string{"XDG_", "LD_"}, begins):
		return false
	case slices.Contains(c.Settings.Environment, name), c.owns(name):
		return true
	}
	return !write && slices.Contains([]string{
		"KVPORT_UCX_DIR", "KVPORT_NCCL_DIR", "KVPORT_CUDA_DIR", "NIXL_LIB_DIR", "NIXL_PLUGIN_DIR", "NIXL_CONFIG_FILE",
	}, name)
}

// variable are the paths in a variable.
func variable(name string) []string {
	value := os.Getenv(name)
	if name == librariesPath {
		return filepath.SplitList(value)
	}
	return []string{value}
}
