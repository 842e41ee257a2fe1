package kvevents

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/kvport/kvport/internal/strictjson"
	"github.com/kvport/kvport/internal/zmtp"
)

// ErrConfig says that a config of events cannot work. The message names the field and what to do.
var ErrConfig = errors.New("kv-events-config")

// Config says whether and where an engine publishes its events. Its fields are those of vLLM. Unlike there, without
// an endpoint both are sockets that only the engine's user can open.
type Config struct {
	Enable         bool    `json:"enable_kv_cache_events" jsonschema:"description=Whether events are published."`
	Publisher      string  `json:"publisher" jsonschema:"enum=zmq,enum=null,description=zmq publishes; null does not."`
	Endpoint       string  `json:"endpoint" jsonschema:"description=Where events are published: ipc://PATH or tcp://HOST:PORT."`
	ReplayEndpoint *string `json:"replay_endpoint" jsonschema:"nullable,description=Where readers ask for events that they have missed."`
	BufferSteps    int     `json:"buffer_steps" jsonschema:"minimum=0,maximum=10000000,description=The steps whose events are kept for that."`
	HWM            int     `json:"hwm" jsonschema:"minimum=1,maximum=10000000,description=The steps that wait for one slow reader at most."`
	MaxQueueSize   int     `json:"max_queue_size" jsonschema:"minimum=1,maximum=10000000,description=The steps that wait to be published at most."`
	Topic          string  `json:"topic" jsonschema:"maxLength=256,description=What readers can select events by."`
}

// Place is where events are to be had, as an engine tells it to routers.
type Place struct {
	Endpoint       string `json:"endpoint"`
	ReplayEndpoint string `json:"replay_endpoint,omitempty"` // empty: what was missed is lost
	Topic          string `json:"topic,omitempty"`

	own bool // a socket must be of a process of this user: an instance has named it
}

// ParseConfig reads a config as JSON. Decoding is strict. Errors wrap ErrConfig and name the field.
func ParseConfig(data []byte) (*Config, error) {
	v, err := strictjson.Parse(data)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	c := &Config{BufferSteps: 10_000, HWM: 100_000, MaxQueueSize: 100_000}
	if err := (strictjson.Options{}).Decode(v, c); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if c.Publisher == "" && c.Enable {
		c.Publisher = "zmq"
	}
	c.Enable = c.Enable && c.Publisher == "zmq"
	for field, endpoint := range map[string]*string{"endpoint": &c.Endpoint, "replay_endpoint": c.ReplayEndpoint} {
		if endpoint == nil || *endpoint == "" {
			continue
		}
		if _, err := zmtp.ParseEndpoint(*endpoint); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrConfig, v.Field(field).Errorf("%w", err))
		}
	}
	if c.Endpoint == "" && c.ReplayEndpoint != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, v.Field("replay_endpoint").Errorf("is of no use without endpoint: give both or neither"))
	}
	return c, nil
}

// Check refuses a place to which nobody can connect. The message names the endpoint.
func (p *Place) Check() error {
	for _, endpoint := range []string{p.Endpoint, p.ReplayEndpoint} {
		if endpoint == "" && p.Endpoint != "" {
			continue
		}
		if _, err := zmtp.ParseEndpoint(endpoint); err != nil {
			return err
		}
	}
	return nil
}

// Of is the place as an instance with that host name tells it, if a reader elsewhere can and may go there: to a port of
// the same host, or on this machine to a socket of this user. An instance cannot send a reader anywhere else. Whose socket
// it is a reader looks at again when it is connected, since another may lie at its path by then.
func (p *Place) Of(host string) (Place, error) {
	of := Place{Topic: p.Topic, own: true}
	if len(p.Topic) > maxText {
		return Place{}, fmt.Errorf("the topic has %d bytes, want at most %d", len(p.Topic), maxText)
	}
	for _, one := range []struct {
		from string
		to   *string
	}{{p.Endpoint, &of.Endpoint}, {p.ReplayEndpoint, &of.ReplayEndpoint}} {
		if one.from == "" && one.to != &of.Endpoint {
			continue
		}
		e, err := zmtp.ParseEndpoint(one.from)
		if err == nil {
			e, err = reachable(e, host)
		}
		if err != nil {
			return Place{}, fmt.Errorf("%.200q: %w", one.from, err)
		}
		*one.to = e.String()
	}
	return of, nil
}

func reachable(e zmtp.Endpoint, host string) (zmtp.Endpoint, error) {
	if e.Network == "unix" {
		if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
			return e, errors.New("a socket of another machine")
		}
		info, err := os.Lstat(e.Address)
		if err != nil {
			return e, err
		}
		stat, ok := info.Sys().(*syscall.Stat_t)
		if !ok || info.Mode()&os.ModeSocket == 0 || int(stat.Uid) != os.Getuid() {
			return e, errors.New("it is not a socket of this user")
		}
		return e, nil
	}
	named, port, err := net.SplitHostPort(e.Address)
	if err != nil {
		return e, err
	}
	if ip := net.ParseIP(named); named != "" && !strings.EqualFold(named, host) && (ip == nil || !ip.IsUnspecified()) {
		return e, errors.New("a port of another host than the instance's")
	}
	e.Address = net.JoinHostPort(host, port)
	return e, nil
}
