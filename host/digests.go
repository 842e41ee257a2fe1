package host

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/digest"
	"github.com/kvport/kvport/internal/keyring"
)

// openDigests finds out what digests are made and checked with.
func (h *Host) openDigests() error {
	s := &h.cfg.Settings
	secret, err := s.TenantSecret()
	if err != nil {
		return err
	}
	if h.tenant = "none"; secret != nil {
		h.tenant = keyring.ID(secret)
	}
	if h.digests = digest.Keyed(h.keys, secret); s.Digest == DigestXXH3 {
		h.digests = digest.XXH3()
		h.log.Warn(`digests find damage, but whoever can write a store or send blocks can forge them (kvport.digest is "xxh3")`)
	}
	return nil
}

// CheckShared refuses a store that machines share while digests are made with a key that only this machine has: nobody else
// could use what is stored. Errors wrap ErrConfig.
func (s *Settings) CheckShared(info *connector.Info) error {
	if info.BeyondMachine == "" || s.TicketKeyFile != "" || s.Digest == DigestXXH3 {
		return nil
	}
	return fmt.Errorf("%w: kvport.ticket_key_file is not set, but other machines may see what %s stores (%s), and need the same key for digests: "+
		`kvport keys init --file FILE makes one, which belongs on all of them; or set kvport.digest to "xxh3", with which whoever can write the store can forge blocks`,
		ErrConfig, info.Name, info.BeyondMachine)
}

// checkOwnKey refuses a key that only this process has where other engines need it: those that see the same store could use
// nothing of it, and would replace in turn what this one has stored, and those that prefill or decode for it could accept none
// of its tickets. Errors wrap ErrConfig.
func (c *Config) checkOwnKey(keys *keyring.File, info *connector.Info) error {
	why := keys.Own()
	others := info.Scope != connector.ScopeEngine && c.Settings.Digest != DigestXXH3
	if why == nil || c.alone() && !others && info.Capabilities&connector.CanHold == 0 {
		return nil
	}
	return fmt.Errorf("%w: kvport.ticket_key_file: %w; %s is for other engines, too, which need the same key", ErrConfig, why, info.Name)
}

// alone reports whether an engine, and every child of its connector, both prefills and decodes.
func (c *Config) alone() bool {
	return c.Role == connector.RoleBoth && !slices.ContainsFunc(c.Children, func(child *Config) bool { return !child.alone() })
}

// warnOwnKey says what it means that a key is in no file.
func warnOwnKey(log *slog.Logger, keys *keyring.File) {
	if why := keys.Own(); why != nil && log != nil {
		log.Warn("the key that this user's engines share has no folder, so this engine has a key of its own: no other engine takes its blocks or tickets, "+
			"and its next start finds nothing of what it has stored; set kvport.ticket_key_file", "error", why)
	}
}

// warnFreshKey says that nothing can be loaded that a store has from before, because the key is a new one. Where the state folder
// does not outlive a container, that is so after each start.
func (h *Host) warnFreshKey() {
	if !h.keys.Fresh() || h.info.Scope <= connector.ScopeEngine || h.cfg.Settings.Digest == DigestXXH3 {
		return
	}
	h.log.Warn("the key of this user's engines was made just now, so blocks that the store has from before count as misses",
		"connector", h.info.Name, "file", h.keys.Path(), "key", h.keys.Ring().First().ID,
		"remedy", "if this comes back at each start, or engines of other users or containers share the store: kvport keys init --file FILE, and name it in kvport.ticket_key_file of all of them")
}

// unreadable are loaded blocks that cannot be used, by reason.
type unreadable struct {
	corrupt  []connector.BlockID
	foreign  []connector.BlockID // by a key that is not in the ring
	outdated []connector.BlockID // of another edition
	keys     map[string]bool     // those of foreign
	editions map[string]bool     // those of outdated
}

// add notes what the check of a block said.
func (u *unreadable) add(id connector.BlockID, err error) {
	switch {
	case err == nil:
	case u.see(err):
		u.foreign = append(u.foreign, id)
	case errors.Is(err, connector.ErrOutdated):
		u.outdated = append(u.outdated, id)
	default:
		u.corrupt = append(u.corrupt, id)
	}
}

// see notes which key or edition an error speaks of, and says whether it is about a key that is not in the ring.
func (u *unreadable) see(err error) (foreign bool) {
	if key, is := errors.AsType[*digest.ForeignKeyError](err); is {
		note(&u.keys, key.ID)
		return true
	}
	if other, is := errors.AsType[*digest.EditionError](err); is {
		note(&u.editions, fmt.Sprintf("edition %d", other.Edition))
	} else if errors.Is(err, connector.ErrOutdated) {
		note(&u.editions, "another length")
	}
	return false
}

// maxSeen bounds what is noted of headers, which anybody may have written.
const maxSeen = 8

func note(seen *map[string]bool, what string) {
	if *seen == nil {
		*seen = map[string]bool{}
	}
	if len(*seen) < maxSeen {
		(*seen)[what] = true
	}
}

// unreadableLog says when blocks that cannot be checked were logged last, by reason, and what has been seen since.
type unreadableLog struct {
	mu                sync.Mutex
	foreign, outdated unreadableReason
}

type unreadableReason struct {
	complaints
	seen map[string]bool
}

// due notes some blocks, and says whether it is time for a line in the log. Then it gives what was seen since the last one,
// and how many blocks that were not logged.
func (r *unreadableReason) due(now time.Time, blocks int, seen map[string]bool) (all []string, dropped int, yes bool) {
	for what := range seen {
		note(&r.seen, what)
	}
	if blocks == 0 || now.Before(r.next) {
		r.dropped += blocks
		return nil, 0, false
	}
	all, dropped = slices.Sorted(maps.Keys(r.seen)), r.dropped
	*r = unreadableReason{complaints: complaints{next: now.Add(missedEvery)}}
	return all, dropped, true
}

// unread logs blocks of a load whose digests cannot be checked, with the remedy, but not more often than missedEvery: what is
// true of one block is true of a whole store. err is what the plugin said about a load of that many blocks.
func (h *Host) unread(found *unreadable, blocks int, err error) {
	outdated := len(found.outdated)
	if errors.Is(err, connector.ErrOutdated) {
		if some, is := errors.AsType[*connector.BlockError](err); is && len(some.Blocks) > 0 {
			blocks = len(some.Blocks)
		}
		outdated += blocks
		note(&found.editions, "another length")
	}
	if outdated+len(found.foreign) == 0 {
		return
	}
	l := &h.unreadable
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if seen, dropped, yes := l.foreign.due(now, len(found.foreign), found.keys); yes {
		h.log.Warn("blocks were stored with a key that is not in the ring, they count as misses",
			"connector", h.info.Name, "blocks", len(found.foreign), "keys_seen", seen, "ring", h.keys.Ring().IDs(), "file", h.keyFile(),
			"remedy", "compare kvport keys list on the machine that stored them, and give all engines that share the store the same kvport.ticket_key_file; if the key is lost, nothing needs to be done, because engines that save replace blocks as they compute them; if no engine of yours has that key, find out who writes the store",
			"not_logged", dropped)
	}
	if seen, dropped, yes := l.outdated.due(now, outdated, found.editions); yes {
		h.log.Warn("blocks were stored by another version or with another kvport.digest, they count as misses",
			"connector", h.info.Name, "blocks", outdated, "seen", seen, "edition", h.digests.Edition(),
			"remedy", "give all engines that share the store the same version and the same kvport.digest; engines that save replace blocks of earlier versions as they compute them; if no engine of yours has stored such blocks, find out who writes the store",
			"not_logged", dropped)
	}
}

// keyFile is where the ring is, for messages.
func (h *Host) keyFile() string { return cmp.Or(h.keys.Path(), "none") }
