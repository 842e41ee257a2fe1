package nixl

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// Options are those of an agent. The zero value is a good choice.
type Options struct {
	// Progress, if it is not 0, has a thread of NIXL's make progress and then wait for so long, again
	// and again. It costs a core that the program may need: see the package comment.
	Progress time.Duration
	// Telemetry has NIXL measure each transfer for Transfer.Telemetry.
	Telemetry bool
}

// Agent is one end of transfers. It has a name that its peers know it by.
type Agent struct {
	name string
	lib  *library

	// life is held for reading while NIXL is called and for writing while the agent is closed.
	life   sync.RWMutex
	handle handle // nil: closed

	mu        sync.Mutex // guards what follows
	backends  []*Backend
	memories  map[*Memory]struct{}
	transfers map[*Transfer]struct{}
	lists     map[*List]struct{}
	peers     map[string]struct{}
}

// NewAgent makes an agent. Its name must differ from those of the agents that it will talk to. A process
// may have several.
func (l *Library) NewAgent(name string, o Options) (*Agent, error) {
	if name == "" || strings.ContainsRune(name, 0) {
		return nil, fmt.Errorf("nixl: agent %q: %w", name, ErrInvalid)
	}
	h, err := l.lib.newAgent(name, o)
	if err != nil {
		return nil, fmt.Errorf("nixl: agent %q: %w (NIXL reads a configuration below HOME: see that it can, or set NIXL_CONFIG_FILE)", name, err)
	}
	return &Agent{
		name: name, lib: l.lib, handle: h,
		memories: map[*Memory]struct{}{}, transfers: map[*Transfer]struct{}{}, lists: map[*List]struct{}{}, peers: map[string]struct{}{},
	}, nil
}

// Name is the agent's name.
func (a *Agent) Name() string { return a.name }

// enter keeps the agent from being closed until leave.
func (a *Agent) enter() error {
	a.life.RLock()
	if a.handle == nil {
		a.life.RUnlock()
		return fmt.Errorf("nixl: agent %q: %w", a.name, ErrClosed)
	}
	return nil
}

func (a *Agent) leave() { a.life.RUnlock() }

// Close ends the agent and what belongs to it: transfers in flight are given up, memory is deregistered.
// Peers find out when they next try to reach it. Everything of the agent fails with ErrClosed from then
// on; closing it again does nothing.
func (a *Agent) Close() error {
	a.life.Lock()
	defer a.life.Unlock()
	if a.handle == nil {
		return nil
	}
	var errs []error
	for t := range a.transfers {
		errs = append(errs, t.release())
	}
	for l := range a.lists {
		errs = append(errs, l.release())
	}
	for m := range a.memories {
		errs = append(errs, m.deregister())
	}
	for _, b := range a.backends {
		errs = append(errs, a.lib.freeBackend(b.handle))
	}
	errs = append(errs, a.lib.freeAgent(a.handle))
	a.handle = nil
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("nixl: close agent %q: %w", a.name, err)
	}
	return nil
}

// Plugins are the names of the backends that the library came with, in order. That one is listed does
// not mean that it starts here: GPU ones do not without a GPU.
func (a *Agent) Plugins() ([]string, error) {
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	names, err := a.lib.plugins(a.handle)
	if err != nil {
		return nil, fmt.Errorf("nixl: list the backends: %w", err)
	}
	slices.Sort(names)
	return names, nil
}

// Backend is a way to move memory, started for one agent; it ends with the agent.
type Backend struct {
	name   string
	handle handle
}

// Name is the backend's name, as in "UCX".
func (b *Backend) Name() string { return b.name }

// Backend starts a backend, which may take half a second. It has to be started before memory is
// registered. Params are the backend's own, each added to its defaults; nil is fine. Those of UCX:
//
//   - ucx_error_handling_mode: peer (the default) reports a peer that has died, and sends notifications
//     over TCP; none uses shared memory for them, and leaves it to timeouts to notice a death;
//   - engine_config: settings of UCX without their UCX_ prefix, as in "TLS=tcp,NET_DEVICES=lo", where the
//     environment does not say otherwise.
func (a *Agent) Backend(name string, params map[string]string) (*Backend, error) {
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	pairs := make([]string, 0, 2*len(params))
	for _, k := range slices.Sorted(maps.Keys(params)) {
		pairs = append(pairs, k, params[k])
	}
	h, err := a.lib.newBackend(a.handle, name, pairs)
	if err != nil {
		known, _ := a.lib.plugins(a.handle)
		return nil, fmt.Errorf("nixl: backend %q of agent %q does not start: %w (the library has %s; what the backend lacks is on stderr)", name, a.name, err, strings.Join(known, ", "))
	}
	b := &Backend{name: name, handle: h}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.backends = append(a.backends, b)
	return b, nil
}

// Memory is memory that transfers may use.
type Memory struct {
	agent   *Agent
	backend *Backend
	kind    Kind
	regions []Region
	closed  bool // guarded by agent.mu
}

// Register makes memory known to NIXL, so that transfers here may use it and, once they have metadata
// made after this, peers may read and write it. It must stay where it is until the Memory is closed.
// With a nil backend it is registered with every backend that takes its kind.
func (a *Agent) Register(b *Backend, kind Kind, regions ...Region) (*Memory, error) {
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	for i, r := range regions {
		if r.Len == 0 {
			return nil, fmt.Errorf("nixl: register region %d: it is empty: %w", i, ErrInvalid)
		}
	}
	if len(regions) == 0 {
		return nil, fmt.Errorf("nixl: register no regions: %w", ErrInvalid)
	}
	m := &Memory{agent: a, backend: b, kind: kind, regions: slices.Clone(regions)}
	if err := a.lib.register(a.handle, m.backendHandle(), kind, m.regions); err != nil {
		return nil, fmt.Errorf("nixl: register %d regions of %v: %w", len(regions), kind, err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.memories[m] = struct{}{}
	return m, nil
}

// Kind is where the memory is.
func (m *Memory) Kind() Kind { return m.kind }

// Regions are those that were registered. The slice is the caller's.
func (m *Memory) Regions() []Region { return slices.Clone(m.regions) }

// Close deregisters the memory. No transfer that uses it may be in flight. A peer that still has metadata
// of it cannot reach it any more over RDMA or TCP; over cma, which goes by process and address, it still
// can, so what was shared with a peer must not be used for anything else while that peer may be writing.
func (m *Memory) Close() error {
	a := m.agent
	a.life.RLock()
	defer a.life.RUnlock()
	if a.handle == nil {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if m.closed {
		return nil
	}
	delete(a.memories, m)
	if err := m.deregister(); err != nil {
		return fmt.Errorf("nixl: deregister %d regions of %v: %w", len(m.regions), m.kind, err)
	}
	return nil
}

// deregister is Close's last part; the caller keeps the agent from being closed, or is closing it.
func (m *Memory) deregister() error {
	m.closed = true
	return m.agent.lib.deregister(m.agent.handle, m.backendHandle(), m.kind, m.regions)
}

func (m *Memory) backendHandle() handle {
	if m.backend == nil {
		return nil
	}
	return m.backend.handle
}

// Metadata is what a peer needs to reach this agent: its addresses and the memory that is registered
// now. Make it after registering, and again when that has changed. It is a few hundred bytes, and a
// permission to write that memory.
func (a *Agent) Metadata() ([]byte, error) {
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	data, err := a.lib.metadata(a.handle)
	if err != nil {
		return nil, fmt.Errorf("nixl: metadata of agent %q: %w", a.name, err)
	}
	return data, nil
}

// AddPeer takes a peer's metadata and returns the name that the peer's agent has given itself. Metadata
// is not authenticated: take it only from a channel that is. Adding a peer again replaces what was known.
func (a *Agent) AddPeer(metadata []byte) (string, error) {
	if err := a.enter(); err != nil {
		return "", err
	}
	defer a.leave()
	if len(metadata) == 0 {
		return "", fmt.Errorf("nixl: add a peer without metadata: %w", ErrInvalid)
	}
	name, err := a.lib.addPeer(a.handle, metadata)
	if err != nil {
		return "", fmt.Errorf("nixl: add the peer of %d bytes of metadata: %w", len(metadata), err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.peers[name] = struct{}{}
	return name, nil
}

// RemovePeer forgets a peer and disconnects from it. Transfers with it must have been closed.
func (a *Agent) RemovePeer(peer string) error {
	return a.withPeer("remove", peer, func(agent handle, peer string) error {
		err := a.lib.removePeer(agent, peer)
		if err == nil {
			a.mu.Lock()
			defer a.mu.Unlock()
			delete(a.peers, peer)
		}
		return err
	})
}

// Connect connects to a peer now rather than within the first transfer, which saves that one some
// milliseconds. A peer that has gone may fail here or only when it is first used.
func (a *Agent) Connect(peer string) error {
	return a.withPeer("connect to", peer, a.lib.connect)
}

func (a *Agent) withPeer(what, peer string, do func(agent handle, peer string) error) error {
	if err := a.enter(); err != nil {
		return err
	}
	defer a.leave()
	if err := do(a.handle, peer); err != nil {
		return fmt.Errorf("nixl: %s peer %q: %w", what, peer, err)
	}
	return nil
}

// Notification is a message that came in.
type Notification struct {
	Peer    string // the name of the sender's agent, as the sender says
	Message []byte // the receiver's own copy
}

// Notify sends a message to a peer. It returns once the message is on its way; that it arrives is not
// promised, but messages to one peer keep their order.
func (a *Agent) Notify(peer string, message []byte) error {
	if len(message) == 0 {
		return fmt.Errorf("nixl: notify peer %q of nothing: %w", peer, ErrInvalid)
	}
	return a.withPeer("notify", peer, func(agent handle, peer string) error { return a.lib.notify(agent, peer, message) })
}

// Notifications makes progress and returns what has come in since the last call, often nothing. Messages
// of one peer are in the order in which they were sent.
func (a *Agent) Notifications() ([]Notification, error) {
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	all, err := a.lib.notifications(a.handle)
	if err != nil {
		return nil, fmt.Errorf("nixl: notifications of agent %q: %w", a.name, err)
	}
	return all, nil
}
