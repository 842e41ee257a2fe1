package main

import (
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// strangersPause is how long a warning of requests without a key stands for those that come after it.
const strangersPause = 10 * time.Second

// strangers counts requests that were refused because they have no valid API key, and warns of them: somebody may be trying keys.
type strangers struct {
	refused prometheus.Counter
	log     *slog.Logger

	mu     sync.Mutex
	last   time.Time // of the last warning
	untold int       // requests since then
}

func newStrangers() *strangers {
	return &strangers{log: slog.Default(), refused: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "kvport_http_unauthorized_total", Help: "Requests that were refused because they have no valid API key, also of `kvport route`.",
	})}
}

// came takes note of one. The log never has what came in place of a key: it may be the one of another server.
func (s *strangers) came(r *http.Request, now time.Time) {
	s.refused.Inc()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.untold++
	if now.Sub(s.last) < strangersPause {
		return
	}
	const longest = 100 // bytes of a path
	s.log.Warn("requests without a valid API key are refused", "requests", s.untold, "remote", r.RemoteAddr, "path", r.URL.Path[:min(len(r.URL.Path), longest)])
	s.last, s.untold = now, 0
}
