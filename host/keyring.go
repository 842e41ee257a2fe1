package host

import (
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/ticket"
)

// keyring is what plugins' keys come from. The key that signs tickets stays with the host.
type keyring struct {
	links  connector.Secret // of which each connector is given its own; nil: none
	router connector.Secret
}

func newKeyring(ticketKey []byte) (k keyring, err error) {
	if k.links, err = ticket.LinkRoot(ticketKey); err != nil {
		return k, err
	}
	k.router, err = ticket.RouterKey(ticketKey)
	return k, err
}

// of is what a connector is given. It depends on its name and not on its place in a MultiConnector, so that
// engines with other composites have the same. Whoever keeps no blocks for others has no business with routers.
func (k keyring) of(name string, info *connector.Info) (link, router connector.Secret, err error) {
	if k.links == nil {
		return nil, nil, nil
	}
	if info.Scope == connector.ScopeEngine && info.Capabilities&connector.CanHold != 0 {
		router = k.router
	}
	link, err = ticket.LinkKey(k.links, name)
	return link, router, err
}
