package staged

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// linger is how long a link that is over waits for its peer to end as well.
const linger = time.Second

// link is one end of a link: a connection, a mover and two pipes.
type link struct {
	conn  net.Conn
	mover Mover
	o     Options
	done  func()
	out   *out
	in    *in

	ctx    context.Context //nolint:containedctx // the link's life
	cancel context.CancelFunc
	tasks  sync.WaitGroup // goroutines that use the mover
	parted chan struct{}  // closed when both pipes are over and the peer was told

	writing sync.Mutex
	buffer  []byte

	mu    sync.Mutex
	over  [2]bool // out, in
	ended bool
	dirty bool // a Put has failed, and it may still write
}

// say sends one message. If the peer does not take it in time, the link ends.
func (l *link) say(w *message) error {
	l.writing.Lock()
	defer l.writing.Unlock()
	l.buffer = w.encode(l.buffer[:0])
	_ = l.conn.SetWriteDeadline(time.Now().Add(l.o.Patience))
	if _, err := l.conn.Write(l.buffer); err != nil {
		return fmt.Errorf("the peer does not take messages: %w: %w", err, connector.ErrGone)
	}
	return nil
}

// read receives the peer's messages until the last one, and then releases what the link holds.
func (l *link) read() {
	r := bufio.NewReaderSize(l.conn, 64<<10)
	var err error
	clean := false
	for err == nil {
		var w *message
		if w, err = readMessage(r); err == nil {
			clean = w.kind == messageBye
			err = l.hear(w)
		}
	}
	if !errors.Is(err, connector.ErrIncompatible) {
		err = fmt.Errorf("the peer has gone: %w: %w", err, connector.ErrGone)
	}
	l.lose(err)
	<-l.parted
	_ = l.conn.Close()
	_ = l.mover.Free(clean)
	if l.done != nil {
		l.done()
	}
}

// hear acts on one message.
func (l *link) hear(w *message) error {
	switch w.kind {
	case messageFree:
		return l.out.freed(w.slot)
	case messageTaken:
		return l.out.taken()
	case messageClosed:
		l.out.finish(fmt.Errorf("the receiver has closed: %w", pipe.ErrClosed))
		return nil
	case messageBye:
		return nil
	}
	return l.in.heard(w)
}

// lose ends both pipes. What has already come can still be received.
func (l *link) lose(err error) {
	l.out.finish(err)
	l.in.lost(err)
	l.cancel()
}

// halfOver records the end of one pipe. After the second, nothing is moved any more, and the peer is told.
func (l *link) halfOver(half int) {
	l.mu.Lock()
	l.over[half] = true
	last := l.over[0] && l.over[1] && !l.ended
	l.ended = l.ended || last
	l.mu.Unlock()
	if !last {
		return
	}
	l.cancel()
	go func() {
		defer close(l.parted)
		l.tasks.Wait()
		_ = l.conn.SetReadDeadline(time.Now().Add(linger))
		if l.isDirty() {
			_ = l.conn.Close()
			return
		}
		_ = l.say(&message{kind: messageBye}) // a peer that misses it keeps its landing memory for a while
		if c, ok := l.conn.(interface{ CloseWrite() error }); !ok || c.CloseWrite() != nil {
			_ = l.conn.Close()
		}
	}()
}

func (l *link) isDirty() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dirty
}

func (l *link) soil() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dirty = true
}

// The pipes of a link.
const (
	halfOut = iota
	halfIn
)
