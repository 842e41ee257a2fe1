// Server is a connector on top of a server, over TCP: it keeps KV blocks in Redis or Valkey, whose protocol it speaks itself.
package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/sdk"
)

type config struct {
	Address string `json:"address"          jsonschema:"required,description=HOST:PORT of the server."`
	Prefix  string `json:"prefix,omitempty" jsonschema:"description=What all keys begin with\\, so that others can use the same server."`
}

// BeyondMachine says why other machines may see the blocks: then operators give all engines a key for their digests.
func (c config) BeyondMachine() string {
	host, _, _ := net.SplitHostPort(c.Address)
	if host == "localhost" || net.ParseIP(host).IsLoopback() {
		return ""
	}
	return "address is " + c.Address
}

// store has the connections that nobody uses at the moment.
type store struct {
	config
	idle chan link
}

type link struct {
	net.Conn
	in  *bufio.Reader
	out *bufio.Writer
}

// open does not connect: a server that is away when an engine starts may be there for its first call.
func open(_ context.Context, _ connector.Env, c config) (connector.Store, error) {
	if _, _, err := net.SplitHostPort(c.Address); err != nil {
		return nil, fmt.Errorf("address: %w: %w", err, connector.ErrIncompatible)
	}
	return &store{c, make(chan link, 4)}, nil
}

// Close implements connector.Store. No call runs any more.
func (s *store) Close() error {
	var errs []error
	for len(s.idle) > 0 {
		errs = append(errs, (<-s.idle).Close())
	}
	return errors.Join(errs...)
}

// An exchange sends n requests one after another and then hears their answers, in the same order, so that a server far away costs one
// round trip. hear fails only if the connection does.
type exchange struct {
	n    int
	send func(out *bufio.Writer, i int)
	hear func(in *bufio.Reader, i int) error
}

// do makes an exchange. A server may have closed a connection that nobody used for long: then it is made again, with a new one.
func (s *store) do(ctx context.Context, e exchange) error {
	select {
	case l := <-s.idle:
		if err := s.on(ctx, l, e); err == nil || ctx.Err() != nil {
			return err
		}
	default:
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.Address)
	if err != nil {
		return err
	}
	return s.on(ctx, link{conn, bufio.NewReader(conn), bufio.NewWriter(conn)}, e)
}

// on makes an exchange on a connection. The end of the context ends it at once, also amid a write or a read, and with it the connection,
// whose next answers would be those of another call.
func (s *store) on(ctx context.Context, l link, e exchange) (err error) {
	stop := context.AfterFunc(ctx, func() { _ = l.SetDeadline(time.Unix(1, 0)) })
	defer func() {
		if stop() && err == nil {
			select {
			case s.idle <- l:
				return
			default: // there are enough
			}
		}
		_ = l.Close()
	}()
	for i := range e.n {
		e.send(l.out, i)
	}
	if err := l.out.Flush(); err != nil {
		return err
	}
	for i := range e.n {
		if err := e.hear(l.in, i); err != nil {
			return err
		}
	}
	return nil
}

// request writes a command on a key, and the value if there is one.
func request(out *bufio.Writer, command, key string, value ...[]byte) {
	parts, size := 2, 0
	for _, span := range value {
		parts, size = 3, size+len(span)
	}
	fmt.Fprintf(out, "*%d\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", parts, len(command), command, len(key), key)
	if parts == 3 {
		fmt.Fprintf(out, "$%d\r\n", size)
		for _, span := range value {
			_, _ = out.Write(span) // Flush has the error
		}
		_, _ = out.WriteString("\r\n")
	}
}

// number reads the first line of an answer. refused is what the server says in the place of a number.
func number(in *bufio.Reader) (n int, refused, err error) {
	line, err := in.ReadSlice('\n')
	text := strings.TrimSpace(string(line))
	switch {
	case err != nil:
		return 0, nil, err
	case strings.HasPrefix(text, "-WRONGTYPE"):
		return 0, fmt.Errorf("%w: %s", connector.ErrCorrupt, text), nil
	case strings.HasPrefix(text, "-"): // it has no room, or does something else: that may pass
		return 0, fmt.Errorf("%w: %s", connector.ErrBusy, text), nil
	case text == "+OK":
		return 0, nil, nil
	}
	n, err = strconv.Atoi(strings.TrimLeft(text, ":$"))
	return n, nil, err
}

func (s *store) key(k connector.StoreKey) string { return s.Prefix + k.String() }

// Lookup implements connector.Store, with one exchange for all keys. Any failure is a miss.
func (s *store) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	var keys []string
	for _, run := range runs {
		for _, k := range run {
			keys = append(keys, s.key(k))
		}
	}
	there := make([]bool, len(keys))
	err := s.do(ctx, exchange{len(keys), func(out *bufio.Writer, i int) { request(out, "EXISTS", keys[i]) }, func(in *bufio.Reader, i int) error {
		n, refused, err := number(in)
		there[i] = n == 1 && refused == nil
		return err
	}})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", cmp.Or(ctx.Err(), connector.ErrGone), err)
	}
	found := make([]int, len(runs))
	for i, run := range runs {
		for found[i] < len(run) && there[found[i]] {
			found[i]++
		}
		there = there[len(run):]
	}
	return found, nil
}

// Get implements connector.Store: values go from the connection to their places.
func (s *store) Get(ctx context.Context, items []connector.Item) error {
	return s.each(ctx, items, func(out *bufio.Writer, it connector.Item) { request(out, "GET", s.key(it.Key)) }, get)
}

// get hears a value.
func get(in *bufio.Reader, it connector.Item) (failed, err error) {
	size, refused, err := number(in)
	switch {
	case err != nil || refused != nil:
		return refused, err
	case size < 0:
		return connector.ErrGone, nil
	case size != it.Size(): // another version of kvport has stored it, or it was cut
		_, err = in.Discard(size + len("\r\n"))
		return connector.ErrOutdated, err
	}
	for _, span := range it.Spans {
		if _, err := io.ReadFull(in, span); err != nil {
			return nil, err
		}
	}
	_, err = in.Discard(len("\r\n"))
	return nil, err
}

// Put implements connector.Store. It writes always, so Replace needs nothing more.
func (s *store) Put(ctx context.Context, items []connector.Item) error {
	return s.each(ctx, items, func(out *bufio.Writer, it connector.Item) { request(out, "SET", s.key(it.Key), it.Spans...) }, func(in *bufio.Reader, _ connector.Item) (failed, err error) {
		_, refused, err := number(in)
		return refused, err
	})
}

// each makes exchanges of a number of items, and names those that failed. Those whose answers were not heard may be tried again.
func (s *store) each(ctx context.Context, items []connector.Item, send func(*bufio.Writer, connector.Item), hear func(*bufio.Reader, connector.Item) (failed, err error)) error {
	const most = 128
	all := &connector.ItemError{}
	for first := 0; first < len(items); first += most {
		part := items[first:min(first+most, len(items))]
		failed, heard := make([]error, len(part)), 0
		lost := s.do(ctx, exchange{len(part), func(out *bufio.Writer, i int) { send(out, part[i]) }, func(in *bufio.Reader, i int) (err error) {
			heard = i
			if failed[i], err = hear(in, part[i]); err == nil {
				heard++
			}
			return err
		}})
		for i := range part {
			if lost != nil && i >= heard {
				failed[i] = fmt.Errorf("%w: %w", cmp.Or(ctx.Err(), connector.ErrBusy), lost)
			}
			if failed[i] != nil {
				all.Items, all.Err = append(all.Items, first+i), worse(all.Err, failed[i])
			}
		}
	}
	if all.Items == nil {
		return nil
	}
	return all
}

// worse is which of two causes is told.
func worse(x, y error) error {
	for _, cause := range []error{connector.ErrCorrupt, connector.ErrOutdated, connector.ErrGone} {
		for _, err := range []error{x, y} {
			if errors.Is(err, cause) {
				return err
			}
		}
	}
	return cmp.Or(x, y)
}

func main() {
	sdk.Serve(sdk.FromStore(sdk.Definition{Name: "ServerExample", Version: "1", Scope: connector.ScopeShared, Groups: true, Needs: connector.Needs{Network: true}}, open))
}
