package archtest

import (
	"cmp"
	"maps"
	"slices"
)

// Policy is what the rules check against. Folders are relative to the root of the tree.
type Policy struct {
	// Imports says which folders of the module a folder may import. A row covers its folder and
	// everything below; the most specific row wins, and a folder without a row is a violation.
	// A "*" in a row stands for one path element. Folders under one row, with the same "*", may
	// import each other. An allowed folder means exactly that one, with "/..." everything below
	// too; its "*" is what the row's "*" stands for; "..." is the whole module; a leading "!"
	// takes away what stands before it.
	Imports map[string][]string
	// Tests is what the tests of any folder may import in addition to their row.
	Tests []string
	// Heavy maps an import path (and everything below) to the rows whose folders may import it.
	Heavy map[string][]string
	// StdOnly are the rows whose folders import nothing from outside the module and the standard
	// library, tests apart.
	StdOnly []string
	// Modules are the folders that may be modules of their own.
	Modules []string

	// FileLines, FunctionLines, Complexity, Parameters are the limits of every Go file that is
	// not generated.
	FileLines, FunctionLines, Complexity, Parameters int
	// Methods is the limit of an interface in the folders of Core, PublicMethods in other public
	// packages.
	Methods, PublicMethods int
	Core                   []string
	// Budgets limit the lines of several folders together.
	Budgets []Budget

	// Untyped are the files and folders where map[string]any may stand: the JSON edge.
	Untyped []string
	// Panics are the folders, apart from commands, where panic may be called.
	Panics []string
	// Names are the files apart from a connector's own that name connectors, and in how many lines. The numbers only fall: a file with
	// fewer lines is a violation too, until its number is lowered.
	Names map[string]int
	// Words says how many phrases of the word list a folder or file still has. The most specific row
	// counts; what has no row has none. A number only falls.
	Words map[string]int
}

// Budget limits the non-test, non-generated lines of some folders together.
type Budget struct {
	Name    string
	Folders []string // with everything below; "*" is one path element: then each match has the limit for itself
	Except  []string // folders that do not count
	Lines   int
}

// Kvport is the policy of this repository: DESIGN's import table and the limits of CONTRIBUTING.md.
func Kvport() *Policy {
	return &Policy{
		Imports: imports(),
		Tests:   []string{"verify/acceptance/rig", "verify/cluster", "verify/fixture", "verify/testkit", "internal/machine", "internal/keyring", "internal/ticket", "sdk", "host", "host/internal/leaktest", "conformance/...", "pipe/pipetest", "lookupbuffer/..."},
		Heavy: map[string][]string{
			"github.com/hashicorp/go-plugin": {"sdk", "host/internal/plugin", "proto", "internal/wire"},
			"google.golang.org/grpc":         {"sdk", "host", "host/internal/plugin", "proto", "internal/wire", "verify/protocol"}, // host: the connection that Connect is given
			"C":                              {"native/*"},
		},
		StdOnly: []string{"connector", "engine/kvcache", "engine/sched", "engine/sample", "internal/archtest"},
		Modules: []string{"tools"},
		Panics:  []string{"verify/simulate", "internal/shm"}, // how a coroutine of a world that is over ends; a guard passes on what is no fault of memory

		FileLines: 1000, FunctionLines: 70, Complexity: 15, Parameters: 5,
		Methods: 4, PublicMethods: 5,
		Core: []string{"connector", "pipe", "lookupbuffer", "sdk"},
		Budgets: []Budget{
			{Name: "engine core", Folders: []string{"engine/sched", "engine/kvcache", "engine/model", "engine/sample"}, Except: []string{"engine/model/kernel", "engine/model/sim"}, Lines: 2499},
			{Name: "main of a plugin", Folders: []string{"plugins/*"}, Lines: 20},
			{Name: "minimal example", Folders: []string{"examples/minimal"}, Lines: 100},
		},
		Untyped: []string{"engine/server", "engine/router", "internal/strictjson", "verify/fixture/fill.go"},
		Names:   kvportNames(),
		Words:   kvportWords(),
	}
}

// kvportWords is what is left to rewrite. TestWords says which number to lower.
func kvportWords() map[string]int {
	return map[string]int{
		"conformance/mutants": 10, // names of mutants, which verify/names keeps
	}
}

// kvportNames are the files that still name connectors.
func kvportNames() map[string]int {
	return map[string]int{
		// Examples in the documentation and a message of the shim, which can be pasted.
		"python/kvport_vllm/__init__.py": 1,
		"python/kvport_vllm/config.py":   1,
		// It runs without the repository around it.
		"verify/faultsuite/workload_test.go": 3,
	}
}

// imports are the rows of kvport, of what attacks it, and of placement.
func imports() map[string][]string {
	rows := kvportImports()
	rows["conformance/internal/model"] = []string{"connector"} // pure
	rows["verify/attack"] = []string{"internal/keyring", "internal/machine", "internal/register", "internal/sandbox", "internal/ticket", "verify/cluster", "verify/fixture"}
	rows["internal/place"] = []string{"connector"}
	rows["internal/pairid"] = nil
	rows["host"] = append(rows["host"], "internal/place")
	rows["conformance"] = append(rows["conformance"], "internal/place")
	rows["internal/storekit"] = []string{"connector"}
	rows["sdk/tier"] = []string{"connector", "internal/storekit", "internal/fault", "internal/machine", "internal/place"}
	rows["verify/simulate/clock"] = nil
	rows["verify/simulate/fleet"] = []string{"verify/simulate/clock", "engine/kvevents", "engine/router", "engine/router/policy", "internal/register"}
	rows["verify/simulate/placement"] = []string{"connector", "internal/place"}
	rows["verify/protocol"] = []string{"connector", "internal/shm", "proto/..."}
	rows["verify/attack/plugin"] = []string{"connector", "internal/digest", "sdk"}
	return rows
}

// kvportImports is the import table of DESIGN section 3.
func kvportImports() map[string][]string {
	rows := map[string][]string{
		"connector":         {},
		"proto":             {},
		"native/*":          {"native/internal/..."},
		"native/internal/*": {}, // what several bindings share

		"internal/archtest":   {},
		"verify/cluster":      {}, // runs the binaries, so it needs none of the packages
		"verify/fixture":      {},
		"verify/testkit":      {"connector", "verify/fixture"}, // what tests of several packages share
		"verify/names":        {},                              // reads the source, and builds a program of its own
		"verify/acceptance":   {"connector", "conformance/redistest", "conformance/relay", "internal/machine", "internal/zmtp", "verify/cluster", "verify/fixture", "verify/testkit"},
		"verify/faultsuite":   {"connector", "engine", "engine/model/sim", "engine/tokenizer", "host", "internal/fault"},
		"internal/sandbox":    {},
		"internal/shm":        {},
		"internal/machine":    {},
		"internal/meter":      {},
		"internal/register":   {},
		"internal/fault":      {},
		"internal/digest":     {"connector", "internal/keyring", "internal/mac"},
		"internal/mac":        {"connector"},
		"internal/eventlog":   {"connector"},
		"internal/keyring":    {"connector"},
		"internal/ticket":     {"connector", "internal/keyring"},
		"internal/tracker":    {"connector"},
		"internal/wire":       {"connector", "proto/..."},
		"internal/strictjson": {},
		"internal/zmtp":       {},
		"verify/simulate":     {"connector", "engine/kvcache", "engine/router", "engine/sched", "internal/tracker", "internal/keyring", "internal/ticket", "multiconnector"},

		"pipe":            {"connector"},
		"pipe/*":          {"connector", "pipe"},
		"pipe/shm":        {"connector", "pipe", "internal/shm"},
		"pipe/internal/*": {"connector", "pipe"}, // what several pipes share
		"pipe/ucx":        {"connector", "pipe", "pipe/internal/...", "native/ucx"},
		"pipe/nccl":       {"connector", "pipe", "pipe/internal/...", "native/nccl", "native/cuda"},
		"lookupbuffer":    {"connector", "pipe"},
		"connectors/*":    connectorImports(),

		"connectors/p2pnccl":          connectorImports("internal/register", "internal/keyring", "internal/pairid", "internal/ticket", "internal/zmtp"), // records 106 and 169
		"connectors/lmcache":          connectorImports("internal/strictjson"),                                                                          // LMCache's file suggests names, too
		"connectors/internal/*":       {"connector", "internal/storekit", "internal/fault", "internal/machine"},                                         // what several connectors share
		"connectors/internal/peerkey": {"connector", "pipe", "internal/keyring", "internal/ticket"},
		"multiconnector":              {"connector", "internal/eventlog"},

		"sdk":           {"connector", "pipe", "lookupbuffer", "proto/...", "internal/eventlog", "internal/strictjson", "internal/wire", "internal/shm", "internal/fault", "sdk/internal/..."},
		"host":          {"connector", "multiconnector", "host/internal/...", "internal/...", "!internal/archtest"},
		"host/agent":    {"connector", "host", "proto/...", "internal/machine", "internal/wire", "internal/shm"},
		"plugins":       {}, // the fixtures
		"plugins/*":     {"sdk", "connectors/*"},
		"plugins/multi": {"sdk", "host", "multiconnector"},
		"conformance":   {"connector", "docs", "pipe", "lookupbuffer", "multiconnector", "sdk", "host", "internal/digest", "internal/machine", "internal/keyring", "internal/ticket", "conformance/internal/model"},

		"sdk/internal/peer": {"connector", "pipe", "lookupbuffer", "internal/wire"},

		"host/internal/config":   {"internal/strictjson"},
		"host/internal/leaktest": {"internal/machine"},
		"host/internal/plugin":   {"connector", "host/internal/config", "proto/...", "internal/strictjson", "internal/wire", "internal/sandbox", "internal/shm", "internal/fault", "internal/machine"},

		"verify/bench":     {"...", "!connectors/...", "!plugins/...", "plugins", "!cmd/...", "!examples/..."},
		"cmd/kvport":       {"...", "!connectors/...", "!plugins/...", "!examples/..."},
		"docs":             {"verify/fixture"}, // its tests; nothing else
		"examples":         {"connector", "pipe", "lookupbuffer", "sdk"},
		"examples/demo":    {"internal/machine", "plugins", "verify/cluster", "verify/fixture"},
		"examples/minimal": {"connector", "sdk"},
	}
	maps.Copy(rows, engineImports())
	return rows
}

// connectorImports is what a connector may import, and more that one of them needs.
func connectorImports(more ...string) []string {
	return append([]string{"connector", "connectors/internal/...", "sdk/tier", "internal/storekit", "pipe/...", "lookupbuffer/...", "native/...", "internal/fault"}, more...)
}

// engineImports are the rows of the engine.
func engineImports() map[string][]string {
	host := []string{"connector", "host", "internal/fault", "internal/meter"}
	return map[string][]string{
		"engine":                  slices.Concat(host, engineParts()),
		"engine/*":                host,
		"engine/apikeys":          {"connector", "engine/router/admission", "internal/keyring", "internal/strictjson"},
		"engine/gguf":             {},
		"engine/kvcache":          {"connector"},
		"engine/kvevents":         {"internal/meter", "internal/strictjson", "internal/zmtp"},
		"engine/model":            {"connector", "engine/gguf", "engine/model/kernel", "internal/fault"},
		"engine/model/kernel":     {"engine/gguf"},
		"engine/model/sim":        {"connector", "engine/model"},
		"engine/router":           {"connector", "engine/apikeys", "engine/kvevents", "engine/router/...", "internal/meter", "internal/pairid", "internal/register"},
		"engine/router/admission": {}, // pure
		"engine/router/kvindex":   {"engine/kvevents"},
		"engine/router/policy":    {"internal/strictjson", "engine/router/internal/fairlru"}, // pure: no clock, no lock, no I/O

		"engine/router/internal/fairlru": {},

		"engine/sample":    {},
		"engine/sched":     {"connector", "engine/kvcache"},
		"engine/server":    slices.Concat(host, engineParts(), []string{"engine", "engine/apikeys", "engine/router/admission", "internal/pairid"}),
		"engine/tokenizer": {"engine/gguf"},
	}
}

// engineParts are the packages that the engine's loop and its HTTP front put together.
func engineParts() []string {
	return []string{"engine/gguf", "engine/kvcache", "engine/kvevents", "engine/model", "engine/model/sim", "engine/sample", "engine/sched", "engine/tokenizer"}
}

// sortedKeys makes walks over a map the same in every run.
func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// declaring are the types whose literals name a connector: connector.Plugin and sdk.Definition.
var declaring = []string{"Plugin", "Definition"}
