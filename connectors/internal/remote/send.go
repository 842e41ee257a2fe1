package remote

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/kvport/kvport/connector"
)

// answerBytes is the longest answer to a SET that is understood.
const answerBytes = 4 << 10

// send writes values with SET from where their blocks lie, over a connection that go-redis has made, logged in
// and keeps: go-redis itself wants each value in one piece, which costs a copy of it. The answers are in
// errs, one for each item; the error is the first of them, or the connection's, which is closed then since
// nobody knows where in the stream it is; what got no answer keeps errNoReply.
func (s *Store) send(ctx context.Context, c *conn, items []connector.Item, errs []error) error {
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(deadline); err != nil {
			_ = c.Close()
			return err
		}
	}
	if err := s.exchange(c, items, errs); err != nil {
		_ = c.Close()
		return err
	}
	return firstError(errs)
}

// sendGathered sends values with SET by way of go-redis, which finds the server of each in a cluster, and makes a
// connection if there is none. The errors are those of send.
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

func firstError(errs []error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// exchange sends the commands and reads as many answers.
func (s *Store) exchange(c *conn, items []connector.Item, errs []error) error {
	var out net.Buffers
	for _, it := range items {
		out = append(out, s.setHead(it))
		out = append(out, it.Spans...)
		out = append(out, s.setTail())
	}
	if _, err := out.WriteTo(c.Conn); err != nil {
		return err
	}
	in := bufio.NewReaderSize(c, answerBytes) // keeps nothing: after these answers the server sends none
	for i := range items {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return fmt.Errorf("answer to SET: %w", err)
		}
		switch text := strings.TrimRight(string(line[1:]), "\r\n"); line[0] {
		case '+':
			errs[i] = nil
		case '-':
			errs[i] = answerError(text)
		default:
			return fmt.Errorf("answer to SET begins with %q: %w", line[0], connector.ErrCorrupt)
		}
	}
	return nil
}

// setHead is all of a SET before the block: the command, the key, and the value's header.
func (s *Store) setHead(it connector.Item) []byte {
	key, args := s.key(it.Key), 3
	if s.o.TTL > 0 {
		args = 5
	}
	b := make([]byte, 0, 64+len(key)+headerSize)
	b = fmt.Appendf(b, "*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n", args, len(key), key, headerSize+it.Size())
	return appendHeader(b, it)
}

// setTail is what follows the block.
func (s *Store) setTail() []byte {
	if s.o.TTL == 0 {
		return []byte("\r\n")
	}
	ms := strconv.FormatInt(s.o.TTL.Milliseconds(), 10)
	return fmt.Appendf(nil, "\r\n$2\r\nPX\r\n$%d\r\n%s\r\n", len(ms), ms)
}
