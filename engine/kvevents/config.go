package kvevents

import (
	"errors"
	"fmt"

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
