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
	of map[string]*Seldom // by the names of clients
}

// Log keeps one. Its line says how many it stands for, as refused.
func (f *Refusals) Log(log *slog.Logger, act Act) {
	f.mu.Lock()
	its := f.of[act.Key]
	if its == nil {
		if f.of == nil {
			f.of = map[string]*Seldom{}
		}
		its = &Seldom{}
		f.of[act.Key] = its
	}
	f.mu.Unlock()
	its.Came(func(n int) { act.Log(log, "refused", n) })
}

// Pause is how long what a Seldom has told stands for what comes after it.
const Pause = 10 * time.Second

// Seldom writes down what somebody can cause as often as they like: at once, and after that once in a Pause, the last one too.
type Seldom struct {
	mu     sync.Mutex
	last   time.Time // when it told something
	untold int
	tell   func(n int) // of the newest that is not told
	later  bool        // there is a timer
}

// Came takes note of one, which tell writes down together with others that were not told yet, n in all, unless a newer one's does.
func (s *Seldom) Came(tell func(n int)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.untold++
	s.tell = tell
	wait := Pause - time.Since(s.last)
	switch {
	case wait <= 0:
		s.tellLocked()
	case !s.later: // if nobody comes any more, these would not be told
		s.later = true
		time.AfterFunc(wait, s.rest)
	}
}

// rest tells what has come since.
func (s *Seldom) rest() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.later = false
	if s.untold > 0 {
		s.tellLocked()
	}
}

func (s *Seldom) tellLocked() {
	s.tell(s.untold)
	s.last, s.untold, s.tell = time.Now(), 0, nil
}
