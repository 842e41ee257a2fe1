package host

import (
	"context"
	"encoding/json"
	"errors"

	"google.golang.org/grpc"

	"github.com/kvport/kvport/connector"
)

var errEarly = errors.New("signatures only; the body follows")

// Host is one connector at work for one engine.
type Host struct{}

// Open starts the connector that cfg names and opens both of its sides.
func Open(ctx context.Context, cfg *Config, eng Engine, opts Options) (*Host, error) {
	return nil, errEarly
}

// Match asks what could be loaded for a request. It returns within 200 microseconds.
func (h *Host) Match(q connector.Query, ticket []byte) connector.Match { return connector.Match{} }

// Step hands over what the engine decided in one step; it never blocks.
func (h *Host) Step(s *connector.Step) {}

// Events is how the host reports; closed after Close.
func (h *Host) Events() <-chan Event { return nil }

// Reset makes the connector forget everything.
func (h *Host) Reset(ctx context.Context) (bool, error) { return false, errEarly }

// Health is the state of the plugin.
func (h *Host) Health() Health { return Health{} }

// Info is what the connector says of itself.
func (h *Host) Info() connector.Info { return connector.Info{} }

// Close drains until ctx ends, then kills.
func (h *Host) Close(ctx context.Context) error { return errEarly }

// LaunchOptions say what a plugin process gets.
type LaunchOptions struct {
	Regions []*Region
}

// Process is one running plugin.
type Process struct{ *Remote }

// Launch starts a plugin binary.
func Launch(ctx context.Context, path string, opts LaunchOptions) (*Process, error) {
	return nil, errEarly
}

// PID is the process id.
func (p *Process) PID() int { return 0 }

// Done is closed once the process is gone and reaped.
func (p *Process) Done() <-chan struct{} { return nil }

// Err says why it ended.
func (p *Process) Err() error { return errEarly }

// Kill kills and reaps it.
func (p *Process) Kill() {}

// Close ends it gracefully within ctx, else kills.
func (p *Process) Close(ctx context.Context) error { return errEarly }

// Remote speaks to a plugin over a connection.
type Remote struct{}

// Connect makes a Remote of any connection; regions are passed by their fd in this process.
func Connect(conn grpc.ClientConnInterface, regions []*Region) *Remote { return nil }

// Describe asks the plugin what it would do with config.
func (r *Remote) Describe(ctx context.Context, config json.RawMessage) (connector.Info, error) {
	return connector.Info{}, errEarly
}

// OpenScheduler opens the scheduler side.
func (r *Remote) OpenScheduler(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Scheduler, error) {
	return nil, errEarly
}

// OpenWorker opens the worker side of rank env.Rank, whose cache is regions[env.Rank].
func (r *Remote) OpenWorker(ctx context.Context, env connector.Env, config json.RawMessage) (connector.Worker, error) {
	return nil, errEarly
}
