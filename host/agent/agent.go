// Package agent is a host as a process, for engines that are not written in Go.
//
// The processes of such an engine, its scheduler and one for each rank, connect over a unix socket and
// speak proto/kvport/v1/agent.proto. They come in any order. A rank hands over the memory of its paged
// cache as a descriptor; when all ranks are there the agent opens the connector behind them, and from
// then on it does for them what package host does for an engine in Go. No byte of a block passes
// through the socket. docs/agent.md says what an engine's side has to do; rule numbers such as
// AGENT-01 refer to docs/spec.
package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
)

// Config is what an agent must know.
type Config struct {
	Transfer   *host.Config
	PluginPath []string // folders in which to look for plugins, in order
	Socket     string   // path of the socket to listen on
	Log        *slog.Logger
	Ready      func() // called once, when the socket listens; may be nil

	// Build is a metric that the engine is shown beside those of the connector: which agent runs; may be nil.
	Build prometheus.Collector
}

// limits are how long and how much the agent bears. Tests have others.
type limits struct {
	attach time.Duration // from a connection to its first call
	alone  time.Duration // without any connection
	write  time.Duration // without any progress
	finish time.Duration // a holder's ticket
	reset  time.Duration
	pages  time.Duration // a put or get of pages, at most
	doubt  time.Duration // a page that could not be loaded is hidden
	tick   time.Duration // between looks at the connector's state
	stats  time.Duration // between counters to the scheduler
	drain  time.Duration // at the end
	queue  int           // bytes that wait for one connection
	conns  int
	uid    int // of the engine's processes
}

func defaultLimits() limits {
	return limits{
		attach: 10 * time.Second, alone: 30 * time.Second, write: time.Minute, finish: time.Second,
		reset: 30 * time.Second, pages: 10 * time.Minute, doubt: time.Minute, tick: 100 * time.Millisecond, stats: time.Second, drain: 10 * time.Second,
		queue: 64 << 20, conns: 1 << 12, uid: os.Getuid(),
	}
}

// server is an agent at work.
type server struct {
	cfg    Config
	limits limits
	log    *slog.Logger
	life   uint64
	ledger *ledger
	pages  *pageMetrics // nil until an engine comes that stores pages
	stop   context.CancelCauseFunc

	mu        sync.Mutex // guards all below; no call that waits is made under it
	conns     map[*conn]struct{}
	peers     map[int]*osProcess // processes that attached and have not ended
	came      bool               // one ever attached
	since     time.Time          // when the last connection ended
	sched     *conn
	reserved  bool          // an engine that stores pages is getting its memory
	seats     map[int]*seat // by rank
	version   uint64        // of seats and of who steps
	settled   uint64        // the version that the keeper has dealt with
	retired   []io.Closer
	session   *session     // nil while the connector is not open
	used      bool         // the scheduler has said something that the session keeps
	waiting   []*conn      // schedulers whose answer waits for the keeper
	processes []*osProcess // processes of plugins, as far as is known
	last      uint64       // the greatest id of a step
	tardy     bool         // the last ticket of a holder came too late
	reported  string       // state that was told last
	failure   error        // why the connector did not open

	wake chan struct{}
	work sync.WaitGroup
}

// seat is the place of one rank.
type seat struct {
	conn    *conn
	attach  *rankAttach
	pending uint64 // the id of the attach that awaits its answer; 0: it was answered
}

// errOver is why an agent ends by itself.
var errOver = errors.New("the engine has ended")

// Run serves an engine until all its processes have ended, until nobody has been there for a while, or
// until ctx ends: then what is under way ends first. It leaves no process, socket or descriptor. What a
// changed config or path could cure wraps host.ErrConfig.
func Run(ctx context.Context, cfg Config) error { return run(ctx, cfg, defaultLimits()) }

func run(ctx context.Context, cfg Config, l limits) error {
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	sock, err := listen(cfg.Socket)
	if err != nil {
		return err
	}
	s := &server{
		cfg: cfg, limits: l, log: cfg.Log, life: uint64(time.Now().UnixNano()), ledger: newLedger(),
		conns: map[*conn]struct{}{}, peers: map[int]*osProcess{}, seats: map[int]*seat{}, since: time.Now(),
		wake: make(chan struct{}, 1),
	}
	if cfg.Build != nil {
		s.ledger.MustRegister(cfg.Build) // the first one: there is nothing that it could clash with
	}
	var inner context.Context
	inner, s.stop = context.WithCancelCause(ctx)
	defer s.stop(nil)
	s.work.Go(func() { s.accept(sock) })
	s.work.Go(func() { s.watch(inner) })
	kept := make(chan struct{})
	go func() {
		defer close(kept)
		s.keep(inner)
	}()
	if cfg.Ready != nil {
		cfg.Ready()
	}
	<-inner.Done()
	s.log.Info("agent ends", "reason", context.Cause(inner))
	err = sock.close()
	<-kept
	s.disperse()
	s.work.Wait()
	return err
}

// accept takes connections until the socket is closed.
func (s *server) accept(sock *socket) {
	for {
		c, err := sock.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.log.Error("no more connections can be accepted", "error", err)
			s.stop(err)
			return
		}
		if err := s.admit(c); err != nil {
			s.log.Warn("connection refused", "error", err)
			_ = c.Close()
		}
	}
}

// admit lets in who is the same user (rule AGENT-02).
func (s *server) admit(c *net.UnixConn) error {
	cred, err := credentials(c)
	switch {
	case err != nil:
		return err
	case int(cred.Uid) != s.limits.uid:
		return fmt.Errorf("process %d is of user %d, this agent serves user %d", cred.Pid, cred.Uid, s.limits.uid)
	case cred.Pid == 0:
		return errors.New("a process of another pid namespace: its end could not be seen")
	}
	n := newConn(c, int(cred.Pid), &s.limits)
	s.mu.Lock()
	full := len(s.conns) >= s.limits.conns
	if !full {
		s.conns[n] = struct{}{}
	}
	s.mu.Unlock()
	if full {
		return fmt.Errorf("%d connections are open", s.limits.conns)
	}
	s.work.Go(n.write)
	s.work.Go(func() { s.serve(n) })
	return nil
}

// serve reads one connection until it ends, then gives up its place.
func (s *server) serve(c *conn) {
	err := s.read(c)
	c.cut(err)
	if file := c.fds.take(); file != nil {
		_ = file.Close()
	}
	<-c.gone
	why := c.reason()
	s.mu.Lock()
	delete(s.conns, c)
	who := s.leave(c)
	s.since = time.Now()
	s.mu.Unlock()
	s.log.Info("connection ended", "pid", c.pid, "side", who, "reason", why)
	s.endIfAlone()
}

// leave takes a connection out of the table. The caller holds mu.
func (s *server) leave(c *conn) (who string) {
	who = "none"
	if s.sched == c {
		s.sched, who = nil, "scheduler"
	}
	for rank, seat := range s.seats {
		if seat.conn == c {
			who = fmt.Sprintf("rank %d", rank)
			s.empty(rank)
		}
	}
	return who
}

// empty takes a rank's seat away. The caller holds mu.
func (s *server) empty(rank int) {
	s.retired = append(s.retired, s.seats[rank].attach.memory)
	delete(s.seats, rank)
	s.change()
}

// change makes the keeper look at the table. The caller holds mu.
func (s *server) change() {
	s.version++
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// endIfAlone ends the agent when every process that attached has ended (rule AGENT-09).
func (s *server) endIfAlone() {
	s.mu.Lock()
	over := s.came && len(s.peers) == 0 && len(s.conns) == 0
	s.mu.Unlock()
	if over {
		s.stop(errOver)
	}
}

// meet notes the process of a connection that attaches, and watches for its end: a connection alone
// does not say that, its descriptor may have been inherited. The caller holds mu.
func (s *server) meet(c *conn) error {
	s.came = true
	if s.peers[c.pid] != nil {
		return nil
	}
	p, err := newPeer(c.UnixConn, c.pid)
	if err != nil {
		return err
	}
	s.peers[c.pid] = p
	s.work.Go(func() {
		if p.wait() {
			s.bury(p)
		}
	})
	return nil
}

// bury forgets a process that has ended.
func (s *server) bury(p *osProcess) {
	s.mu.Lock()
	if s.peers[p.pid] == p {
		delete(s.peers, p.pid)
	}
	for c := range s.conns {
		if c.pid == p.pid {
			c.cut(fmt.Errorf("process %d has ended", p.pid))
		}
	}
	s.mu.Unlock()
	p.close()
	s.endIfAlone()
}

// disperse ends all connections, when what was said last has been sent.
func (s *server) disperse() {
	s.mu.Lock()
	conns := slices.Collect(maps.Keys(s.conns))
	for _, p := range s.peers {
		p.close()
	}
	s.mu.Unlock()
	patience := time.NewTimer(time.Second)
	defer patience.Stop()
	for _, c := range conns {
		c.finish()
	}
	for _, c := range conns {
		select {
		case <-c.gone:
		case <-patience.C:
			patience.Reset(0)
			c.cut(errors.New("the agent ends"))
		}
	}
	s.mu.Lock()
	retired := s.retired
	for _, seat := range s.seats {
		retired = append(retired, seat.attach.memory)
	}
	s.retired, s.seats = nil, map[int]*seat{}
	for _, g := range s.processes {
		g.close()
	}
	s.mu.Unlock()
	for _, r := range retired {
		_ = r.Close()
	}
}

// everybody is all connections that have a place. The caller holds mu.
func (s *server) everybody() []*conn {
	var out []*conn
	if s.sched != nil {
		out = append(out, s.sched)
	}
	for _, seat := range s.seats {
		out = append(out, seat.conn)
	}
	return out
}

// rankAttach is what a rank has brought.
type rankAttach struct {
	rank, world  int
	model, shape connector.Fingerprint
	shapeText    string
	layout       connector.Layout // with digests
	region       *host.Region
	memory       io.Closer // the region, and what uses it
	engine       string
	hashes       string
	events       bool       // of blocks are wanted
	pages        *pageStore // nil: it is a rank
}

// maxSocketPath is the longest path of a unix socket in bytes.
const maxSocketPath = 107

// lockSuffix makes the name of the file whose lock (flock) an agent holds while it has the socket.
const lockSuffix = ".agent"

// socket is a listening socket that no other agent has.
type socket struct {
	*net.UnixListener
	path string
	lock *os.File
}

// listen makes the socket, in a folder that only its owner can enter, and makes that folder if need be
// (rule AGENT-01). The socket that a killed agent left behind is replaced; one that is in use is not.
// Errors wrap host.ErrConfig where another path could cure them.
func listen(path string) (*socket, error) {
	if err := CheckSocket(path); err != nil {
		return nil, err
	}
	err := os.Mkdir(filepath.Dir(path), 0o700)
	if err == nil || errors.Is(err, fs.ErrExist) {
		err = privateFolder(filepath.Dir(path))
	}
	if err != nil {
		return nil, fmt.Errorf("%w: socket: %w", host.ErrConfig, err)
	}
	lock, err := lockFile(path + lockSuffix)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	s := &socket{path: path, lock: lock}
	if err := removeStale(path); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: socket: %w", host.ErrConfig, err), s.unlock())
	}
	if s.UnixListener, err = net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: socket: %w", host.ErrConfig, err), s.unlock())
	}
	return s, nil
}

// CheckSocket refuses a path that is too long, and one whose folder others can enter. A folder that Run would make
// need not be there. It leaves nothing behind. Errors wrap host.ErrConfig.
func CheckSocket(path string) error {
	if len(path) > maxSocketPath {
		return fmt.Errorf("%w: socket: %s has %d bytes, want at most %d: use a shorter folder", host.ErrConfig, path, len(path), maxSocketPath)
	}
	dir := filepath.Dir(path)
	err := privateFolder(dir)
	if errors.Is(err, fs.ErrNotExist) {
		_, err = os.Stat(filepath.Dir(dir))
	}
	if err != nil {
		return fmt.Errorf("%w: socket: %w", host.ErrConfig, err)
	}
	return nil
}

// privateFolder makes sure that nobody else can enter dir.
func privateFolder(dir string) error {
	st, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	owner, ok := st.Sys().(*syscall.Stat_t)
	switch {
	case !st.IsDir():
		return fmt.Errorf("%s is not a folder", dir)
	case !ok || int(owner.Uid) != os.Getuid():
		return fmt.Errorf("%s belongs to another user", dir)
	case st.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("%s has mode %#o, others could enter it: chmod 700 it, or use a folder of its own", dir, st.Mode().Perm())
	}
	return nil
}

// lockFile takes the lock at path. The file is created again if its holder has just removed it.
func lockFile(path string) (*os.File, error) {
	for range 100 {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			return nil, errors.Join(fmt.Errorf("another agent serves it: %w", &fs.PathError{Op: "flock", Path: path, Err: err}), f.Close())
		}
		mine, err := f.Stat()
		there, err2 := os.Lstat(path)
		if err == nil && err2 == nil && os.SameFile(mine, there) {
			return f, nil
		}
		_ = f.Close()
	}
	return nil, fmt.Errorf("%s is made and removed again and again", path)
}

// removeStale removes a socket that nobody serves: we have the lock.
func removeStale(path string) error {
	st, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case st.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s is not a socket", path)
	}
	return os.Remove(path)
}

// close removes the socket and lets go of its lock.
func (s *socket) close() error {
	err := s.Close() // removes the socket too
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	return errors.Join(err, s.unlock())
}

func (s *socket) unlock() error {
	return errors.Join(os.Remove(s.path+lockSuffix), s.lock.Close())
}
