package p2pnccl

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/connectors/internal/peerkey"
	"github.com/kvport/kvport/internal/keyring"
	"github.com/kvport/kvport/internal/pairid"
	"github.com/kvport/kvport/internal/register"
	"github.com/kvport/kvport/internal/ticket"
	"github.com/kvport/kvport/pipe"
)

// Environment lists the variables that the plugin needs: they say where sockets may lie, and UCX and NCCL read
// them.
func Environment() []string {
	return []string{
		"TMPDIR", "KVPORT_UCX_DIR", "KVPORT_NCCL_DIR", "KVPORT_CUDA_DIR", "UCX_TLS", "UCX_NET_DEVICES", "UCX_MODULES",
		"UCX_LOG_LEVEL", "UCX_RNDV_SCHEME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_P2P_LEVEL", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH",
	}
}

// Needs says that the plugin talks to others, and names what it reads and writes, for its manifest.
func Needs() connector.Needs {
	return connector.Needs{
		Network: true, Reads: []string{"key_file", "KVPORT_UCX_DIR", "KVPORT_NCCL_DIR", "KVPORT_CUDA_DIR", "LD_LIBRARY_PATH"}, Writes: []string{"socket_dir"},
	}
}

// Stats lists the numbers that the connector shows in addition to sdk.PeerStats and sdk.LayerStats.
func Stats() []connector.StatInfo {
	counter := func(name, help string, labels ...string) connector.StatInfo {
		return connector.StatInfo{Name: name, Help: help, Kind: connector.Counter, Labels: labels}
	}
	return []connector.StatInfo{
		{Name: "links", Help: "Links to peers that are open, by transport.", Kind: connector.Gauge, Labels: []string{"transport"}},
		counter("links_total", "Links to peers that were made.", "transport"),
		counter("link_failures_total", "Transports that both ends have and that did not connect them.", "transport"),
		counter("link_bytes_total", "Payload over links, by direction.", "transport", "direction"),
		counter("request_ids_total", "Request ids that name engines: those of the kinds signed and trusted are used, others (unsigned, unlisted, forged, replayed, malformed) are not.", "kind"),
		counter("registrations_total", "Registrations with routers.", "outcome"),
	}
}

// Open makes the peers of a config, for sdk.FromPipe.
func Open(_ context.Context, env connector.Env, c Config) (pipe.Peers, error) {
	links, routers, err := c.keys(&env)
	if err != nil {
		return pipe.Peers{}, err
	}
	keyed, err := peerkey.OfKeys(links)
	if err != nil {
		return pipe.Peers{}, err
	}
	log := env.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	listed, err := c.listed()
	if err != nil {
		return pipe.Peers{}, err
	}
	n, err := c.network(keyed, log)
	if err != nil {
		return pipe.Peers{}, err
	}
	c.tellTrust(log)
	c.tellAddress(log)
	ids := newReader(listed, log, routers...)
	life := &registered{network: n}
	var registrars []registering
	begin := func(r registering) {
		registrars = append(registrars, r)
		life.begin = append(life.begin, func(ctx context.Context, address string) { r.run(ctx, types(env.Role), c.httpAddress(), address) })
	}
	for _, at := range c.registrars() {
		begin(newRegistrar(&c, at, routers[0], log))
	}
	if c.ProxyProtocol == byZMQ {
		begin(newZMQRegistrar(&c, log))
	}
	peers := pipe.Peers{
		Network: life, Subscribe: c.Subscribe, LayersToTarget: c.LayersTo != toAll, Bytes: c.buffer(log), Spill: c.spill(), Patience: c.timeout(), Close: life.close,
		Await: c.SendType == put, Pushed: env.Role.Loads() && (c.SendType != get || len(registrars) > 0), // who registers has to listen
		Find: func(id connector.RequestID) []string {
			if a := ids.read(id).prefill; a != "" {
				return []string{a}
			}
			return nil
		},
		Stats: func() []connector.Stat {
			return append(append(n.stats(), ids.stats()...), registrations(registrars)...)
		},
	}
	if c.SendType != get {
		peers.Push = func(id connector.RequestID) string { return ids.read(id).decode }
	}
	return peers, nil
}

// tellTrust says in the log what the config trusts, and what it lacks.
func (c *Config) tellTrust(log *slog.Logger) {
	switch {
	case c.UnsignedIDs == trustProxy:
		log.Warn("request ids that nobody has signed count: whoever reaches the HTTP server can name any two engines of peers", "unsigned_ids", trustProxy, "peers", len(c.Peers))
		if open := c.anywhere(); len(open) > 0 {
			log.Warn("such an id can have this engine connect to any port of other machines: list the ports of the engines (kv_port)", "peers", open)
		}
	case c.ProxyProtocol == byZMQ:
		log.Warn("the proxy signs no request ids, so they are ignored and decode engines compute all prompts: trust it with unsigned_ids and peers", "proxy", c.proxy())
	}
}

// tellAddress says in the log that no request id can name this engine, if it registers to be named.
func (c *Config) tellAddress(log *slog.Logger) {
	registers := len(c.registrars()) > 0 || c.ProxyProtocol == byZMQ
	if registers && !pairid.IsAddress(net.JoinHostPort(c.reach(), "1")) {
		log.Warn("no request id can name this engine, so that ids do not count which are made for it: give it another kv_ip or advertise", "host", c.reach(), "reason", pairid.WantAddress)
	}
}

// connectorName is the connector's, as its plugin's manifest has it: the host derives the link key for it.
const connectorName = "P2pNcclConnector"

// keys are what engines show each other, and what routers sign with, the first of each to be used by this engine. The
// host derives both from the deployment's keys, as is done here with a key file.
func (c *Config) keys(env *connector.Env) (links, routers []connector.Secret, err error) {
	if c.KeyFile == "" {
		if env.LinkKey == nil || env.RouterKey == nil {
			return nil, nil, bad("key_file", "it is needed, since this engine's host gives its plugins no link key: it is older than this plugin")
		}
		return env.LinkKeys(), env.RouterKeys(), nil
	}
	ring, err := keyring.Load(c.KeyFile)
	if err != nil {
		return nil, nil, err
	}
	links, err = ticket.OfRing(ring, func(key []byte) (connector.Secret, error) {
		root, err := ticket.LinkRoot(key)
		if err != nil {
			return nil, err
		}
		return ticket.LinkKey(root, connectorName)
	})
	if err != nil {
		return nil, nil, err
	}
	routers, err = ticket.OfRing(ring, ticket.RouterKey)
	return links, routers, err
}

func (c *Config) httpAddress() string {
	return net.JoinHostPort(cmp.Or(c.HTTPIP, c.reach()), strconv.Itoa(c.HTTPPort))
}

// registered is a network that is registered with a router from the time it listens until it is closed.
type registered struct {
	*network
	begin []func(ctx context.Context, address string) // for each router

	mu     sync.Mutex
	cancel context.CancelFunc
	tasks  sync.WaitGroup
}

// Listen implements pipe.Network.
func (r *registered) Listen(ctx context.Context) (pipe.Listener, error) {
	l, err := r.network.Listen(ctx)
	if err != nil || len(r.begin) == 0 {
		return l, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cancel == nil {
		registering, cancel := context.WithCancel(context.Background())
		r.cancel = cancel
		for _, begin := range r.begin {
			r.tasks.Go(func() { begin(registering, l.Address()) })
		}
	}
	return l, nil
}

func (r *registered) close() error {
	r.mu.Lock()
	if r.cancel != nil {
		r.cancel()
	}
	r.mu.Unlock()
	r.tasks.Wait()
	return errors.Join(r.network.close())
}

// leaveTime is how long an engine that ends waits for a router to take note of it.
const leaveTime = time.Second

// registering registers one engine with one router, whichever protocol it speaks.
type registering interface {
	run(ctx context.Context, types []string, httpAddress, kvAddress string)
	Counts() (good, failed int64)
}

// registrar registers one engine with one router of kvport until its context ends.
type registrar struct {
	register.Client
	group string // the engine's replica; empty: none
}

func newRegistrar(c *Config, router string, key []byte, log *slog.Logger) *registrar {
	return &registrar{group: c.Group, Client: register.Client{
		URL: "http://" + router, Every: c.registerEvery(), Log: log,
		Sign: func(body string) string { return ticket.SignText(key, ticket.RegisterText, body) },
	}}
}

// registerEvery is the time between two registrations.
func (c *Config) registerEvery() time.Duration {
	return cmp.Or(time.Duration(c.RegisterMS)*time.Millisecond, 3*time.Second)
}

// types are the parts an engine plays for a router.
func types(r connector.Role) []string {
	switch r {
	case connector.RoleProducer:
		return []string{"P"}
	case connector.RoleConsumer:
		return []string{"D"}
	case connector.RoleBoth:
	}
	return []string{"P", "D"}
}

// run registers as each of the types, at once and then regularly. When its context ends, it says that the engine leaves.
func (r *registrar) run(ctx context.Context, types []string, httpAddress, kvAddress string) {
	defer r.Close()
	var as []register.Message
	for _, t := range types {
		as = append(as, register.Message{Type: t, HTTP: httpAddress, KV: kvAddress, Group: r.group})
	}
	r.Run(ctx, as)
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTime)
	defer cancel()
	if err := r.Leave(last, as); err != nil {
		r.Log.Debug("a router was not told that this engine ends, it will notice by itself", "router", r.URL, "err", err)
	}
}

func registrations(all []registering) []connector.Stat {
	done, failed := int64(0), int64(0)
	for _, r := range all {
		good, bad := r.Counts()
		done += good
		failed += bad
	}
	return []connector.Stat{
		{Name: "registrations_total", Labels: []string{"ok"}, Value: float64(done)},
		{Name: "registrations_total", Labels: []string{"failed"}, Value: float64(failed)},
	}
}
