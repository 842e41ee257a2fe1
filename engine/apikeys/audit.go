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

// Refusals keeps acts that were refused in the log, of each client a line once in a while: whoever is refused can try often, and
// shall not fill the log nor hide what others try.
type Refusals struct {
	mu sync.Mutex
	of map[string]*LogLimiter // by the names of clients
}

// Log keeps one. Its line says how many it stands for, as refused.
func (f *Refusals) Log(log *slog.Logger, act Act) {
	f.mu.Lock()
	its := f.of[act.Key]
	if its == nil {
		if f.of == nil {
			f.of = map[string]*LogLimiter{}
		}
		its = &LogLimiter{}
		f.of[act.Key] = its
	}
	f.mu.Unlock()
	its.Event(func(n int) { act.Log(log, "refused", n) })
}

// LogInterval is the time between two lines of a LogLimiter.
const LogInterval = 10 * time.Second

// LogLimiter limits how often a log has what somebody can cause as often as they like: at once, and after that once in a LogInterval,
// the last one included. The zero value is ready to use.
type LogLimiter struct {
	mu        sync.Mutex
	last      time.Time   // of a line
	unwritten int         // events that no line stands for
	write     func(n int) // of the newest of them
	waits     bool        // there is a timer
}

// Event counts one. Its write is called, at once or later, with the number of events that the line stands for, unless a newer event's
// is called instead.
func (l *LogLimiter) Event(write func(n int)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unwritten++
	l.write = write
	wait := LogInterval - time.Since(l.last)
	switch {
	case wait <= 0:
		l.writeLocked()
	case !l.waits: // no further event may come
		l.waits = true
		time.AfterFunc(wait, l.writeRest)
	}
}

func (l *LogLimiter) writeRest() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waits = false
	if l.unwritten > 0 {
		l.writeLocked()
	}
}

func (l *LogLimiter) writeLocked() {
	l.write(l.unwritten)
	l.last, l.unwritten, l.write = time.Now(), 0, nil
}
