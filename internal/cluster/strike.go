package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"syscall"
)

// ErrTooLate says that a load was over before the fault could meet it. The plugin is unharmed.
var ErrTooLate = errors.New("the load was over before the fault")

// Health is the part of an engine's /health that faults are checked against.
type Health struct {
	Status    string    `json:"status"`
	Connector Connector `json:"connector"`
}

// Connector is how an engine's connector is, or a child of it.
type Connector struct {
	Name     string      `json:"connector"` // a child's begins with its place, such as 0/
	State    string      `json:"state"`
	PID      int         `json:"pid"`
	Restarts int         `json:"restarts"`
	Pending  int         `json:"pending"` // transfers that run
	Children []Connector `json:"children"`
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

// StrikeLoad waits until the plugin with the given pid has read some bytes of a load, stops it, makes
// sure that the engine still waits for it, and only then gives it the signal. started runs after
// counting begins and should cause the load; over ends the wait. The error is ErrTooLate if the load
// was over by then: so a strike that returns nil is known to have met a load.
func (c *Client) StrikeLoad(ctx context.Context, engine *Process, plugin int, signal syscall.Signal, start func() (over <-chan struct{})) error {
	const some = 1 << 20
	before := BytesRead(plugin)
	over := start()
	for BytesRead(plugin)-before < some {
		select {
		case <-over:
			return ErrTooLate
		default:
			runtime.Gosched()
		}
	}
	if err := syscall.Kill(plugin, syscall.SIGSTOP); err != nil {
		return fmt.Errorf("stop plugin %d: %w", plugin, err)
	}
	h, err := c.Health(ctx, engine.URL)
	if err == nil && h.Connector.Pending == 0 {
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
