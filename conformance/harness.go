package conformance

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kvport/kvport/conformance/relay"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
)

// A Harness starts a connector with one config. Every case gets its own.
type Harness interface {
	// Start starts the connector for one engine whose ranks have size bytes of cache each.
	Start(ctx context.Context, ranks int, size int64) (*Instance, error)
	// Config is the connector's config, a JSON object.
	Config() json.RawMessage
	// Close removes what the harness made, after the last Instance was closed.
	Close() error
}

// Maker makes a Harness for one case.
type Maker func() (Harness, error)

// Instance is one started connector: what an engine sees of it.
type Instance struct {
	Describe  func(ctx context.Context, config json.RawMessage) (connector.Info, error)
	Scheduler func(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Scheduler, error)
	// Worker opens the worker side of rank env.Rank, whose cache is Memory[env.Rank].
	Worker func(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Worker, error)
	Memory [][]byte // the cache of each rank
	// Fit gives Arena the size that Describe asks for, before a side opens; once in an engine's life.
	Fit func(size int64) error
	// Arena is what sides get as Env.Arena when they open; nil: none.
	Arena []byte
	// Again starts the connector again for the same engine life: same Memory, same content of the
	// arena. All sides of this Instance are closed, or its process is dead; its Memory and Arena
	// stay until its Close, which comes after that of the new one.
	Again func(ctx context.Context) (*Instance, error)
	PID   int          // the connector's process, for counting its resources; 0: this one
	Close func() error // ends the connector; all sides are closed

	Process Process      // the connector's process, to be hurt; nil: it runs in this one
	Logged  func() int64 // lines logged so far by its process; nil: all lines go to Env.Log

	killed bool // by the case: the way it ended is not an error
}

// A Process is a connector's process, as far as a case of a fault needs it. Signals go to its PID.
type Process interface {
	// PID is its number.
	PID() int
	// Heartbeat asks for a sign of life.
	Heartbeat(ctx context.Context) error
	// Done is closed when the process was reaped.
	Done() <-chan struct{}
}

// A Manifester is a Harness that knows what the plugin says about itself before it is started.
type Manifester interface {
	// Manifest is what the plugin prints when it is run with --manifest.
	Manifest(ctx context.Context) (*host.Manifest, error)
}

// A Backend is a Harness whose config names a folder (@TMP@) in which the connector keeps what it
// stores. Cases of faults damage what is in it.
type Backend interface {
	// Folder is its path; "" when the config names none.
	Folder() string
}

// A Runner is a Harness of a program that can be started by hand.
type Runner interface {
	// Program is its path.
	Program() string
}

// placeholders in a config's strings stand for a new folder that every case gets; see
// plugins/*/conform.json.
const placeholder, shellPlaceholder = "@TMP@", "${TMP}"

// These stand for a new Redis server that every case gets: its host:port, which is that of a relay in
// front of it, and a file with the password that it requires.
const serverPlaceholder, passwordPlaceholder = "@SERVER@", "@PASSWORD_FILE@"

// uniquePlaceholder stands for a name that is new in every case: of a bucket, a table, or the keys in a server that cases share.
const uniquePlaceholder = "@UNIQUE@"

// proxied stands for the address of a relay in front of the server whose address it names, so that cases can hurt the way to it; proxyMark
// is where one begins, or what is meant to be one.
var (
	proxied   = regexp.MustCompile(`^@PROXY:([^@"]+)@`)
	proxyMark = regexp.MustCompile(`@PROXY[:@]`)
)

// Proxied gives the addresses, HOST:PORT, of the servers to which a config has relays, each once. It looks at the text alone: the error says
// which of the words that Makers replace cannot be replaced.
func Proxied(config json.RawMessage) (addresses []string, err error) {
	for _, at := range proxyMark.FindAllIndex(config, -1) {
		m := proxied.FindSubmatch(config[at[0]:])
		if m == nil {
			word, _, _ := bytes.Cut(config[at[0]:], []byte{'"'})
			return nil, fmt.Errorf("%s: want @PROXY:HOST:PORT@", word)
		}
		host, port, err := net.SplitHostPort(string(m[1]))
		if n, bad := strconv.ParseUint(port, 10, 16); err != nil || bad != nil || n == 0 || host == "" {
			return nil, fmt.Errorf("%s: want @PROXY:HOST:PORT@", m[0])
		}
		if address := string(m[1]); !slices.Contains(addresses, address) {
			addresses = append(addresses, address)
		}
	}
	if len(addresses) > 0 && bytes.Contains(config, []byte(serverPlaceholder)) {
		return nil, errors.New("the config has @SERVER@ and @PROXY:HOST:PORT@: cases would hurt only one of the servers")
	}
	return addresses, nil
}

// base is what all harnesses share: the config, its folder and its server.
type base struct {
	config  json.RawMessage
	dir     string // "" when the config has no placeholder
	server  *server
	proxies relays
	servers []string // behind the proxies
	unique  string   // what @UNIQUE@ became; "": the config has none
	control *control // of the servers behind the proxies; nil: there is none
}

func newBase(config json.RawMessage) (base, error) {
	if len(config) == 0 {
		config = json.RawMessage("{}")
	}
	text := strings.ReplaceAll(string(config), shellPlaceholder, placeholder)
	servers, err := Proxied(json.RawMessage(text))
	b := base{servers: servers}
	if err != nil {
		return b, err
	}
	if strings.Contains(text, placeholder) {
		dir, err := os.MkdirTemp("", "kvport-conform-")
		if err != nil {
			return b, fmt.Errorf("folder for the config: %w", err)
		}
		b.dir = dir
		text = strings.ReplaceAll(text, placeholder, inQuotes(dir))
	}
	if strings.Contains(text, serverPlaceholder) {
		s, err := newServer(strings.Contains(text, passwordPlaceholder))
		if err != nil {
			return b, errors.Join(fmt.Errorf("server for the config: %w", err), b.Close())
		}
		b.server = s
		text = strings.ReplaceAll(text, serverPlaceholder, s.relays[0].Address())
		text = strings.ReplaceAll(text, passwordPlaceholder, inQuotes(s.passwordFile()))
	}
	for _, address := range servers {
		r, err := relay.New(address, 0)
		if err != nil {
			return b, errors.Join(fmt.Errorf("relay for the config: %w", err), b.Close())
		}
		b.proxies = append(b.proxies, r)
		text = strings.ReplaceAll(text, "@PROXY:"+address+"@", r.Address())
	}
	if strings.Contains(text, uniquePlaceholder) {
		b.unique = "kvport" + randomHex(8)
		text = strings.ReplaceAll(text, uniquePlaceholder, b.unique)
	}
	b.config = json.RawMessage(text)
	return b, nil
}

// randomHex is a new name of n bytes in hex.
func randomHex(n int) string {
	name := make([]byte, n)
	_, _ = rand.Read(name) // never fails
	return hex.EncodeToString(name)
}

// inQuotes is a text as it stands between the quotes of a JSON string.
func inQuotes(text string) string {
	quoted, err := json.Marshal(text)
	if err != nil {
		return text
	}
	return string(quoted[1 : len(quoted)-1])
}

// Config implements Harness.
func (b base) Config() json.RawMessage { return b.config }

// Folder implements Backend.
func (b base) Folder() string { return b.dir }

// Close implements Harness.
func (b base) Close() error {
	var errs []error
	var mending error
	if b.control != nil {
		mending = b.control.close()
	}
	for _, r := range b.proxies {
		errs = append(errs, r.Close())
	}
	if b.server != nil {
		errs = append(errs, b.server.close())
	}
	if b.dir != "" {
		errs = append(errs, os.RemoveAll(b.dir))
	}
	return cmp.Or(errors.Join(errs...), mending) // what a control program fails to do says nothing of the rest
}

// behindRelays are the addresses of the servers that the config has relays for.
func (b base) behindRelays() []string { return b.servers }

// remoteServer is the server of the config, or the ways to those that it has relays for; nil when it names none.
func (b base) remoteServer() *server {
	if b.server == nil && len(b.proxies) > 0 {
		return &server{relays: b.proxies, control: b.control}
	}
	return b.server
}

// InProcess runs the connector without a process boundary. @TMP@ (or ${TMP}) in the config stands
// for a new folder that each case gets, @UNIQUE@ for a new name, @PROXY:HOST:PORT@ for the address of a relay to that server, and
// @SERVER@ for that of a new Redis server.
func InProcess(p connector.Plugin, config json.RawMessage) Maker {
	return func() (Harness, error) {
		b, err := newBase(config)
		return &inProcess{b, p}, err
	}
}

type inProcess struct {
	base
	plugin connector.Plugin
}

// Manifest implements Manifester.
func (h *inProcess) Manifest(context.Context) (*host.Manifest, error) {
	return manifestOf(&h.plugin), nil
}

// manifestOf is what a plugin prints when it is run with --manifest.
func manifestOf(p *connector.Plugin) *host.Manifest {
	return &host.Manifest{
		Name: p.Name, Aliases: p.Aliases, Version: p.Version, Environment: p.Environment, ConfigSchema: p.Schema,
		Capabilities: p.Capabilities.Names(),
	}
}

// Start implements Harness.
func (h *inProcess) Start(_ context.Context, ranks int, size int64) (*Instance, error) {
	memory := make([][]byte, ranks)
	for r := range memory {
		memory[r] = make([]byte, size)
	}
	return h.instance(memory), nil
}

func (h *inProcess) instance(memory [][]byte) *Instance {
	i := &Instance{
		Describe: h.plugin.Describe, Scheduler: h.plugin.Scheduler, Worker: h.plugin.Worker, Memory: memory,
		Close: func() error { return nil },
	}
	i.Fit = func(size int64) error {
		i.Arena = make([]byte, size)
		return nil
	}
	i.Again = func(context.Context) (*Instance, error) {
		again := h.instance(memory)
		again.Arena = bytes.Clone(i.Arena)
		for at := range i.Arena { // as in another process, the arena is elsewhere now
			i.Arena[at] = guardByte
		}
		return again, nil
	}
	return i
}
