package mutants

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/kvport/kvport/connector"
)

// remoteFault is one way in which Remote can be wrong.
type remoteFault struct {
	fault, caseID string
	name          string
	plant         func(*remote)
}

// remoteMutants are the faults of Remote as mutants.
func remoteMutants() []Mutant {
	var out []Mutant
	for _, f := range remoteFaults() {
		out = append(out, Mutant{
			Name: f.name, Case: f.caseID, Plugin: Remote,
			Config: `{"url": "redis://@SERVER@", "password_file": "@PASSWORD_FILE@", "fault": "` + f.fault + `"}`,
		})
	}
	return out
}

func remoteFaults() []remoteFault {
	return slices.Concat(waitingFaults(), believingFaults(), forgettingFaults(), otherRemoteFaults())
}

// waitingFaults are about time.
func waitingFaults() []remoteFault {
	return []remoteFault{
		{"endless", "remote-stopped", "a remote store that waits for a stopped server as long as it takes", func(s *remote) {
			s.options.ContextTimeoutEnabled, s.options.ReadTimeout = false, -1
			s.read = func(ctx context.Context, key string) ([]byte, error) {
				return s.client.Get(context.WithoutCancel(ctx), key).Bytes()
			}
		}},
		{"deadline-only", "remote-cancelled", "a remote store that minds deadlines and no cancellation", func(s *remote) {
			s.options.ReadTimeout = -1
			s.read = func(ctx context.Context, key string) ([]byte, error) { return s.client.Get(ctx, key).Bytes() }
		}},
		{"sticky", "remote-idle", "a remote store that gives up when its connection has ended", func(s *remote) {
			var once sync.Once
			var one *redis.Conn
			s.read = func(ctx context.Context, key string) ([]byte, error) {
				once.Do(func() { one = s.client.Conn() })
				return one.Get(ctx, key).Bytes()
			}
		}},
		{"chatty", "remote-slow", "a remote store that reads each value in four round trips", func(s *remote) {
			s.read = func(ctx context.Context, key string) ([]byte, error) {
				for range 3 {
					if _, err := s.exists(ctx, key); err != nil {
						return nil, err
					}
				}
				return s.get(ctx, key)
			}
		}},
		{"waits-for-gone", "remote-evicted", "a remote store that asks for patience with what is gone", func(s *remote) {
			s.failure = func(err error) error {
				if errors.Is(err, redis.Nil) {
					return connector.ErrBusy
				}
				return s.gone(err)
			}
		}},
	}
}

// believingFaults call something done that is not.
func believingFaults() []remoteFault {
	return []remoteFault{
		{"half-answers", "remote-cut-load", "a remote store that takes no answer for an answer", func(s *remote) {
			s.check = func(value []byte, it connector.Item, err error) error {
				if err != nil && !errors.Is(err, redis.Nil) {
					return nil
				}
				return fillFrom(value, it)
			}
		}},
		{"fire-and-forget", "remote-cut-save", "a remote store that does not wait for the server's word", func(s *remote) {
			s.known = func(ctx context.Context, key string) (bool, error) {
				have, _ := s.exists(ctx, key)
				return have, nil
			}
			s.write = func(ctx context.Context, key string, value []byte) error {
				_ = s.set(ctx, key, value)
				return nil
			}
		}},
		{"full-is-fine", "remote-full", "a remote store that calls a save done which a full server refused", func(s *remote) {
			s.write = func(ctx context.Context, key string, value []byte) error {
				if err := s.set(ctx, key, value); err != nil && !strings.HasPrefix(err.Error(), "OOM") {
					return err
				}
				return nil
			}
		}},
		{"busy-is-fine", "remote-busy", "a remote store that calls a save done which a busy server refused", func(s *remote) {
			s.failure = func(err error) error {
				if strings.HasPrefix(err.Error(), "BUSY") {
					return nil
				}
				return s.gone(err)
			}
		}},
		{"busy-first", "remote-busy", "a remote store that names the first block alone which a busy server refused", namesFirst},
		{"full-first", "remote-full", "a remote store that names the first block alone for which a full server has no room", namesFirst},
		{"cut-first", "remote-cut-save", "a remote store that names the first block alone whose connection was cut", namesFirst},
		{"lists-are-fine", "remote-type", "a remote store that takes an error of the server for a block", func(s *remote) {
			s.failure = func(err error) error {
				if strings.HasPrefix(err.Error(), "WRONGTYPE") {
					return nil
				}
				return s.gone(err)
			}
		}},
		{"zeros", "remote-flushed", "a remote store that reads what is gone as zeros", func(s *remote) {
			s.check = func(value []byte, it connector.Item, err error) error {
				if errors.Is(err, redis.Nil) {
					for _, span := range it.Spans {
						clear(span)
					}
					return nil
				}
				if err != nil {
					return s.gone(err)
				}
				return fillFrom(value, it)
			}
		}},
	}
}

// namesFirst ends a pipeline's answers with the first error, although all its commands have failed.
func namesFirst(s *remote) { s.first = true }

// forgettingFaults do not see that the server has changed, or see it for ever.
func forgettingFaults() []remoteFault {
	return []remoteFault{
		{"remembers", "remote-restart", "a remote store that remembers what the server had", func(s *remote) {
			var seen sync.Map
			s.known = func(ctx context.Context, key string) (bool, error) {
				if _, ok := seen.Load(key); ok {
					return true, nil
				}
				have, err := s.exists(ctx, key)
				if have {
					seen.Store(key, true)
				}
				return have, err
			}
		}},
		{"stored-once", "remote-flushed", "a remote store that never stores again what it has stored", storesOnce},
		{"gives-up", "remote-away", "a remote store that gives up after a failure", func(s *remote) {
			var once sync.Once
			s.failure = func(err error) error {
				if !errors.Is(err, redis.Nil) {
					once.Do(func() { _ = s.client.Close() })
				}
				return s.gone(err)
			}
		}},
		{"never-overwrites", "remote-length", "a remote store that never overwrites", func(s *remote) {
			s.write = func(ctx context.Context, key string, value []byte) error {
				return s.client.SetNX(ctx, key, value, 0).Err()
			}
		}},
		{"own-errors", "remote-swapped", "a remote store whose errors mean nothing to a host", func(s *remote) {
			s.check = func(value []byte, it connector.Item, err error) error {
				if err != nil {
					return s.gone(err)
				}
				if err := fillFrom(value, it); err != nil {
					return fmt.Errorf("value: %s", err.Error())
				}
				return nil
			}
		}},
	}
}

// storesOnce remembers what it has stored itself, whether or not the server has it still.
func storesOnce(s *remote) {
	var stored sync.Map
	s.write = func(ctx context.Context, key string, value []byte) error {
		err := s.set(ctx, key, value)
		if err == nil {
			stored.Store(key, true)
		}
		return err
	}
	s.skips = func(key string) bool {
		_, known := stored.Load(key)
		return known
	}
}

func otherRemoteFaults() []remoteFault {
	return []remoteFault{
		{"clears", "remote-others", "a remote store that makes room by clearing the server", func(s *remote) {
			s.write = func(ctx context.Context, key string, value []byte) error {
				if n, err := s.client.DBSize(ctx).Result(); err == nil && n > 8 {
					_ = s.client.FlushDB(ctx).Err()
				}
				return s.set(ctx, key, value)
			}
		}},
		{"logs-all", "remote-outage-log", "a remote store that logs every failure", func(s *remote) {
			s.failure = func(err error) error {
				s.log.Error("server", "error", err)
				return s.gone(err)
			}
		}},
		{"shows", "remote-secret", "a remote store that shows the password it was refused with", func(s *remote) {
			s.refusal = func(err error) error {
				return fmt.Errorf("password_file: %q: %w: %w", s.password, err, connector.ErrIncompatible)
			}
		}},
	}
}
