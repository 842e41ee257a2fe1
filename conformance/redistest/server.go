// Package redistest runs a real Redis or Valkey server for tests and hurts it: it can be killed,
// stopped, restarted empty, filled, and put behind a relay that delays, cuts and refuses.
package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvport/kvport/internal/machine"
)

// ProgramVariable is the environment variable that names the server's binary.
const ProgramVariable = "KVPORT_REDIS_SERVER"

const (
	startTimeout = time.Minute
	probeEvery   = 5 * time.Millisecond
	clientWait   = time.Minute // for an answer: a busy machine must not make a client send a command again
)

// ErrNoServer says that this machine has no server to run.
var ErrNoServer = errors.New("no Redis or Valkey server: run make deps, install redis-server, or set " + ProgramVariable)

// Programs are the server binaries of this machine, the preferred one first: that of the environment,
// that of make deps, and those on the path.
func Programs() []string {
	if path := os.Getenv(ProgramVariable); path != "" {
		return []string{path}
	}
	var found []string
	if dir, err := os.Getwd(); err == nil {
		for {
			path := filepath.Join(dir, ".deps", "valkey", "valkey-server")
			if info, err := os.Stat(path); err == nil && info.Mode()&0o100 != 0 {
				found = append(found, path)
				break
			}
			parent := filepath.Dir(dir)
			if parent == dir {
				break
			}
			dir = parent
		}
	}
	for _, name := range []string{"valkey-server", "redis-server"} {
		if path, err := exec.LookPath(name); err == nil {
			found = append(found, path)
		}
	}
	return found
}

// Server is a running server. Its methods are not for concurrent use.
type Server struct {
	Address string // host:port; stays the same over restarts

	program string
	args    []string
	dir     string
	cmd     *exec.Cmd
	done    chan struct{} // closed when it was reaped
}

// Start runs the preferred server on a free port of this machine, with further arguments such as
// "--requirepass", "x". It keeps nothing on disk and dies with this process.
func Start(args ...string) (*Server, error) {
	programs := Programs()
	if len(programs) == 0 {
		return nil, ErrNoServer
	}
	return StartProgram(programs[0], args...)
}

// StartProgram is Start with a certain binary.
func StartProgram(program string, args ...string) (*Server, error) {
	dir, err := os.MkdirTemp("", "kvport-redis-")
	if err != nil {
		return nil, err
	}
	s := &Server{program: program, args: args, dir: dir}
	for attempt := 0; ; attempt++ {
		var port string
		if port, err = machine.FreePort(context.Background()); err == nil {
			s.Address = net.JoinHostPort("127.0.0.1", port)
			err = s.Restart()
		}
		if err == nil {
			return s, nil
		}
		if attempt == 2 { // another process may have taken the port
			return nil, errors.Join(err, os.RemoveAll(dir))
		}
	}
}

// Restart starts the server again, empty, on the same address. Kill comes first.
func (s *Server) Restart() error {
	_, port, err := net.SplitHostPort(s.Address)
	if err != nil {
		return err
	}
	args := append([]string{
		"--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", s.dir, "--daemonize", "no",
		"--logfile", filepath.Join(s.dir, "log"), "--loglevel", "warning", "--io-threads", "1",
	}, s.args...)
	cmd := exec.CommandContext(context.Background(), s.program, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", filepath.Base(s.program), err)
	}
	done := make(chan struct{})
	s.cmd, s.done = cmd, done
	go func() {
		defer close(done)
		_ = cmd.Wait()
	}()
	return s.ready()
}

// ready waits until the server answers, and not another process that has taken its port.
func (s *Server) ready() error {
	for end := time.Now().Add(startTimeout); ; {
		c, err := (&net.Dialer{Timeout: time.Second}).DialContext(context.Background(), "tcp", s.Address)
		if err == nil {
			if err = errors.Join(c.Close(), s.itself()); err != nil {
				s.Kill()
			}
			return err
		}
		select {
		case <-s.done:
			log, _ := os.ReadFile(filepath.Join(s.dir, "log"))
			return fmt.Errorf("%s ended: %s", filepath.Base(s.program), strings.TrimSpace(string(log)))
		case <-time.After(probeEvery):
		}
		if time.Now().After(end) {
			s.Kill()
			return fmt.Errorf("%s does not listen: %w", filepath.Base(s.program), err)
		}
	}
}

// itself reports an error unless the process that answers at the address is ours.
func (s *Server) itself() error {
	ctx, cancel := context.WithTimeout(context.Background(), clientWait)
	defer cancel()
	info, err := s.info(ctx)
	if err != nil {
		return fmt.Errorf("ask the server at %s which process it is: %w", s.Address, err)
	}
	if pid := field(info, "process_id"); pid != strconv.Itoa(s.PID()) {
		return fmt.Errorf("the server at %s is process %q, the one that was started is %d", s.Address, pid, s.PID())
	}
	return nil
}

// PID is the number of its process.
func (s *Server) PID() int { return s.cmd.Process.Pid }

// Kill ends the process with SIGKILL and waits until it is reaped. What was stored is lost.
func (s *Server) Kill() {
	_ = s.cmd.Process.Kill()
	<-s.done
}

// Pause stops the process with SIGSTOP: it still takes connections, and answers nothing.
func (s *Server) Pause() error { return s.cmd.Process.Signal(syscall.SIGSTOP) }

// Resume continues it.
func (s *Server) Resume() error { return s.cmd.Process.Signal(syscall.SIGCONT) }

// Client is a client of the server itself, past any relay. The caller closes it.
func (s *Server) Client() *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: s.Address, Username: s.value("--user"), Password: s.value("--requirepass"), Protocol: 2, DisableIdentity: true,
		DialTimeout: clientWait, ReadTimeout: clientWait, WriteTimeout: clientWait,
	})
}

// value is the argument behind a name, or empty.
func (s *Server) value(name string) string {
	for i := 0; i+1 < len(s.args); i++ {
		if s.args[i] == name {
			return s.args[i+1]
		}
	}
	return ""
}

// Do runs one command on the server itself.
func (s *Server) Do(ctx context.Context, args ...any) error {
	c := s.Client()
	return errors.Join(c.Do(ctx, args...).Err(), c.Close())
}

// Keys lists all keys of database 0.
func (s *Server) Keys(ctx context.Context) ([]string, error) {
	c := s.Client()
	keys, err := c.Keys(ctx, "*").Result()
	return keys, errors.Join(err, c.Close())
}

// Close ends the server and removes its folder.
func (s *Server) Close() error {
	s.Kill()
	return os.RemoveAll(s.dir)
}

// Version is the server's name and version, such as valkey-9.1.2.
func (s *Server) Version(ctx context.Context) (string, error) {
	info, err := s.info(ctx)
	version := "redis-" + field(info, "redis_version")
	if v := field(info, "valkey_version"); v != "" {
		version = "valkey-" + v
	}
	return version, err
}

// info is what the server says about itself.
func (s *Server) info(ctx context.Context) (string, error) {
	c := s.Client()
	info, err := c.Info(ctx, "server").Result()
	return info, errors.Join(err, c.Close())
}

// field is the value of a field of an INFO answer.
func field(info, name string) string {
	for line := range strings.Lines(info) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
