// Command control is a control program for a Redis server, as an author would write one for another server.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

func main() { os.Exit(run(os.Args[1:])) }

// run does what a word asks of the server at KVPORT_TEST_REDIS. The password of its clients is in KVPORT_TEST_PASSWORD.
func run(words []string) (code int) {
	ctx := context.Background()
	o, err := redis.ParseURL(os.Getenv("KVPORT_TEST_REDIS"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	o.Protocol, o.DisableIdentity = 2, true
	c := redis.NewClient(o)
	defer c.Close()
	switch words[0] {
	case "list":
		for _, name := range c.Keys(ctx, os.Getenv("KVPORT_UNIQUE")+"*").Val() {
			_, _ = fmt.Fprintln(os.Stdout, name)
		}
	case "get":
		var value []byte
		if value, err = c.Get(ctx, words[1]).Bytes(); err == nil {
			_, err = os.Stdout.Write(value)
		}
	case "put":
		var value []byte
		if value, err = io.ReadAll(os.Stdin); err == nil {
			err = c.Set(ctx, words[1], value, 0).Err()
		}
	case "remove":
		err = c.Del(ctx, words[1]).Err()
	case "refuse":
		err = jam(ctx, c)
	default:
		orders, known := serverOrders()[words[0]]
		if !known {
			return 64
		}
		if words[0] == "mend" {
			for c.Do(ctx, "script", "kill").Err() == nil { // until there is none any more
			}
		}
		err = give(ctx, c, orders)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// give sends orders until one fails.
func give(ctx context.Context, c *redis.Client, orders [][]any) error {
	for _, order := range orders {
		if err := c.Do(ctx, order...).Err(); err != nil {
			return err
		}
	}
	return nil
}

// jam has the server run a script without an end: it answers every request with BUSY meanwhile.
func jam(ctx context.Context, c *redis.Client) error {
	if err := c.Do(ctx, "config", "set", "lua-time-limit", "20").Err(); err != nil {
		return err
	}
	o := *c.Options()
	o.ReadTimeout, o.MaxRetries = 20*time.Millisecond, -1
	once := redis.NewClient(&o)
	defer once.Close()
	_ = once.Do(ctx, "eval", "while true do end", "0").Err() // nobody waits for the answer
	for {
		if err := c.Ping(ctx).Err(); err != nil && strings.HasPrefix(err.Error(), "BUSY") {
			return nil
		}
	}
}

func serverOrders() map[string][][]any {
	return map[string][][]any{
		"restart": {{"flushall"}, {"client", "kill", "type", "normal", "skipme", "yes"}},
		"full":    {{"config", "set", "maxmemory-policy", "noeviction"}, {"config", "set", "maxmemory", "1"}},
		"lock":    {{"config", "set", "requirepass", "another"}},
		"mend":    {{"config", "set", "maxmemory", "0"}, {"config", "set", "requirepass", os.Getenv("KVPORT_TEST_PASSWORD")}},
	}
}
