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

// strangers counts requests that lack a valid API key where one is needed, or have a wrong one where none is, and warns of them:
// somebody may be trying keys.
type strangers struct {
	refused prometheus.Counter
	log     *slog.Logger

	mu     sync.Mutex
	last   time.Time // of the last warning
	untold int       // requests since then
	later  bool      // a warning of these will come
	remote string    // of the newest, as path
	path   string
}

func newStrangers() *strangers {
	return &strangers{log: slog.Default(), refused: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "kvport_http_unauthorized_total", Help: "Requests without a valid API key where one is needed, and those with a wrong one to `/health`, also of `kvport route`.",
	})}
}

// came takes note of one. The log never has what came in place of a key: it may be the one of another server.
func (s *strangers) came(r *http.Request) {
	const longest = 100 // bytes of a path
	s.refused.Inc()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.untold++
	s.remote, s.path = r.RemoteAddr, r.URL.Path[:min(len(r.URL.Path), longest)]
	passed := time.Since(s.last)
	switch {
	case passed >= strangersPause:
		s.tellLocked()
	case !s.later: // if nobody comes any more, these would not be told
		s.later = true
		time.AfterFunc(strangersPause-passed, s.tell)
	}
}

func (s *strangers) tell() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.later = false
	if s.untold > 0 {
		s.tellLocked()
	}
}

// tellLocked warns of what was not told yet. The caller holds mu.
func (s *strangers) tellLocked() {
	s.log.Warn("requests came without a valid API key", "requests", s.untold, "remote", s.remote, "path", s.path)
	s.last, s.untold = time.Now(), 0
}
