package conformance

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/conformance/relay"
)

// server is the server that the connector under test stores its blocks in, behind a relay.
type server struct {
	*redistest.Server          // nil: it is somebody else's
	control           *control // changes somebody else's; nil: only the way to it can be hurt
	relays            relays
	dir               string
	password          string // "": it requires none
}

// relays are all ways to a server, which are hurt together: a connector may have several addresses, of shards or replicas, and goes on
// with one if only the other is hurt.
type relays []*relay.Relay

// Refuse is relay.Relay.Refuse.
func (rs relays) Refuse(refuse bool) {
	for _, r := range rs {
		r.Refuse(refuse)
	}
}

// Cut is relay.Relay.Cut.
func (rs relays) Cut() {
	for _, r := range rs {
		r.Cut()
	}
}

// Stall is relay.Relay.Stall.
func (rs relays) Stall(toServer, fromServer bool) {
	for _, r := range rs {
		r.Stall(toServer, fromServer)
	}
}

// Delay is relay.Relay.Delay.
func (rs relays) Delay(d time.Duration) {
	for _, r := range rs {
		r.Delay(d)
	}
}

// CutAfter is relay.Relay.CutAfter.
func (rs relays) CutAfter(n int64) {
	for _, r := range rs {
		r.CutAfter(n)
	}
}

// CutSentAfter is relay.Relay.CutSentAfter.
func (rs relays) CutSentAfter(n int64) {
	for _, r := range rs {
		r.CutSentAfter(n)
	}
}

// Cuts is how many connections CutAfter and CutSentAfter have cut.
func (rs relays) Cuts() (sum int) {
	for _, r := range rs {
		sum += r.Cuts()
	}
	return sum
}

// Answered is the most bytes that came through one connection since the last CutAfter.
func (rs relays) Answered() (most int64) {
	for _, r := range rs {
		most = max(most, r.Count().Answered)
	}
	return most
}

// Sent is the most bytes that one connection has sent since the last CutSentAfter.
func (rs relays) Sent() (most int64) {
	for _, r := range rs {
		most = max(most, r.Count().Sent)
	}
	return most
}

// newServer starts an empty server.
func newServer(locked bool) (*server, error) {
	dir, err := os.MkdirTemp("", "kvport-conform-")
	if err != nil {
		return nil, err
	}
	s := &server{dir: dir}
	var args []string
	if locked {
		secret := make([]byte, 16)
		_, _ = rand.Read(secret) // never fails
		s.password = "pw-" + hex.EncodeToString(secret)
		args = append(args, "--requirepass", s.password)
	}
	err = os.WriteFile(s.passwordFile(), []byte(s.password), 0o600)
	if err == nil {
		s.Server, err = redistest.Start(args...)
	}
	if err == nil {
		var way *relay.Relay
		if way, err = relay.New(s.Address, 0); err == nil {
			s.relays = relays{way}
		}
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// passwordFile is where the connector finds the password.
func (s *server) passwordFile() string { return filepath.Join(s.dir, "password") }

func (s *server) close() error {
	var errs []error
	for _, r := range s.relays {
		errs = append(errs, r.Close())
	}
	if s.Server != nil {
		errs = append(errs, s.Close())
	}
	return errors.Join(append(errs, os.RemoveAll(s.dir))...)
}

// Pause keeps the server from answering: its process is stopped, or nothing passes the relays.
func (s *server) Pause() error {
	if s.Server != nil {
		return s.Server.Pause()
	}
	s.relays.Stall(true, true)
	return nil
}

// Resume ends Pause.
func (s *server) Resume() error {
	if s.Server != nil {
		return s.Server.Resume()
	}
	s.relays.Stall(false, false)
	return nil
}

// remote is the server of the connector under test. Without one the case does not apply.
func (r *rig) remote() *server {
	r.Helper()
	if s := r.server(); s != nil {
		return s
	}
	r.Skipf("the config names no server (@SERVER@, or @PROXY:HOST:PORT@) that could be hurt")
	return nil
}

// server is the server of the connector under test; nil when its config names none.
func (r *rig) server() *server {
	if h, ok := r.harness().(interface{ remoteServer() *server }); ok {
		return h.remoteServer()
	}
	return nil
}

// values gives every value that is stored to change, which returns what is stored instead; nil removes
// it.
func (r *rig) values(s *server, change func(n int, value []byte) []byte) int {
	r.Helper()
	in := r.stock(s)
	names := r.names(in)
	for n, name := range names {
		value, err := in.get(r.Context(), name)
		r.done(err, "read a value")
		if value = change(n, value); value == nil {
			r.done(in.remove(r.Context(), name), "remove a value")
			continue
		}
		r.done(in.put(r.Context(), name, value), "write a value")
	}
	return len(names)
}

// names are those of all plain values. A connector that keeps its blocks in none cannot be hurt
// this way.
func (r *rig) names(in stock) []string {
	r.Helper()
	names, err := in.names(r.Context())
	r.done(err, "list values")
	if len(names) == 0 {
		r.Skipf("the server holds no plain values after a save")
	}
	return names
}

// stop ends the server of a case, or the way to somebody else's.
func (s *server) stop() {
	if s.Server == nil {
		s.relays.Refuse(true)
		return
	}
	s.Kill()
}

// restart starts the server again, empty.
func (r *rig) restart(s *server) {
	r.Helper()
	if s.Server != nil {
		r.must(s.Restart(), "start the server again")
		return
	}
	_, err := s.control.run(r.Context(), nil, "restart")
	r.done(err, "restart")
	s.relays.Refuse(false)
}

// empty removes all that lies in the server.
func (r *rig) empty(s *server) {
	r.Helper()
	if s.Server == nil {
		r.values(s, func(int, []byte) []byte { return nil })
		return
	}
	r.do(r.Context(), s, "flushall")
}

// crowd takes all room from the server, until vacate.
func (r *rig) crowd(s *server) {
	r.Helper()
	if s.Server == nil {
		r.order(s, "full")
		return
	}
	r.do(r.Context(), s, "config", "set", "maxmemory-policy", "noeviction")
	r.do(r.Context(), s, "config", "set", "maxmemory", "1")
}

func (r *rig) vacate(s *server) {
	r.Helper()
	if s.Server == nil {
		r.mend(s)
		return
	}
	r.do(r.Context(), s, "config", "set", "maxmemory", "0")
}

// do runs one command on the server, past the relay.
func (r *rig) do(ctx context.Context, s *server, args ...any) {
	r.Helper()
	r.must(s.Do(ctx, args...), "%v", args[0])
}
