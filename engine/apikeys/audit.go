package apikeys

import (
	"log/slog"
	"sync"
	"time"
)

// Act is something that somebody did to a server, or tried to, which its log keeps as a line "audit".
type Act struct {
	Action string // reset, register, reload
	Key    string // the name of the client's key; empty: it has none
	Remote string // the address that it came from; empty: from this machine's operator
	Result string // ok, or why not; for an instance also expired or moved
}

// Log writes the line, with further attributes.
func (a Act) Log(log *slog.Logger, more ...any) {
	log.Info("audit", append([]any{"action", a.Action, "key", a.Key, "remote", a.Remote, "result", a.Result}, more...)...)
}

// ResultOf is an error's, or ok.
func ResultOf(err error) string {
	if err != nil {
		return err.Error()
	}
	return "ok"
}

// auditPause is how long a line about something that was refused stands for what comes after it.
const auditPause = 10 * time.Second

// Refusals are acts that were refused and are not in the log yet. Whoever is refused can try often, and shall not fill the log.
type Refusals struct {
	mu     sync.Mutex
	last   time.Time
	untold int
}

// Due counts one more, and says how many a line is to tell; 0: none is due.
func (f *Refusals) Due(now time.Time) (untold int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.untold++
	if now.Sub(f.last) < auditPause {
		return 0
	}
	untold, f.untold, f.last = f.untold, 0, now
	return untold
}
