package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// UniqueVariable is the variable of the environment in which a control program finds what @UNIQUE@ in the config has become.
const UniqueVariable = "KVPORT_UNIQUE"

// cannot is the exit code of a control program that does not know a word.
const cannot = 2

// errCannot says that it does not.
var errCannot = errors.New("the control program of the server does not do it")

// Controlled lets cases change what lies in the server to which the config has relays (@PROXY:HOST:PORT@), and how it runs, by a program of
// the author's. It is called with a word and exits with 0 when that is done, and with 2 if it does not know the word; the cases that need the
// word are skipped then. UniqueVariable says whose values the case means. The words are
//
//	list         prints the name of each value, one a line
//	get NAME     prints a value
//	put NAME     makes its standard input a value
//	remove NAME  removes a value
//	restart      the server has lost all values, and its clients their connections
//	full         from now on the server has no room for new values
//	refuse       from now on the server answers every request with an error
//	lock         from now on the server refuses the password of the config
//	mend         ends full, refuse and lock
func Controlled(inner Maker, program string) Maker {
	if abs, err := filepath.Abs(program); err == nil {
		program = abs // a bare name means a file here, not one on PATH
	}
	return func() (Harness, error) {
		h, err := inner()
		if err != nil {
			return nil, err
		}
		c, ok := h.(interface{ controlledBy(program string) error })
		if !ok {
			return nil, errors.Join(errors.New("the harness has no server"), h.Close())
		}
		if err := c.controlledBy(program); err != nil {
			return nil, errors.Join(err, h.Close())
		}
		return h, nil
	}
}

// controlledBy gives the servers of the config a control program.
func (b *base) controlledBy(program string) error {
	if len(b.proxies) == 0 {
		return errors.New("a control program is for a server that the config names by @PROXY:HOST:PORT@")
	}
	b.control = &control{program: program, unique: b.unique}
	return nil
}

// control is a program that changes a server.
type control struct{ program, unique string }

// run calls the program and gives what it prints.
func (c *control) run(ctx context.Context, in []byte, words ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, c.program, words...)
	cmd.Env = append(os.Environ(), UniqueVariable+"="+c.unique)
	cmd.WaitDelay = time.Second
	var out, says bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(in), &out, &says
	err := cmd.Run()
	if exit, is := errors.AsType[*exec.ExitError](err); is && exit.ExitCode() == cannot {
		return nil, fmt.Errorf("%w: %s", errCannot, words[0])
	}
	if err != nil {
		return nil, fmt.Errorf("the control program of the server failed at %s: %w: %s", strings.Join(words, " "), err, strings.TrimSpace(says.String()))
	}
	return out.Bytes(), nil
}

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

// done is must for a change of the server. What its control program cannot do is no matter of the connector.
func (r *rig) done(err error, format string, args ...any) {
	r.Helper()
	if errors.Is(err, errCannot) {
		r.unfit(err.Error())
	}
	r.must(err, format, args...)
}

// afterwards makes a call at the end of the case, also when its time is over. What a control program cannot do it need not end.
func (r *rig) afterwards(call func(context.Context) error) {
	r.closers = append(r.closers, func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), grace)
		defer cancel()
		if err := call(ctx); !errors.Is(err, errCannot) {
			return err
		}
		return nil
	})
}

// order has the server of the case be full, refuse or lock, until it is mended or the case ends.
func (r *rig) order(s *server, word string) {
	r.Helper()
	r.afterwards(func(ctx context.Context) error {
		_, err := s.control.run(ctx, nil, "mend")
		return err
	})
	_, err := s.control.run(r.Context(), nil, word)
	r.done(err, "%s", word)
}

// mend ends what order began.
func (r *rig) mend(s *server) {
	r.Helper()
	_, err := s.control.run(r.Context(), nil, "mend")
	r.done(err, "mend")
}
