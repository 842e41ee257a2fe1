package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"syscall"
	"time"
)

// ErrTooLate says that a load was over before the fault could meet it. The plugin is unharmed.
var ErrTooLate = errors.New("the load was over before the fault")

// Health is the part of an engine's /health that faults are checked against.
type Health struct {
	Status    string    `json:"status"`
	Blocks    Blocks    `json:"blocks"`
	Connector Connector `json:"connector"`
}

// Blocks counts those slots of an engine's cache that are not free.
type Blocks struct {
	Used   int `json:"used"`   // belong to requests
	Pinned int `json:"pinned"` // a running transfer reads or writes them
	Held   int `json:"held"`   // kept for consumers
}

// Connector is how an engine's connector is, or a child of it.
type Connector struct {
	Name     string      `json:"connector"` // a child's begins with its place, such as 0/
	State    string      `json:"state"`
	PID      int         `json:"pid"`
	Restarts int         `json:"restarts"`
	Pending  int         `json:"pending"` // transfers that run
	Loading  int         `json:"loading"` // loads among them that a plugin works for
	Held     int         `json:"held"`    // holds that are open
	Children []Connector `json:"children"`
	Sandbox  string      `json:"sandbox"`       // on, partial or off
	Lacks    []string    `json:"sandbox_lacks"` // of it
}

// Leaves are the plugins of a MultiConnector, those of nested ones too, in order; of another
// connector it is itself.
func (c *Connector) Leaves() []Connector {
	if len(c.Children) == 0 {
		return []Connector{*c}
	}
	var out []Connector
	for i := range c.Children {
		out = append(out, c.Children[i].Leaves()...)
	}
	return out
}

// Health asks an engine how it is.
func (c *Client) Health(ctx context.Context, url string) (*Health, error) {
	data, err := c.Get(ctx, url+"/health")
	if err != nil {
		return nil, err
	}
	h := &Health{}
	if err := json.Unmarshal(data, h); err != nil {
		return nil, fmt.Errorf("health of %s: %w", url, err)
	}
	return h, nil
}

// lookEvery is how often SignalLoad looks.
const lookEvery = 200 * time.Microsecond

// SignalLoad waits until the plugin with the given pid is at work on a load, stops it, makes sure that the
// engine still waits for it, and only then gives it the signal. start should cause the load and return
// what ends the wait. The error is ErrTooLate if the load was over by then: so a call that returns nil
// has certainly met a load.
//
// That the plugin is at work shows in the bytes that it has read or in the engine's health: one that
// reads another process's memory counts no bytes.
func (c *Client) SignalLoad(ctx context.Context, engine *Process, plugin int, signal syscall.Signal, start func() (over <-chan struct{})) error {
	const some = 1 << 20
	before := BytesRead(plugin)
	over := start()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for met := false; !met; {
		select {
		case <-over:
			return ErrTooLate
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		if met = BytesRead(plugin)-before >= some; !met {
			h, err := c.Health(ctx, engine.URL)
			met = err == nil && h.Connector.Loading > 0
		}
	}
	if err := syscall.Kill(plugin, syscall.SIGSTOP); err != nil {
		return fmt.Errorf("stop plugin %d: %w", plugin, err)
	}
	h, err := c.Health(ctx, engine.URL)
	if err == nil && h.Connector.Loading == 0 {
		err = ErrTooLate
	}
	if err != nil {
		return errors.Join(err, syscall.Kill(plugin, syscall.SIGCONT))
	}
	if signal == syscall.SIGSTOP {
		return nil
	}
	if err := syscall.Kill(plugin, signal); err != nil {
		return fmt.Errorf("signal plugin %d: %w", plugin, err)
	}
	return nil
}
