package kvevents

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvport/kvport/internal/meter"
	"github.com/kvport/kvport/internal/zmtp"
)

// The limits of a publisher, in addition to those of its config.
const (
	maxReaders     = 64        // connections to each endpoint
	maxTopics      = 64        // of a reader
	maxWaiting     = 64 << 20  // bytes that wait for one reader
	maxBuffered    = 256 << 20 // bytes that are kept to be replayed
	maxRequest     = 4 << 10   // bytes of what a reader sends
	batchTokens    = 1 << 18   // of a batch; more are divided. A hash counts as hashTokens
	hashTokens     = 8
	handshakeTime  = 5 * time.Second
	writeTime      = time.Minute     // for a reader to take one message
	sendReplay     = 2 * time.Minute // for a reader to take a whole replay
	endOfReplay    = 1<<64 - 1       // the sequence number behind the last message of a replay
	sequenceLength = 8
)

// Publisher publishes batches of events, numbered from 0, and replays those that it still has. Nothing waits for a
// reader: what one does not take in time it does not get, and the numbers show that.
type Publisher struct {
	config Config
	place  Place
	log    *slog.Logger
	topic  []byte
	slow   time.Duration // for a reader to take one message
	folder string        // to be removed at the end; empty: none

	published, lost prometheus.Counter
	dropped         *prometheus.CounterVec
	set             *meter.Set

	listeners []net.Listener
	tasks     sync.WaitGroup
	wake      chan struct{}

	mu      sync.Mutex
	closed  bool
	next    uint64 // the next batch's number
	queue   []numbered
	buffer  []*message // the oldest first
	bytes   int        // of buffer
	readers map[*reader]bool
	conns   map[net.Listener]map[net.Conn]bool
}

// numbered is a batch before it is encoded.
type numbered struct {
	seq   uint64
	batch Batch
}

// message is a batch as it goes over the wire.
type message struct {
	seq     uint64
	number  []byte // seq, encoded
	payload []byte
}

// NewPublisher opens the endpoints of a config, which must be enabled. Errors wrap ErrConfig and name the endpoint.
// Close ends it.
func NewPublisher(c Config, log *slog.Logger, metrics prometheus.Registerer) (*Publisher, error) {
	s := meter.New()
	p := &Publisher{
		config: c, log: log, topic: []byte(c.Topic), slow: writeTime, set: s, wake: make(chan struct{}, 1),
		published: s.Counter("kvport_kv_events_total", "KV events that were published."),
		lost:      s.Counter("kvport_kv_events_lost_total", "KV events that were not published since too many waited."),
		dropped:   s.Counters("kvport_kv_events_dropped_total", "Batches of KV events that a reader did not get, by why: it was slow, or too many were connected.", "why"),
		readers:   map[*reader]bool{}, conns: map[net.Listener]map[net.Conn]bool{},
	}
	p.place = Place{Endpoint: c.Endpoint, Topic: c.Topic}
	if c.ReplayEndpoint != nil {
		p.place.ReplayEndpoint = *c.ReplayEndpoint
	}
	if err := p.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %w", ErrConfig, err), p.Close())
	}
	if err := s.Register(metrics); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	p.tasks.Go(p.pump)
	return p, nil
}

// open begins to listen.
func (p *Publisher) open() (err error) {
	if p.place.Endpoint == "" {
		if p.folder, err = privateFolder(); err != nil {
			return err
		}
		p.place.Endpoint = "ipc://" + filepath.Join(p.folder, eventsFile)
		p.place.ReplayEndpoint = "ipc://" + filepath.Join(p.folder, replayFile)
	}
	for _, at := range []struct {
		field    string
		endpoint *string
		serve    func(net.Conn)
	}{{"endpoint", &p.place.Endpoint, p.read}, {"replay_endpoint", &p.place.ReplayEndpoint, p.replay}} {
		if *at.endpoint == "" {
			continue
		}
		if err := p.listen(at.field, at.endpoint, at.serve); err != nil {
			return fmt.Errorf("%s: %w", at.field, err)
		}
	}
	return nil
}

// listen begins to listen at an endpoint, and makes it the one that readers elsewhere need.
func (p *Publisher) listen(field string, endpoint *string, serve func(net.Conn)) error {
	e, err := zmtp.ParseEndpoint(*endpoint)
	if err == nil && e.Network == "unix" { // readers have working directories of their own
		e.Address, err = filepath.Abs(e.Address)
		*endpoint = e.String()
	}
	if err != nil {
		return err
	}
	l, err := listen(e)
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.listeners, p.conns[l] = append(p.listeners, l), map[net.Conn]bool{}
	p.mu.Unlock()
	if tcp, is := l.Addr().(*net.TCPAddr); is {
		*endpoint = portOf(*endpoint, tcp.Port)
		p.log.Warn("KV events are published over TCP without encryption: whoever reaches the port reads the token ids of all prompts", field, *endpoint)
	}
	p.tasks.Go(func() { p.accept(l, serve) })
	return nil
}

// portOf is an endpoint with the port that port 0 became.
func portOf(endpoint string, port int) string {
	if host, all := strings.CutSuffix(endpoint, ":0"); all {
		return fmt.Sprintf("%s:%d", host, port)
	}
	return endpoint
}

// Place is where the events are to be had.
func (p *Publisher) Place() Place { return p.place }

// Publish numbers the events of a step and leaves them to be sent. It never waits. The publisher owns the events from
// now on, and may read their tokens later.
func (p *Publisher) Publish(events []Event) {
	now := float64(time.Now().UnixNano()) / 1e9
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(events) > 0 && !p.closed {
		n, tokens := 0, 0
		for n < len(events) && n < maxEvents && (n == 0 || tokens+events[n].cost() <= batchTokens) {
			tokens += events[n].cost()
			n++
		}
		seq := p.next
		p.next++ // also of what is lost, so that it shows
		if len(p.queue) < p.config.MaxQueueSize {
			p.queue = append(p.queue, numbered{seq, Batch{Time: now, Events: events[:n]}})
		} else {
			p.lost.Add(float64(n))
		}
		events = events[n:]
	}
	wake(p.wake)
}

// cost is how long an event is on the wire, in tokens.
func (ev *Event) cost() int { return len(ev.Tokens) + hashTokens*len(ev.Hashes) }

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // it will look anyway
	}
}

// pump encodes what waits and gives it to the readers, until the publisher is closed.
func (p *Publisher) pump() {
	for {
		p.mu.Lock()
		waiting, closed := p.queue, p.closed
		p.queue = nil
		p.mu.Unlock()
		for i := range waiting {
			p.send(&waiting[i])
		}
		if closed {
			return
		}
		if len(waiting) == 0 {
			<-p.wake
		}
	}
}

func (p *Publisher) send(n *numbered) {
	payload, err := n.batch.Append(nil)
	if err != nil {
		p.log.Error("KV events cannot be encoded", "err", err)
		p.lost.Add(float64(len(n.batch.Events)))
		return
	}
	m := &message{n.seq, binary.BigEndian.AppendUint64(nil, n.seq), payload}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.buffer, p.bytes = append(p.buffer, m), p.bytes+len(payload)
	for len(p.buffer) > p.config.BufferSteps || p.bytes > maxBuffered {
		p.bytes -= len(p.buffer[0].payload)
		p.buffer[0] = nil
		p.buffer = p.buffer[1:]
	}
	for r := range p.readers {
		if !r.offer(m, p.config.HWM) {
			p.dropped.WithLabelValues("slow").Inc()
		}
	}
	p.published.Add(float64(len(n.batch.Events)))
}

// accept serves connections, each by a goroutine, until the listener is closed.
func (p *Publisher) accept(l net.Listener, serve func(net.Conn)) {
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // such as too many open files
			p.log.Warn("a reader of KV events cannot connect", "err", err)
			<-time.After(time.Second)
			continue
		}
		if !p.enter(l, conn) {
			p.dropped.WithLabelValues("connections").Inc()
			_ = conn.Close()
			continue
		}
		p.tasks.Go(func() {
			serve(conn)
			p.leave(l, conn)
		})
	}
}

func (p *Publisher) enter(l net.Listener, conn net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.conns[l]) == maxReaders {
		return false
	}
	p.conns[l][conn] = true
	return true
}

func (p *Publisher) leave(l net.Listener, conn net.Conn) {
	p.mu.Lock()
	delete(p.conns[l], conn)
	p.mu.Unlock()
	_ = conn.Close()
}

// handshake opens a reader's connection.
func handshake(conn net.Conn, own string, peers ...string) (*zmtp.Conn, error) {
	if err := conn.SetDeadline(time.Now().Add(handshakeTime)); err != nil {
		return nil, err
	}
	z, err := zmtp.Open(conn, maxRequest, own, peers...)
	if err != nil {
		return nil, err
	}
	return z, conn.SetDeadline(time.Time{})
}

// reader is a subscriber.
type reader struct {
	wake chan struct{}

	mu     sync.Mutex
	topics []string
	queue  []*message // the first may be on its way
	bytes  int        // of queue
	closed bool
}

// read serves a subscriber until its connection ends.
func (p *Publisher) read(conn net.Conn) {
	z, err := handshake(conn, zmtp.Pub, zmtp.Sub, zmtp.XSub)
	if err != nil {
		p.log.Debug("a reader of KV events was refused", "err", err)
		return
	}
	r := &reader{wake: make(chan struct{}, 1)}
	p.mu.Lock()
	p.readers[r] = true
	p.mu.Unlock()
	var writing sync.WaitGroup
	writing.Go(func() {
		r.write(conn, z, p)
		_ = conn.Close() // which ends the loop below
	})
	for err == nil {
		var frames [][]byte
		if frames, err = z.Receive(); err == nil {
			err = r.subscribe(frames, p.config.Topic)
		}
	}
	p.mu.Lock()
	delete(p.readers, r)
	p.mu.Unlock()
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	wake(r.wake)
	_ = conn.Close()
	writing.Wait()
}

// subscribe takes a subscription, or the end of one.
func (r *reader) subscribe(frames [][]byte, topic string) error {
	if len(frames) != 1 || len(frames[0]) == 0 || frames[0][0] > 1 {
		return fmt.Errorf("%w: a subscriber sends something else than subscriptions", zmtp.ErrProtocol)
	}
	prefix := string(frames[0][1:])
	if !strings.HasPrefix(topic, prefix) {
		return nil // there is only one topic
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	at := slices.Index(r.topics, prefix)
	switch {
	case frames[0][0] == 1 && len(r.topics) == maxTopics:
		return fmt.Errorf("%w: over %d subscriptions", zmtp.ErrProtocol, maxTopics)
	case frames[0][0] == 1:
		r.topics = append(r.topics, prefix)
	case at >= 0:
		r.topics = slices.Delete(r.topics, at, at+1)
	}
	return nil
}

// offer leaves a message to be written. It reports false if too many wait already.
func (r *reader) offer(m *message, most int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.topics) == 0 || r.closed {
		return true
	}
	if len(r.queue) >= most || len(r.queue) > 0 && r.bytes+len(m.payload) > maxWaiting {
		return false
	}
	r.queue, r.bytes = append(r.queue, m), r.bytes+len(m.payload)
	wake(r.wake)
	return true
}

// write sends what waits until the reader is closed or does not take it.
func (r *reader) write(conn net.Conn, z *zmtp.Conn, p *Publisher) {
	for {
		m, closed := r.first()
		switch {
		case closed:
			return
		case m == nil:
			_ = conn.SetWriteDeadline(time.Time{}) // heartbeats may be answered much later
			<-r.wake
			continue
		}
		_ = conn.SetWriteDeadline(time.Now().Add(p.slow)) // the write fails if this does
		if z.Send(p.topic, m.number, m.payload) != nil {
			return
		}
		r.sent()
	}
}

// first is the message to be written next; nil: none waits.
func (r *reader) first() (m *message, closed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) > 0 {
		m = r.queue[0]
	}
	return m, r.closed
}

// sent takes the first message out.
func (r *reader) sent() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bytes -= len(r.queue[0].payload)
	r.queue[0] = nil
	r.queue = r.queue[1:]
}

// replay serves a reader that asks for what it has missed.
func (p *Publisher) replay(conn net.Conn) {
	z, err := handshake(conn, zmtp.Router, zmtp.Req, zmtp.Dealer)
	for err == nil {
		var frames [][]byte
		if frames, err = z.Receive(); err != nil {
			break
		}
		if len(frames) != 2 || len(frames[0]) > 0 || len(frames[1]) > sequenceLength {
			err = fmt.Errorf("%w: a replay is asked for with %d frames, want an empty one and a number", zmtp.ErrProtocol, len(frames))
			break
		}
		var number [sequenceLength]byte
		copy(number[sequenceLength-len(frames[1]):], frames[1])
		err = p.sendFrom(conn, z, binary.BigEndian.Uint64(number[:]))
	}
	p.log.Debug("a replay of KV events is over", "err", err)
}

// sendFrom sends what is kept from a number on, up to what is the newest now, and the mark behind it. A reader that is slow
// keeps nothing in memory for longer.
func (p *Publisher) sendFrom(conn net.Conn, z *zmtp.Conn, next uint64) error {
	_ = conn.SetWriteDeadline(time.Now().Add(sendReplay)) // a write fails if this does
	p.mu.Lock()
	end := p.next
	p.mu.Unlock()
	for m := p.kept(next); m != nil && m.seq < end; m = p.kept(m.seq + 1) {
		if err := z.Send(nil, p.topic, m.number, m.payload); err != nil {
			return err
		}
	}
	if err := z.Send(nil, nil, binary.BigEndian.AppendUint64(nil, endOfReplay), nil); err != nil {
		return err
	}
	return conn.SetWriteDeadline(time.Time{}) // heartbeats may be answered much later
}

// kept is the oldest message that is kept and has at least that number; nil: there is none.
func (p *Publisher) kept(number uint64) *message {
	p.mu.Lock()
	defer p.mu.Unlock()
	at, _ := slices.BinarySearchFunc(p.buffer, number, func(m *message, n uint64) int { return cmp.Compare(m.seq, n) })
	if at == len(p.buffer) {
		return nil
	}
	return p.buffer[at]
}

// Close ends the publisher: connections are cut, and nothing of it is left.
func (p *Publisher) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	wake(p.wake)
	var errs []error
	for _, l := range p.listeners {
		if err := l.Close(); !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	p.mu.Lock()
	for _, conns := range p.conns {
		for conn := range conns {
			_ = conn.Close()
		}
	}
	p.mu.Unlock()
	p.tasks.Wait()
	p.set.Unregister()
	if p.folder != "" {
		errs = append(errs, os.RemoveAll(p.folder))
	}
	return errors.Join(errs...)
}
