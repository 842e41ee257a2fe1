package router

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/kvport/kvport/engine/apikeys"
)

// passesKeys reports whether clients' own keys go to the instances, which may put requests into tenants that the router does not know.
func (c *Config) passesKeys() bool { return !c.OwnKeys && c.UpstreamKey == "" }

// foreign reports whether instances may put the request into a tenant that the router does not know: its client has a key, and some
// instance may have tenants.
func (c *call) foreign() bool {
	return c.router.config.passesKeys() && c.header.Get("Authorization") != "" && c.router.pool.mayHaveTenants()
}

// within adds the client's key to what separates the prompts of clients, if instances may put it into a tenant of its own: neither what
// was sent nor where an answer is held says anything about another client's then.
func (c *call) within(scope []byte) []byte {
	if c.foreign() {
		scope = append(scope, c.header.Get("Authorization")...)
	}
	return scope
}

// mayHaveTenants reports whether an instance that takes requests may have tenants.
func (p *pool) mayHaveTenants() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.known {
		if k := &p.known[i]; k.sources != 0 && !k.open && p.table.available(i) {
			return true
		}
	}
	return false
}

// isOpen reports by the body of /health, asked without a key, whether the instance has no tenants: an engine of kvport says what it
// serves only where it has no keys, and vLLM, whose keys have no tenants, says nothing.
func isOpen(body []byte) bool {
	var h struct {
		Model string `json:"model"`
	}
	return len(body) == 0 || json.Unmarshal(body, &h) == nil && h.Model != ""
}

// saltField is the field of a request that separates its KV blocks from those of others.
const saltField = "cache_salt"

// keyOf is the client's key, nil if there are no keys, and whether the client may come in. The front has checked it, but the
// keys may have changed since then, and some paths need no key.
func (r *Router) keyOf(req *http.Request) (k *apikeys.Key, known bool) {
	if r.config.Key == nil {
		return nil, true
	}
	k = r.config.Key(req.Header.Get("Authorization"))
	return k, k != nil
}

// salt puts a request's KV blocks into the tenant of its client. Instances know tenants by salts alone, and a kvport instance
// believes those of a client that is a router.
func (r *Router) salt(body fields, k *apikeys.Key) error {
	if k == nil { // instances would take this router's word for whose tenant it is, and what is known of them would be told to anybody who names it
		k = &apikeys.Key{}
	}
	given := ""
	if raw, is := body[saltField]; is && json.Unmarshal(raw, &given) != nil {
		if k.Tenant == "" { // an instance will refuse it
			return nil
		}
		return errors.New(saltField + ": want a string")
	}
	salt, err := k.Salt(given)
	if err != nil || salt == given {
		return err
	}
	raw, err := json.Marshal(salt)
	if err != nil {
		return fmt.Errorf("%s: %w", saltField, err)
	}
	body[saltField] = raw
	return nil
}
