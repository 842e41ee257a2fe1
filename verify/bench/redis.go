package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/kvport/kvport/conformance/redistest"
	"github.com/kvport/kvport/connector"
)

// startRedis starts a server on a free port, with room for what the benchmark stores; the oldest blocks go. It
// keeps nothing on disk.
func startRedis(program string) (*redistest.Server, error) {
	// With the few samples of the default a value of a moment ago may go.
	room := []string{"--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru", "--maxmemory-samples", "64"}
	if program == "" {
		return redistest.Start(room...)
	}
	return redistest.StartProgram(program, room...)
}

// rawRedis is the limit of remote stores: SET and GET of the same bytes over one connection, sent from where
// they lie and received where they belong.
type rawRedis struct {
	hot
	conn *net.TCPConn
	in   *bufio.Reader
}

func redisLimit(ctx context.Context, s *store, l *link, _ string) (limit, error) {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", s.server.Address)
	if err != nil {
		return nil, err
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return nil, errors.Join(errors.ErrUnsupported, c.Close())
	}
	return &rawRedis{hot: hot{link: l}, conn: tcp, in: bufio.NewReaderSize(c, 64<<10)}, nil
}

func rawKey(b connector.Block) string { return "raw:" + strconv.Itoa(int(b.ID)) }

func (r *rawRedis) save(t *connector.Transfer, digests bool) error {
	r.pass(t, digests)
	for _, b := range t.Blocks {
		k := rawKey(b)
		out := net.Buffers{fmt.Appendf(nil, "*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n", len(k), k, r.link.shape.block())}
		r.link.each(&connector.Transfer{Blocks: []connector.Block{b}}, func(part []byte) { out = append(out, part) })
		out = append(out, []byte("\r\n"))
		if _, err := out.WriteTo(r.conn); err != nil {
			return err
		}
		if line, err := r.in.ReadString('\n'); err != nil || line != "+OK\r\n" {
			return fmt.Errorf("SET: answer %q: %w", line, err)
		}
	}
	return nil
}

func (r *rawRedis) load(t *connector.Transfer, digests bool) error {
	for _, b := range t.Blocks {
		k := rawKey(b)
		if _, err := fmt.Fprintf(r.conn, "*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n", len(k), k); err != nil {
			return err
		}
		line, err := r.in.ReadString('\n')
		if err != nil {
			return err
		}
		if strings.TrimSpace(line) == "$-1" { // never stored, or evicted: the next round has it
			if err := r.save(&connector.Transfer{Blocks: []connector.Block{b}}, false); err != nil {
				return err
			}
			continue
		}
		if line != fmt.Sprintf("$%d\r\n", r.link.shape.block()) {
			return fmt.Errorf("GET: answer %q", line)
		}
		r.link.each(&connector.Transfer{Blocks: []connector.Block{b}}, func(part []byte) {
			if err == nil {
				_, err = io.ReadFull(r.in, part)
			}
		})
		if err != nil {
			return err
		}
		if _, err := r.in.Discard(2); err != nil {
			return err
		}
	}
	r.pass(t, digests)
	return nil
}

func (r *rawRedis) close() error { return r.conn.Close() }

// clientRedis is what a remote store costs with go-redis and nothing else: SET and GET of a whole block, which
// is put together from its parts and taken apart.
type clientRedis struct {
	hot
	client *redis.Client
	buffer []byte
}

func goRedis(_ context.Context, s *store, l *link, _ string) (limit, error) {
	client := redis.NewClient(&redis.Options{Addr: s.server.Address, ContextTimeoutEnabled: true})
	return &clientRedis{hot: hot{link: l}, client: client, buffer: make([]byte, l.shape.block())}, nil
}

func (c *clientRedis) save(t *connector.Transfer, digests bool) error {
	c.pass(t, digests)
	for _, b := range t.Blocks {
		to := c.buffer
		c.link.each(&connector.Transfer{Blocks: []connector.Block{b}}, func(part []byte) { to = to[copy(to, part):] })
		if err := c.client.Set(context.Background(), "client"+rawKey(b), c.buffer, 0).Err(); err != nil {
			return err
		}
	}
	return nil
}

func (c *clientRedis) load(t *connector.Transfer, digests bool) error {
	for _, b := range t.Blocks {
		one := &connector.Transfer{Blocks: []connector.Block{b}}
		from, err := c.client.Get(context.Background(), "client"+rawKey(b)).Bytes()
		if errors.Is(err, redis.Nil) { // never stored, or evicted: the next round has it
			if err := c.save(one, false); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		c.link.each(one, func(part []byte) { from = from[copy(part, from):] })
	}
	c.pass(t, digests)
	return nil
}

func (c *clientRedis) close() error { return c.client.Close() }
