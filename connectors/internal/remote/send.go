package remote

import (
	"context"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/kvport/kvport/connector"
)

// sendGathered sends values with SET by way of go-redis, which finds the server of each in a cluster, and makes a
// connection if there is none. The answers are in errs, one for each item.
func (s *Store) sendGathered(ctx context.Context, l *lane, items []connector.Item, errs []error) error {
	size := 0
	for _, it := range items {
		size += headerSize + it.Size()
	}
	pipe := l.client.Pipeline()
	answers := make([]*redis.StatusCmd, len(items))
	gathered := slices.Grow(l.scratch[:0], size)
	for i, it := range items {
		begin := len(gathered)
		gathered = appendValue(gathered, it)
		answers[i] = pipe.Set(ctx, s.key(it.Key), gathered[begin:], s.o.TTL)
	}
	l.scratch = gathered
	_, err := pipe.Exec(ctx)
	for i := range answers {
		errs[i] = answers[i].Err()
	}
	return err
}
