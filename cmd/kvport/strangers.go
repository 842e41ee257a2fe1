package main

import (
	"log/slog"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvport/kvport/engine/apikeys"
)

// strangers counts requests that lack a valid API key where one is needed, or have a wrong one where none is, and warns of them once
// in a while: somebody may be trying keys.
type strangers struct {
	refused prometheus.Counter
	log     *slog.Logger
	limiter apikeys.LogLimiter
}

func newStrangers() *strangers {
	return &strangers{log: slog.Default(), refused: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "kvport_http_unauthorized_total", Help: "Requests without a valid API key where one is needed, and those with a wrong one to `/health`, `/livez` and `/readyz`, also of `kvport route`.",
	})}
}

// came takes note of one. The log never has what came in place of a key: it may be the one of another server.
func (s *strangers) came(r *http.Request) {
	const longest = 100 // bytes of a path
	s.refused.Inc()
	remote, path := r.RemoteAddr, r.URL.Path[:min(len(r.URL.Path), longest)]
	s.limiter.Event(func(n int) {
		s.log.Warn("requests came without a valid API key", "requests", n, "remote", remote, "path", path)
	})
}
