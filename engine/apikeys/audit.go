package apikeys

import "log/slog"

// Act is something that somebody did to a server, or tried to, which its log keeps as a line "audit".
type Act struct {
	Action string // reset, register, reload
	Key    string // the name of the client's key; empty: it has none
	Remote string // the address that it came from; empty: from this machine's operator
	Result string // ok, or why not
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
