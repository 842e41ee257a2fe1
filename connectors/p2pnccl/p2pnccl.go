package p2pnccl

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
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

// Stats lists the numbers that the connector shows in addition to sdk.PeerStats.
func Stats() []connector.StatInfo {
	counter := func(name, help string, labels ...string) connector.StatInfo {
		return connector.StatInfo{Name: name, Help: help, Kind: connector.Counter, Labels: labels}
	}
	return []connector.StatInfo{
		{Name: "links", Help: "Links to peers that are open, by transport.", Kind: connector.Gauge, Labels: []string{"transport"}},
		counter("links_total", "Links to peers that were made.", "transport"),
		counter("link_failures_total", "Transports that both ends have and that did not connect them.", "transport"),
		counter("link_bytes_total", "Payload over links, by direction.", "transport", "direction"),
		counter("request_ids_total", "Request ids with addresses: signed ones are used, others are not.", "kind"),
		counter("registrations_total", "Registrations with the router.", "outcome"),
	}
}

// Open makes the peers of a config, for sdk.FromPipe.
func Open(_ context.Context, env connector.Env, c Config) (pipe.Peers, error) {
	link, router, err := c.keys(&env)
	if err != nil {
		return pipe.Peers{}, err
	}
	keyed, err := pipe.KeyTLS(link)
	if err != nil {
		return pipe.Peers{}, err
	}
	log := env.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	n, err := c.network(keyed, log)
	if err != nil {
		return pipe.Peers{}, err
	}
	ids := newReader(router)
	life := &registered{network: n}
	var registrars []*registrar
	for _, at := range c.registrars() {
		r := newRegistrar(&c, at, router, log)
		registrars = append(registrars, r)
		life.begin = append(life.begin, func(ctx context.Context, address string) { r.run(ctx, types(env.Role), c.httpAddress(), address) })
	}
	peers := pipe.Peers{
		Network: life, Bytes: c.buffer(log), Spill: c.spill(), Patience: c.timeout(), Close: life.close,
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

// connectorName is the connector's, as its plugin's manifest has it: the host derives the link key for it.
const connectorName = "P2pNcclConnector"

// keys are what engines show each other, and what routers sign with. The host derives both from the
// deployment's key, as is done here with a key file.
func (c *Config) keys(env *connector.Env) (link, router connector.Secret, err error) {
	if c.KeyFile == "" {
		if env.LinkKey == nil || env.RouterKey == nil {
			return nil, nil, bad("key_file", "it is needed, since this engine's host gives its plugins no link key: it is older than this plugin")
		}
		return env.LinkKey, env.RouterKey, nil
	}
	key, err := ticket.LoadKey(c.KeyFile)
	if err != nil {
		return nil, nil, err
	}
	root, err := ticket.LinkRoot(key)
	if err != nil {
		return nil, nil, err
	}
	if link, err = ticket.LinkKey(root, connectorName); err != nil {
		return nil, nil, err
	}
	router, err = ticket.RouterKey(key)
	return link, router, err
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

// registration is what an engine tells a router, again and again. Type, HTTP and KV have vLLM's names.
type registration struct {
	Type string `json:"type"`         // P or D
	HTTP string `json:"http_address"` // where requests go
	KV   string `json:"zmq_address"`  // where blocks go
	// At is the time in nanoseconds, on the engine's clock: a registration that is older than the last one
	// from there is a replay.
	At int64 `json:"at"`
}

// macHeader carries the signature of a registration.
const macHeader = "X-Kvport-Mac"

// registrar registers one engine with one router until its context ends.
type registrar struct {
	url    string
	key    []byte
	every  time.Duration
	log    *slog.Logger
	client http.Client

	done, failed atomic.Int64
}

func newRegistrar(c *Config, router string, key []byte, log *slog.Logger) *registrar {
	every := cmp.Or(time.Duration(c.RegisterMS)*time.Millisecond, 3*time.Second)
	return &registrar{
		url: "http://" + router + "/register",
		key: key, every: every, log: log, client: http.Client{Timeout: every, Transport: &http.Transport{}},
	}
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

// run registers as each of the types, at once and then regularly.
func (r *registrar) run(ctx context.Context, types []string, httpAddress, kvAddress string) {
	defer r.client.CloseIdleConnections()
	tick := time.NewTicker(r.every)
	defer tick.Stop()
	well := true
	for {
		for _, t := range types {
			err := r.register(ctx, &registration{Type: t, HTTP: httpAddress, KV: kvAddress, At: time.Now().UnixNano()})
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				r.failed.Add(1)
			default:
				r.done.Add(1)
			}
			if (err == nil) != well {
				well = err == nil
				r.log.Warn("registration with the router has changed", "router", r.url, "well", well, "error", err)
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (r *registrar) register(ctx context.Context, what *registration) error {
	body, err := json.Marshal(what)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(macHeader, ticket.SignText(r.key, ticket.RegisterText, string(body)))
	resp, err := r.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d: %s", resp.StatusCode, bytes.TrimSpace(answer))
	}
	return nil
}

func registrations(all []*registrar) []connector.Stat {
	done, failed := int64(0), int64(0)
	for _, r := range all {
		done += r.done.Load()
		failed += r.failed.Load()
	}
	return []connector.Stat{
		{Name: "registrations_total", Labels: []string{"ok"}, Value: float64(done)},
		{Name: "registrations_total", Labels: []string{"failed"}, Value: float64(failed)},
	}
}
