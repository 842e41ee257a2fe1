package mutants

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

// RemoteConfig is the config of Remote.
type RemoteConfig struct {
	URL          string `json:"url" jsonschema:"description=redis://HOST:PORT"`
	PasswordFile string `json:"password_file" jsonschema:"description=File with the password."`
	Prefix       string `json:"prefix,omitempty" jsonschema:"description=How its keys begin; empty: mutant."`
	OneUse       bool   `json:"one_use,omitempty" jsonschema:"description=Each command has a connection of its own."`
	Fault        string `json:"fault,omitempty" jsonschema:"description=What is wrong with it; empty: nothing."`
}

// Remote is a connector that keeps each block in a Redis server and passes the profile remote. It is
// plain: no pipelines, a copy of every block. Its config may name one way to be wrong; see All.
func Remote() connector.Plugin {
	d := sdk.Definition{Name: "RemoteConnector", Version: "1", Scope: connector.ScopeShared, Groups: true}
	return sdk.FromStore(d, openRemote)
}

func openRemote(ctx context.Context, env connector.Env, c RemoteConfig) (connector.Store, error) {
	password, err := os.ReadFile(c.PasswordFile)
	if err != nil {
		return nil, fmt.Errorf("password_file: %w: %w", err, connector.ErrIncompatible)
	}
	s := &remote{password: string(password), oneUse: c.OneUse, log: env.Log, prefix: cmp.Or(c.Prefix, "mutant:"), options: redis.Options{
		Addr: strings.TrimPrefix(c.URL, "redis://"), Password: string(password), Protocol: 2, DisableIdentity: true,
		ContextTimeoutEnabled: true, MaxRetries: -1, ReadTimeout: time.Second, WriteTimeout: time.Second, DialTimeout: time.Second,
		DialerRetries: 1,
	}}
	s.failure, s.refusal, s.read, s.write, s.known = s.gone, s.refused, s.get, s.set, s.exists
	for _, f := range remoteFaults() {
		if f.fault == c.Fault {
			f.plant(s)
		}
	}
	s.client = redis.NewClient(&s.options)
	if err := s.client.Ping(ctx).Err(); err != nil {
		if strings.Contains(err.Error(), "WRONGPASS") {
			return nil, errors.Join(s.refusal(err), s.client.Close())
		}
	}
	return s, nil
}

// remote is a Store whose parts faults replace.
type remote struct {
	client   *redis.Client
	oneUse   bool
	options  redis.Options
	password string
	prefix   string
	log      *slog.Logger
	first    bool // Put names the first item that failed alone

	failure func(error) error                                      // what an error of the server means
	refusal func(error) error                                      // the error of opening with a wrong password
	read    func(context.Context, string) ([]byte, error)          // the value of a key
	write   func(context.Context, string, []byte) error            // stores a value
	known   func(ctx context.Context, key string) (bool, error)    // is there a value?
	skips   func(key string) bool                                  // is nothing saved under it without Replace? nil: by known
	check   func(value []byte, it connector.Item, err error) error // replaces fillFrom; nil: right
}

// gone makes an error of the server one that a host can act on.
func (s *remote) gone(err error) error { return fmt.Errorf("server: %w: %w", err, connector.ErrGone) }

func (s *remote) refused(error) error {
	return fmt.Errorf("password_file: the server refuses the password: %w", connector.ErrIncompatible)
}

// apart runs a call and gives up on it when ctx ends. What it brings later is thrown away.
func apart[V any](ctx context.Context, call func(context.Context) (V, error)) (V, error) {
	type result struct {
		value V
		err   error
	}
	done := make(chan result, 1)
	go func() {
		v, err := call(ctx)
		done <- result{v, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		var none V
		return none, ctx.Err()
	}
}

// twice reads again if the connection had ended, unnoticed.
func twice[V any](ctx context.Context, read func(context.Context) (V, error)) (V, error) {
	v, err := apart(ctx, read)
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		v, err = apart(ctx, read)
	}
	return v, err
}

// connection is what a command is sent with. The caller calls done afterwards.
func (s *remote) connection() (c *redis.Client, done func()) {
	if !s.oneUse {
		return s.client, func() {}
	}
	c = redis.NewClient(&s.options)
	return c, func() { _ = c.Close() }
}

func (s *remote) get(ctx context.Context, key string) ([]byte, error) {
	return twice(ctx, func(ctx context.Context) ([]byte, error) {
		c, done := s.connection()
		defer done()
		return c.Get(ctx, key).Bytes()
	})
}

func (s *remote) set(ctx context.Context, key string, value []byte) error {
	_, err := apart(ctx, func(ctx context.Context) (string, error) {
		c, done := s.connection()
		defer done()
		return c.Set(ctx, key, value, 0).Result()
	})
	return err
}

func (s *remote) exists(ctx context.Context, key string) (bool, error) {
	n, err := twice(ctx, func(ctx context.Context) (int64, error) {
		c, done := s.connection()
		defer done()
		return c.Exists(ctx, key).Result()
	})
	return n == 1, err
}

func (s *remote) key(k connector.StoreKey) string { return s.prefix + k.String() }

// Lookup implements connector.Store.
func (s *remote) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	found := make([]int, len(runs))
	for i, run := range runs {
		for _, k := range run {
			have, err := s.known(ctx, s.key(k))
			if err != nil || !have {
				break
			}
			found[i]++
		}
	}
	return found, nil
}

// each does all items and names those that failed.
func (s *remote) each(items []connector.Item, do func(connector.Item) error) error {
	failed := &connector.ItemError{}
	for i, it := range items {
		if err := do(it); err != nil {
			failed.Items, failed.Err = append(failed.Items, i), err
		}
	}
	if len(failed.Items) == 0 {
		return nil
	}
	return failed
}

// Get implements connector.Store.
func (s *remote) Get(ctx context.Context, items []connector.Item) error {
	return s.each(items, func(it connector.Item) error {
		value, err := s.read(ctx, s.key(it.Key))
		if s.check != nil {
			return s.check(value, it, err)
		}
		if err != nil {
			return s.failure(err)
		}
		return fillFrom(value, it)
	})
}

// Put implements connector.Store.
func (s *remote) Put(ctx context.Context, items []connector.Item) error {
	err := s.each(items, func(it connector.Item) error {
		if s.skips != nil && !it.Replace && s.skips(s.key(it.Key)) {
			return nil
		}
		have, err := s.known(ctx, s.key(it.Key))
		if err == nil && have && !it.Replace && s.same(ctx, it) {
			return nil
		}
		if err == nil {
			err = s.write(ctx, s.key(it.Key), content(it))
		}
		if err != nil {
			return s.failure(err)
		}
		return nil
	})
	if s.first {
		return ofFirst(err)
	}
	return err
}

// ofFirst is the error of a call that ended its work with the first item that failed, and says nothing of those behind it.
func ofFirst(err error) error {
	if failed, ok := errors.AsType[*connector.ItemError](err); ok {
		failed.Items = failed.Items[:1]
	}
	return err
}

// same reports whether the value of a key is the block as it is.
func (s *remote) same(ctx context.Context, it connector.Item) bool {
	value, err := s.read(ctx, s.key(it.Key))
	head := sumBytes + len(it.Key)
	return err == nil && len(value) >= head && sameVersion(value[head:], it.Spans)
}

// Close implements connector.Store.
func (s *remote) Close() error { return s.client.Close() }
