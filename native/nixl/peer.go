package nixl

import "fmt"

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
