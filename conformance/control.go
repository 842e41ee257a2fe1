package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// UniqueVariable is the variable of the environment in which a control program finds what @UNIQUE@ in the config has become.
const UniqueVariable = "KVPORT_UNIQUE"

// cannot is the exit code of a control program that does not know a word. Programs that fail hardly ever end so: shells, interpreters and grep
// end with 1 or 2.
const cannot = 64

// controlLimit is how long one call of a control program may take, also when its case is over.
const controlLimit = 10 * time.Second

var (
	// errCannot says that a control program does not know a word.
	errCannot = errors.New("the control program of the server does not do it")
	// errControl says that one failed, which says nothing of the connector.
	errControl = errors.New("the control program of the server failed")
)

// Controlled lets cases change what lies in the server to which the config has relays (@PROXY:HOST:PORT@), and how it runs, by a program of
// the author's. It is called with a word and exits with 0 when that is done, and with 64 if it does not know the word; the cases that need the
// word are skipped then. After any other exit code, and after 10 s, the case is inconclusive. UniqueVariable says whose values the case means,
// so the config must have @UNIQUE@. The words are
//
//	list         prints the name of each value of the case, one a line
//	get NAME     prints a value, or fails if there is none
//	put NAME     makes its standard input a value
//	remove NAME  removes a value
//	restart      the server has lost all values, and its clients their connections
//	full         from now on the server has no room for new values
//	refuse       from now on the server answers every request with an error that may pass
//	lock         from now on the server refuses the password of the config
//	mend         ends full, refuse and lock
//
// A case puts, gets and removes values of others, too, whose names begin with "kvport-others-" and which lie beside those of the case. Before
// the first case mend is called whether or not there is anything to end, and its exit code does not count then. The program has files for its
// input and output, so that a server which restart leaves running can write to them as long as it likes.
func Controlled(inner Maker, program string) Maker {
	if abs, err := filepath.Abs(program); err == nil {
		program = abs // a bare name means a file here, not one on PATH
	}
	var first sync.Once
	owes := new(atomic.Bool)
	return func() (Harness, error) {
		h, err := inner()
		if err != nil {
			return nil, err
		}
		c, ok := h.(interface {
			controlledBy(program string, owes *atomic.Bool) error
			remoteServer() *server
		})
		if !ok {
			return nil, errors.Join(errors.New("the harness has no server"), h.Close())
		}
		if err := c.controlledBy(program, owes); err != nil {
			return nil, errors.Join(err, h.Close())
		}
		first.Do(func() { // a run before, which was killed, may have left the server full or locked
			_, _ = c.remoteServer().control.run(context.Background(), nil, "mend")
		})
		return h, nil
	}
}

// controlledBy gives the servers of the config a control program. It fails with errControl if they are still as another case left them.
func (b *base) controlledBy(program string, owes *atomic.Bool) error {
	if len(b.proxies) == 0 {
		return errors.New("a control program is for a server that the config names by @PROXY:HOST:PORT@")
	}
	if b.unique == "" {
		return errors.New("a control program is for values whose names the config has @UNIQUE@ for: it would change those of others")
	}
	c := &control{program: program, unique: b.unique, owes: owes}
	if err := c.close(); err != nil {
		return fmt.Errorf("the server is as another case left it: %w", err)
	}
	b.control = c
	return nil
}

// hasControl reports whether a control program changes the servers of a harness.
func hasControl(h Harness) bool {
	owner, ok := h.(interface{ remoteServer() *server })
	if !ok {
		return false
	}
	s := owner.remoteServer()
	return s != nil && s.control != nil
}

// control is a program that changes a server.
type control struct {
	program, unique string

	owes *atomic.Bool // a mend: a word that mend ends was done, or partly; all cases share it
}

// run calls the program and gives what it prints. It has files for its input and output, not pipes: a server that it starts in the background
// has them, too, and must not end when it writes a line of its log after the call.
func (c *control) run(ctx context.Context, in []byte, words ...string) ([]byte, error) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, controlLimit)
	defer cancel()
	input, inErr := nameless(in)
	output, outErr := nameless(nil)
	complaints, complaintsErr := nameless(nil)
	defer func() { _, _, _ = input.Close(), output.Close(), complaints.Close() }()
	if err := errors.Join(inErr, outErr, complaintsErr); err != nil {
		return nil, fmt.Errorf("%w: %w", errControl, err)
	}
	cmd := exec.CommandContext(ctx, c.program, words...)
	cmd.Env = append(os.Environ(), UniqueVariable+"="+c.unique)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // with all that a script has started
	cmd.Stdin, cmd.Stdout, cmd.Stderr = input, output, complaints
	err := cmd.Run()
	out, outErr := written(output)
	says, saysErr := written(complaints)
	err = cmp.Or(err, outErr, saysErr)
	if err == nil {
		return out, nil
	}
	call := strings.TrimSpace(strings.Join(words, " ") + ": " + strings.TrimSpace(string(says)))
	if exit, is := errors.AsType[*exec.ExitError](err); is && exit.ExitCode() == cannot {
		return nil, fmt.Errorf("%w: %s", errCannot, strings.TrimSuffix(call, ":"))
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("no end after %v: %w", time.Since(began).Round(time.Second), err)
	}
	return nil, fmt.Errorf("%w: %w: %s", errControl, err, strings.TrimSuffix(call, ":"))
}

// absent reports whether an error may be the answer that there is no such value: of a server, or of a control program that has ended by itself.
func absent(err error) bool {
	exit, is := errors.AsType[*exec.ExitError](err)
	return errors.Is(err, redis.Nil) || errors.Is(err, errControl) && is && exit.Exited()
}

// nameless is a file that has a content and no name, and goes with whoever has it open last.
func nameless(content []byte) (*os.File, error) {
	f, err := os.CreateTemp("", "kvport-control-")
	if err != nil {
		return nil, err
	}
	_, err = f.WriteAt(content, 0)
	if err = errors.Join(err, os.Remove(f.Name())); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// written is what a file has by now, never nil.
func written(f *os.File) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	content := make([]byte, info.Size())
	_, err = f.ReadAt(content, 0)
	return content, err
}

// order calls the program with a word that mend ends.
func (c *control) order(ctx context.Context, word string) error {
	owed := c.owes.Swap(true)
	_, err := c.run(ctx, nil, word)
	if errors.Is(err, errCannot) {
		c.owes.Store(owed)
	}
	return err
}

// mend ends what order began, once.
func (c *control) mend(ctx context.Context) error {
	if !c.owes.Load() {
		return nil
	}
	_, err := c.run(ctx, nil, "mend")
	if errors.Is(err, errCannot) {
		return fmt.Errorf("%w: it knows no mend for what it did: %w", errControl, err)
	}
	if err == nil {
		c.owes.Store(false)
	}
	return err
}

// close mends the server if no case has: one that hung was left behind.
func (c *control) close() error { return c.mend(context.Background()) }

// stock is what lies in a server, seen past the relay.
type stock interface {
	names(ctx context.Context) ([]string, error)
	get(ctx context.Context, name string) ([]byte, error)
	put(ctx context.Context, name string, value []byte) error
	remove(ctx context.Context, name string) error
}

func (c *control) names(ctx context.Context) (names []string, err error) {
	out, err := c.run(ctx, nil, "list")
	for line := range strings.Lines(string(out)) {
		if name := strings.TrimRight(line, "\n"); name != "" {
			names = append(names, name)
		}
	}
	return names, err
}

func (c *control) get(ctx context.Context, name string) ([]byte, error) {
	return c.run(ctx, nil, "get", name)
}

func (c *control) put(ctx context.Context, name string, value []byte) error {
	_, err := c.run(ctx, value, "put", name)
	return err
}

func (c *control) remove(ctx context.Context, name string) error {
	_, err := c.run(ctx, nil, "remove", name)
	return err
}

// redisStock is the stock of a Redis server.
type redisStock struct{ *redis.Client }

// names are the keys of all plain values.
func (c redisStock) names(ctx context.Context) (names []string, err error) {
	all, err := c.Keys(ctx, "*").Result()
	for _, k := range all {
		kind, failed := c.Type(ctx, k).Result()
		if err = errors.Join(err, failed); kind == "string" {
			names = append(names, k)
		}
	}
	return names, err
}

func (c redisStock) get(ctx context.Context, name string) ([]byte, error) {
	return c.Get(ctx, name).Bytes()
}

func (c redisStock) put(ctx context.Context, name string, value []byte) error {
	return c.Set(ctx, name, value, 0).Err()
}

func (c redisStock) remove(ctx context.Context, name string) error { return c.Del(ctx, name).Err() }

// stock is what lies in the server of the case.
func (r *rig) stock(s *server) stock {
	if s.Server == nil {
		return s.control
	}
	c := s.Client()
	r.closers = append(r.closers, c.Close)
	return redisStock{c}
}

// done is must for a change of the server. What its control program cannot do, or fails to do, is no matter of the connector.
func (r *rig) done(err error, format string, args ...any) {
	r.Helper()
	switch {
	case errors.Is(err, errControl):
		r.inconclusive("%s: %v", fmt.Sprintf(format, args...), err)
	case errors.Is(err, errCannot):
		r.unfit(err.Error())
	}
	r.must(err, format, args...)
}

// afterwards makes a call at the end of the case, also when its time is over. A case has one at most that a control program answers: for longer
// nobody waits (see checkCase).
func (r *rig) afterwards(call func(context.Context) error) {
	r.closers = append(r.closers, func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), controlLimit)
		defer cancel()
		return call(ctx)
	})
}

// order has the server of the case be full, refuse or lock, until it is mended or the case ends.
func (r *rig) order(s *server, word string) {
	r.Helper()
	err := s.control.order(r.Context(), word)
	r.afterwards(s.control.mend)
	r.done(err, "%s", word)
}

// mend ends what order began.
func (r *rig) mend(s *server) {
	r.Helper()
	r.done(s.control.mend(r.Context()), "mend")
}
