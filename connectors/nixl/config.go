package nixl

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// The environment that vLLM's own connector reads; the config goes before it.
const (
	EnvHost = "VLLM_NIXL_SIDE_CHANNEL_HOST"
	EnvPort = "VLLM_NIXL_SIDE_CHANNEL_PORT"
	// EnvLease is in seconds.
	EnvLease = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"
)

// Config is the kv_connector_extra_config.
type Config struct {
	Host       string   `json:"side_channel_host,omitempty" jsonschema:"description=Address at which consumers ask for blocks; default VLLM_NIXL_SIDE_CHANNEL_HOST or 127.0.0.1."`
	Port       int      `json:"side_channel_port,omitempty" jsonschema:"minimum=0,maximum=65535,description=Its port; default VLLM_NIXL_SIDE_CHANNEL_PORT or a free one."`
	Advertise  string   `json:"advertise,omitempty" jsonschema:"description=Host that tickets name instead of side_channel_host."`
	KeyFile    string   `json:"key_file,omitempty" jsonschema:"description=Key that all peers share; needed beyond loopback; makes mutual TLS of it. Without it peers prove a key that their hosts derive from the ticket key."`
	Backends   []string `json:"backends,omitempty" jsonschema:"description=Backends of NIXL to start; default UCX. One that does not start is named in the log; if none starts that is an error."`
	NetDevices string   `json:"ucx_net_devices,omitempty" jsonschema:"description=UCX_NET_DEVICES; default lo where side_channel_host is a loopback address and else all. Of no use where UCX has shared memory alone."`
	UCXTCP     string   `json:"ucx_tcp,omitempty" jsonschema:"enum=trusted-network,description=trusted-network lets UCX use TCP: anybody who can reach its ports can then write the plugin's memory. Default: shared memory on one machine, RDMA between machines."`
	Mode       string   `json:"mode,omitempty" jsonschema:"enum=auto,enum=pull,enum=push,description=Who moves the bytes of a load: pull (the consumer reads) or push (it has the producer write); default auto: push where they go over TCP and pull elsewhere."`
	LeaseMS    int      `json:"lease_ms,omitempty" jsonschema:"minimum=10,maximum=600000,description=How long in milliseconds finished blocks wait for a sign of life of their consumer; default VLLM_NIXL_ABORT_REQUEST_TIMEOUT (seconds) or 30000."`
	Subscribe  []string `json:"subscribe,omitempty" jsonschema:"description=Side channels (host:port) of producers whose blocks a consumer reads while they are computed (layer by layer); tickets stands for all that its tickets name."`
	EarlyBytes int64    `json:"early_bytes,omitempty" jsonschema:"minimum=1048576,description=With subscribe: memory of each rank for blocks that were read before their ticket came; default 268435456."`
	LibDir     string   `json:"nixl_lib_dir,omitempty" jsonschema:"description=Folder of the NIXL library; default NIXL_LIB_DIR or where make deps puts it."`
}

// Values of mode.
const (
	modeAuto = "auto"
	modePull = "pull"
	modePush = "push"
)

const (
	defaultLease = 30 * time.Second
	defaultEarly = 256 << 20
)

// settle fills in what the environment and the defaults say. Errors name the field.
func (c Config) settle(getenv func(string) string) (Config, error) {
	c.Host = cmp.Or(c.Host, getenv(EnvHost), "127.0.0.1")
	var err error
	if c.Port == 0 {
		if c.Port, err = number(getenv, EnvPort, 0, 65535, 0); err != nil {
			return c, err
		}
	}
	if c.LeaseMS == 0 {
		seconds, err := number(getenv, EnvLease, 1, maxLeaseMS/1000, int(defaultLease/time.Second))
		if err != nil {
			return c, err
		}
		c.LeaseMS = seconds * 1000
	}
	if c.Mode = cmp.Or(c.Mode, modeAuto); !slices.Contains([]string{modeAuto, modePull, modePush}, c.Mode) {
		return c, fmt.Errorf("mode: is %q, want auto, pull or push: %w", c.Mode, connector.ErrIncompatible)
	}
	if err := c.settleSubscribe(); err != nil {
		return c, err
	}
	if len(c.Backends) == 0 {
		c.Backends = []string{backendUCX}
	}
	if c.UCXTCP != "" && c.UCXTCP != trustNetwork {
		return c, fmt.Errorf("ucx_tcp: is %q, the one value is %q: %w", c.UCXTCP, trustNetwork, connector.ErrIncompatible)
	}
	local := pipe.IsLoopback(c.Host)
	if !local && c.KeyFile == "" {
		return c, fmt.Errorf("key_file: others can reach side_channel_host %s, so it needs a shared key: %w", c.Host, connector.ErrIncompatible)
	}
	if c.NetDevices == "" && local {
		c.NetDevices = "lo"
	}
	return c, nil
}

// settleSubscribe checks that subscribe has addresses, or the word that stands for them, and that there is
// room for what comes from there.
func (c *Config) settleSubscribe() error {
	if len(c.Subscribe) > 0 && c.EarlyBytes == 0 {
		c.EarlyBytes = defaultEarly
	}
	for i, address := range c.Subscribe {
		if _, _, err := net.SplitHostPort(address); err != nil && address != followTickets {
			return fmt.Errorf("subscribe[%d]: want host:port or %s: %w: %w", i, followTickets, err, connector.ErrIncompatible)
		}
	}
	return nil
}

// number reads a variable of the environment; without one it is otherwise.
func number(getenv func(string) string, name string, low, high, otherwise int) (int, error) {
	value := getenv(name)
	if value == "" {
		return otherwise, nil
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < low || n > high {
		return 0, fmt.Errorf("%s is %q, want a number from %d to %d: %w", name, value, low, high, connector.ErrIncompatible)
	}
	return n, nil
}

func (c *Config) lease() time.Duration { return time.Duration(c.LeaseMS) * time.Millisecond }
