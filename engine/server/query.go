package server

import (
	"fmt"
	"net/http"
	"sync"

	"golang.org/x/time/rate"

	"github.com/kvport/kvport/connector"
)

// cacheAnswer is kvport_cache of kv_transfer_params: what a request with this prompt would get now instead of computing
// it. Whoever passes these parameters on with a request is not asking again.
type cacheAnswer struct {
	CachedTokens int         `json:"cached_tokens"` // of all scopes together
	BlockSize    int         `json:"block_size"`
	Engine       scopeAnswer `json:"engine"`
	Node         scopeAnswer `json:"node"`
	Shared       scopeAnswer `json:"shared"`
	NotHeld      string      `json:"not_held,omitempty"` // why the hold that was wanted is not there
}

// scopeAnswer is what would come from one scope.
type scopeAnswer struct {
	CachedTokens int      `json:"cached_tokens"`
	BlockIDs     []string `json:"block_ids,omitempty"` // the blocks' keys in hex, in order of the prompt
	Unknown      bool     `json:"unknown,omitempty"`   // a connector did not say in time, or failed: there may be more
}

// cacheAnswer puts the answer to a cache query into words, beside the ticket if there is one.
func (a *writer) cacheAnswer(t *transferParams) any {
	c := a.x.cached
	answer := cacheAnswer{BlockSize: a.server.info.BlockSize, NotHeld: c.NotHeld}
	for i := range c.Scopes {
		in := &c.Scopes[i]
		answer.CachedTokens += in.Tokens
		s := scopeAnswer{CachedTokens: in.Tokens, Unknown: in.Unknown}
		if !a.params.noBlockIDs {
			for _, key := range in.Blocks {
				s.BlockIDs = append(s.BlockIDs, key.String())
			}
		}
		switch in.Scope {
		case connector.ScopeEngine:
			answer.Engine = s
		case connector.ScopeNode:
			answer.Node = s
		case connector.ScopeShared:
			answer.Shared = s
		}
	}
	type cached struct {
		Cache cacheAnswer `json:"kvport_cache"`
	}
	if t == nil {
		return cached{answer}
	}
	return struct {
		transferParams
		cached
	}{*t, cached{answer}}
}

// answered says how a cache query ended, as a label; e is the error that it was answered with, if any.
func (x *exchange) answered(e *Error) string {
	switch {
	case e != nil && e.Code == tooManyQueries:
		return "limited"
	case x.cached == nil:
		return "failed"
	}
	for _, in := range x.cached.Scopes {
		if in.Unknown {
			return "unknown"
		}
	}
	return "answered"
}

// tooManyQueries is the code of the error that says so.
const tooManyQueries = "cache_query_rate"

// admitQuery refuses a cache query that is one too many.
func (s *Server) admitQuery(x *exchange) error {
	switch {
	case !x.params.query:
		return nil
	case s.config.CacheQueryRate < 0:
		return unsupported("kv_transfer_params.cache_query", "is turned off on this server")
	case x.params.salt == "" && s.config.SharedKeys != nil && s.config.SharedKeys():
		return &Error{
			http.StatusForbidden, "invalid_request_error", "cache_salt", "cache_query_salt",
			"cache_salt: a cache query needs one, since several API keys share the cache of prompts without (--cache-query-unsalted allows it)",
		}
	case !s.queries.allow(x.client()):
		return &Error{
			http.StatusTooManyRequests, "rate_limit_error", "kv_transfer_params.cache_query", tooManyQueries,
			fmt.Sprintf("more than %d cache queries a second with this API key, try again later", s.config.CacheQueryRate),
		}
	}
	return nil
}

// client names the client's key; empty if there are no keys.
func (x *exchange) client() string {
	if x.key == nil {
		return ""
	}
	return x.key.Name
}

// maxQueryKeys bounds the API keys of which the rate is remembered: beyond it all are forgotten.
const maxQueryKeys = 1 << 12

// queryLimit bounds the rate of cache queries of each API key. It is safe for concurrent use.
type queryLimit struct {
	rate int

	mu   sync.Mutex
	keys map[string]*rate.Limiter
}

func newQueryLimit(perSecond int) *queryLimit {
	return &queryLimit{rate: perSecond, keys: map[string]*rate.Limiter{}}
}

// allow reports whether a key may ask now. The queries of a second may come at once.
func (l *queryLimit) allow(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	of := l.keys[key]
	if of == nil {
		if len(l.keys) >= maxQueryKeys {
			clear(l.keys)
		}
		of = rate.NewLimiter(rate.Limit(l.rate), l.rate)
		l.keys[key] = of
	}
	return of.Allow()
}
