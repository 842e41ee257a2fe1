// Package p2pnccl is P2pNcclConnector: any number of prefill and decode engines, each of which talks to each
// directly, and none of which knows a world of all. vLLM had a connector of this name until 2026, whose
// config and addresses it understands.
//
// A router names both ends of a request in the request's id, and signs it with the key that the engines
// share; then the prefill engine sends blocks to the decode engine as they are computed. The ids of vLLM's own proxy,
// which signs nothing, count where the config trusts it, for the engines that the config lists. Without such an id, and for
// what did not arrive, the decode engine asks, as the ticket of the prefill engine says. Data goes by the best
// way that both ends have: NCCL, UCX, memory of one host, TCP.
package p2pnccl

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/register"
	native "github.com/kvport/kvport/native/ucx"
	"github.com/kvport/kvport/pipe"
	"github.com/kvport/kvport/pipe/nccl"
	"github.com/kvport/kvport/pipe/shm"
	"github.com/kvport/kvport/pipe/tcp"
	"github.com/kvport/kvport/pipe/ucx"
)

// Config is the kv_connector_extra_config. The names are those that vLLM's users know, where it had them.
type Config struct {
	SendType      string   `json:"send_type,omitempty"          jsonschema:"default=PUT_ASYNC,enum=PUT,enum=PUT_ASYNC,enum=GET,description=PUT: a save ends when the decode engine was sent the blocks. PUT_ASYNC: they are sent meanwhile. GET: the decode engine asks for them."`
	IP            string   `json:"kv_ip,omitempty"              jsonschema:"default=127.0.0.1,description=address at which peers find this engine; they all share one key"`
	Port          int      `json:"kv_port,omitempty"            jsonschema:"minimum=0,maximum=65535,description=the port of all its ranks; 0 takes a free one"`
	Advertise     string   `json:"advertise,omitempty"          jsonschema:"description=host that peers and routers are told instead of kv_ip"`
	KeyFile       string   `json:"key_file,omitempty"           jsonschema:"description=the deployment's key as kvport.ticket_key_file and the router's --ticket-key-file name it; the keys for peers and routers are derived from it; default: the host derives them from its own; needed beyond loopback"`
	ProxyIP       string   `json:"proxy_ip,omitempty"           jsonschema:"description=host of the router to register with"`
	ProxyPort     int      `json:"proxy_port,omitempty"         jsonschema:"minimum=0,maximum=65535,description=port of its kvport route --register; without it the engine does not register"`
	ProxyProtocol string   `json:"proxy_protocol,omitempty"     jsonschema:"default=http,enum=http,enum=zmq,description=what the router at proxy_ip speaks. http: it is kvport route --register. zmq: it is vLLM's proxy for P2P NCCL (ZeroMQ and msgpack) and believes whoever registers."`
	Routers       []string `json:"routers,omitempty"            jsonschema:"description=further routers to register with as HOST:PORT; they are kvport route --register"`
	UnsignedIDs   string   `json:"unsigned_ids,omitempty"       jsonschema:"enum=trusted-proxy,description=trusted-proxy: request ids that no router has signed count too (as vLLM's proxy for P2P NCCL makes them) if peers lists both engines that they name. Anybody who reaches the HTTP server can write one. Default: they do not count."`
	Peers         []string `json:"peers,omitempty"              jsonschema:"description=engines that such an id may name: HOST:PORT of each (kv_ip:kv_port) where HOST may be a prefix of at least 8 bits such as 10.0.0.0/24 and PORT may be * (such as 127.0.0.1:* for engines of one machine); needed with unsigned_ids"`
	HTTPIP        string   `json:"http_ip,omitempty"            jsonschema:"description=host at which the router reaches this engine's HTTP server; default: advertise or kv_ip"`
	HTTPPort      int      `json:"http_port,omitempty"          jsonschema:"minimum=0,maximum=65535,description=the port of the engine's HTTP server; needed to register"`
	Subscribe     []string `json:"subscribe,omitempty"          jsonschema:"description=addresses (kv_ip:kv_port) of prefill engines whose blocks a decode engine takes over while they are computed (layer by layer); those of its own requests or, where they have layers_to all, of all"`
	LayersTo      string   `json:"layers_to,omitempty"          jsonschema:"default=target,enum=target,enum=all,description=who gets the layers of what a prefill engine computes. target: the decode engine that the request names, if it subscribes. all: every engine that subscribes."`
	BufferSize    int64    `json:"kv_buffer_size,omitempty"     jsonschema:"minimum=0,description=default 1000000000 and at least 1048576: bytes of blocks that wait to be fetched or have arrived"`
	PoolGB        float64  `json:"mem_pool_size_gb,omitempty"   jsonschema:"minimum=0,maximum=1048576,default=4,description=GiB of host memory to which the oldest blocks move when that is full; 0: they are dropped. Memory is taken as it is used."`
	Transports    []string `json:"transports,omitempty"         jsonschema:"description=ways to try in this order; default nccl ucx shm tcp. Beyond one host UCX and NCCL encrypt nothing and are used only if they are named here; UCX goes by RDMA there."`
	UCXTCP        string   `json:"ucx_tcp,omitempty"            jsonschema:"enum=trusted-network,description=trusted-network lets UCX use TCP: anybody who can reach its ports can then write the plugin's memory. Default: UCX within one host by shared memory, and beyond it by RDMA if transports names it."`
	Device        int      `json:"device,omitempty"             jsonschema:"minimum=0,description=the GPU for NCCL"`
	Channels      int      `json:"nccl_num_channels,omitempty"  jsonschema:"minimum=0,maximum=1024,description=NCCL_MAX_NCHANNELS; 0: as NCCL likes"`
	NetDevices    string   `json:"ucx_net_devices,omitempty"    jsonschema:"description=UCX_NET_DEVICES; default lo where kv_ip is a loopback address and else all. Of no use where UCX has shared memory alone."`
	SocketDir     string   `json:"socket_dir,omitempty"         jsonschema:"description=shm: folder of the sockets; empty: one of its own for each"`
	TimeoutMS     int      `json:"peer_timeout_ms,omitempty"    jsonschema:"default=3000,minimum=100,maximum=60000,description=how long a peer may neither receive nor answer before it is cut"`
	RegisterMS    int      `json:"register_ms,omitempty"        jsonschema:"default=3000,minimum=50,maximum=60000,description=time between two registrations"`
	Group         string   `json:"register_group,omitempty"     jsonschema:"description=the replica to which the engine belongs; for routers with --mode replica, which make pairs only within one"`
	Digest        bool     `json:"digest,omitempty"             jsonschema:"default=true,description=digest over every frame, in addition to the host's digest over every block"`
}

const (
	put      = "PUT"
	putAsync = "PUT_ASYNC"
	get      = "GET"
)

// toAll is the value of layers_to that is not its default.
const toAll = "all"

// trustNetwork is the one value of ucx_tcp.
const trustNetwork = "trusted-network"

// The values of proxy_protocol, and the one of unsigned_ids.
const (
	byHTTP     = "http"
	byZMQ      = "zmq"
	trustProxy = "trusted-proxy"
)

// ways are the transports, the best first.
func ways() []string { return []string{"nccl", "ucx", "shm", "tcp"} }

// bad is an error that names a field.
func bad(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), connector.ErrIncompatible)
}

// Validate reports what cannot be meant. Errors name the field and wrap connector.ErrIncompatible.
func (c *Config) Validate() error {
	if err := c.validateWays(); err != nil {
		return err
	}
	if err := c.validateProxy(); err != nil {
		return err
	}
	switch {
	case !slices.Contains([]string{"", put, putAsync, get}, c.SendType):
		return bad("send_type", "%q is none of PUT, PUT_ASYNC, GET", c.SendType)
	case c.HTTPPort == 0 && (c.proxy() != "" || len(c.Routers) > 0):
		return bad("http_port", "it is needed to register: the router must know where the engine's HTTP server is")
	case c.Group != "" && len(c.registrars()) == 0:
		return bad("register_group", "it is said to the routers of kvport that proxy_ip and routers name, and there are none")
	case c.Group != "" && !register.IsGroup(c.Group):
		return bad("register_group", "it is %q, %s", c.Group, register.WantGroup)
	case c.KeyFile == "" && !c.local():
		return bad("key_file", "others can reach kv_ip %s, so it needs a shared key", c.IP)
	}
	return nil
}

// validateWays checks what leads to peers and routers.
func (c *Config) validateWays() error {
	for _, r := range c.Routers {
		if host, _, err := net.SplitHostPort(r); err != nil || host == "" {
			return bad("routers", "%q is not HOST:PORT", r)
		}
	}
	for _, a := range c.Subscribe {
		if host, _, err := net.SplitHostPort(a); err != nil || host == "" {
			return bad("subscribe", "%q is not HOST:PORT", a)
		}
	}
	for _, w := range c.Transports {
		if !slices.Contains(ways(), w) {
			return bad("transports", "%q is none of %s", w, strings.Join(ways(), ", "))
		}
	}
	if c.UCXTCP != "" && c.UCXTCP != trustNetwork {
		return bad("ucx_tcp", "%q is not %s, the one value that it has", c.UCXTCP, trustNetwork)
	}
	return nil
}

// validateProxy checks what is said of the proxy, and whom its ids may name.
func (c *Config) validateProxy() error {
	switch {
	case (c.ProxyPort != 0) != (c.ProxyIP != ""):
		return bad("proxy_port", "it goes together with proxy_ip")
	case c.ProxyProtocol != "" && c.ProxyProtocol != byHTTP && c.ProxyProtocol != byZMQ:
		return bad("proxy_protocol", "%q is none of %s, %s", c.ProxyProtocol, byHTTP, byZMQ)
	case c.ProxyProtocol == byZMQ && c.ProxyPort == 0:
		return bad("proxy_protocol", "there is no proxy_ip that could speak %s", byZMQ)
	case c.UnsignedIDs != "" && c.UnsignedIDs != trustProxy:
		return bad("unsigned_ids", "%q is not %s, the one value that it has", c.UnsignedIDs, trustProxy)
	case (c.UnsignedIDs != "") != (len(c.Peers) > 0):
		return bad("peers", "it goes together with unsigned_ids: it lists the engines that an unsigned request id may name")
	}
	_, err := c.listed()
	return err
}

// UnsignedPairs implements what sdk.FromPipe asks a config: whether request ids count that no router has signed.
func (c *Config) UnsignedPairs() bool { return c.UnsignedIDs == trustProxy }

// proxy is the address of the router that proxy_ip and proxy_port name; empty: there is none.
func (c *Config) proxy() string {
	if c.ProxyPort == 0 {
		return ""
	}
	host := c.ProxyIP
	if host == "0.0.0.0" { // where a router listens; whoever connects to it comes to this machine
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, strconv.Itoa(c.ProxyPort))
}

// registrars are the addresses of the routers of kvport to register with.
func (c *Config) registrars() []string {
	if p := c.proxy(); p != "" && c.ProxyProtocol != byZMQ {
		return append([]string{p}, c.Routers...)
	}
	return c.Routers
}

// leastBuffer is the smallest buffer: vLLM's users give prefill engines, which receive nothing, one of 10 bytes.
const leastBuffer = 1 << 20

// buffer is kv_buffer_size, or the least that works.
func (c *Config) buffer(log *slog.Logger) int64 {
	const usual = 1_000_000_000
	switch {
	case c.BufferSize == 0:
		return usual
	case c.BufferSize < leastBuffer:
		log.Warn("kv_buffer_size is too small for a block and is raised", "kv_buffer_size", c.BufferSize, "bytes", leastBuffer)
		return leastBuffer
	}
	return c.BufferSize
}

// local reports whether only this host can reach the engine's address.
func (c *Config) local() bool { return pipe.IsLoopback(c.host()) }

func (c *Config) host() string { return cmp.Or(c.IP, "127.0.0.1") }

// reach is the host that others are told.
func (c *Config) reach() string { return cmp.Or(c.Advertise, c.host()) }

func (c *Config) timeout() time.Duration {
	return cmp.Or(time.Duration(c.TimeoutMS)*time.Millisecond, 3*time.Second)
}

// spill is the size of the pool in bytes.
func (c *Config) spill() int64 { return int64(c.PoolGB * (1 << 30)) }

// errNoWay says that two ends have no transport in common.
var errNoWay = errors.New("no transport that both ends have")

// way is one transport, as this process can use it.
type way struct {
	name    string
	network pipe.Network
	start   func() error // fails if this machine cannot use it; nil: it always can
	close   func() error // nil: there is nothing to close
	plain   bool         // it encrypts nothing: beyond one host the config must name it
	near    bool         // it is for one host only

	links                         atomic.Int64 // open
	total, failed, sent, received atomic.Int64
}

// makeWays gives the transports of a config that work here, the best first, and why others do not.
func (c *Config) makeWays(keyed *tls.Config) (usable []*way, reasons map[string]error) {
	listen := net.JoinHostPort(c.host(), "0")
	advertise := ""
	if c.Advertise != "" {
		advertise = net.JoinHostPort(c.Advertise, "0")
	}
	names := c.Transports
	if len(names) == 0 {
		names = ways()
	}
	reasons = map[string]error{}
	for _, name := range names {
		w := &way{name: name}
		switch name {
		case "nccl":
			n := &nccl.Network{Address: listen, Advertise: advertise, TLS: keyed, Device: c.Device, NoDigest: !c.Digest, Patience: c.timeout()}
			w.network, w.start, w.close, w.plain = n, n.Start, n.Close, true
		case "ucx":
			n := c.ucx()
			n.Address, n.Advertise, n.TLS = listen, advertise, keyed
			w.network, w.start, w.close, w.plain, w.near = n, n.Start, n.Close, true, !n.Far && !n.TrustNetwork
		case "shm":
			w.network, w.near = &shm.Network{Dir: c.SocketDir}, true
		case "tcp":
			w.network = &tcp.Network{Address: listen, Advertise: advertise, TLS: keyed, NoDigest: !c.Digest}
		}
		if w.start != nil {
			err := w.start()
			if errors.Is(err, native.ErrOpenPort) {
				err = fmt.Errorf("%w: use the transport tcp, which is inside TLS, or take the risk, on a network that you trust, with \"ucx_tcp\": \"trusted-network\"", err)
			}
			if err != nil {
				reasons[name] = err
				continue
			}
		}
		usable = append(usable, w)
	}
	return usable, reasons
}

// ucx is UCX with the transports that it may use: shared memory on this host, or RDMA beyond it where the config
// names UCX. By TCP it would open a port at which anybody writes the memory of this process.
func (c *Config) ucx() *ucx.Network {
	n := &ucx.Network{NoDigest: !c.Digest, Patience: c.timeout(), TrustNetwork: c.UCXTCP == trustNetwork}
	n.Far = !n.TrustNetwork && !c.local() && slices.Contains(c.Transports, "ucx")
	if n.TrustNetwork || n.Far {
		n.Devices = c.devices()
	}
	return n
}

// devices are the network devices for UCX.
func (c *Config) devices() string {
	if c.NetDevices == "" && c.local() && os.Getenv("UCX_NET_DEVICES") == "" {
		return "lo"
	}
	return c.NetDevices
}

// setChannels tells NCCL how many channels it may use, which is what its buffers on the GPU grow with.
func (c *Config) setChannels() error {
	if c.Channels == 0 {
		return nil
	}
	return os.Setenv("NCCL_MAX_NCHANNELS", strconv.Itoa(c.Channels))
}

// choose gives the first of our ways that a peer can use too: one of its list, and none that is for one
// host, or unencrypted and not named in the config, if the peer is on another.
func choose(ours []*way, named, theirs []string, sameHost bool) (*way, error) {
	for _, w := range ours {
		far := w.near || w.plain && !slices.Contains(named, w.name)
		if slices.Contains(theirs, w.name) && (sameHost || !far) {
			return w, nil
		}
	}
	return nil, errors.Join(errNoWay, connector.ErrIncompatible)
}

// thisHost tells hosts and users apart, as far as shared memory goes.
func thisHost() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	space, spaceErr := os.Readlink("/proc/self/ns/mnt")
	if err != nil || spaceErr != nil {
		return ""
	}
	return strings.TrimSpace(string(boot)) + "/" + space + "/" + strconv.Itoa(os.Getuid())
}

// counted is a link that is counted.
func (w *way) counted(l pipe.Link) pipe.Link {
	w.total.Add(1)
	w.links.Add(1)
	ends := &atomic.Int32{}
	return pipe.Link{Out: &countedPipe{Pipe: l.Out, way: w, ends: ends}, In: &countedPipe{Pipe: l.In, way: w, ends: ends}}
}

// countedPipe counts what goes through a pipe.
type countedPipe struct {
	pipe.Pipe
	way    *way
	ends   *atomic.Int32 // pipes of the link that were closed
	closed atomic.Bool
}

// Send implements pipe.Pipe.
func (p *countedPipe) Send(ctx context.Context, header []byte, spans [][]byte) error {
	err := p.Pipe.Send(ctx, header, spans)
	if err == nil {
		p.way.sent.Add(int64(pipe.Size(spans)))
	}
	return err
}

// Recv implements pipe.Pipe.
func (p *countedPipe) Recv(ctx context.Context, place pipe.Place) error {
	got := 0
	err := p.Pipe.Recv(ctx, func(header []byte, size int) ([][]byte, error) {
		got = size
		return place(header, size)
	})
	if err == nil {
		p.way.received.Add(int64(got))
	}
	return err
}

// Close implements pipe.Pipe.
func (p *countedPipe) Close() error {
	if p.closed.CompareAndSwap(false, true) && p.ends.Add(1) == 2 {
		p.way.links.Add(-1)
	}
	return p.Pipe.Close()
}
