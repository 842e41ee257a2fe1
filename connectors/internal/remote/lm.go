package remote

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/storekit"
)

// LM is a connector.Store on LMCache's own cache server (`lmcache_server`, remote_url lm://HOST:PORT), in
// its protocol of fixed binary headers: record 87 in docs/adr has the layout and where it was read. Blocks are opaque to
// the server, which evicts nothing and asks for no password.
type LM struct {
	served
	conns chan *lmConn
	n     int
	sent  sent
}

// The protocol's numbers, from lmcache/v1/protocol.py and memory_management.py of LMCache 0.5.6.
const (
	lmPut, lmGet, lmExist = 1, 2, 3
	lmSuccess             = 200
	lmBinary              = 4 // MemoryFormat.BINARY
	lmUint8               = 6 // torch.uint8
	lmKeyBytes            = 150
	lmAskBytes            = 9*4 + lmKeyBytes
	lmAnswerBytes         = 9 * 4
	lmBatch               = 128 // requests that are sent before their answers are read
)

// errAnswer says that the server does not speak the protocol.
var errAnswer = errors.New("answer of another protocol")

// OpenLM makes a store on the one server of o. It connects when it is used; a server that cannot be
// reached is logged, and blocks are computed until it can.
func OpenLM(o Options) (*LM, error) {
	o = o.withDefaults()
	if err := o.validate(); err != nil {
		return nil, err
	}
	s := &LM{served: served{o: o}, conns: make(chan *lmConn, o.Connections), n: o.Connections}
	s.health.log, s.health.where = o.Log, o.where()
	for range o.Connections {
		s.conns <- &lmConn{}
	}
	return s, nil
}

// lmConn is one connection; net.Conn is nil while there is none.
type lmConn struct {
	net.Conn
	heard atomic.Int64 // when the server last sent something, in Unix nanoseconds
}

// Read implements io.Reader and notes that the server is there.
func (c *lmConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.heard.Store(time.Now().UnixNano())
	}
	return n, err
}

func (c *lmConn) close() {
	if c.Conn != nil {
		_ = c.Close()
		c.Conn = nil
	}
}

// do runs call on a free connection, within ctx and the time-out. After a failure the connection is closed:
// nobody knows where in the stream it is.
func (s *LM) do(ctx context.Context, call func(*lmConn) error) error {
	if err := s.health.ask(time.Now()); err != nil {
		return err
	}
	var c *lmConn
	select {
	case c = <-s.conns:
	case <-ctx.Done():
		return errNoLane
	}
	defer func() { s.conns <- c }()
	ctx, cancel := context.WithTimeout(ctx, s.o.Timeout)
	defer cancel()
	start, used := time.Now(), c.Conn != nil
	err := s.on(ctx, c, call)
	if err != nil && used && ctx.Err() == nil { // the connection may have ended long ago, unnoticed
		c.close()
		err = s.on(ctx, c, call)
	}
	if err == nil {
		s.health.worked()
		return nil
	}
	c.close()
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	s.health.failed(err, time.Since(time.Unix(0, max(start.UnixNano(), c.heard.Load()))), time.Now())
	return err
}

// on runs call on a connection, which it makes if there is none. When ctx ends reads and writes do too.
func (s *LM) on(ctx context.Context, c *lmConn, call func(*lmConn) error) error {
	if c.Conn == nil {
		d := net.Dialer{Timeout: s.o.Timeout}
		raw, err := d.DialContext(ctx, "tcp", s.o.Addresses[0])
		if err != nil {
			return err
		}
		c.Conn = raw
	}
	raw := c.Conn
	told := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(told)
		_ = raw.SetDeadline(past())
	})
	err := call(c)
	if !stop() {
		<-told
		err = errors.Join(err, ctx.Err()) // the deadline of this connection is over for good
	}
	return err
}

// ask is the header of a request: command, length, format, dtype, location, shape, key.
func ask(command, length int, k connector.StoreKey) []byte {
	b := make([]byte, 0, lmAskBytes)
	for _, n := range []int{command, length, lmBinary, lmUint8, 0, length, 0, 0, 0} {
		b = binary.LittleEndian.AppendUint32(b, uint32(n))
	}
	b = append(b, "kvport@1@0@"+k.String()+"@uint8"...) // model, world, worker, hash, dtype
	for len(b) < lmAskBytes {
		b = append(b, ' ')
	}
	return b
}

// answer reads the header of an answer.
func (c *lmConn) answer() (ok bool, length int, err error) {
	var b [lmAnswerBytes]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return false, 0, err
	}
	switch code := binary.LittleEndian.Uint32(b[:]); code {
	case lmSuccess:
		return true, int(binary.LittleEndian.Uint32(b[4:])), nil
	case 400:
		return false, 0, nil
	default:
		return false, 0, fmt.Errorf("code %d: %w", code, errAnswer)
	}
}

// Lookup implements connector.Store. While the server is away nothing is found.
func (s *LM) Lookup(ctx context.Context, runs [][]connector.StoreKey) ([]int, error) {
	present, err := s.present(ctx, distinct(runs))
	if err != nil {
		return make([]int, len(runs)), ctx.Err()
	}
	return storekit.Leading(runs, func(k connector.StoreKey) bool { return present[k] }), nil
}

func (s *LM) present(ctx context.Context, keys []connector.StoreKey) (map[connector.StoreKey]bool, error) {
	present := make(map[connector.StoreKey]bool, len(keys))
	for len(keys) > 0 {
		part := keys[:min(lmBatch, len(keys))]
		keys = keys[len(part):]
		err := s.do(ctx, func(c *lmConn) error {
			out := make([]byte, 0, len(part)*lmAskBytes)
			for _, k := range part {
				out = append(out, ask(lmExist, 0, k)...)
			}
			if _, err := c.Write(out); err != nil {
				return err
			}
			for _, k := range part {
				ok, _, err := c.answer()
				if err != nil {
					return err
				}
				present[k] = ok
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return present, nil
}

// Get implements connector.Store.
func (s *LM) Get(ctx context.Context, items []connector.Item) error {
	return eachBatch(items, s.n, func(part []connector.Item) []error {
		errs := make([]error, len(part))
		done := 0
		err := s.do(ctx, func(c *lmConn) error {
			done = 0
			for asked := 0; done < len(part); done++ {
				// Many questions at once: the server sends header and block in two packets, and waits for the
				// first one's acknowledgement, which a question in between carries.
				if done == asked {
					asked = min(done+lmBatch, len(part))
					if err := c.askFor(part[done:asked]); err != nil {
						return err
					}
				}
				r := newScatter(part[done])
				if err := c.value(r); err != nil {
					return err
				}
				errs[done] = s.received(r)
			}
			return nil
		})
		for ; done < len(part); done++ {
			errs[done] = s.o.explain(ctx, err)
		}
		return errs
	})
}

// askFor sends a GET for each item.
func (c *lmConn) askFor(items []connector.Item) error {
	out := make([]byte, 0, len(items)*lmAskBytes)
	for _, it := range items {
		out = append(out, ask(lmGet, 0, it.Key)...)
	}
	_, err := c.Write(out)
	return err
}

// value reads the answer to a GET into the spans of an item.
func (c *lmConn) value(r *scatter) error {
	ok, length, err := c.answer()
	if err != nil {
		return err
	}
	if !ok {
		r.err = fmt.Errorf("%s is not stored: %w", short(r.item.Key), connector.ErrGone)
		return nil
	}
	if length < 0 || length > MaxValue {
		return fmt.Errorf("%d bytes: %w", length, errAnswer)
	}
	r.length = length
	left := &io.LimitedReader{R: c, N: int64(length)}
	if _, err := r.ReadFrom(left); err != nil {
		return err
	}
	if left.N > 0 {
		return io.ErrUnexpectedEOF
	}
	return nil
}

// sentMost is how many blocks a sent remembers.
const sentMost = 1 << 16

// sent remembers how the digests of blocks begin that this process has sent. The protocol cannot ask for a part of a value, so
// nobody knows with which key a block on the server was made, except whoever has sent it. A block that this process has not
// sent is therefore sent, also if it is there.
type sent struct {
	mu    sync.Mutex
	marks map[connector.StoreKey][storekit.MarkBytes]byte
}

// has reports whether a block was sent as it is. One without digests counts as sent, so that the server is asked.
func (s *sent) has(it connector.Item) bool {
	mark, _ := storekit.Mark(it)
	s.mu.Lock()
	defer s.mu.Unlock()
	old, ok := s.marks[it.Key]
	return mark == nil || ok && bytes.Equal(old[:], mark)
}

func (s *sent) add(it connector.Item) {
	mark, _ := storekit.Mark(it)
	if mark == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.marks == nil || len(s.marks) >= sentMost {
		s.marks = map[connector.StoreKey][storekit.MarkBytes]byte{}
	}
	s.marks[it.Key] = [storekit.MarkBytes]byte(mark)
}

// Put implements connector.Store. The server acknowledges no PUT, so each batch ends with questions whether
// its blocks are there: it answers them after it has stored what came before.
func (s *LM) Put(ctx context.Context, items []connector.Item) error {
	var keys []connector.StoreKey
	for _, it := range items {
		if !it.Replace && s.sent.has(it) {
			keys = append(keys, it.Key)
		}
	}
	known, err := s.present(ctx, keys)
	if err != nil {
		return s.o.explain(ctx, err)
	}
	return eachBatch(items, s.n, func(part []connector.Item) []error {
		errs := make([]error, len(part))
		err := s.do(ctx, func(c *lmConn) error { return s.put(c, part, known, errs) })
		for i := range errs {
			if err != nil {
				errs[i] = s.o.explain(ctx, err)
			}
			if errs[i] != nil {
				s.counts.Count(func(n *Stats) { n.Refused++ })
			}
		}
		return errs
	})
}

func (s *LM) put(c *lmConn, part []connector.Item, known map[connector.StoreKey]bool, errs []error) error {
	var sent []int
	for i, it := range part {
		length := headerSize + it.Size()
		switch {
		case known[it.Key] && !it.Replace:
			s.counts.Count(func(n *Stats) { n.Known++ })
			continue
		case length > s.o.MaxValue:
			errs[i] = fmt.Errorf("block of %d bytes is larger than the largest value, %d: %w", it.Size(), s.o.MaxValue, connector.ErrIncompatible)
			continue
		}
		head := ask(lmPut, length, it.Key)
		head = appendHeader(head, it)
		out := append(net.Buffers{head}, it.Spans...)
		if _, err := out.WriteTo(c.Conn); err != nil {
			return err
		}
		if _, err := c.Write(ask(lmExist, 0, it.Key)); err != nil {
			return err
		}
		sent = append(sent, i)
	}
	for _, i := range sent {
		ok, _, err := c.answer()
		if err != nil {
			return err
		}
		if !ok {
			errs[i] = fmt.Errorf("%s: the server has not stored it: %w", short(part[i].Key), connector.ErrGone)
			continue
		}
		s.sent.add(part[i])
		s.counts.Count(func(n *Stats) { n.wrote(part[i].Size()) })
	}
	return nil
}

// Close implements connector.Store.
func (s *LM) Close() error {
	for range s.n {
		c := <-s.conns
		c.close()
	}
	return nil
}
