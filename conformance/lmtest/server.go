// Package lmtest speaks the protocol of LMCache's own cache server (lm://) for tests: a server that keeps values in memory or
// asks a real one, the real one if this machine has it, and a client that reads and writes values as anybody can who reaches
// a server. Record 87 in docs/adr has the protocol.
package lmtest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
)

// The numbers of the protocol.
const (
	put, get     = 1, 2
	found        = 200
	missing      = 400
	keyBytes     = 150
	askBytes     = 9*4 + keyBytes
	answerBytes  = 9 * 4
	lengthOffset = 4
)

// Server answers PUT, GET and EXIST.
type Server struct {
	Address string
	behind  string // a server that has the values; empty: this one
	listen  net.Listener
	tasks   sync.WaitGroup

	mu     sync.Mutex
	values map[string][]byte // by key; nil where another server has it
	conns  map[net.Conn]struct{}
}

// Start starts a server on loopback. behind is the address of one that has the values, or empty. Close ends it.
func Start(ctx context.Context, behind string) (*Server, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &Server{Address: l.Addr().String(), behind: behind, listen: l, values: map[string][]byte{}, conns: map[net.Conn]struct{}{}}
	s.tasks.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.note(c)
			s.tasks.Go(func() {
				defer s.drop(c)
				_ = s.serve(ctx, c) // until the client leaves
			})
		}
	})
	return s, nil
}

func (s *Server) note(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns[c] = struct{}{}
}

func (s *Server) drop(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	_ = c.Close()
}

// Close ends the server and its connections.
func (s *Server) Close() error {
	err := s.listen.Close()
	s.mu.Lock()
	for c := range s.conns {
		_ = c.Close()
	}
	s.mu.Unlock()
	s.tasks.Wait()
	return err
}

// Keys are those that have been stored, in order.
func (s *Server) Keys() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.values))
}

// serve answers the requests of a connection.
func (s *Server) serve(ctx context.Context, c net.Conn) error {
	var behind *Client
	if s.behind != "" {
		var err error
		if behind, err = Dial(ctx, s.behind); err != nil {
			return err
		}
		defer func() { _ = behind.Close() }()
	}
	for {
		var head [askBytes]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			return err
		}
		length, key := binary.LittleEndian.Uint32(head[lengthOffset:]), strings.TrimRight(string(head[askBytes-keyBytes:]), " ")
		command := binary.LittleEndian.Uint32(head[:])
		if command == put {
			value := make([]byte, length)
			if _, err := io.ReadFull(c, value); err != nil {
				return err
			}
			if err := s.keep(key, value, behind); err != nil {
				return err
			}
			continue
		}
		value, err := s.find(key, behind)
		if err != nil && !errors.Is(err, ErrMissing) {
			return err
		}
		if _, err = c.Write(answer(err == nil, value, command == get)); err != nil {
			return err
		}
	}
}

func (s *Server) keep(key string, value []byte, behind *Client) error {
	if behind != nil {
		if err := behind.Put(key, value); err != nil {
			return err
		}
		value = nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.values[key] = value
	return nil
}

func (s *Server) find(key string, behind *Client) ([]byte, error) {
	if behind != nil {
		return behind.Get(key)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	value, ok := s.values[key]
	if !ok {
		return nil, ErrMissing
	}
	return value, nil
}

func answer(ok bool, value []byte, wanted bool) []byte {
	var head [answerBytes]byte
	binary.LittleEndian.PutUint32(head[:], missing)
	if !ok {
		return head[:]
	}
	binary.LittleEndian.PutUint32(head[:], found)
	if !wanted {
		return head[:]
	}
	binary.LittleEndian.PutUint32(head[lengthOffset:], uint32(len(value)))
	return append(head[:], value...)
}

// ErrMissing says that a server does not have a key.
var ErrMissing = errors.New("no such key")

// Client reads and writes values. It is for one goroutine.
type Client struct{ conn net.Conn }

// Dial connects to a server.
func Dial(ctx context.Context, address string) (*Client, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return &Client{conn}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.conn.Close() }

// ask sends the head of a request.
func (c *Client) ask(command, length int, key string) error {
	head := make([]byte, 0, askBytes)
	for _, n := range []int{command, length, 4, 6, 0, length, 0, 0, 0} { // BINARY, uint8
		head = binary.LittleEndian.AppendUint32(head, uint32(n))
	}
	head = append(head, key...)
	for len(head) < askBytes {
		head = append(head, ' ')
	}
	_, err := c.conn.Write(head)
	return err
}

// Put stores a value, and returns when the server has it.
func (c *Client) Put(key string, value []byte) error {
	if err := c.ask(put, len(value), key); err != nil {
		return err
	}
	if _, err := c.conn.Write(value); err != nil {
		return err
	}
	_, err := c.Get(key) // a PUT has no answer
	return err
}

// Get reads a value. Errors wrap ErrMissing if there is none.
func (c *Client) Get(key string) ([]byte, error) {
	if err := c.ask(get, 0, key); err != nil {
		return nil, err
	}
	var head [answerBytes]byte
	if _, err := io.ReadFull(c.conn, head[:]); err != nil {
		return nil, err
	}
	switch code := binary.LittleEndian.Uint32(head[:]); code {
	case found:
		value := make([]byte, binary.LittleEndian.Uint32(head[lengthOffset:]))
		_, err := io.ReadFull(c.conn, value)
		return value, err
	case missing:
		return nil, fmt.Errorf("%s: %w", key, ErrMissing)
	default:
		return nil, fmt.Errorf("code %d is of another protocol", code)
	}
}
